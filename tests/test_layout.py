"""Rules for the sources: layers, imports, declared packages and configuration files."""

import ast
import functools
import graphlib
import itertools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

from scripts import keys_table, lowest_versions
from ursa_minor.recipe.keys import FIELDS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "ursa_minor"
# Each package imports from itself and from packages on a lower level only.
LEVELS = (
    ("base",),
    ("recipe",),
    ("data/sources", "data/sources/formats", "model"),
    ("data/tokens", "data/tokens/formats"),
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
PARTS = {
    "data/sources/formats": "data/sources",
    "data/tokens/formats": "data/tokens",
    "evaluation/tasks": "evaluation",
}
NO_TORCH = (
    "recipe.command_line",
    "recipe.loading",
    "recipe.batching",
    "model.architectures",
    "model.resolve",
    "model.model_list",
    "evaluation.score_file",
    "model.adapters",
    "model.weight_names",
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
DISTRIBUTIONS = {
    "charset_normalizer": "charset-normalizer",
    "pynvml": "nvidia-ml-py",
    "yaml": "pyyaml",
}
YAMLS = sorted((ROOT / "accelerate_configs").glob("*.yaml"))


@functools.cache
def tree(path):
    """Return the syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), path.name)


@functools.cache
def nodes(path, kind):
    """Return the nodes of one type in a file."""
    return [node for node in ast.walk(tree(path)) if isinstance(node, kind)]


@functools.cache
def imported(path):
    """Return the dotted names that a file imports. A relative import begins with a dot."""
    names = set()
    for node in nodes(path, ast.Import):
        names |= {alias.name for alias in node.names}
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
            module = "/".join(parts)
            if module not in MODULES:  # the name of something in a module
                module = "/".join(parts[:-1])
            modules.add(module if module in MODULES else name)
    return modules


def package_of(module):
    """Return the package of a module, such as "data/tokens"."""
    return module.rpartition("/")[0]


def level_of(package):
    """Return the level of a package in ``LEVELS``."""
    return next(level for level, packages in enumerate(LEVELS) if package in packages)


def may_import(module, other):
    """Return whether the layers allow a module to import another one."""
    package = PARTS.get(package_of(module), package_of(module))
    other_package = PARTS.get(package_of(other), package_of(other))
    return other_package == package or level_of(other_package) < level_of(package)


def dotted_name(node):
    """Return the name that an expression consists of, or "" for other expressions."""
    if isinstance(node, (ast.Name, ast.Attribute)):
        return ast.unparse(node)
    return ""


def tracked_files():
    """Return the files that git tracks. Skip the test without a git checkout."""
    result = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if result.returncode:
        pytest.skip("not a git checkout")
    return [name for name in result.stdout.split("\0") if name]


def read(name):
    """Return the text of a file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def requirements(file):
    """Return the names of the packages in a requirements file."""
    return re.findall(r"^[A-Za-z][\w-]*", read(file), re.MULTILINE)


def test_each_module_is_in_a_known_package():
    assert {package_of(module) for module in MODULES} == set(itertools.chain(*LEVELS))


def test_package_has_a_docstring_and_no_code():
    for path in INITS:
        assert len(tree(path).body) == 1, path
        assert ast.get_docstring(tree(path)), path


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
        top_level_names = {name.split(".")[0] for name in names}

        assert not [name for name in names if name.startswith(".") or name.endswith("*")], path
        if path.stem != "eval_hellaswag":  # it calls eval_tasks
            assert not top_level_names & set(SCRIPTS), path


@pytest.mark.parametrize("module", NO_TORCH)
def test_module_needs_no_torch(module):
    code = f"import sys, ursa_minor.{module}; sys.exit(str({HEAVY} & {{*sys.modules}} or ''))"

    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert not result.stderr.strip()


def test_gpu_data_needs_no_package():
    subprocess.run(
        [sys.executable, "-S", "-c", "import ursa_minor.base.gpus"], cwd=ROOT, check=True
    )


PICKLE_READER = MODULES["model/import_checkpoint"]  # reads checkpoints of other trainers


def test_product_uses_no_pickle():
    modules = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
    options = {("allow_pickle", "True"), ("trust_remote_code", "True"), ("weights_only", "False")}
    functions = {"torch.load", "torch.save", "eval", "exec"}
    for path in PRODUCT:
        calls = nodes(path, ast.Call)
        called = {dotted_name(call.func) for call in calls}
        arguments = set()
        for call in calls:
            arguments |= {(keyword.arg, ast.unparse(keyword.value)) for keyword in call.keywords}
        imported_packages = {name.split(".")[0] for name in imported(path)}
        if path == PICKLE_READER:
            imported_packages.remove("pickle")
            called.remove("torch.load")

        assert not imported_packages & modules, path
        assert not (imported(path) | called) & functions, path
        assert not arguments & options, path


def test_pickles_are_read_without_executing_code():
    calls = nodes(PICKLE_READER, ast.Call)
    loads = [call for call in calls if dotted_name(call.func) == "torch.load"]
    attributes = {dotted_name(node) for node in nodes(PICKLE_READER, ast.Attribute)}

    (load,) = loads
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in load.keywords}
    assert options["weights_only"] == "True"
    pickle_names = {name for name in attributes if name.startswith("pickle.")}
    assert pickle_names == {"pickle.Unpickler", "pickle.UnpicklingError"}


def test_readme_names_every_top_level_entry():
    readme = read("README.md")

    entries = {name.split("/")[0] for name in tracked_files()}

    # Entries that begin with a dot configure git and the forge.
    visible = {name for name in entries if not name.startswith(".")}
    assert not {name for name in visible if name not in readme}


def test_tour_names_every_package():
    tour = read("docs/tour.md")

    packages = set(itertools.chain(*LEVELS)) - set(PARTS)

    assert not {package for package in packages if f"### `ursa_minor/{package}`" not in tour}


def test_version_is_the_same_everywhere():
    version = tomllib.loads(read("pyproject.toml"))["project"]["version"]

    (locked,) = re.findall(r'^name = "ursa-minor"\nversion = "(.*)"$', read("uv.lock"), re.M)
    (cited,) = re.findall(r"^version: (.*)$", read("CITATION.cff"), re.M)
    (release_date,) = re.findall(r"^date-released: (.*)$", read("CITATION.cff"), re.M)
    released = re.findall(r"^## \[(.*)\] - (.*)$", read("CHANGELOG.md"), re.M)
    assert locked == version
    assert cited == version
    assert released[0] == (version, release_date)


def test_changelog_sections_are_short_and_standard():
    newest = read("CHANGELOG.md").split("\n## [")[1]

    headings = re.findall(r"^### (.*)$", newest, re.M)

    assert headings == ["Added", "Changed", "Fixed", "Removed", "Results that changed"]
    assert len(newest.split()) <= 700


def test_lowest_versions_are_lower_bounds():
    constraints = lowest_versions.lowest_constraints(
        "torch>=2.11,<3  # why\naccelerate>=1.12,<2,!=1.14.0\n",
        "torch==2.13.0\naccelerate==1.15.0\npytest==9.2.0\n",
    )

    assert constraints == "torch==2.11\naccelerate==1.12\npytest==9.2.0\n"


def test_requirements_without_lower_bound_are_rejected():
    with pytest.raises(ValueError, match="tqdm"):
        lowest_versions.lowest_versions("tqdm<5\n")


def test_make_help_lists_at_most_15_targets():
    command = ["make", "--no-print-directory", "help"]
    output = subprocess.check_output(command, cwd=ROOT, text=True)

    targets = re.findall(r"^  make (\S+)", output, re.M)
    assert "train" in targets
    assert len(targets) <= 15
    assert max(len(line) for line in output.splitlines()) <= 80


def test_lock_file_names_public_index_only():
    text = read("uv.lock")

    urls = re.findall(r'url = "([^"]+)"(, hash = "sha256:)?', text)

    assert not re.search(r'file:|(path|directory|editable) = |"/', text)
    assert set(re.findall(r'registry = "([^"]+)"', text)) == {"https://pypi.org/simple"}
    assert urls
    for url, hash_key in urls:
        assert url.startswith("https://files.pythonhosted.org/")
        assert hash_key, url


def test_lock_file_has_constrained_versions():
    pattern = r'^name = "([^"]+)"\nversion = "([^"]+)"'
    locked = set(re.findall(pattern, read("uv.lock"), re.MULTILINE))
    settings = tomllib.loads(read("pyproject.toml"))["tool"]["uv"]

    constraints = re.findall(r"^([\w-]+)==(\S+)", read("constraints.txt"), re.MULTILINE)

    assert len(constraints) > 15
    not_locked = set(requirements("requirements/slow.txt"))
    for name, version in constraints:
        if name not in not_locked:
            assert (name.lower().replace("_", "-"), version) in locked
    pinned = [f"{name}=={version}" for name, version in constraints]
    assert settings["constraint-dependencies"] == pinned


def test_every_imported_package_is_declared():
    declared = set()
    for file in ("requirements.txt", "requirements/trackers.txt", "requirements/post.txt"):
        declared |= {name.lower() for name in requirements(file)}
    installed_where_needed = {"bitsandbytes", "gguf", "sentencepiece"}
    own_names = {"ursa_minor", *SCRIPTS}

    for path in PRODUCT:
        names = {name.lstrip(".").split(".")[0] for name in imported(path)}
        names -= installed_where_needed | own_names | sys.stdlib_module_names

        assert {DISTRIBUTIONS.get(name, name) for name in names} <= declared, path


def test_configuration_reference_lists_every_key():
    text = read("docs/configuration.md")

    _, _, tables = text.partition(keys_table.MARK)

    assert len(FIELDS) > 60
    assert tables == keys_table.tables()
    assert not [key for key in FIELDS if f"| `{key}:" not in text]


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.stem)
def test_accelerate_yaml_loads(path):
    config = load_config_from_file(str(path))

    assert config.num_processes >= 1
    assert config.mixed_precision in ("no", "bf16", "fp16")
