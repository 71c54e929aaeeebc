"""End a run.

This table lists how a run can end, whether all processes know it, whether a checkpoint is saved,
whether ``model/`` is written, and the exit status.

======================  ===================  ====================  ========  ================
reason                  processes that know  checkpoint            model/    exit status
======================  ===================  ====================  ========  ================
max_steps reached       all                  saved                 written   0 (1 if model/
                                                                             cannot be written)
early stopping          all                  saved                 written   the same
max_hours used up       all                  saved                 no        0
signal                  all                  saved                 no        128 + its number
data cannot be read     all                  saved                 no        1
three updates skipped   all                  saved                 no        1
out of memory           one                  saved unless sharded  no        1
======================  ===================  ====================  ========  ================

An out-of-memory error is handled in ``machine/micro_batch.py``.
"""

import contextlib
import logging
import os
from pathlib import Path

from accelerate import Accelerator

from ursa_minor.base import checkpoint_files, cudnn, paths
from ursa_minor.base.errors import TrainingStopped
from ursa_minor.base.run_files import (
    CURVES,
    LOG,
    METRICS,
    MODEL_FOLDER,
    SAMPLES,
    Finish,
    step_name,
)
from ursa_minor.base.stopping import StopRequest
from ursa_minor.base.wording import pluralize
from ursa_minor.checkpoint.state import RunState
from ursa_minor.data.loading.corpus import Corpus
from ursa_minor.evaluation.baselines import baselines
from ursa_minor.export import stock as stock_export
from ursa_minor.recipe import keys
from ursa_minor.reporting.report import duration
from ursa_minor.run.setup import Run

log = logging.getLogger(__name__)

STOPPED_FILE = "URSA_MINOR_STOPPED_FILE"  # environment variable


def complete(run: Run, recipe: keys.Recipe, corpus: Corpus, accelerator: Accelerator) -> None:
    """Evaluate the test split, write ``model/``, start the last push, and log the next steps.

    Raises:
        OSError: ``model/`` cannot be written. The same command writes it later.
    """
    run_dir = recipe.saving.run_dir
    is_main = accelerator.is_main_process
    state = run.state
    with run.clock.paused():
        run.report.last_update()
        run.report.end_progress()
        weights_step = run.checkpoints.load_best(state)
        if corpus.test:
            micro_batch = run.plan.per_device_train_batch_size
            run.report.loss(state.step, "test", run.evaluator.loss("test", micro_batch))
        with run.evaluator.model() as full_model:
            if is_main:
                stock_export.write(full_model, run_dir / MODEL_FOLDER, corpus.tokenizer)
        if is_main and recipe.evaluation.eval_steps:
            run.report.baselines(state, baselines(corpus, recipe.evaluation.eval_tokens))
    if recipe.saving.load_best_model_at_end and weights_step == state.best_step:
        evaluations = pluralize(state.evaluations, "evaluation", "evaluations")
        log.info(
            f"model/ has the weights of step {weights_step}: validation loss "
            f"{state.best_loss:.4f}, the lowest of {evaluations}"
        )
    run.report.draw()
    run.checkpoints.finish()  # the last push may include this checkpoint
    if is_main:
        finish_of(state, recipe, weights_step).write(run_dir)
    run.publish.finished(state.step, weights_step)
    log.info(f"trained for {duration(run.clock.elapsed)} (excluding evaluation and saving)")
    log.info(f"{run_dir}/: {describe_contents(recipe.saving)}")
    command = f"python generate.py --model {paths.quoted(run_dir)}"
    log.info(f"{run_dir}/model/: for AutoModelForCausalLM.from_pretrained, or: {command}")


def finish_of(state: RunState, recipe: keys.Recipe, weights_step: int) -> Finish:
    """Return the contents of ``finished.json`` for a run that has ended in this state.

    Args:
        weights_step: the step of the weights in ``model/``, the best or the last.
    """
    path = recipe.saving.checkpoints / step_name(state.step)
    stops_early = state.stops_early(recipe.evaluation.early_stopping_patience)
    return Finish(
        step=state.step,
        since_best=state.since_best if stops_early else 0,
        has_checkpoint=path.is_dir() and not checkpoint_files.is_weights_only(path),
        weights_step=weights_step if weights_step != state.step else None,
        origin=state.origin,
        max_steps=recipe.schedule.total_steps,
    )


def describe_contents(saving: keys.Saving) -> str:
    """Return the names of the files in the run folder that are of interest to a user."""
    names = []
    for name in (CURVES, SAMPLES, METRICS, LOG):
        path = saving.run_dir / name
        if path.is_file() and path.stat().st_size:
            names.append(name)
    text = ", ".join(names)
    if checkpoint_files.list_resume_points(saving.checkpoints):
        return f"{text}, and checkpoints/ to resume from"
    if checkpoint_files.list_checkpoints(saving.checkpoints):
        return f"{text}, and checkpoints/ with weights"
    return text


def close(run: Run, accelerator: Accelerator, stop: StopRequest, *, stopped: bool) -> int:
    """Wait for the other processes and the Hub, and return the exit status."""
    run.report.close()
    accelerator.wait_for_everyone()
    if stopped:
        if accelerator.is_main_process:
            mark_as_stopped()
        run.publish.wait(stop.signal, give_up=lambda: False)
        return stop.exit_code
    run.publish.wait(None, give_up=lambda: stop.requested)
    return 0


def stopped_before_training(stop: StopRequest, accelerator: Accelerator) -> int:
    """Log that a signal has ended the run while its data was prepared. Return the exit status."""
    assert stop.signal is not None  # agreed() sets it on every process
    log.info(
        f"stopped by {stop.signal.name} before the first step; the same command continues to "
        f"prepare the data"
    )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        mark_as_stopped()
    accelerator.end_training()
    return stop.exit_code


def mark_as_stopped() -> None:
    """Create the file that scripts/slurm.sh names, so that the script queues the job again.

    The exit status is not enough: under a launcher, a stopped run and a failed run both end with 1.
    """
    path = os.environ.get(STOPPED_FILE)
    if path:
        with contextlib.suppress(OSError):  # the run is saved in any case
            Path(path).touch()


def stopped_early(step: int, since_best: int) -> str:
    """Return the log line of a run that early stopping ends.

    Args:
        step: the last step.
        since_best: number of evaluations since the lowest validation loss.
    """
    evaluations = pluralize(since_best, "evaluation", "evaluations")
    return f"step {step}: early stopping, after {evaluations} without a lower validation loss"


def diverged(
    step: int, reason: str, in_a_row: int, attention_kernel: str | None
) -> TrainingStopped:
    """Return the error that ends a run whose updates are skipped.

    Args:
        step: the step of the last skipped update.
        reason: the reason why that update was skipped.
        in_a_row: number of consecutive skipped updates.
        attention_kernel: ``Run.attention_kernel``, or None on a CPU.
    """
    return TrainingStopped(
        f"{in_a_row} updates in a row were skipped, the last at step {step}: {reason}. The newest "
        f"checkpoint has the weights of the last good update. Check the data, or start again with "
        f"a lower learning_rate and another --run_name. The same command resumes after these "
        f"batches{_attention_advice(attention_kernel)}"
    )


def _attention_advice(kernel: str | None) -> str:
    """Return advice about the attention kernel of a diverged run, empty on a CPU."""
    if kernel is None:
        return ""
    if kernel != "cudnn":
        return f". The attention backend is {kernel}"
    if cudnn.is_deprioritized():  # no other backend can compute this attention
        return f". The attention backend is cudnn, although {cudnn.DEPRIORITIZED_VARIABLE} is set"
    return (
        f". The attention backend is cudnn, which returned NaN gradients in some versions. To "
        f"exclude it as the cause, resume with {cudnn.DEPRIORITIZED_VARIABLE}=1"
    )
