"""Build the null card for the CUDA build of PyTorch that runs this file: ``python tests/card/null/build.py``.

The headers are in NVIDIA's packages: most come with PyTorch, the rest is in requirements.txt here. What PyTorch takes
from NVIDIA's libraries and ``library/`` has not is answered by a stub that fails and names itself.
"""

import hashlib
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = sorted((HERE / "library").glob("*.cpp"))
BUILT = HERE / "built"  # git-ignored
LIBRARY = "libcuda.so.1"  # the name by which PyTorch and Triton open the driver; the others are preloaded with it
TAKEN = re.compile(r"(__)?cuda[A-Z]\w+|cu[A-Z]\w+|cublas[A-Z]\w+|nccl[A-Z]\w+")
LOOKED_UP = re.compile(rb"\0(nvml[A-Z]\w+)\0")  # by name, when the program runs; the driver's are answered there
LINKED = ["-ldl", "-lrt"]
STUB = """extern "C" int {name}() {{ return not_simulated("{name}"); }}\n"""
STUBS_HEAD = """// Written by build.py.
#include <cstdio>
static int not_simulated(const char* name) {
    fprintf(stderr, "null card: %s is not simulated\\n", name);
    return 801;  // "not supported" of runtime and driver; the others count any number but 0 as an error
}
"""


def folder_of(package: str) -> Path:
    """Return where a package of this environment lies, without importing it."""
    spec = find_spec(package)
    if spec is None:
        raise SystemExit(f"null card: {package} is not installed for {sys.executable}: take the CUDA build of torch")
    return Path(next(iter(spec.submodule_search_locations)))


def include_folders() -> list[Path]:
    """Return where cuda.h, cuda_runtime_api.h, cublasLt.h, nccl.h and what they include lie."""
    return sorted(folder_of("nvidia").glob("*/include"))


def symbols(path: Path, *kind: str) -> set[str]:
    """Return the dynamic symbols of a library, ``--undefined-only`` or ``--defined-only``, without versions."""
    listed = subprocess.run(["nm", "-D", *kind, str(path)], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].split("@")[0] for line in listed.splitlines() if line}


def wanted() -> set[str]:
    """Return what PyTorch's libraries take from those that the null card stands for."""
    libraries = folder_of("torch") / "lib"
    taken = set().union(*(symbols(path, "--undefined-only") for path in libraries.glob("*.so")))
    names = {name for name in taken if TAKEN.fullmatch(name)}
    return names | {name.decode() for name in LOOKED_UP.findall((libraries / "libc10_cuda.so").read_bytes())}


def build() -> Path:
    """Compile what is not compiled yet; return the folder that holds the library under all its names."""
    torch_version = (folder_of("torch") / "version.py").read_bytes()
    parts = [path.read_bytes() for path in (*SOURCES, HERE / "library" / "null_card.h", Path(__file__))]
    folder = BUILT / hashlib.sha256(b"".join([torch_version, *parts])).hexdigest()[:16]
    if (folder / LIBRARY).exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    compiler = ["g++", "-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wno-deprecated-declarations"]
    compiler += [f"-I{path}" for path in include_folders()]
    sources, first = list(map(str, SOURCES)), folder / "without-stubs.so"
    subprocess.run([*compiler, "-o", str(first), *sources, *LINKED], check=True)
    missing = sorted(wanted() - symbols(first, "--defined-only"))
    stubs = folder / "stubs.cpp"
    stubs.write_text(STUBS_HEAD + "".join(STUB.format(name=name) for name in missing))
    whole = folder / "whole.so"
    subprocess.run([*compiler, f"-Wl,-soname,{LIBRARY}", "-o", str(whole), *sources, str(stubs), *LINKED], check=True)
    first.unlink()
    for alias in ("libcuda.so", "libnvidia-ml.so.1"):
        (folder / alias).unlink(missing_ok=True)
        (folder / alias).symlink_to(LIBRARY)
    whole.rename(folder / LIBRARY)
    return folder


if __name__ == "__main__":
    print(build())
