"""How a run ends, and whether all processes know, a checkpoint is saved, and the model is exported.

max_steps reached        all know    saved                  exported   exit status 0, or 1 where model/ cannot be written
early_stopping_patience  all know    saved                  exported   the same
max_hours used up early  all agree   saved                  no         0
asked to stop (signal)   all agree   saved                  no         128 + the signal's number
data cannot come         all agree   saved                  no         1
bad updates in a row     all know    saved                  no         1
out of memory            one knows   saved unless sharded   no         1 (machine/micro_batch.py)
"""

import contextlib
import logging
import os
from pathlib import Path

from accelerate import Accelerator

from ursa_minor.base import cudnn, paths
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
from ursa_minor.checkpoint import format as checkpoint
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
    """Evaluate the test split, write ``model/``, stage the last push, and log what to do with the model.

    Raises OSError where ``model/`` cannot be written; the same command writes it later.
    """
    run_dir, is_main = recipe.saving.run_dir, accelerator.is_main_process
    with run.clock.paused():
        run.report.last_update()
        step = run.checkpoints.load_best(run.state)
        if corpus.test:
            run.report.loss(
                run.state.step,
                "test",
                run.evaluator.loss("test", run.plan.per_device_train_batch_size),
            )
        with run.evaluator.model() as whole:
            if is_main:
                stock_export.write(whole, run_dir / MODEL_FOLDER, corpus.tokenizer)
        if is_main and recipe.evaluation.eval_steps:
            run.report.baselines(run.state.step, baselines(corpus, recipe.evaluation.eval_tokens))
    if recipe.saving.load_best_model_at_end and step == run.state.best_step:
        evaluations = pluralize(run.state.evaluations, "evaluation", "evaluations")
        best = f"validation loss {run.state.best_loss:.4f}, the lowest of {evaluations}"
        log.info(f"model/ has the weights of step {step}: {best}")
    run.report.draw()
    run.checkpoints.finish()  # the last push may have its checkpoint
    if is_main:
        finish_of(run.state, recipe).write(run_dir)
    run.publish.finished(run.state.step, step)
    log.info(f"trained for {duration(run.clock.elapsed)} (evaluating and saving not counted)")
    log.info(f"{run_dir}/: {contents(recipe.saving)}")
    command = f"python generate.py --model {paths.quoted(run_dir)}"
    log.info(f"{run_dir}/model/: for AutoModelForCausalLM.from_pretrained, or: {command}")


def finish_of(state: RunState, recipe: keys.Recipe) -> Finish:
    """Return what ``finished.json`` states of a run that has ended in this state."""
    stops_early = state.stops_early(recipe.evaluation.early_stopping_patience)
    return Finish(
        step=state.step,
        since_best=state.since_best if stops_early else 0,
        has_checkpoint=(recipe.saving.checkpoints / step_name(state.step)).is_dir(),
        origin=state.origin,
    )


def contents(saving: keys.Saving) -> str:
    """Return the names of the files in the run folder that a user may want to see, and its checkpoints."""
    names = []
    for name in (CURVES, SAMPLES, METRICS, LOG):
        path = saving.run_dir / name
        if path.is_file() and path.stat().st_size:
            names.append(name)
    text = ", ".join(names)
    if checkpoint.list_checkpoints(saving.checkpoints):
        return f"{text}, and checkpoints/ to resume from"
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


def mark_as_stopped() -> None:
    """Create the file that scripts/slurm.sh names. The script then queues the job again.

    The exit status is not enough: under a launcher, a run that was stopped and one that failed both end with 1.
    """
    path = os.environ.get(STOPPED_FILE)
    if path:
        with contextlib.suppress(OSError):  # the run is saved all the same
            Path(path).touch()


def stopped_early(step: int, since_best: int) -> str:
    """Return the line of a run that early stopping ends; ``since_best``: evaluations without a lower loss."""
    evaluations = pluralize(since_best, "evaluation", "evaluations")
    return f"step {step}: early stopping, after {evaluations} without a lower validation loss"


def diverged(
    step: int, reason: str, in_a_row: int, attention_kernel: str | None
) -> TrainingStopped:
    """Return the error of a run whose updates are skipped.

    Args:
        step: of the last skipped update.
        reason: why that update was skipped.
        in_a_row: number of skipped updates.
        attention_kernel: ``Run.attention_kernel``; None on a CPU.
    """
    return TrainingStopped(
        f"{in_a_row} updates in a row were skipped, the last at step {step}: {reason}. The newest checkpoint has the "
        f"weights of the last good update. Check the data, or begin again with a lower learning_rate and another "
        f"--run_name; the same command resumes after these batches{_attention_advice(attention_kernel)}"
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
        f". The attention backend is cudnn, which returned NaN gradients in some versions. To exclude it as the cause, "
        f"resume with {cudnn.DEPRIORITIZED_VARIABLE}=1"
    )
