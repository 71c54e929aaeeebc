"""Real trials of a machine, each in a process of its own, so that a crash or a hang is a result, not the end."""

import contextlib
import dataclasses
import json
import math
import multiprocessing
import os
import resource
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a trial: what it returned, or ``problem`` in one line (empty: none)."""

    value: dict
    problem: str = ""


def attempt(work: Callable[..., dict], arguments: list[dict], seconds: float) -> Result:
    """Call ``work(**arguments[i])`` in one fresh process each; return what the first returned when all have.

    A process that raises, dies or is not done after ``seconds`` ends them all, with the compilers they started.
    ``work`` and its arguments must be importable by a new Python, its result JSON. Processes are forks of a server that
    has imported what ``multiprocessing.set_forkserver_preload`` names, and has touched neither a card nor a thread; they
    see the environment as it was at the first attempt.
    """
    # A trial that ends at once leaves its locks to this process's tracker, which frees them, and would warn of it.
    os.environ.setdefault("PYTHONWARNINGS", "ignore::UserWarning:multiprocessing.resource_tracker")
    context = multiprocessing.get_context("forkserver")
    deadline, started, found = time.monotonic() + seconds, {}, {}
    with tempfile.TemporaryDirectory(prefix="trial-", ignore_cleanup_errors=True) as folder:
        try:
            for i, given in enumerate(arguments):
                (place := Path(folder, str(i))).mkdir()
                process = context.Process(target=_child, args=(place, seconds, work, given), daemon=True)
                process.start()
                started[i] = process
            while len(found) < len(started):
                running = {i: process for i, process in started.items() if i not in found}
                ended = wait([process.sentinel for process in running.values()], max(0.0, deadline - time.monotonic()))
                if not ended:
                    return Result({}, f"no answer in {seconds:.0f} s")
                for i in (i for i, process in running.items() if process.sentinel in ended):
                    found[i] = _outcome(started[i], Path(folder, str(i)))
                    if found[i].problem:
                        return found[i]
            return found[0]
        finally:
            for process in started.values():
                assert process.pid
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()


def _child(place: Path, seconds: float, work: Callable[..., dict], arguments: dict) -> None:
    os.setsid()  # its own group, so that the compilers it starts end with it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is a line, not a file of gigabytes
    signal.alarm(math.ceil(seconds) + 5)  # should the parent die
    output = os.open(place / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # A fresh cache: what is tried is the compiler, not what it left behind.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place / "inductor")
    try:
        result = Result(work(**arguments))
    except BaseException as error:
        lines = str(error).strip().splitlines() or [""]
        result = Result({}, f"{type(error).__name__}: {lines[0]}"[:300])
    (place / "result.json").write_text(json.dumps(dataclasses.asdict(result)))
    os._exit(0)  # a library that hangs as it is put away takes no result back


def _outcome(process, place: Path) -> Result:
    """Return what an ended process has left: its result, or how it died and its last words."""
    process.join()
    if (place / "result.json").is_file():
        return Result(**json.loads((place / "result.json").read_text()))
    code, output = process.exitcode, place / "output.txt"
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    lines = output.read_text(errors="replace").strip().splitlines() if output.is_file() else []
    return Result({}, f"its process ended without a result, {how}" + (f": {lines[-1][:200]}" if lines else ""))


def training_step(make: Callable[[], nn.Module], *, device: str, precision: str, compiled: bool) -> dict[str, float]:
    """Train ``make()`` for a few steps; return ``first_seconds`` (compiling included), ``seconds`` a step, ``loss``.

    Args:
        make: returns a module that maps (B, T) int64 inputs and targets to a loss, and knows ids below 16.
        precision: no (fp32), bf16 or fp16 by autocast.

    Raises RuntimeError when a loss or a gradient is not finite.
    """
    torch.manual_seed(1)
    module = make().to(device)
    run = torch.compile(module) if compiled else module
    ids = torch.randint(0, 16, (4, 65), device=device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    half, taken = HALF.get(precision), []
    for _ in range(6):
        start = time.perf_counter()
        with torch.autocast(torch.device(device).type, dtype=half, enabled=half is not None):
            loss = run(ids[:, :-1], ids[:, 1:])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        if not (loss.isfinite() and norm.isfinite()):
            raise RuntimeError(f"loss {loss.item()}, gradient norm {norm.item()}: not finite")
        optimizer.step()
        optimizer.zero_grad()
        _finish(device)
        taken.append(time.perf_counter() - start)
    return {"first_seconds": taken[0], "seconds": min(taken[1:]), "loss": loss.item()}


def attention(*, device: str, precision: str, length: int = 1024) -> dict[str, float | str]:
    """Run causal attention forward and backward, 4 x 12 heads x ``length`` x 64; return seconds by kernel.

    Keys: cudnn, flash, efficient, math; one is missing where it does not run. ``training`` names the one that torch takes
    when it may choose, as in training.
    """
    kernels = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }
    seconds = {}
    shape = {"size": (4, 12, length, 64), "device": device, "dtype": HALF[precision]}
    query, key, value = (torch.randn(**shape, requires_grad=True) for _ in range(3))
    chosen = torch._fused_sdp_choice(query, key, value, is_causal=True)
    for name, kernel in kernels.items():
        with contextlib.suppress(RuntimeError), sdpa_kernel(kernel):
            for _ in range(3):
                start = time.perf_counter()
                F.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
                _finish(device)
                seconds[name] = time.perf_counter() - start
    names = {int(kernel): name for name, kernel in kernels.items()}
    return seconds | {"training": names.get(chosen, str(chosen))}


def tf32(*, device: str, size: int = 4096) -> dict[str, float]:
    """Time a fp32 matrix product without and with TF32; return ``fp32`` and ``tf32``, FLOP/s."""
    a, b = torch.randn(2, size, size, device=device)
    found = {}
    for name, precision in (("fp32", "highest"), ("tf32", "high")):
        torch.set_float32_matmul_precision(precision)
        for _ in range(3):
            start = time.perf_counter()
            a @ b
            _finish(device)
            found[name] = 2 * size**3 / (time.perf_counter() - start)
    return found


def all_reduce(*, rank: int, count: int, backend: str, meeting: str, megabytes: int = 64) -> dict[str, float]:
    """Sum ``megabytes`` of fp32 over ``count`` processes; return ``bytes_per_second`` over each link of the ring.

    A ring moves 2 (n - 1) / n of the bytes over each link (NCCL's tests call that the bus bandwidth). nccl: process i
    takes card i. ``meeting``: a path that does not exist yet, the same for all. Raises RuntimeError on a wrong sum.
    """
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=count)
    values, repeats = torch.full((megabytes * 2**18,), rank + 1.0, device=device), 3
    dist.all_reduce(values)
    if not (values == count * (count + 1) / 2).all():
        raise RuntimeError("the sum over the processes is wrong")
    dist.barrier()
    _finish(device)
    start = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(values.fill_(1.0))
    _finish(device)
    seconds = (time.perf_counter() - start) / repeats
    dist.destroy_process_group()
    return {"bytes_per_second": 2 * (count - 1) / count * values.nbytes / seconds}


def together(count: int, backend: str, seconds: float, megabytes: int = 64) -> Result:
    """Attempt ``all_reduce`` in ``count`` processes."""
    with tempfile.TemporaryDirectory(prefix="meeting-") as folder:
        given = {"count": count, "backend": backend, "meeting": str(Path(folder) / "store"), "megabytes": megabytes}
        return attempt(all_reduce, [given | {"rank": rank} for rank in range(count)], seconds)


def write_speed(folder: Path, megabytes: int = 256) -> float:
    """Write and fsync a file of random bytes in ``folder``, and remove it; return bytes per second.

    Raises OSError when the folder does not take it.
    """
    block, path = os.urandom(8 * 2**20), folder / f".write-trial-{uuid.uuid4().hex[:8]}"
    blocks = max(1, megabytes // 8)
    try:
        start = time.perf_counter()
        with open(path, "wb") as file:
            for _ in range(blocks):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return blocks * len(block) / (time.perf_counter() - start)
    finally:
        path.unlink(missing_ok=True)


def reach(urls: list[str], seconds: float) -> dict[str, str]:
    """Ask each address at once; return what went wrong by address ("": it answered; a status: it refused)."""
    found = dict.fromkeys(urls, f"no answer in {seconds:g} s")

    def ask(url: str) -> None:
        try:
            urllib.request.urlopen(url, timeout=seconds).close()
            found[url] = ""
        except urllib.error.HTTPError as error:
            found[url] = f"HTTP {error.code} {error.reason}"
        except Exception as error:  # names, sockets, TLS and bad addresses each raise their own kinds
            found[url] = str(getattr(error, "reason", error)) or type(error).__name__

    threads = [threading.Thread(target=ask, args=(url,), daemon=True) for url in urls]  # a name's look-up has no limit
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds + 1
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return dict(found)


def load(
    devices: list[str], seconds: float, precision: str, *, size: int = 8192, interval: float = 5.0
) -> Iterator[dict[str, dict]]:
    """Multiply matrices on all devices at once for ``seconds``; every ``interval`` yield readings by device.

    A reading has ``flops_per_second`` of that interval, ``watts`` and ``celsius`` (None without nvidia-ml-py). Raises
    what a device raised.
    """

    def work(device: str, until: float) -> dict:
        a, b = torch.randn(2, size, size, device=device).to(HALF[precision])
        out, start, products = torch.empty_like(a), time.monotonic(), 0
        while time.monotonic() < until:
            for _ in range(8):
                torch.mm(a, b, out=out)
            _finish(device)
            products += 8
        return {
            "flops_per_second": 2 * size**3 * products / (time.monotonic() - start),
            "watts": _sensor(torch.cuda.power_draw, device, 1000),
            "celsius": _sensor(torch.cuda.temperature, device, 1),
        }

    end = time.monotonic() + seconds
    with ThreadPoolExecutor(len(devices)) as pool:
        while (now := time.monotonic()) < end:
            yield dict(zip(devices, pool.map(work, devices, [min(now + interval, end)] * len(devices)), strict=True))


def _sensor(read: Callable, device: str, unit: float) -> float | None:
    try:
        return read(torch.device(device)) / unit
    except Exception:  # no nvidia-ml-py, no such sensor, not a CUDA device
        return None


def _finish(device: str | torch.device) -> None:
    """Wait until a card has done what it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
