"""Improve a model by a reward that a program checks: TRL's GRPOTrainer, with what a GPT-2 of ours lacks for it.

    python post_train.py --config recipes/post/addition.yaml
    python post_train.py --config recipes/post/addition.yaml --reward my_rewards.py:short --max_steps 100

The file holds the keys of ursa_minor/post/settings.Task and those of TRL's GRPOConfig; flags come over it. Chat models
(trl sft) and preferences (trl dpo) need no script of ours: docs/post_training.md.
"""

import logging
import os
import sys
import warnings
from pathlib import Path

from ursa_minor.base import console, cudnn, files, paths
from ursa_minor.base.cli import exit_on_bad_input
from ursa_minor.base.errors import BadInput, errno_of
from ursa_minor.base.launch import check_launch
from ursa_minor.base.run_files import METRICS, MODEL_FOLDER

log = logging.getLogger("ursa_minor.post_train")


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Post-train as the command line asks; return the exit status."""
    # These are read when TRL is imported, or later. Trainer would spread one process over all cards of the machine.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault(cudnn.DEPRIORITIZED_VARIABLE, "1")
    if "WORLD_SIZE" not in os.environ:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    # TRL uses Transformers in a deprecated way.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    console.start(is_main=os.environ.get("RANK", "0") == "0")
    log.info("start    importing torch and Transformers")
    check_launch(os.environ)
    post_train(*parse(sys.argv[1:] if argv is None else argv))
    return 0


def parse(argv: list[str]) -> tuple:
    """Return the Task and TRL's GRPOConfig; raises BadInput for what makes no sense to either."""
    try:
        from trl import GRPOConfig
    except ImportError as error:
        raise BadInput(
            f"TRL cannot be imported ({error}): pip install -r requirements/post.txt"
        ) from None
    from ursa_minor.post import settings

    return settings.read(argv, GRPOConfig)


def post_train(task, settings) -> None:
    """Train ``task.model`` by GRPO; write model/, metrics.jsonl and reward.png into ``settings.output_dir``."""
    # Here, for they take seconds: a wrong flag is answered before.
    from datasets import Dataset
    from transformers import AutoConfig, PrinterCallback, ProgressCallback
    from transformers.utils.logging import disable_progress_bar
    from trl import GRPOTrainer

    from ursa_minor.data.tokens import tokenizer as tokenization
    from ursa_minor.evaluation.likelihood import context_length
    from ursa_minor.export import stock as stock_export
    from ursa_minor.hub import client
    from ursa_minor.model import pretrained
    from ursa_minor.model.adapters import check_no_hub_adapter
    from ursa_minor.model.resolve import resolve_model
    from ursa_minor.model.vocabulary import check_embedding_rows
    from ursa_minor.post import positions, rewards
    from ursa_minor.post import prompts as prompt_sets
    from ursa_minor.post.report import RewardReport
    from ursa_minor.post.settings import refusal

    client.bound_client()
    disable_progress_bar()
    folder, longest = Path(settings.output_dir), settings.max_completion_length
    if why := files.find_folder_problem(folder):
        raise BadInput(f"output_dir = {folder}: {why}; give another --output_dir")
    if (folder / MODEL_FOLDER).exists():
        raise BadInput(
            f"output_dir = {folder}: holds a model already; give another --output_dir, or remove it"
        )
    begun = settings.resume_from_checkpoint
    if begun is not None and not os.path.isfile(f"{begun}/trainer_state.json"):  # noqa: PTH113
        raise BadInput(
            f"resume_from_checkpoint = {begun}: holds no checkpoint of TRL; give output_dir's checkpoint-N"
        )
    reward = rewards.checked(task.reward, task.stop)
    prompts, held_out = (
        prompt_sets.read("prompts", task.prompts),
        prompt_sets.read("held_out", task.held_out),
    )
    where = f"model = {task.model}"
    name = resolve_model(task.model, "model = ")
    check_no_hub_adapter(name, where)
    tokenizer = tokenization.load(name, of_model=True)
    prompt_sets.check(tokenizer, [*prompts, *held_out])
    # Loading the config is cheap: prompts are dropped before the weights are loaded.
    context = context_length(pretrained.from_pretrained(where, AutoConfig, name))
    limits = {"context": context, "max_completion_length": longest}
    prompts = prompt_sets.drop_long(f"prompts = {task.prompts}", tokenizer, prompts, **limits)
    prompt_sets.require_batch(
        f"prompts = {task.prompts}",
        prompts,
        completions=settings.generation_batch_size,
        num_generations=settings.num_generations,
    )
    held_out = prompt_sets.drop_long(f"held_out = {task.held_out}", tokenizer, held_out, **limits)
    model = pretrained.load(name).float()
    check_embedding_rows(model, tokenizer, where)
    prompt_sets.stop_at(model, tokenizer, task.stop)
    positions.derive_positions(model)

    report = RewardReport(
        folder if os.environ.get("RANK", "0") == "0" else None,
        f"{reward.__name__}: {task.model}",
        lambda: prompt_sets.score(model, tokenizer, held_out, reward, longest),
        task.held_out_steps,
        resumed=begun is not None,
    )
    try:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=[prompt_sets.with_completions_of(tokenizer, reward)],
            args=settings,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=tokenizer,
            callbacks=[report],
        )
        for printing in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(printing)
        trainer.train(resume_from_checkpoint=begun)
    except Exception as error:  # TRL checks many values only where it uses them
        if isinstance(error, BadInput) or errno_of(error) or len(report.rows) > 1:
            raise
        raise refusal(error) from error
    if trainer.accelerator.is_main_process:
        stock_export.write(model, folder / MODEL_FOLDER, tokenizer)
    scores = [row["eval/reward"] for row in report.rows if "eval/reward" in row]
    log.info(f"{len(held_out):,} held-out prompts: {scores[0]:.3f} before, {scores[-1]:.3f} after")
    if reward.problems:
        log.warning(
            f"{reward.problems:,} of {reward.calls:,} calls of the reward failed, and count 0"
        )
    command = f"python generate.py --model {paths.quoted(folder)}"
    log.info(f"{folder}/model/: for AutoModelForCausalLM.from_pretrained; {command}")
    log.info(f"{folder}/{METRICS}, reward.png: every number above, both rewards over steps")


if __name__ == "__main__":
    sys.exit(main())
