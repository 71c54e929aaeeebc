"""Pre-train GPT-2 from a recipe. ``train`` contains the training loop and every decision of a step.

    accelerate launch --quiet --config_file accelerate_configs/cpu.yaml train.py \
        --recipe recipes/quickstart.yaml
    python train.py --recipe recipes/own_text.yaml --data_files my.txt --max_steps 500

If the run was stopped or killed, the same command resumes it.
"""

import dataclasses
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ursa_minor.base import cli
from ursa_minor.preflight import train_command
from ursa_minor.recipe import command_line, keys

# The launcher may die during the slow imports, so its process id is read before them.
PARENT = os.getppid()
# A wrong command line is reported within a second, before the slow imports.
COMMAND = cli.parse_before_imports(__name__, train_command.parse)
if COMMAND and COMMAND.recipe and "eval_only" not in COMMAND.modes:
    cli.announce_early_stop()

import numpy as np
import torch
from accelerate import Accelerator
from transformers.utils.logging import disable_progress_bar

from ursa_minor.base import console
from ursa_minor.base.errors import TrainingStopped
from ursa_minor.base.run_files import RECIPE
from ursa_minor.base.stopping import (
    StopRequest,
    end_with_launcher,
    raise_on_lost_peer,
    stop_requests,
)
from ursa_minor.data.loading.corpus import Corpus
from ursa_minor.evaluation.encoded_task import EncodedTask
from ursa_minor.evaluation.evaluator import check_prompts, encode_items, read_items
from ursa_minor.evaluation.task import Task
from ursa_minor.hub import client, push
from ursa_minor.machine import device as hardware
from ursa_minor.machine.accelerator import check_kernels, make_accelerator, sync_gradients
from ursa_minor.machine.micro_batch import save_when_out_of_memory
from ursa_minor.model import pretrained
from ursa_minor.model.resolve import convert_others_in
from ursa_minor.optim import optimizers, update
from ursa_minor.optim.schedule import learning_rate, set_lr
from ursa_minor.preflight import vocabulary
from ursa_minor.recipe.batching import make_plan
from ursa_minor.reporting import trackers
from ursa_minor.reporting.profiler import profiling
from ursa_minor.reporting.report import due
from ursa_minor.run import eval_only, finish, folder, publish
from ursa_minor.run.resume import extended, saved_task_commits
from ursa_minor.run.setup import open_run
from ursa_minor.run.time_limit import CHECKPOINT, SAMPLES, TASKS, UPDATE, VALIDATION, TimeBudget

log = logging.getLogger("ursa_minor.train")

BAD_UPDATES_IN_A_ROW = 3


@cli.exit_on_bad_input
def main(
    argv: list[str] | None = None,
    command: command_line.TrainCommand | None = None,
    parent: int | None = None,
) -> int:
    """Run the command line.

    Args:
        argv: the command-line arguments, or None for those of this process.
        command: the parsed command line, if it was parsed before the imports.
        parent: process id of the launcher, or None for the parent process.

    Returns:
        The exit status: 0 for success (also if ``max_hours`` ended the run early), 1 for an error,
        2 for bad input, 128 + n for signal n.
    """
    end_with_launcher(parent or os.getppid())
    if command is None:
        console.start(is_main=cli.is_main_process())
        command = train_command.parse(sys.argv[1:] if argv is None else argv)
    client.set_timeouts()
    disable_progress_bar()  # those of Transformers for saving and loading a file
    if command.recipe is None:
        return publish.push_pending(Path(command.modes["push_pending"]))
    recipe = complete_recipe(command.recipe, command.modes)
    if "eval_only" in command.modes:
        line = eval_only.evaluate(recipe, command.reader_argv)
        if cli.is_main_process():
            print(line)
        return 0
    trackers.drop_overridden(recipe, command.reader_argv)
    return train_run(recipe, command.reader_argv, command.modes)


def complete_recipe(recipe: keys.Recipe, modes: Mapping[str, Any]) -> keys.Recipe:
    """Return the recipe with the values that ``--extend_steps`` and ``init_from`` determine.

    Raises:
        BadInput: the options do not fit the recipe, or the processes cannot divide a step.
    """
    if "extend_steps" in modes:
        recipe = extended(recipe, modes["extend_steps"])
    convert_others_in(recipe)
    stated_vocab_size = recipe.model.vocab_size
    recipe = pretrained.complete(recipe)
    vocabulary.check_tokenizer_fits(recipe, stated_vocab_size)
    make_plan(recipe, int(os.environ.get("WORLD_SIZE", "1")))
    return recipe


def train_run(recipe: keys.Recipe, reader_argv: list[str], modes: Mapping[str, Any]) -> int:
    """Do all checks that need no data, open the data, and train.

    Args:
        recipe: the complete recipe.
        reader_argv: the flags that make prepare_data.py read the same recipe.
        modes: the options on the command line that are not recipe keys. With ``profile``, a profile
            of a few updates is recorded into the run folder.

    Returns:
        The exit status.
    """
    folder.check_run_folder(recipe)
    trackers.check(recipe.tracking.names)
    repo_id = publish.check(recipe)
    device = hardware.this_device()
    check_kernels(device)
    accelerator = make_accelerator(device, recipe.machine)
    optimizers.check(recipe.optimizer, accelerator.device, sharded=accelerator.is_fsdp2)
    if has_nothing_left(recipe, accelerator):
        return 0
    items = {}
    if recipe.evaluation.task_steps:
        commits = saved_task_commits(recipe.saving, accelerator)
        items = read_items(recipe.evaluation, accelerator, commits)

    with raise_on_lost_peer(), Corpus(recipe, reader_argv) as corpus:
        if recipe.schedule.max_steps is None:  # it follows from num_train_epochs and the data
            with stop_requests(recipe.machine.ddp_timeout) as stop:
                corpus.wait_until_complete(stop)
                if stop.agreed():
                    return finish.stopped_before_training(stop, accelerator)
            recipe = with_length(recipe, corpus, modes)
            if has_nothing_left(recipe, accelerator):
                return 0
        tests = encode_items(items, corpus.tokenizer, recipe.model.sequence_length)
        check_prompts(recipe.evaluation, corpus.tokenizer)
        with folder.locked(recipe, accelerator):
            profiled = "profile" in modes
            status = train(recipe, corpus, tests, accelerator, repo_id, profiled=profiled)
        # After an error this is not called, because it would wait for lost processes.
        accelerator.end_training()
    return status


def with_length(recipe: keys.Recipe, corpus: Corpus, modes: Mapping[str, Any]) -> keys.Recipe:
    """Return the recipe with the ``max_steps`` of ``num_train_epochs``, and check what needs them.

    Args:
        recipe: a recipe that states ``num_train_epochs``.
        corpus: the data, which is completely prepared.
        modes: see ``train_run``.

    Raises:
        BadInput: the length does not fit the schedule, ``--profile`` or the run in the folder.
    """
    is_new = not (recipe.saving.run_dir / RECIPE).is_file()
    completed = corpus.complete_recipe(logs_advice=is_new)
    command_line.check_profile(completed.schedule.total_steps, modes)
    folder.check_run_folder(completed)
    return completed


def has_nothing_left(recipe: keys.Recipe, accelerator: Accelerator) -> bool:
    """Return whether the run has finished. Then log that, and end the processes' communication.

    Raises:
        BadInput: see ``folder.nothing_left``.
    """
    nothing_left = folder.nothing_left(recipe, accelerator)
    if nothing_left:
        log.info(nothing_left)
        accelerator.end_training()
    return nothing_left is not None


def train(  # noqa: C901  (the loop shows every decision of a step)
    recipe: keys.Recipe,
    corpus: Corpus,
    tests: Mapping[Task, EncodedTask],
    accelerator: Accelerator,
    repo_id: str | None,
    *,
    profiled: bool = False,
) -> int:
    """Train to ``max_steps``, from the newest checkpoint if there is one.

    ``ursa_minor/run/finish.py`` lists the other ways in which a run ends.

    Args:
        recipe: the complete recipe.
        corpus: the opened data.
        tests: the tasks on which the run is scored.
        accelerator: of this process.
        repo_id: the repository of the Hub to push to, or None for a run that pushes nothing.
        profiled: whether to record a profile of a few updates into the run folder.

    Returns:
        The exit status.

    Raises:
        TrainingStopped: the data cannot be read, or updates were skipped because the run diverged.
    """
    device = accelerator.device
    evaluation = recipe.evaluation
    patience = evaluation.early_stopping_patience
    stop = StopRequest(recipe.machine.ddp_timeout)
    run = open_run(recipe, corpus, tests, accelerator, stop, repo_id)
    state = run.state
    plan = run.plan
    clock = run.clock
    report = run.report
    evaluator = run.evaluator
    checkpoints = run.checkpoints
    optimizer = run.optimizer
    micro_batch = plan.per_device_train_batch_size
    first_step = state.step
    waited_before = state.data_wait_seconds
    loader = corpus.loader(plan, device, accelerator.process_index)
    budget = TimeBudget(recipe, spent=state.wall_seconds, is_planned=state.planned)
    profile_dir = None
    if profiled and accelerator.is_main_process:
        profile_dir = recipe.saving.run_dir / "profile"
    updates_left = state.max_steps - state.step

    def mean_over_processes(tensor: torch.Tensor) -> torch.Tensor:
        """Return the mean of a tensor over all processes. Every process calls it."""
        return accelerator.reduce(tensor.to(device), "mean")

    with (
        checkpoints,  # at the end, waits for the checkpoint that is being written
        profiling(profile_dir, device, clock, updates_left=updates_left) as profile_update,
    ):
        data_failure = None
        stopping = False
        is_out_of_time = False  # max_hours are used up before max_steps are reached
        # `step` counts attempted updates. A run of max_steps updates has max_steps + 1 iterations:
        # the last one only evaluates and saves.
        while True:
            step = state.step
            last = state.has_ended(patience)
            is_best = False

            with clock.paused():  # training time excludes evaluations and checkpoints
                if due(step, evaluation.eval_steps, last, evaluation.eval_on_start):
                    result = evaluator.loss("validation", micro_batch)
                    report.loss(step, "validation", result)
                    is_best = result is not None and state.record_loss(result["loss"])
                    if state.stops_early(patience) and not last:
                        log.info(finish.stopped_early(step, state.since_best))
                        last = True
                    budget.count(VALIDATION)
                if due(step, evaluation.task_steps, last, evaluation.eval_on_start):
                    for task in evaluator.tests:
                        revision = evaluator.tests[task].revision
                        report.scores(step, task, evaluator.score_or_skip(task), revision)
                    budget.count(TASKS)
                if due(step, evaluation.sample_steps, last, evaluation.eval_on_start):
                    report.samples(step, evaluator.samples(), show=last)
                    budget.count(SAMPLES)
                state.wall_seconds = budget.seconds
                is_save_step = due(step, recipe.saving.save_steps, last)
                is_save_step = is_save_step or step == checkpoints.keep_step(state)
                saves_progress = is_save_step and step > first_step
                saves_best = is_best and recipe.saving.load_best_model_at_end
                if saves_progress or saves_best:
                    checkpoints.save(state)
                    loader.delete_consumed(checkpoints.oldest_step(state))
                    budget.count(CHECKPOINT)
                elif checkpoints.is_kept(state):
                    checkpoints.keep(state)
                    budget.count(CHECKPOINT)
            if last:
                stopping = stop.agreed()
                break

            # All processes get the same answer.
            data_failure = loader.wait_for(step, stop)
            budget.start()
            if budget.is_limited:  # the main process decides
                (is_out_of_time,) = stop.any_of(budget.is_used_up and accelerator.is_main_process)
            if is_out_of_time:
                break
            lr = learning_rate(step, recipe.schedule, state.length)
            set_lr(optimizer, lr)

            means = update.MeanLosses(plan.gradient_accumulation_steps, device, recipe.loss)
            with save_when_out_of_memory(
                recipe, plan, device, lambda: checkpoints.save_alone(state)
            ):
                for micro_step in range(plan.gradient_accumulation_steps):
                    stopping = stop.agreed()
                    if stopping or data_failure:
                        break  # this step is discarded; a resumed run repeats it exactly
                    inputs_BT, targets_BT = loader.batch(step, micro_step)
                    seed_dropout(recipe.model, step, loader.number(micro_step))
                    is_last_micro = micro_step + 1 == plan.gradient_accumulation_steps
                    syncs = is_last_micro or plan.exchange_each
                    with sync_gradients(run.module, accelerator, enabled=syncs):
                        losses = run.module(inputs_BT, targets_BT, with_cross_entropy=True)
                        accelerator.backward(losses.objective / plan.gradient_accumulation_steps)
                    means.add(losses)
            if stopping or data_failure:
                break

            outcome = update.update(
                optimizer,
                list(run.model.parameters()),
                means.loss,
                objective=means.objective,
                max_grad_norm=recipe.optimizer.max_grad_norm,
                scaler=accelerator.scaler,
                reduce_mean=mean_over_processes,
            )
            clock.count(recipe.batch.tokens_per_step)
            state.record(outcome, clock.elapsed, waited_before + corpus.data_wait.waited_seconds)
            budget.count(UPDATE)
            state.wall_seconds = budget.seconds
            profile_update()
            if not outcome.applied:  # the weights are unchanged
                log.info(f"step {state.step}: update skipped: {outcome.reason}")
            planned = budget.plan(state.step)
            if planned:
                state.set_length(**dataclasses.asdict(planned))
            is_due = due(state.step, evaluation.logging_steps, state.step == state.max_steps)
            report.update(state, outcome, lr, device, is_due=is_due)
            if state.bad_in_a_row == BAD_UPDATES_IN_A_ROW:  # not counting fp16 overflows
                report.last_update()
                # A resumed run continues after these batches and counts from 0.
                state.bad_in_a_row = 0
                checkpoints.save(state)
                checkpoints.finish()
                raise finish.diverged(
                    state.step, outcome.reason, BAD_UPDATES_IN_A_ROW, run.attention_kernel
                )
            if planned:
                checkpoints.save(state)  # so that a resumed run keeps the planned length

        if state.step > first_step and (stopping or data_failure or is_out_of_time):
            state.wall_seconds = budget.seconds
            checkpoints.save(state)
        if data_failure and not stopping:
            raise TrainingStopped(data_failure)
        if stopping or is_out_of_time:
            report.end_progress()  # so that the message is the last line
        if stopping:
            assert stop.signal is not None  # agreed() sets it on every process
            log.info(
                f"stopped by {stop.signal.name} after step {step}; "
                f"the same command resumes from there"
            )
            report.draw()
        elif is_out_of_time:
            report.draw()
            log.info(budget.stop_message(state.step))
        else:
            finish.complete(run, recipe, corpus, accelerator)
        checkpoints.finish()
        loader.delete_consumed(checkpoints.oldest_step(state))
    return finish.close(run, accelerator, stop, stopped=stopping)


def seed_dropout(model: keys.Model, step: int, micro_batch: int) -> None:
    """Seed the generator of the dropout masks from the position of the micro-batch.

    The masks then depend on nothing else, so a checkpoint contains no state of a generator.

    Args:
        model: the recipe's section. Without dropout nothing is seeded.
        step: number of the step.
        micro_batch: number of the micro-batch within the step, counted over all processes.
    """
    if model.resid_pdrop or model.embd_pdrop or model.attn_pdrop:
        sequence = np.random.SeedSequence([model.seed, step, micro_batch])
        (seed,) = sequence.generate_state(1, np.uint64)
        torch.manual_seed(int(seed >> np.uint64(1)))  # torch's seeds have 63 bits


if __name__ == "__main__":
    cli.run_and_exit(lambda: main(command=COMMAND, parent=PARENT), push.is_uploading)
