"""Post-train a model with TRL's GRPOTrainer: improve it by a reward function.

    python post_train.py --config recipes/post/addition.yaml
    python post_train.py --config recipes/post/addition.yaml --reward my_rewards.py:short

The file has the keys of PostTrainingTask (ursa_minor/post/settings.py) and of TRL's GRPOConfig.
Flags override it. Fine-tuning on chats (trl sft) and on preferences (trl dpo) uses TRL's own
commands: see docs/post_training.md.
"""

import argparse
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import NoReturn

from ursa_minor.base import console, cudnn, files, paths
from ursa_minor.base.cli import exit_on_bad_input, is_main_process
from ursa_minor.base.errors import BadInput, errno_of
from ursa_minor.base.launch import check_launch
from ursa_minor.base.run_files import METRICS, MODEL_FOLDER

log = logging.getLogger("ursa_minor.post_train")

INSTALL_TRL = "pip install -r requirements/post.txt"


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Post-train as the command line states, and return the exit status."""
    # These variables are read when TRL is imported, or later.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault(cudnn.DEPRIORITIZED_VARIABLE, "1")
    if "WORLD_SIZE" not in os.environ:
        # Otherwise Trainer would use all GPUs of the machine from one process.
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    # TRL uses Transformers in a deprecated way.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    console.start(is_main=is_main_process())
    log.info("start    importing torch and Transformers")
    check_launch(os.environ)
    task, settings = parse(sys.argv[1:] if argv is None else argv)
    post_train(task, settings)
    return 0


def parse(argv: list[str]) -> tuple:
    """Return the PostTrainingTask and TRL's GRPOConfig. Raises BadInput for invalid settings."""
    try:
        from trl import GRPOConfig
    except ImportError as error:
        if not {"-h", "--help"}.isdisjoint(argv):
            show_help_without_trl()
        raise BadInput(f"TRL cannot be imported ({error}). Install it: {INSTALL_TRL}") from None
    from ursa_minor.post import settings

    return settings.read(argv, GRPOConfig)


def show_help_without_trl() -> NoReturn:
    """Print the help without the options that TRL defines, and exit."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s --config PATH [--key value ...]",
        description=__doc__.partition("\n")[0],
        epilog=f"Each key of the file is also an option. Most are those of TRL's GRPOConfig. To "
        f"list them, install TRL: {INSTALL_TRL}",
    )
    parser.add_argument(
        "--config",
        metavar="PATH",
        help="YAML file with the settings (required), for example recipes/post/addition.yaml.",
    )
    parser.print_help()
    raise SystemExit(0)


def post_train(task, settings) -> None:
    """Train ``task.model`` by GRPO and write it into ``settings.output_dir``.

    The folder gets model/, metrics.jsonl and reward.png.

    Args:
        task: PostTrainingTask.
        settings: GRPOConfig of TRL.
    """
    # These imports take seconds, so they come after the check of the flags.
    from datasets import Dataset
    from transformers import AutoConfig, PrinterCallback, ProgressCallback
    from transformers.utils.logging import disable_progress_bar
    from trl import GRPOTrainer

    from ursa_minor.data.tokens import pretrained_tokenizer
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
    from ursa_minor.post.settings import trl_error

    client.set_timeouts()
    disable_progress_bar()
    check_folders(settings)
    folder = Path(settings.output_dir)

    # Load the reward, the prompts and the tokenizer, and check that they fit together.
    reward = rewards.load_reward(task.reward, task.stop)
    prompts = prompt_sets.read("prompts", task.prompts)
    held_out = prompt_sets.read("held_out", task.held_out)
    model_label = f"model = {task.model}"
    name = resolve_model(task.model, "model = ")
    check_no_hub_adapter(name, model_label)
    tokenizer = pretrained_tokenizer.load(name, of_model=True)
    prompt_sets.check(tokenizer, [*prompts, *held_out])

    # Drop the prompts that are too long. This needs only the config of the model, which is loaded
    # in a moment, and not the weights.
    context = context_length(pretrained.from_pretrained(model_label, AutoConfig, name))
    limits = {"context": context, "max_completion_length": settings.max_completion_length}
    prompts_label = f"prompts = {task.prompts}"
    prompts = prompt_sets.drop_long(prompts_label, tokenizer, prompts, **limits)
    prompt_sets.require_batch(
        prompts_label,
        prompts,
        completions=settings.generation_batch_size,
        num_generations=settings.num_generations,
    )
    held_out = prompt_sets.drop_long(f"held_out = {task.held_out}", tokenizer, held_out, **limits)

    model = pretrained.load(name).float()
    check_embedding_rows(model, tokenizer, model_label)
    prompt_sets.stop_at(model, tokenizer, task.stop)
    positions.derive_positions(model)

    def score_held_out() -> float:
        return prompt_sets.score(model, tokenizer, held_out, reward, settings.max_completion_length)

    report = RewardReport(
        folder if is_main_process() else None,
        f"{reward.__name__}: {task.model}",
        score_held_out,
        task.held_out_steps,
        resumed=settings.resume_from_checkpoint is not None,
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
        for printing_callback in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(printing_callback)
        trainer.train(resume_from_checkpoint=settings.resume_from_checkpoint)
    except Exception as error:
        # TRL checks many settings only where it uses them. An error before the first update is
        # one of the settings.
        has_trained = len(report.rows) > 1
        if isinstance(error, BadInput) or errno_of(error) or has_trained:
            raise
        raise trl_error(error) from error
    if trainer.accelerator.is_main_process:
        stock_export.write(model, folder / MODEL_FOLDER, tokenizer)

    scores = [row["eval/reward"] for row in report.rows if "eval/reward" in row]
    log.info(
        f"mean reward of {len(held_out):,} held-out prompts: {scores[0]:.3f} before, "
        f"{scores[-1]:.3f} after"
    )
    if reward.failures:
        log.warning(
            f"{reward.failures:,} of {reward.calls:,} calls of the reward function failed. Their "
            f"completions have the reward 0"
        )
    log.info(
        f"the model is in {folder}/{MODEL_FOLDER}/, for AutoModelForCausalLM.from_pretrained. Try "
        f"it: python generate.py --model {paths.quoted(folder)}"
    )
    log.info(f"the rewards of each step are in {folder}/{METRICS} and reward.png")


def check_folders(settings) -> None:
    """Raise BadInput if output_dir cannot take a model, or if there is no checkpoint to resume."""
    folder = Path(settings.output_dir)
    problem = files.find_folder_problem(folder)
    if problem:
        raise BadInput(f"output_dir = {folder}: {problem}. Use another --output_dir")
    if (folder / MODEL_FOLDER).exists():
        raise BadInput(
            f"output_dir = {folder}: the folder contains a model already. Use another "
            f"--output_dir, or remove {MODEL_FOLDER}/ in it"
        )
    checkpoint = settings.resume_from_checkpoint
    if checkpoint is not None and not Path(checkpoint, "trainer_state.json").is_file():
        raise BadInput(
            f"resume_from_checkpoint = {checkpoint}: the folder contains no checkpoint of TRL. "
            f"Use a checkpoint-N folder in output_dir"
        )


if __name__ == "__main__":
    sys.exit(main())
