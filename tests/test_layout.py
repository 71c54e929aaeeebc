"""Rules of the repository that are read from its source: layers, imports, declared packages, configuration files."""

import ast
import functools
import graphlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from scripts import keys_table
from ursa_minor.recipe.keys import FIELDS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ursa_minor"
# Each package imports from itself and from packages on a lower level only.
LEVELS = (
    ("base",),
    ("recipe",),
    ("data/sources", "data/sources/formats", "model"),
    ("data/tokens",),
    ("data/preparation", "data/loading"),
    ("optim",),
    ("preflight", "checkpoint"),
    ("machine",),
    ("evaluation", "evaluation/tasks"),
    ("export", "hub", "reporting"),
    ("run",),
    ("post",),
)
# A package that is part of another one, with which it may import both ways.
PARTS = {"data/sources/formats": "data/sources", "evaluation/tasks": "evaluation"}
NO_TORCH = (
    "recipe.command_line",
    "recipe.loading",
    "recipe.batching",
    "model.architectures",
    "model.resolve",
    "model.adapters",
    "optim.optimizers",
    "data.sources.find",
    "data.tokens.shards",
    "data.tokens.manifest",
    "preflight.estimate",
    "preflight.run_estimate",
    "preflight.checks",
    "preflight.compatibility",
)
HEAVY = {"torch", "transformers", "accelerate"}

INITS = sorted(PACKAGE.rglob("__init__.py"))
MODULES = {
    path.relative_to(PACKAGE).with_suffix("").as_posix(): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.stem != "__init__"
}
SCRIPTS = {path.stem: path for path in sorted(ROOT.glob("*.py"))}
PRODUCT = [*MODULES.values(), *SCRIPTS.values(), *INITS]
DISTRIBUTIONS = {"yaml": "pyyaml", "tiktoken_ext": "tiktoken", "pynvml": "nvidia-ml-py"}
YAMLS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


@functools.cache
def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"), path.name)


@functools.cache
def nodes(path, kind):
    return [node for node in ast.walk(tree(path)) if isinstance(node, kind)]


@functools.cache
def imported(path):
    """Return the dotted names that a file imports. A relative import begins with a dot."""
    names = {alias.name for node in nodes(path, ast.Import) for alias in node.names}
    for node in nodes(path, ast.ImportFrom):
        prefix = f"{'.' * node.level}{node.module or ''}"
        names |= {f"{prefix}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def imported_modules(path):
    """Return the modules of the package that a file imports, as in ``MODULES``."""
    modules = set()
    for name in imported(path):
        if name.startswith("ursa_minor."):
            parts = name.split(".")[1:]
            candidates = ["/".join(parts), "/".join(parts[:-1])]
            modules.add(next((module for module in candidates if module in MODULES), name))
    return modules


def package_of(module):
    return module.rpartition("/")[0]


def level_of(package):
    return next(level for level, packages in enumerate(LEVELS) if package in packages)


def may_import(module, other):
    package = PARTS.get(package_of(module), package_of(module))
    other_package = PARTS.get(package_of(other), package_of(other))
    return other_package == package or level_of(other_package) < level_of(package)


def dotted(node):
    return ast.unparse(node) if isinstance(node, (ast.Name, ast.Attribute)) else ""


def test_each_module_is_in_a_known_package():
    known = {package for packages in LEVELS for package in packages}
    assert {package_of(module) for module in MODULES} == known


def test_package_has_a_docstring_and_no_code():
    for path in INITS:
        assert len(tree(path).body) == 1 and ast.get_docstring(tree(path)), path


def test_package_docstring_names_each_module():
    for module, path in MODULES.items():
        if package_of(module) not in PARTS:
            text = (path.parent / "__init__.py").read_text(encoding="utf-8")
            assert f"``{path.stem}``" in text, module


@pytest.mark.parametrize("module", MODULES)
def test_module_imports_from_lower_layers_only(module):
    others = imported_modules(MODULES[module])
    assert others <= set(MODULES), module
    assert not [other for other in others if not may_import(module, other)]


def test_layers_reject_an_upward_import():
    assert not may_import("base/files", "recipe/keys")
    assert not may_import("data/sources/find", "data/tokens/shards")
    assert not may_import("export/stock", "hub/push")  # on the same level
    assert may_import("data/tokens/shards", "data/sources/find")


def test_modules_of_a_package_import_without_cycle():
    for packages in LEVELS:
        inside = {module for module in MODULES if package_of(module) in packages}
        graph = {module: imported_modules(MODULES[module]) & inside for module in inside}
        graphlib.TopologicalSorter(graph).prepare()


def test_imports_are_absolute_and_name_no_script():
    for path in PRODUCT:
        names = imported(path)
        assert not [name for name in names if name.startswith(".") or name.endswith("*")], path
        assert path.stem == "eval_hellaswag" or not {name.split(".")[0] for name in names} & set(
            SCRIPTS
        ), path


@pytest.mark.parametrize("module", NO_TORCH)
def test_module_needs_no_torch(module):
    code = f"import sys, ursa_minor.{module}; sys.exit(str({HEAVY} & {{*sys.modules}} or ''))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert not done.stderr.strip()


def test_gpu_data_needs_no_package():
    subprocess.run(
        [sys.executable, "-S", "-c", "import ursa_minor.base.gpus"], cwd=ROOT, check=True
    )


def test_product_uses_no_pickle():
    modules = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    options = {("allow_pickle", "True"), ("trust_remote_code", "True")}
    for path in PRODUCT:
        assert not {name.split(".")[0] for name in imported(path)} & modules, path
        assert not imported(path) & {"torch.load", "torch.save"}, path
        calls = nodes(path, ast.Call)
        assert not {dotted(call.func) for call in calls} & {
            "torch.load",
            "torch.save",
            "eval",
            "exec",
        }, path
        assert (
            not {(key.arg, ast.unparse(key.value)) for call in calls for key in call.keywords}
            & options
        ), path


def test_readme_names_every_top_level_entry():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    entries = {name.split("/")[0] for name in listed.stdout.split("\0") if name}
    visible = {
        name for name in entries if not name.startswith(".")
    }  # the others are for git and the forge
    assert not {name for name in visible if name not in readme}


def test_tour_names_every_package():
    tour = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    packages = {package for level in LEVELS for package in level if package not in PARTS}
    assert not {package for package in packages if f"### `ursa_minor/{package}`" not in tour}


def test_version_is_the_newest_of_the_changelog():
    (version,) = re.findall(
        r'^version: "(.*)"$', (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert f"\n## {version}, " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_lock_file_has_the_constrained_versions():
    text = (ROOT / "uv.lock").read_text(encoding="utf-8")
    assert not re.search(r'file:|(path|directory|editable) = |"/', text)
    urls = re.findall(r'url = "([^"]+)"(, hash = "sha256:)?', text)
    assert urls and all(
        url.startswith("https://files.pythonhosted.org/") and hashed for url, hashed in urls
    )
    assert set(re.findall(r'registry = "([^"]+)"', text)) == {"https://pypi.org/simple"}
    locked = set(re.findall(r'^name = "([^"]+)"\nversion = "([^"]+)"', text, re.MULTILINE))
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    wanted = re.findall(r"^([\w-]+)==(\S+)", constraints, re.MULTILINE)
    assert (
        len(wanted) > 15
        and not {(name.lower().replace("_", "-"), version) for name, version in wanted} - locked
    )
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]
    assert settings["constraint-dependencies"] == [f"{name}=={version}" for name, version in wanted]


def test_every_imported_package_is_declared():
    files = ("requirements.txt", "requirements/trackers.txt", "requirements/post.txt")
    declared = {name.lower() for file in files for name in requirements(file)}
    for path in PRODUCT:
        names = {
            name.lstrip(".").split(".")[0] for name in imported(path)
        } - sys.stdlib_module_names
        names -= {
            "ursa_minor",
            "bitsandbytes",
            "gguf",
            *SCRIPTS,
        }  # these packages are installed where needed
        assert {DISTRIBUTIONS.get(name, name) for name in names} <= declared, path


def requirements(file):
    return re.findall(r"^[A-Za-z][\w-]*", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_configuration_reference_lists_every_key():
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert len(FIELDS) > 60 and text.partition(keys_table.MARK)[2] == keys_table.tables()
    assert not [key for key in FIELDS if f"| `{key}:" not in text]


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_accelerate_yaml_loads(path):
    loaded = load_config_from_file(str(path))
    assert loaded.num_processes >= 1 and loaded.mixed_precision in ("no", "bf16", "fp16")
