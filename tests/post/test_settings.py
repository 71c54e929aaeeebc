"""Post-training's file and flags: each value is checked before TRL takes it, and every problem is a line."""

import os
from dataclasses import dataclass

import pytest

from ursa_minor.base.errors import BadInput
from ursa_minor.post import settings

TASK = {"model": "runs/a", "reward": "addition", "prompts": "p.jsonl", "held_out": "h.jsonl"}


@dataclass
class Config:
    """A few of GRPOConfig's keys, as it types them; make test-post asks the whole of it."""

    output_dir: str | None = None
    learning_rate: float = 1e-6
    num_generations: int | None = 8
    report_to: None | str | list[str] = None
    deepspeed: dict | str | None = None
    bf16: bool | None = None
    scale_rewards: str = "group"

    def __post_init__(self):
        if self.deepspeed:
            raise ImportError("deepspeed is not installed")


def read(place, text, *flags):
    stated = "".join(f"{key}: {value}\n" for key, value in TASK.items() if f"{key}:" not in text)
    (place / "a.yaml").write_text(f"{stated}{text}\n")
    return settings.read(["--config", str(place / "a.yaml"), *flags], Config)


def test_flags_come_over_the_file_and_numbers_are_numbers(tmp_path, monkeypatch):
    monkeypatch.delenv("OF_THE_FILE", raising=False)
    text = (
        "learning_rate: 6e-4\nreport_to: none\nscale_rewards: true\nheld_out_steps: 1e2\nstop: null"
    )
    text += "\nenv: {OF_THE_FILE: b}"
    task, config = read(
        tmp_path, text, "--num-generations", "4", "--bf16", "true", "--reward", "brackets"
    )
    assert (task.model, task.reward, task.held_out_steps, task.stop) == (
        "runs/a",
        "brackets",
        100,
        None,
    )
    assert (config.learning_rate, config.num_generations, config.bf16, config.scale_rewards) == (
        6e-4,
        4,
        True,
        True,
    )
    assert os.environ["OF_THE_FILE"] == "b"
    task, config = settings.read(
        [f"--config={tmp_path / 'a.yaml'}", "--learning_rate", "1"], Config
    )
    assert type(config.learning_rate) is float


def test_flags_are_read_as_in_train_py(tmp_path):
    _, config = read(tmp_path, "", "--bf16", "--num_generations", "4", "--num-generations=6")
    assert (config.bf16, config.num_generations) == (True, 6)
    assert read(tmp_path, "", "--bf16", "False")[1].bf16 is False


@pytest.mark.parametrize(
    ("text", "flags"), [("held_out_steps: 0.1", []), ("", ["--held-out-steps", "0.1"])]
)
def test_fraction_of_steps_is_refused(tmp_path, text, flags):
    with pytest.raises(BadInput, match="fractions of max_steps are not supported"):
        read(tmp_path, text, *flags)


def test_a_value_that_makes_no_sense_is_a_line_with_file_key_value_and_rule(tmp_path):
    for text, words in (
        ("learning_rate: .nan", "learning_rate = nan: the value must be a finite number"),
        ("learning_rate: -5", "learning_rate = -5: the value must be above 0"),
        ("held_out_steps: 0", "held_out_steps = 0: the value must be 1 or more"),
        ("model: null", "model = none: the value must be text"),
        ("model: ''", "model = : the value must be a text that is not empty"),
        ("report_to: 5", "report_to = 5: the value must be null, text or a list of texts"),
        ("deepspeed: x", "TRL rejects these settings (ImportError: deepspeed is not installed"),
        (
            "num_generation: 4",
            "num_generation is not a key of the settings; did you mean num_generations?",
        ),
    ):
        with pytest.raises(BadInput) as raised:
            read(tmp_path, text)
        (line,) = raised.value.lines
        assert line.startswith(f"{tmp_path}/a.yaml: ") and words in line and len(line) < 700


def test_what_is_missing_is_named_with_what_it_is_and_help_needs_no_file(tmp_path, capsys):
    with pytest.raises(BadInput, match="--config is missing. Use a settings file"):
        settings.read([], Config)
    (tmp_path / "a.yaml").write_text("model: a\n")
    with pytest.raises(BadInput) as raised:
        settings.read(["--config", str(tmp_path / "a.yaml")], Config)
    assert [line.split(": ")[1].partition(".")[0] for line in raised.value.lines] == [
        f"{key} is missing" for key in list(TASK)[1:]
    ]
    with pytest.raises(SystemExit) as ended:
        settings.read(["--help"], Config)
    assert ended.value.code == 0 and "--held_out_steps" in capsys.readouterr().out


def test_paths_are_expanded_and_the_file_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACE", "/place")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("UNSET", raising=False)
    task, config = read(
        tmp_path, "prompts: ~/p.jsonl\noutput_dir: $PLACE/x", "--reward", "~/r.py:short"
    )
    assert (task.prompts, config.output_dir, task.reward) == (
        "/home/me/p.jsonl",
        "/place/x",
        "/home/me/r.py:short",
    )
    with pytest.raises(
        BadInput, match=r"a.yaml: held_out = \$UNSET/h: the environment variable UNSET is not set"
    ):
        read(tmp_path, "", "--held_out", "$UNSET/h")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        BadInput, match=r"recipes/post/addition.yaml: "
    ):  # found; this Config lacks most of its keys
        settings.read(["--config", "recipes/post/addition.yaml"], Config)
