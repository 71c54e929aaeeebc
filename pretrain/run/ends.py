"""How a run ends, and whether all processes know, a checkpoint is saved, and the model is exported.

max_steps reached        all know    saved                  exported   exit status 0, or 1 where model/ cannot be written
early_stopping_patience  all know    saved                  exported   the same
asked to stop (signal)   all agree   saved                  no         128 + the signal's number
data cannot come         all agree   saved                  no         1
bad updates in a row     all know    saved                  no         1
out of memory            one knows   saved unless sharded   no         1 (machine/fit.py)
"""

import logging

from accelerate import Accelerator

from pretrain.base import cudnn
from pretrain.base.errors import TrainingStopped
from pretrain.base.stopping import StopRequest
from pretrain.data.corpus import Corpus
from pretrain.evaluation.baselines import baselines
from pretrain.model import export
from pretrain.recipe import keys
from pretrain.run import folder
from pretrain.run.opening import Run
from pretrain.run.publisher import push_seconds
from pretrain.run.report import duration

log = logging.getLogger(__name__)


def complete(run: Run, recipe: keys.Recipe, corpus: Corpus, accelerator: Accelerator) -> None:
    """Evaluate the test split, write ``model/``, stage the last push, and log what to do with the model.

    Raises OSError where ``model/`` cannot be written; the same command writes it later.
    """
    run_dir, is_main = recipe.saving.run_dir, accelerator.is_main_process
    with run.clock.paused():
        step = run.checkpoints.load_best(run.state)
        if corpus.test:
            run.report.loss(run.state.step, "test", run.evaluator.loss("test", run.plan.per_device_train_batch_size))
        with run.evaluator.model() as whole:
            if is_main:
                export.write(whole, run_dir / folder.MODEL_FOLDER, corpus.tokenizer)
        if is_main and recipe.evaluation.eval_steps:
            run.report.baselines(run.state.step, baselines(corpus, recipe.evaluation.eval_tokens))
    if recipe.saving.load_best_model_at_end and step == run.state.best_step:
        best = f"validation loss {run.state.best_loss:.4f}, the lowest of {run.state.evaluations} evaluations"
        log.info(f"model/ has the weights of step {step}: {best}")
    run.report.draw()
    run.checkpoints.finish()  # the last push may have its checkpoint
    run.publish.finished(run.state.step, step)
    log.info(f"trained for {duration(run.clock.elapsed)} (evaluating and saving not counted)")
    log.info(f"{run_dir}/: curves.png, samples.txt, metrics.jsonl, run.log, and checkpoints/ to resume from")
    log.info(f"{run_dir}/model/: for AutoModelForCausalLM.from_pretrained, or: python generate.py --model {run_dir}")


def close(run: Run, accelerator: Accelerator, stop: StopRequest, *, stopped: bool) -> int:
    """Wait for the other processes and the Hub, and return the exit status."""
    run.report.close()
    accelerator.wait_for_everyone()
    run.publish.wait(push_seconds(stop.signal if stopped else None), lambda: stop.requested and not stopped)
    return stop.exit_code if stopped else 0


def diverged(step: int, reason: str, in_a_row: int, attention_kernel: str | None) -> TrainingStopped:
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
        return f". The attention backend is cudnn, although {cudnn.VARIABLE} is set"
    return (
        f". The attention backend is cudnn, which returned NaN gradients in some versions. To exclude it as the cause, "
        f"resume with {cudnn.VARIABLE}=1"
    )
