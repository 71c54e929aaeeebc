"""A script ends at an environment in which it could not run with one line, at once, and at Ctrl-C without a traceback."""

import os
import signal
import subprocess
import sys

import pytest
from accelerate.utils import DynamoBackend, PrecisionType
from conftest import ROOT

from pretrain.base import entry
from pretrain.base.errors import BadInput

SCRIPTS = sorted(path.name for path in ROOT.glob("*.py"))
TWO = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
BAD = {
    "WORLD_SIZE": ("abc", "0", "-1", "", "2.0", "²", "1" * 5000),
    "RANK": ("x", "-1", "1", "5"),
    "LOCAL_RANK": ("x", "5"),
    "LOCAL_WORLD_SIZE": ("x",),
    "OMP_NUM_THREADS": ("abc", "0", "-1"),
    "MASTER_PORT": ("garbage", "0", "65536"),
    "ACCELERATE_MIXED_PRECISION": ("foo", ""),
    "ACCELERATE_DYNAMO_BACKEND": ("foo",),
    "ACCELERATE_DYNAMO_USE_DYNAMIC": ("maybe",),
    "ACCELERATE_USE_CPU": ("maybe", "1"),
    "HF_ENDPOINT": ("nope", "ftp://x", "http://a b", "https://", "http://a:b", ""),
}


def faults(**environment):
    try:
        entry.refuse_environment(environment)
    except BadInput as error:
        assert error.alone and error.status == 2
        return error.lines
    return []


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_variable_that_a_library_would_end_at_is_one_line_with_its_value_its_rule_and_the_remedy(name, value):
    (line,) = faults(**{name: value})
    if name == "LOCAL_RANK" and value == "5":
        assert line.startswith("WORLD_SIZE = 1: RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT must be set, too; start ")
    else:
        assert line.startswith(f"{name} = {value:.200}: must be ") and line.endswith("; correct it, or unset it")


def test_what_only_some_of_a_launch_have_is_refused_and_what_a_launcher_gives_is_not():
    assert not faults() and not faults(**TWO) and not faults(MASTER_PORT="29500", RANK="0", MASTER_ADDR="")
    assert not faults(OMP_NUM_THREADS="8", ACCELERATE_USE_CPU="True", ACCELERATE_USE_FSDP="false", TORCH_LOGS="")
    for url in ("https://user:pw@hub.example:8443/mirror", "http://[::1]:80", "http://127.0.0.1:5000/"):
        assert not faults(HF_ENDPOINT=url)
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        (line,) = faults(**{other: value for other, value in TWO.items() if other != name})
        assert line.startswith(f"WORLD_SIZE = 2: {name} must be set, too; start the processes with accelerate launch")
    for name in ("RANK", "LOCAL_RANK"):
        assert faults(**TWO | {name: "2"}) == [f"{name} = 2: must be below WORLD_SIZE = 2; correct it, or unset it"]


def test_every_word_that_is_taken_is_one_of_accelerates():
    assert set(entry.VARIABLES["ACCELERATE_DYNAMO_BACKEND"]) <= {str(each).lower() for each in DynamoBackend}
    assert set(entry.VARIABLES["ACCELERATE_MIXED_PRECISION"]) == {str(each).lower() for each in PrecisionType}


def started(tmp_path, script, *options, module="torch", code="raise SystemExit('torch is imported')", **environment):
    """Run a script; the package that it imports first of those that take seconds is ``code``."""
    (tmp_path / f"{module}.py").write_text(code)
    command = [sys.executable, *options, str(ROOT / script), "--nope"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)} | environment
    return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("script", SCRIPTS)
def test_each_script_refuses_an_optimised_python_and_such_a_variable_before_what_takes_seconds(tmp_path, script):
    done = started(tmp_path, script, "-OO", WORLD_SIZE="abc", RANK="3")
    optimised, variable = done.stderr.splitlines()
    assert done.returncode == 2 and "PYTHONOPTIMIZE=2" in optimised and variable.startswith("error: WORLD_SIZE = abc: ")
