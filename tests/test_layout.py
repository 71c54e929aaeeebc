"""The rules of the house (who imports whom, what is listed where), read from the source with ``ast``."""

import ast
import subprocess
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

ROOT = Path(__file__).parent.parent
LEAVES = {path.stem: path for path in sorted((ROOT / "pretrain").glob("*.py")) if path.stem != "__init__"}
SCRIPTS = {path.stem: path for path in sorted(ROOT.glob("*.py"))}
PRODUCT = [*LEAVES.values(), *SCRIPTS.values(), ROOT / "pretrain" / "__init__.py"]
MAY_IMPORT = {"redaction": set(), "errors": {"redaction"}, "files": {"errors"}}
YAMLS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"), path.name)


def imported(path):
    """Dotted names that a file imports; ``from . import a`` and ``from pretrain import a`` are ``pretrain.a``."""
    names = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, ["pretrain" if node.level else "", node.module]))
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def leaves_of(path):
    return {name.split(".")[1] for name in imported(path) if name.startswith("pretrain.")} & set(LEAVES)


def dotted(node):
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def test_there_are_leaves_and_scripts_to_keep_rules_for():
    assert {"config", "shards", "model", "errors", "files"} <= set(LEAVES) and "train" in SCRIPTS


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaf_imports_no_leaf_but_the_ground_files(leaf):
    assert leaves_of(LEAVES[leaf]) <= MAY_IMPORT.get(leaf, {"redaction", "errors", "files"})


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: path.stem)
def test_nothing_imports_a_script(path):
    assert not {name.split(".")[0] for name in imported(path)} & set(SCRIPTS)


def test_the_package_itself_imports_nothing():
    assert not imported(ROOT / "pretrain" / "__init__.py")


def test_config_needs_no_torch():
    assert not {name.split(".")[0] for name in imported(LEAVES["config"])} & {"torch", "transformers", "accelerate"}


def test_training_needs_neither_evaluate_nor_datasets():
    paths = [SCRIPTS["train"], *(LEAVES[leaf] for leaf in leaves_of(SCRIPTS["train"]))]
    names = {name.split(".")[0] for path in paths for name in imported(path)}
    assert "accelerate" in names and not names & {"evaluate", "datasets"}


@pytest.mark.parametrize("leaf", sorted(set(LEAVES) - {"report", "errors"}))
def test_leaf_does_not_print(leaf):
    calls = [node for node in ast.walk(tree(LEAVES[leaf])) if isinstance(node, ast.Call)]
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


@pytest.mark.parametrize("leaf", LEAVES)
def test_no_class_of_ours_inherits_from_another_of_ours(leaf):
    ours = {n.name for path in PRODUCT for n in ast.walk(tree(path)) if isinstance(n, ast.ClassDef)}
    classes = [node for node in ast.walk(tree(LEAVES[leaf])) if isinstance(node, ast.ClassDef)]
    assert not {dotted(base).split(".")[-1] for node in classes for base in node.bases} & ours


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: path.stem)
def test_every_public_thing_says_what_it_does(path):
    body = tree(path)
    assert ast.get_docstring(body)
    kinds = (ast.FunctionDef, ast.ClassDef)
    assert not [n.name for n in body.body if isinstance(n, kinds) and n.name[0] != "_" and not ast.get_docstring(n)]


def test_training_loop_fits_one_screen():
    loops = [
        node
        for node in ast.walk(tree(SCRIPTS["train"]))
        if isinstance(node, ast.For) and dotted(node.target) == "step" and ast.unparse(node.iter).startswith("range(")
    ]
    (loop,) = loops
    assert loop.end_lineno - loop.lineno + 1 <= 60


def test_readme_names_every_top_level_entry_and_every_leaf():
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
    assert not missing | {leaf for leaf in LEAVES if leaf not in text}


def test_the_page_of_knobs_names_every_key_of_a_recipe():
    text = (ROOT / "docs" / "knobs.md").read_text(encoding="utf-8")
    body = next(n for n in tree(LEAVES["config"]).body if isinstance(n, ast.ClassDef) and n.name == "Recipe").body
    keys = [node.target.id for node in body if isinstance(node, ast.AnnAssign)]
    assert len(keys) > 60 and not [key for key in keys if f"`{key}`" not in text]


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_every_accelerate_yaml_loads(path):
    loaded = load_config_from_file(str(path))
    assert loaded.num_processes >= 1 and loaded.mixed_precision in ("no", "bf16", "fp16")


def test_there_are_accelerate_yamls():
    assert YAMLS
