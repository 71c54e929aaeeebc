"""The rules of the house (who imports whom, what is listed where), read from the source with ``ast``."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from scripts import keys_table
from ursa_minor.recipe.keys import FIELDS

ROOT = Path(__file__).parent.parent
ROOMS = ("base", "recipe", "data", "model", "optim", "machine", "evaluation", "hub", "run", "post")
PACKAGES = sorted((ROOT / "ursa_minor").rglob("__init__.py"))
# By their dotted name without "ursa_minor.", with slashes; some of a room's stand in a folder of their own.
FILES = {
    path.relative_to(ROOT / "ursa_minor").with_suffix("").as_posix(): path
    for path in sorted((ROOT / "ursa_minor").rglob("*.py"))
    if path.stem != "__init__" and path.parent != ROOT / "ursa_minor"
}
FOLDERS = {"data/readers", "evaluation/tasks"}
SCRIPTS = {path.stem: path for path in sorted(ROOT.glob("*.py"))}
PRODUCT = [*FILES.values(), *SCRIPTS.values(), *PACKAGES]
DISTRIBUTIONS = {"yaml": "pyyaml", "tiktoken_ext": "tiktoken", "pynvml": "nvidia-ml-py"}
YAMLS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


@functools.cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"), path.name)


@functools.cache
def nodes(path, kind=ast.AST):
    return [node for node in (nodes(path) if kind is not ast.AST else ast.walk(tree(path))) if isinstance(node, kind)]


@functools.cache
def imported(path):
    """Dotted names that a file imports; a relative import is ``.`` and what follows."""
    names = {alias.name for node in nodes(path, ast.Import) for alias in node.names}
    for node in nodes(path, ast.ImportFrom):
        names |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return names


def ours(path):
    """Files of the rooms that a file imports, as ``room/file``."""
    return {file_of(name) for name in imported(path) if name.startswith("ursa_minor.")}


def file_of(name):
    """The file that an imported name is, or stands in, as ``room/file``."""
    parts = name.split(".")[1:]
    return "/".join(parts[: 3 if "/".join(parts[:2]) in FOLDERS else 2])


def dotted(node):
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def test_each_file_stands_in_a_room_and_a_room_itself_holds_a_docstring_only():
    assert {name.partition("/")[0] for name in FILES} == set(ROOMS)
    folders = {path.parent.relative_to(ROOT / "ursa_minor").as_posix() for path in PACKAGES}
    assert folders == {".", *ROOMS, *FOLDERS} and not list((ROOT / "ursa_minor").glob("[a-z]*.py"))
    assert all(len(tree(path).body) == 1 and ast.get_docstring(tree(path)) for path in PACKAGES)


def test_a_file_imports_from_its_own_room_and_from_rooms_to_its_left():
    for name, path in FILES.items():
        left = ROOMS[: ROOMS.index(name.partition("/")[0]) + 1]
        assert ours(path) <= {other for other in FILES if other.partition("/")[0] in left}, name


def test_imports_are_written_out_and_none_is_of_a_script():
    for path in PRODUCT:
        assert not [name for name in imported(path) if name.startswith(".") or name.endswith("*")], path
        assert not {name.split(".")[0] for name in imported(path)} & set(SCRIPTS) or path.stem == "eval_hellaswag", path
        assert path in PACKAGES or ours(path) <= set(FILES), path


def test_what_is_asked_before_training_needs_no_torch_and_cards_no_package():
    rooms = {"recipe": "reading plan", "model": "architectures", "optim": "optimizers", "data": "sources shards"}
    rooms["machine"] = "estimate forecast doctor verdicts"
    names = [f"ursa_minor.{room}.{name}" for room, found in rooms.items() for name in found.split()]
    heavy = {"torch", "transformers", "accelerate"}
    code = f"import sys, {', '.join(names)}; sys.exit(str({heavy} & {{*sys.modules}} or ''))"
    assert not subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stderr.strip()
    subprocess.run([sys.executable, "-S", "-c", "import ursa_minor.base.gpus"], cwd=ROOT, check=True)


def test_no_pickle_anywhere():
    modules = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    words = {("allow_pickle", "True"), ("trust_remote_code", "True")}
    for path in PRODUCT:
        assert not {name.split(".")[0] for name in imported(path)} & modules, path
        assert not imported(path) & {"torch.load", "torch.save"}, path
        calls = nodes(path, ast.Call)
        assert not {dotted(call.func) for call in calls} & {"torch.load", "torch.save", "eval", "exec"}, path
        assert not {(key.arg, ast.unparse(key.value)) for call in calls for key in call.keywords} & words, path


def test_files_of_a_room_import_each_other_without_a_circle():
    for room in ROOMS:
        inside = {name: ours(path) for name, path in FILES.items() if name.partition("/")[0] == room}
        graphlib.TopologicalSorter({name: found & set(inside) for name, found in inside.items()}).prepare()


def test_readme_names_every_top_level_entry_and_every_room_and_the_tour_every_file():
    text, tour = ((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/tour.md"))
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    tops = {name.split("/")[0] for name in listed.stdout.split("\0") if name}
    # Names that begin with a dot are for git and the forge, not for a reader.
    missing = {name for name in tops if not name.startswith(".") and name not in text}
    alone = {name.rpartition("/")[2] for name in FILES if name.rpartition("/")[0] not in FOLDERS}
    assert not missing | {name for name in {*alone, *FOLDERS} if name.rpartition("/")[2] not in tour}
    assert not {room for room in ROOMS if f"      {room}/ " not in text or f"      {room}/ " not in tour}


def test_the_version_is_the_changelogs():
    (version,) = re.findall(r'^version: "(.*)"$', (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert f"\n## {version}, " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_lock_holds_the_versions_that_make_installs_from_the_public_index_with_hashes():
    text = (ROOT / "uv.lock").read_text(encoding="utf-8")
    assert not re.search(r'file:|(path|directory|editable) = |"/', text)
    urls = re.findall(r'url = "([^"]+)"(, hash = "sha256:)?', text)
    assert urls and all(url.startswith("https://files.pythonhosted.org/") and hashed for url, hashed in urls)
    assert set(re.findall(r'registry = "([^"]+)"', text)) == {"https://pypi.org/simple"}
    locked = set(re.findall(r'^name = "([^"]+)"\nversion = "([^"]+)"', text, re.MULTILINE))
    wanted = re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(wanted) > 15 and not {(name.lower().replace("_", "-"), version) for name, version in wanted} - locked


def test_every_package_that_is_imported_is_declared():
    declared = {name.lower() for text in ("", "-trackers", "-post") for name in packages(f"requirements{text}.txt")}
    for path in PRODUCT:
        names = {name.lstrip(".").split(".")[0] for name in imported(path)} - sys.stdlib_module_names
        names -= {"ursa_minor", "bitsandbytes", "gguf", *SCRIPTS}  # the packages: where they are needed
        assert {DISTRIBUTIONS.get(name, name) for name in names} <= declared, path


def packages(name):
    return re.findall(r"^[A-Za-z][\w-]*", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE)


def test_the_page_of_knobs_has_every_key_of_a_recipe_as_make_presets_writes_them():
    text = (ROOT / "docs" / "knobs.md").read_text(encoding="utf-8")
    assert len(FIELDS) > 60 and text.partition(keys_table.MARK)[2] == keys_table.tables()
    assert not [key for key in FIELDS if f"| `{key}:" not in text]


def test_every_accelerate_yaml_loads():
    assert YAMLS
    for path in YAMLS:
        loaded = load_config_from_file(str(path))
        assert loaded.num_processes >= 1 and loaded.mixed_precision in ("no", "bf16", "fp16"), path
