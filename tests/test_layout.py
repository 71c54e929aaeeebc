"""The rules of the house (who imports whom, what is listed where), read from the source with ``ast``."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from pretrain.recipe.keys import FIELDS

ROOT = Path(__file__).parent.parent
ROOMS = ("base", "recipe", "data", "model", "optim", "machine", "evaluation", "hub", "run")
PACKAGES = sorted((ROOT / "pretrain").rglob("__init__.py"))
FILES = {
    f"{path.parent.name}/{path.stem}": path
    for path in sorted((ROOT / "pretrain").glob("*/*.py"))
    if path.stem != "__init__"
}
SCRIPTS = {path.stem: path for path in sorted(ROOT.glob("*.py"))}
PRODUCT = [*FILES.values(), *SCRIPTS.values(), *PACKAGES]
YAMLS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


@functools.cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"), path.name)


def imported(path):
    """Dotted names that a file imports; a relative import is ``.`` and what follows."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names}
    return names


def ours(path):
    """Files of the rooms that a file imports, as ``room/file``."""
    parts = [name.split(".") for name in imported(path) if name.startswith("pretrain.")]
    return {f"{room}/{name}" for _, room, name, *_ in parts}


def dotted(node):
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def test_each_file_stands_in_a_room():
    assert {name.partition("/")[0] for name in FILES} == set(ROOMS)
    assert {path.parent.name for path in PACKAGES} == {"pretrain", *ROOMS} and not list(
        (ROOT / "pretrain").glob("[a-z]*.py")
    )
    assert {"recipe/keys", "data/shards", "model/build", "base/errors"} <= set(FILES) and "train" in SCRIPTS


@pytest.mark.parametrize("name", FILES)
def test_a_file_imports_from_its_own_room_and_from_rooms_to_its_left(name):
    left = ROOMS[: ROOMS.index(name.partition("/")[0]) + 1]
    assert ours(FILES[name]) <= {other for other in FILES if other.partition("/")[0] in left}


def test_a_rooms_tests_name_a_file_of_that_room():
    """Or what it does for another: test_model_documents.py is of model.py, documents its subject."""
    found = [(path.parent.name, path.stem) for room in ROOMS for path in (ROOT / "tests" / room).glob("*.py")]
    names = [(room, stem.removeprefix("test_")) for room, stem in found]
    assert len(found) > 30 and all(stem.startswith("test_") for _, stem in found)
    assert not [(room, name) for room, name in names if not any(f"{room}/{name}_".startswith(f"{f}_") for f in FILES)]


@pytest.mark.parametrize("path", [*FILES.values(), *SCRIPTS.values()], ids=lambda path: path.stem)
def test_imports_are_written_out(path):
    assert not [name for name in imported(path) if name.startswith(".")] and ours(path) <= set(FILES)


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: path.stem)
def test_nothing_imports_a_script(path):
    assert not {name.split(".")[0] for name in imported(path)} & set(SCRIPTS)


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: path.parent.name)
def test_a_room_itself_holds_a_docstring_only(path):
    assert len(tree(path).body) == 1 and ast.get_docstring(tree(path))


def needed(name):
    """Top-level packages that importing a file brings, through our own files too; ``name``: ``room/file``."""
    found, left = set(), {name}
    while left:
        path = FILES[left.pop()]
        at_import = {name for node in tree(path).body for name in names_at_import(node)}
        left |= {"/".join(name.split(".")[1:3]) for name in at_import if name.startswith("pretrain.")}
        found |= {name.split(".")[0] for name in at_import}
    return found - {"pretrain"}


def names_at_import(node):
    """Dotted names that a statement at a file's top imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []


@pytest.mark.parametrize(
    "name",
    [
        "recipe/reading",
        "recipe/plan",
        "model/architectures",
        "optim/optimizers",
        "machine/estimate",
        "machine/forecast",
        "machine/doctor",
        "machine/verdicts",
        "data/sources",
        "data/shards",
    ],
)
def test_what_is_asked_before_training_needs_no_torch(name):
    assert not needed(name) & {"torch", "transformers", "accelerate"}


def test_cards_need_the_standard_library_only():
    assert needed("machine/cards") <= sys.stdlib_module_names


def test_training_needs_neither_evaluate_nor_datasets():
    names = {name.split(".")[0] for name in imported(SCRIPTS["train"])}
    names |= {package for name in ours(SCRIPTS["train"]) for package in needed(name)}
    assert "accelerate" in names and not names & {"evaluate", "datasets"}


@pytest.mark.parametrize("name", sorted(set(FILES) - {"base/errors"}))
def test_rooms_do_not_print(name):
    calls = [node for node in ast.walk(tree(FILES[name])) if isinstance(node, ast.Call)]
    assert not [node.lineno for node in calls if dotted(node.func) == "print"]


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: path.stem)
def test_no_star_imports(path):
    assert not [name for name in imported(path) if name.endswith("*")]


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: path.stem)
def test_no_pickle_anywhere(path):
    modules = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    assert not {name.split(".")[0] for name in imported(path)} & modules
    calls = {dotted(node.func) for node in ast.walk(tree(path)) if isinstance(node, ast.Call)}
    assert not calls & {"torch.load", "torch.save", "eval", "exec"}
    assert not {name for name in imported(path) if name in ("torch.load", "torch.save")}
    words = {
        (key.arg, ast.unparse(key.value))
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        for key in node.keywords
    }
    assert not words & {("allow_pickle", "True"), ("trust_remote_code", "True")}


def test_no_class_of_ours_inherits_from_another_of_ours():
    classes = [node for path in PRODUCT for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)]
    bases = {dotted(base).split(".")[-1] for node in classes for base in node.bases}
    assert not bases & {node.name for node in classes}


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: path.stem)
def test_every_public_thing_says_what_it_does(path):
    body = tree(path)
    assert ast.get_docstring(body)
    kinds = (ast.FunctionDef, ast.ClassDef)
    assert not [n.name for n in body.body if isinstance(n, kinds) and n.name[0] != "_" and not ast.get_docstring(n)]


def test_train_py_is_read_in_five_minutes_and_its_loop_on_one_screen():
    (loop,) = [node for node in ast.walk(tree(SCRIPTS["train"])) if isinstance(node, ast.While)]
    assert loop.end_lineno - loop.lineno + 1 <= 70
    assert len(SCRIPTS["train"].read_text(encoding="utf-8").splitlines()) <= 380


def test_no_function_asks_for_more_than_a_few_things():
    nodes = [node for path in PRODUCT for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef)]
    counts = [(node.name, len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)) for node in nodes]
    assert [name for name, count in counts if count > 9] == ["run"]  # estimate.run: a card's rates as plain numbers


def test_readme_names_every_top_level_entry_every_room_and_every_file():
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("README.md is not written yet")
    text = readme.read_text(encoding="utf-8")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    tops = {name.split("/")[0] for name in listed.stdout.split("\0") if name}
    # Names that begin with a dot are for git and the forge, not for a reader.
    missing = {name for name in tops if not name.startswith(".") and name not in text}
    assert not missing | {name for name in FILES if name.partition("/")[2] not in text}
    assert not {room for room in ROOMS if f"      {room}/ " not in text}


def test_the_page_of_knobs_names_every_key_of_a_recipe():
    text = (ROOT / "docs" / "knobs.md").read_text(encoding="utf-8")
    assert len(FIELDS) > 60 and not [key for key in FIELDS if f"`{key}`" not in text]


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_every_accelerate_yaml_loads(path):
    loaded = load_config_from_file(str(path))
    assert loaded.num_processes >= 1 and loaded.mixed_precision in ("no", "bf16", "fp16")


def test_there_are_accelerate_yamls():
    assert YAMLS
