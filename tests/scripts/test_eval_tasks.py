"""eval_tasks.py with several models: repeated commands, damaged checkpoints and pictures."""

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_folders import write_checkpoint, write_model, write_recipe, write_run
from conftest import WORDS, create_shared_folder, run_script

import eval_tasks
from ursa_minor.base.errors import BadInput
from ursa_minor.evaluation import encoded_task, score_model, score_models
from ursa_minor.evaluation.score_file import ScoreFile
from ursa_minor.reporting import learning_curve

STEPS = (0, 1, 4)
PATTERN = "runs/*/checkpoints/*"
ITEMS = ("--tasks", "blimp", "piqa", "--task_files", "blimp=blimp.jsonl", "piqa=piqa.jsonl")
BLIMP = ("--tasks", "blimp", "--task_files", "blimp=blimp.jsonl")
SCORE = ("eval_tasks.py", "--model", PATTERN, *ITEMS, "--scores", "scores.jsonl")


def write_items() -> None:
    """Write 12 pairs of BLiMP in three parts, and 6 items of PIQA."""
    pairs = []
    for number in range(12):
        words = [WORDS[(3 * number + index * index) % len(WORDS)] for index in range(6)]
        pair = {"sentence_good": " ".join(words), "sentence_bad": " ".join(reversed(words))}
        pairs.append(pair | {"UID": f"part_{number % 3}"})
    items = []
    for number in range(6):
        item = {"goal": WORDS[number], "sol1": WORDS[number + 1], "sol2": WORDS[number + 2]}
        items.append(item | {"label": number % 2})
    for name, rows in (("blimp", pairs), ("piqa", items)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="session")
def scored_folder(tmp_path_factory) -> Path:
    """Two runs that differ in their seeds, with three checkpoints each, and items."""

    score_model.by_evaluate()  # the processes of the scripts inherit the loaded metrics

    def make() -> None:
        write_items()
        for seed in (1, 2):
            write_run(Path(f"runs/muon-{seed}"), STEPS, seed=seed, data_seed=seed)
        run_script(*SCORE, PICTURES="1")

    return create_shared_folder(tmp_path_factory, "scored", make)


@pytest.fixture
def workspace(scored_folder, tmp_path, monkeypatch) -> Path:
    """Change to a copy of the folder, whose checkpoints are all scored."""
    score_model.by_evaluate()
    shutil.copytree(scored_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    # Drawing takes as long as all other steps. test_learning_curve.py draws pictures.
    monkeypatch.setattr(learning_curve, "draw", lambda tasks, lines, path: path.touch())
    return tmp_path


def read_scores(path: str = "scores.jsonl") -> list[dict]:
    """Return the lines of a file with scores."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def without_time(lines: list[dict]) -> list[dict]:
    """Return lines without the duration."""
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def test_each_checkpoint_has_a_line_per_task(workspace):
    lines = read_scores()

    names = [(line["run"], line["step"], line["tokens"], line["task"]) for line in lines]
    expected = []
    for run in ("runs/muon-1", "runs/muon-2"):
        for step in STEPS:
            expected += [(run, step, 64 * step, task) for task in ("blimp", "piqa")]
    assert names == expected
    assert lines[0]["items"] == 12
    assert lines[0]["dataset"] == "blimp.jsonl"
    assert 0 <= lines[0]["acc"] <= 1
    assert Path("scores.png").stat().st_size > 10_000


def test_scores_are_those_of_a_single_model(workspace):
    model = f"runs/muon-1/checkpoints/step-{4:08d}"

    result = run_script("eval_tasks.py", "--model", model, *ITEMS)

    single = [json.loads(line) for line in result.stdout.splitlines()]
    several = [line for line in read_scores() if line["model"] == model]
    for line, expected in zip(several, without_time(single), strict=True):
        assert {name: line[name] for name in expected} == expected


def test_repeated_command_scores_nothing_again(workspace, monkeypatch):
    before = Path("scores.jsonl").read_bytes()
    monkeypatch.setattr(score_models.pretrained, "load", pytest.fail)

    result = run_script(*SCORE, "--picture", "again.png")

    assert Path("scores.jsonl").read_bytes() == before
    assert "6 models are not scored again" in result.stderr
    assert result.stdout.count(" ± ") == 13  # the twelve scores, and the legend
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    assert Path("again.png").is_file()


def test_only_changed_checkpoint_is_scored_again(workspace):
    before = read_scores()
    changed = write_changed_checkpoint()

    result = run_script(*SCORE)

    assert "5 models are not scored again" in result.stderr
    lines = read_scores()
    others = [line for line in before if line["model"] != changed]
    assert lines[:-2] == others
    assert [line["model"] for line in lines[-2:]] == [changed, changed]
    assert lines[-1]["weights"] != before[0]["weights"]


def write_changed_checkpoint() -> str:
    """Replace a checkpoint by one with other weights, and return its path."""
    folder = Path(f"runs/muon-1/checkpoints/step-{4:08d}")
    shutil.rmtree(folder)
    write_checkpoint(Path("runs/muon-1"), 4, seed=77)
    return str(folder)


def test_unfinished_and_missing_lines_are_completed(workspace):
    before = read_scores()
    path = Path("scores.jsonl")
    path.write_bytes(path.read_bytes()[:-150])

    run_script(*SCORE)

    assert without_time(read_scores()) == without_time(before)


@pytest.mark.parametrize("flags", [("--limit", "5"), ("--by_part",)])
def test_other_options_are_scored_again(workspace, flags):
    result = run_script(*SCORE, *flags)

    assert "not scored again" not in result.stderr


def test_interrupted_command_keeps_finished_scores(workspace, monkeypatch):
    Path("scores.jsonl").unlink()
    original = ScoreFile.add

    def add_then_interrupt(self, key, lines):
        original(self, key, lines)
        if len(self._lines) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(ScoreFile, "add", add_then_interrupt)

    result = run_script(*SCORE, expect=130)

    assert len(read_scores()) == 3
    assert "interrupted" in result.stderr
    assert "scores.jsonl" in result.stderr


def test_two_processes_compute_the_same_scores(workspace):
    before = read_scores()
    write_changed_checkpoint()

    result = run_script(*SCORE, processes=2)

    lines = read_scores()
    assert len(lines) == len(before)
    assert result.stdout.count("scores.png") == 1
    Path("scores.jsonl").unlink()
    run_script(*SCORE)
    scores = {(line["model"], line["task"]): line["acc"] for line in lines}
    assert {(line["model"], line["task"]): line["acc"] for line in read_scores()} == scores


# ---- encoding


def test_items_are_encoded_once_per_tokenizer(workspace, monkeypatch):
    write_run(Path("runs/other"), STEPS, vocab_size=280, seed=3)
    original = encoded_task.EncodedTask.__init__

    def count(self, *args):
        with Path("encoded.txt").open("a") as file:
            file.write("x")
        original(self, *args)

    monkeypatch.setattr(encoded_task.EncodedTask, "__init__", count)

    run_script(*SCORE, *BLIMP, "--scores", "new.jsonl")

    assert Path("encoded.txt").read_text() == "xx"
    assert len(read_scores("new.jsonl")) == 9


# ---- checkpoints that cannot be scored


def damage(name: str) -> None:
    """Damage a checkpoint in different ways."""
    folder = Path(f"runs/muon-1/checkpoints/step-{1:08d}")
    if name == "corrupted":
        data = bytearray((folder / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (folder / "model.safetensors").write_bytes(data)
    elif name == "truncated":
        (folder / "manifest.json").unlink()
        (folder / "model.safetensors").write_bytes(b"short")
    elif name == "no config":
        (folder / "config.json").unlink()
    elif name == "no tokenizer":
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").unlink()
    elif name == "not finite":
        write_not_finite_weights(folder)


def write_not_finite_weights(folder: Path) -> None:
    """Replace a weight by NaN."""
    from safetensors.torch import load_file, save_file

    (folder / "manifest.json").unlink()
    tensors = load_file(folder / "model.safetensors")
    tensors["wte.weight"][5] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    "problem", ["corrupted", "truncated", "no config", "no tokenizer", "not finite"]
)
def test_other_checkpoints_are_scored_despite_a_bad_one(workspace, problem):
    damage(problem)

    result = run_script(*SCORE, *BLIMP, "--scores", "new.jsonl", expect=1)

    assert "step-00000001" in result.stderr
    assert "1 model was not scored" in result.stderr
    lines = read_scores("new.jsonl")
    assert [line["step"] for line in lines] == [0, 4, 0, 1, 4]
    assert Path("new.png").is_file()


def test_problem_of_a_task_is_reported_once(workspace):
    pair = {"sentence_good": "cat " * 50, "sentence_bad": "dog " * 50}
    Path("blimp.jsonl").write_text(json.dumps(pair))

    result = run_script(*SCORE, *BLIMP, "--scores", "new.jsonl", expect=1)

    assert result.stderr.count("BLiMP cannot be scored") == 1
    assert "6 models were not scored" in result.stderr


def test_bad_checkpoint_is_skipped_by_two_processes(workspace):
    damage("not finite")

    run_script(*SCORE, "--scores", "new.jsonl", expect=1, processes=2)

    assert len(read_scores("new.jsonl")) == 10


def test_other_files_are_skipped(workspace):
    Path("runs/muon-1/checkpoints/notes.txt").write_text("mine")

    result = run_script(*SCORE)

    assert "contain no model and are skipped: runs/muon-1/checkpoints/notes.txt" in result.stderr


def test_model_without_step_is_scored_and_not_drawn(workspace):
    write_model(Path("plain"), seed=5)
    scored = ("--model", "plain", PATTERN, *BLIMP, "--scores", "scores.jsonl")

    result = run_script("eval_tasks.py", *scored)

    assert "The picture leaves out models" in result.stderr
    line = read_scores()[-1]
    assert line["model"] == "plain"
    assert (line["run"], line["step"], line["tokens"]) == (None, None, None)
    assert "\nplain\n" in result.stdout


def test_picture_of_models_without_steps_is_rejected(workspace):
    write_model(Path("plain"), seed=5)
    flags = ("--model", "plain", *BLIMP, "--picture", "curve.png")

    result = run_script("eval_tasks.py", *flags, expect=2)

    assert "--picture curve.png" in result.stderr
    assert "plain" in result.stderr
    assert not Path("curve.png").exists()


def test_files_are_next_to_the_first_run_by_default(workspace):
    run_script("eval_tasks.py", "--model", "runs/muon-1/checkpoints/*0", *BLIMP)

    assert len(read_scores("runs/learning_curve.jsonl")) == 1


# ---- parts


def test_parts_have_lines_and_a_table(workspace):
    result = run_script(*SCORE, "--by_part")

    lines = read_scores()
    parts = [line for line in lines if "part" in line]
    assert len(lines) == 12 + 6 * 3
    assert {line["part"] for line in parts} == {"part_0", "part_1", "part_2"}
    first_parts = [line for line in parts if line["model"] == lines[0]["model"]]
    total = next(line for line in lines if line.get("parts") == 3)
    assert sum(line["acc"] for line in first_parts) / 3 == pytest.approx(total["acc"])
    assert {line["items"] for line in parts} == {4}
    assert result.stdout.count("part_2") == 1

    again = run_script(*SCORE, "--by_part")

    assert read_scores() == lines
    assert "6 models are not scored again" in again.stderr


def test_parts_of_a_single_model_are_printed(workspace):
    model = f"runs/muon-1/checkpoints/step-{4:08d}"

    result = run_script("eval_tasks.py", "--model", model, *BLIMP, "--by_part")

    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line.get("part") for line in lines] == [None, "part_0", "part_1", "part_2"]
    assert "BLiMP, 3 parts" in result.stderr


def test_item_without_part_is_rejected(workspace):
    rows = [json.loads(line) for line in Path("blimp.jsonl").read_text().splitlines()]
    del rows[4]["UID"]
    Path("blimp.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    result = run_script(*SCORE, "--by_part", expect=2)

    assert "--by_part: blimp.jsonl: line 5 has no UID" in result.stderr


def test_task_without_parts_is_rejected(workspace):
    flags = ("--tasks", "piqa", "--task_files", "piqa=piqa.jsonl", "--by_part")

    result = run_script("eval_tasks.py", "--model", PATTERN, *flags, expect=2)

    assert "--by_part: no task of --tasks has parts" in result.stderr


# ---- options


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--output", "x.jsonl"), ("--output x.jsonl", "--scores")),
        (("--picture", "x.jpg"), ("--picture x.jpg", ".png")),
        (("--picture", "none/x.png"), ("--picture none/x.png", "folder that exists")),
        (("--scores", "none/x.jsonl"), ("--scores none/x.jsonl", "folder that exists")),
        (("--scores", "x.png"), ("--scores x.png", "picture")),
        (("--scores", "blimp.jsonl"), ("--scores blimp.jsonl", "overwritten")),
    ],
)
def test_invalid_flag_is_rejected(tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(BadInput) as error:
        eval_tasks.parse(["--model", PATTERN, *BLIMP, *flags])

    for word in words:
        assert word in str(error.value)


def test_single_model_needs_no_scores_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_recipe(Path("runs/a"))

    assert not eval_tasks.parse(["--model", "runs/a", *BLIMP]).has_several_models
    assert eval_tasks.parse(["--model", "runs/a", "runs/b", *BLIMP]).has_several_models
    assert eval_tasks.parse(["--model", "runs/*", *BLIMP]).has_several_models
    assert eval_tasks.parse(["--model", "runs/a", *BLIMP, "--scores", "s"]).has_several_models
