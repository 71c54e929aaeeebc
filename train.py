"""Pre-train GPT-2: read the recipe, open the data, build, loop. All that is decided per step is in ``train``.

    accelerate launch --config_file accelerate_configs/cpu.yaml train.py --recipe recipes/quickstart.yaml
    python train.py --recipe recipes/own_text.yaml --data_files my.txt --max_steps 500

The same command resumes a run that was stopped or killed.
"""

import logging
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    PARENT = os.getppid()  # noted first: a launcher may die during the imports below

from pretrain.recipe import keys, reading

if __name__ == "__main__" and (status := reading.refuse_at_once(sys.argv[1:])):
    sys.exit(status)  # before the imports below, which take seconds

import numpy as np
import torch
from accelerate import Accelerator
from transformers.utils.logging import disable_progress_bar

from pretrain.base import console
from pretrain.base.entry import exit_on_bad_input
from pretrain.base.errors import TrainingStopped
from pretrain.base.stopping import StopRequest, end_with_launcher, peers
from pretrain.data.corpus import Corpus, TrainBatches
from pretrain.evaluation.evaluator import Evaluator, encode_items, read_items, refuse_prompts
from pretrain.evaluation.hellaswag import HellaSwag
from pretrain.hub import client
from pretrain.machine import cards, hardware
from pretrain.machine.accelerator import gradient_exchange, make_accelerator, prepare, refuse_missing_kernels
from pretrain.machine.fit import fit_micro_batch, save_when_out_of_memory
from pretrain.machine.sharding import WholeModel
from pretrain.machine.time_budget import TimeBudget
from pretrain.model import pretrained
from pretrain.model.build import build
from pretrain.model.loss import loss_module
from pretrain.optim import optimizers, update
from pretrain.optim.schedule import learning_rate, set_lr
from pretrain.recipe.plan import make_plan
from pretrain.run import folder, publisher, trackers
from pretrain.run.checkpoint import list_checkpoints
from pretrain.run.clock import Clock
from pretrain.run.header import header
from pretrain.run.profile import Profile
from pretrain.run.publisher import Publisher, push_seconds
from pretrain.run.report import Report, due, duration
from pretrain.run.resume import Checkpoints, extended, resume
from pretrain.run.score import score

log = logging.getLogger("pretrain.train")

BAD_UPDATES_IN_A_ROW = 3


@exit_on_bad_input
def main(argv: list[str] | None = None, parent: int | None = None) -> int:
    """Run the command line; return the exit status: 0 done, 1 failed, 2 bad input, 128 + n for signal n."""
    end_with_launcher(parent or os.getppid())
    console.start(is_main=os.environ.get("RANK", "0") == "0")
    argv = sys.argv[1:] if argv is None else argv
    client.bound_client()
    recipe, modes, words = reading.parse_training(argv)
    if recipe is None:  # works in any folder
        return publisher.push_pending(Path(modes["push_pending"]))
    if "extend_steps" in modes:
        recipe = extended(recipe, modes["extend_steps"])
    recipe = pretrained.complete(recipe)

    # Fail early: nothing is written before this is through.
    make_plan(recipe, int(os.environ.get("WORLD_SIZE", "1")))
    trains = "eval_only" not in modes
    repo_id = None
    if trains:
        folder.refuse_foreign_run(recipe)
        trackers.check(recipe.tracking.names)
        repo_id = publisher.check(recipe)
    disable_progress_bar()  # Transformers' own bars, over saving and loading one file
    device = hardware.this_device()
    refuse_missing_kernels(device)
    accelerator = make_accelerator(device, recipe.machine)
    if trains:
        optimizers.check(recipe.optimizer, accelerator.device, sharded=accelerator.is_fsdp2)
    items = read_items(recipe.evaluation)

    with peers(), Corpus(recipe, words) as corpus:
        hellaswag = encode_items(items, corpus.tokenizer, recipe.model.sequence_length)
        if trains:
            refuse_prompts(recipe.evaluation, corpus.tokenizer)
            with folder.held(recipe, accelerator):
                status = train(recipe, corpus, hellaswag, accelerator, repo_id, profiled="profile" in modes)
        else:
            model = build(recipe.model, eos_token_id=corpus.tokenizer.eos_token_id).to(accelerator.device)
            line, status = score(recipe, corpus, hellaswag, model, accelerator), 0
            if accelerator.is_main_process:
                print(line)
        accelerator.end_training()  # not after a fault: it would wait for processes that are lost
    return status


def train(
    recipe: keys.Recipe,
    corpus: Corpus,
    hellaswag: HellaSwag | None,
    accelerator: Accelerator,
    repo_id: str | None,
    *,
    profiled: bool = False,
) -> int:
    """Train to ``max_steps``, from the newest checkpoint where there is one; return the exit status.

    How a run ends, and whether all processes know, a checkpoint is saved, and the model exported:

        max_steps reached        all know    saved                  exported   0, or 1 where model/ cannot be written
        asked to stop (signal)   all agree   saved                  no         128 + the signal's number
        data cannot come         all agree   saved                  no         1
        3 bad updates in a row   all know    saved                  no         1
        out of memory            one knows   saved unless sharded   no         1

    Args:
        hellaswag: the items that the run scores itself on; None: it does not.
        repo_id: the Hub's repository that it pushes to; None: it does not.
        profiled: record a few updates into the run folder.
    """
    device, rank, is_main = accelerator.device, accelerator.process_index, accelerator.is_main_process
    run_dir, tokenizer, evaluation = recipe.saving.run_dir, corpus.tokenizer, recipe.evaluation
    stop = StopRequest(recipe.machine.ddp_timeout)

    # Accelerate wraps (DDP, FSDP2), compiles and autocasts `training_module`, which returns the loss. `model` stays the
    # unwrapped Transformers model with the same weights: it is what is saved, evaluated, sampled and exported.
    model = build(recipe.model, eos_token_id=tokenizer.eos_token_id).to(device)
    zero1 = recipe.optimizer.shard_optimizer and accelerator.num_processes > 1 and not accelerator.is_fsdp2
    optimizer = optimizers.build(model, recipe.optimizer, shard=zero1)
    training_module, optimizer = prepare(
        loss_module(model, recipe.loss, tokenizer.eos_token_id), optimizer, accelerator
    )
    state, notes = resume(recipe, corpus, model, optimizer, accelerator)
    first_step, waited_before = state.step, state.data_wait_seconds
    plan = fit_micro_batch(
        recipe, training_module, accelerator, stop, begin=state.micro_batch, moments_exist=first_step > 0
    )
    state.micro_batch = micro_batch = plan.per_device_train_batch_size
    batches = TrainBatches(corpus, plan, device, rank)

    facts = publisher.facts_of(recipe, model, tokenizer, accelerator)
    for line in [*header(recipe, plan, corpus, hellaswag, facts, accelerator), *notes]:
        log.info(line)
    peak = cards.peak_flops(facts.hardware, accelerator.mixed_precision)
    clock = Clock(facts.flops_per_token, peak and peak * plan.num_processes, state.elapsed_seconds)
    report = Report(recipe, plan, state, clock, is_main=is_main)
    whole_model = WholeModel(model, recipe.model, device)
    evaluator = Evaluator(recipe, corpus, hellaswag, whole_model, accelerator, lambda: stop.requested)
    budget = TimeBudget(recipe.schedule, planned=state.planned)
    publish = Publisher(recipe, repo_id, state, facts, model, tokenizer)
    checkpoints = Checkpoints(recipe, corpus, model, optimizer, accelerator, publish.saved)
    profile = Profile(run_dir / "profile" if profiled and is_main else None, device)

    def mean_over_processes(tensor: torch.Tensor) -> torch.Tensor:
        """Return the mean; every process calls it."""
        return accelerator.reduce(tensor.to(device), "mean")

    with checkpoints.saver:  # waits, on exit, for the checkpoint that is being written
        data_failure = None
        # `step` = updates attempted. max_steps updates take max_steps + 1 iterations: the last only evaluates and saves.
        while True:
            step, last = state.step, state.step >= state.max_steps

            with clock.paused():  # neither evaluating nor saving counts as training time
                if due(step, evaluation.eval_steps, last):
                    report.loss(step, "validation", evaluator.loss("validation", micro_batch))
                if due(step, evaluation.hellaswag_steps, last):
                    report.hellaswag(step, evaluator.hellaswag())
                if due(step, evaluation.sample_steps, last):
                    report.samples(step, evaluator.samples(), show=last)
                save = due(step, recipe.saving.save_steps, last) or step == checkpoints.spared(state)
                if save and step > first_step:
                    checkpoints.save(state)
                    corpus.delete_consumed(batches.order, checkpoints.oldest_step())
            if last:
                stopping = stop.agreed()
                break

            data_failure = corpus.wait_for(step, batches.order, stop)  # while the stream is behind; the same everywhere
            lr = learning_rate(step, recipe.schedule, max_steps=state.max_steps, warmup_steps=state.warmup_steps)
            set_lr(optimizer, lr)

            loss = torch.zeros((), device=device)  # nats per token, mean over this process's share of the step
            with save_when_out_of_memory(recipe, plan, device, lambda: checkpoints.save_alone(state, first_step)):
                for micro_step in range(plan.gradient_accumulation_steps):
                    if (stopping := stop.agreed()) or data_failure:
                        break  # the partial step is discarded: a resumed run repeats it bit for bit
                    inputs_BT, targets_BT = batches(step, micro_step)  # a pure function: no data-loader state
                    number = batches.order.number(micro_step, rank)
                    seed_dropout(recipe.model, step, *((micro_step, rank) if state.dropout_by == "rank" else (number,)))
                    last_micro = micro_step + 1 == plan.gradient_accumulation_steps
                    with gradient_exchange(training_module, accelerator, wanted=last_micro):
                        micro_loss = training_module(inputs_BT, targets_BT)
                        accelerator.backward(micro_loss / plan.gradient_accumulation_steps)
                    loss += micro_loss.detach() / plan.gradient_accumulation_steps
            if stopping or data_failure:
                break

            outcome = update.update(
                optimizer,
                list(model.parameters()),
                loss,
                max_grad_norm=recipe.optimizer.max_grad_norm,
                scaler=accelerator.scaler,
                reduce_mean=mean_over_processes,
            )
            clock.count(recipe.batch.tokens_per_step)
            state.record(outcome, clock.elapsed, waited_before + corpus.data_wait.waited_seconds)
            checkpoints.saver.prepare(model, optimizer)
            profile.step()
            if not outcome.applied:  # the weights are unchanged
                log.info(f"step {state.step}: update skipped: {outcome.reason}")
            if state.bad_in_a_row == BAD_UPDATES_IN_A_ROW:  # not counting fp16 overflows
                state.bad_in_a_row = 0  # a resumed run skips these batches and has three attempts of its own
                checkpoints.save(state)
                checkpoints.saver.finish()
                raise TrainingStopped(diverged(recipe.saving.checkpoints, state.step, outcome.reason))
            if planned := budget.plan(state.step, clock.elapsed, mean_over_processes):
                state.set_length(*planned)
                report.set_length(state.max_steps)
            if due(state.step, evaluation.logging_steps, state.step == state.max_steps):
                report.update(state, outcome, lr, device)
            if planned:
                checkpoints.save(state)  # a resumed run keeps this length

        profile.close()
        if state.step > first_step and (stopping or data_failure):
            checkpoints.save(state)
        if data_failure and not stopping:
            raise TrainingStopped(data_failure)
        if stopping:
            assert stop.signal is not None  # agreed() sets it on every process
            log.info(f"stopped by {stop.signal.name} after {step} steps; the same command goes on from there")
        else:
            with clock.paused():
                if corpus.test:
                    report.loss(step, "test", evaluator.loss("test", micro_batch))
                with whole_model() as whole:
                    fault = folder.write_model(whole, run_dir, tokenizer) if is_main else None
                if any(stop.any_of(fault is not None)):
                    raise TrainingStopped(fault or "model/ could not be written")
            for line in (
                f"trained for {duration(clock.elapsed)} (evaluating and saving not counted)",
                *folder.describe(run_dir),
            ):
                log.info(line)
        checkpoints.saver.finish()
        corpus.delete_consumed(batches.order, checkpoints.oldest_step())

    report.draw()
    if not stopping:
        publish.finished()
    report.close()
    accelerator.wait_for_everyone()
    publish.wait(push_seconds(stop.signal if stopping else None), lambda: stop.requested and not stopping)
    return stop.exit_code if stopping else 0


def seed_dropout(model: keys.Model, step: int, *micro_batch: int) -> None:
    """Make dropout, if any, a function of where the run is, so that no generator's state needs to be saved."""
    if model.resid_pdrop or model.embd_pdrop or model.attn_pdrop:
        mixed = np.random.SeedSequence([model.seed, step, *micro_batch]).generate_state(1, np.uint64)[0]
        torch.manual_seed(int(mixed >> np.uint64(1)))


def diverged(checkpoints: Path, step: int, reason: str) -> str:
    """Return why the run stopped, which checkpoint is kept, and what to do."""
    newest = next(iter(list_checkpoints(checkpoints)), "none")
    return (
        f"{BAD_UPDATES_IN_A_ROW} updates in a row were skipped, the last at step {step}: {reason}. The weights are those "
        f"of the last good update, in {newest}. Check the data, or begin again with a lower learning_rate and another "
        f"--run_name; the same command resumes behind these batches"
    )


if __name__ == "__main__":
    sys.exit(main(parent=PARENT))
