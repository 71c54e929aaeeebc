"""Settings of post-training: each value is checked before TRL gets it."""

import os
from dataclasses import dataclass

import pytest

from ursa_minor.base.errors import BadInput
from ursa_minor.post import settings

TASK = {"model": "runs/a", "reward": "addition", "prompts": "p.jsonl", "held_out": "h.jsonl"}


@dataclass
class Config:
    """Some keys of GRPOConfig with their types. ``make test-post`` uses the real class."""

    output_dir: str | None = None
    learning_rate: float = 1e-6
    num_generations: int | None = 8
    report_to: None | str | list[str] = None  # noqa: RUF036  (in TRL's order)
    deepspeed: dict | str | None = None
    bf16: bool | None = None
    scale_rewards: str = "group"

    def __post_init__(self):
        if self.deepspeed:
            raise ImportError("deepspeed is not installed")


def read(folder, text, *flags):
    """Write a settings file, with the missing keys of TASK added, and read it with flags."""
    lines = [f"{key}: {value}" for key, value in TASK.items() if f"{key}:" not in text]
    path = folder / "a.yaml"
    path.write_text("\n".join([*lines, text]) + "\n")
    return settings.read(["--config", str(path), *flags], Config)


def test_flags_override_file(tmp_path):
    task, config = read(tmp_path, "num_generations: 6", "--num-generations", "4")
    assert config.num_generations == 4
    assert task.reward == "addition"

    task, _ = read(tmp_path, "", "--reward", "brackets")
    assert task.reward == "brackets"


def test_values_have_types_of_their_keys(tmp_path):
    text = (
        "learning_rate: 6e-4\nreport_to: none\nscale_rewards: true\nheld_out_steps: 1e2\nstop: null"
    )

    task, config = read(tmp_path, text, "--num-generations", "4", "--bf16", "true")

    assert task.model == "runs/a"
    assert task.held_out_steps == 100
    assert task.stop is None
    assert config.learning_rate == 6e-4
    assert config.num_generations == 4
    assert config.bf16 is True
    assert config.scale_rewards is True


def test_integer_flag_becomes_float(tmp_path):
    read(tmp_path, "")  # writes a.yaml
    flags = [f"--config={tmp_path / 'a.yaml'}", "--learning_rate", "1"]

    _, config = settings.read(flags, Config)

    assert config.learning_rate == 1.0
    assert type(config.learning_rate) is float


def test_file_sets_environment_variables(tmp_path, monkeypatch):
    monkeypatch.delenv("OF_THE_FILE", raising=False)

    read(tmp_path, "env: {OF_THE_FILE: b}")

    assert os.environ["OF_THE_FILE"] == "b"


def test_flags_are_parsed_like_in_train_py(tmp_path):
    _, config = read(tmp_path, "", "--bf16", "--num_generations", "4", "--num-generations=6")
    assert config.bf16 is True
    assert config.num_generations == 6

    _, config = read(tmp_path, "", "--bf16", "False")
    assert config.bf16 is False


@pytest.mark.parametrize(
    ("text", "flags"),
    [("held_out_steps: 0.1", []), ("", ["--held-out-steps", "0.1"])],
    ids=["file", "flag"],
)
def test_fraction_of_steps_is_rejected(tmp_path, text, flags):
    with pytest.raises(BadInput, match="fractions of max_steps are not supported"):
        read(tmp_path, text, *flags)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("learning_rate: .nan", "learning_rate = nan: the value must be a finite number"),
        ("learning_rate: -5", "learning_rate = -5: the value must be above 0"),
        ("held_out_steps: 0", "held_out_steps = 0: the value must be 1 or more"),
        ("model: null", "model = none: the value must be text"),
        ("model: ''", "model = '': the value must be a text that is not empty"),
        ("report_to: 5", "report_to = 5: the value must be null, text or a list of texts"),
        ("deepspeed: x", "TRL rejects these settings (ImportError: deepspeed is not installed"),
        ("num_generation: 4", "did you mean num_generations?"),
    ],
)
def test_invalid_value_is_rejected(tmp_path, text, problem):
    with pytest.raises(BadInput) as error:
        read(tmp_path, text)

    assert len(error.value.lines) == 1
    line = error.value.lines[0]
    assert line.startswith(f"{tmp_path}/a.yaml: ")
    assert problem in line
    assert len(line) < 700


def test_missing_config_is_rejected():
    with pytest.raises(BadInput, match="--config is missing"):
        settings.read([], Config)


def test_every_missing_key_is_reported(tmp_path):
    (tmp_path / "a.yaml").write_text("model: a\n")

    with pytest.raises(BadInput) as error:
        settings.read(["--config", str(tmp_path / "a.yaml")], Config)

    missing_keys = list(TASK)[1:]
    assert len(error.value.lines) == len(missing_keys)
    for key, line in zip(missing_keys, error.value.lines, strict=True):
        assert f": {key} is missing" in line


def test_help_needs_no_file(capsys):
    with pytest.raises(SystemExit) as error:
        settings.read(["--help"], Config)

    assert error.value.code == 0
    assert "--held_out_steps" in capsys.readouterr().out


def test_paths_are_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACE", "/place")
    monkeypatch.setenv("HOME", "/home/me")
    text = "prompts: ~/p.jsonl\noutput_dir: $PLACE/x"

    task, config = read(tmp_path, text, "--reward", "~/r.py:short")

    assert task.prompts == "/home/me/p.jsonl"
    assert task.reward == "/home/me/r.py:short"
    assert config.output_dir == "/place/x"


def test_unset_variable_in_path_is_rejected(tmp_path, monkeypatch):
    monkeypatch.delenv("UNSET", raising=False)

    with pytest.raises(BadInput, match=r"a\.yaml: held_out = \$UNSET/h: .* UNSET is not set"):
        read(tmp_path, "", "--held_out", "$UNSET/h")


def test_recipe_is_found_from_any_folder(tmp_path, monkeypatch):
    """The error shows that the file was read: this Config lacks most of its keys."""
    monkeypatch.chdir(tmp_path)

    with pytest.raises(BadInput, match=r"recipes/post/addition\.yaml: "):
        settings.read(["--config", "recipes/post/addition.yaml"], Config)
