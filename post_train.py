"""Improve a model by a reward that a program checks: TRL's GRPOTrainer, with what a GPT-2 of ours lacks for it.

    python post_train.py --config recipes/post/addition.yaml
    python post_train.py --config recipes/post/addition.yaml --reward my_rewards.py:short --max_steps 100

The file holds the keys of Task, below, and those of TRL's GRPOConfig; flags come over it. Chat models (trl sft) and
preferences (trl dpo) need no script of ours: docs/post_training.md.
"""

import logging
import os
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from pretrain.base import console
from pretrain.base.entry import exit_on_bad_input
from pretrain.base.errors import BadInput
from pretrain.base.layout import METRICS
from pretrain.recipe.rules import nearest

log = logging.getLogger("pretrain.post_train")


@dataclass
class Task:
    """What to improve, by which reward, on which prompts."""

    model: str = field(metadata={"help": "a run folder, a model folder, or a Hub id"})
    reward: str = field(metadata={"help": "addition, brackets, python_compiles, or file.py:function of your own"})
    prompts: str = field(metadata={"help": "a file of rows with a column prompt (.jsonl, .parquet, .csv)"})
    held_out: str = field(metadata={"help": "another one, which the model is scored on before, meanwhile and after"})
    held_out_steps: int = field(default=20, metadata={"help": "score it every so many steps"})
    stop: str | None = field(default=None, metadata={"help": "a token that ends a completion, besides the end of text"})


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Post-train as the command line asks; return the exit status."""
    # Both are read when TRL is imported. Trainer would spread one process over all cards of the machine.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if "WORLD_SIZE" not in os.environ:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # TRL's use of it
    console.start(is_main=os.environ.get("RANK", "0") == "0")
    post_train(*parse(sys.argv[1:] if argv is None else argv))
    return 0


def parse(argv: list[str]) -> tuple:
    """Return the Task and TRL's GRPOConfig; raises BadInput for what makes no sense to either."""
    try:
        from trl import GRPOConfig, TrlParser
    except ImportError as error:
        raise BadInput(f"TRL cannot be imported ({error}): pip install -r requirements-post.txt") from None
    import yaml

    parser = TrlParser([Task, GRPOConfig], allow_abbrev=False)

    def refuse(message: str) -> None:
        raise BadInput(message)

    parser.error = refuse
    names = [action.dest for action in parser._actions]
    if "--config" not in argv[:-1]:
        raise BadInput("--config is missing: give a file, for example recipes/post/addition.yaml")
    file = Path(argv[argv.index("--config") + 1])
    if not file.is_file():
        raise BadInput(f"--config {file}: no such file; for example recipes/post/addition.yaml")
    try:
        written = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInput(f"--config {file}: cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(written, dict):
        raise BadInput(f"--config {file}: must hold `key: value` lines")
    flags = [word.partition("=")[0][2:] for word in argv if word.startswith("--")]
    unknown = [(f"{file}: {key}", key, "") for key in written if key not in (*names, "env")]
    unknown += [(f"--{key}", key, "--") for key in flags if key.replace("-", "_") not in (*names, "config")]
    if unknown:
        raise BadInput(f"{shown}: no such key{nearest(key, names, prefix)}" for shown, key, prefix in unknown)
    try:
        return parser.parse_args_and_config(argv)
    except BadInput:
        raise
    except ValueError as error:  # of GRPOConfig, about values that do not fit each other
        raise BadInput(f"TRL refuses these settings: {' '.join(str(error).split())}") from None


def post_train(task: Task, settings) -> None:
    """Train ``task.model`` by GRPO; write model/, metrics.jsonl and reward.png into ``settings.output_dir``."""
    # Here, for they take seconds: a wrong flag is answered before.
    from datasets import Dataset
    from transformers import PrinterCallback, ProgressCallback
    from transformers.utils.logging import disable_progress_bar
    from trl import GRPOTrainer

    from pretrain.data import tokenization
    from pretrain.hub import client
    from pretrain.model import export, pretrained
    from pretrain.post import positions, problems, rewards
    from pretrain.post.report import Report

    client.bound_client()
    disable_progress_bar()
    folder, longest = Path(settings.output_dir), settings.max_completion_length
    if (folder / "model").exists():
        raise BadInput(f"output_dir = {folder}: holds a model already; give another --output_dir, or remove it")
    reward = rewards.CheckedReward(task.reward, rewards.find(task.reward), task.stop)
    prompts, held_out = problems.read("prompts", task.prompts), problems.read("held_out", task.held_out)
    name = pretrained.find(task.model, "model =")
    tokenizer, model = tokenization.load(name, of_model=True), pretrained.load(name).float()
    problems.check(model, tokenizer, [*prompts, *held_out], longest)
    problems.stop_at(model, tokenizer, task.stop)
    positions.derive_positions(model)

    report = Report(
        folder if os.environ.get("RANK", "0") == "0" else None,
        f"{reward.__name__}: {task.model}",
        lambda: problems.score(model, tokenizer, held_out, reward, longest),
        task.held_out_steps,
        resumed=bool(settings.resume_from_checkpoint),
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=[reward],
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=tokenizer,
        callbacks=[report],
    )
    for printing in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(printing)
    trainer.train(resume_from_checkpoint=settings.resume_from_checkpoint)
    if trainer.accelerator.is_main_process:
        export.write(model, folder / "model", tokenizer)
    scores = [row["eval/reward"] for row in report.rows if "eval/reward" in row]
    log.info(f"{len(held_out):,} held-out prompts: {scores[0]:.3f} before, {scores[-1]:.3f} after")
    if reward.faults:
        log.warning(f"{reward.faults:,} of {reward.calls:,} calls of the reward failed, and count 0")
    for file, use in {
        "model/": f"load it with AutoModelForCausalLM.from_pretrained, or: python generate.py --model {folder}",
        "reward.png": "both rewards over steps",
        METRICS: "every number above",
    }.items():
        log.info(f"{folder / file!s:32} {use}")


if __name__ == "__main__":
    sys.exit(main())
