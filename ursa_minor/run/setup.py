"""Set up a run: build the model and the optimizer, resume, and log the header."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from ursa_minor.base import checkpoint_files, files, gpus
from ursa_minor.base.run_files import FINISH
from ursa_minor.base.stopping import StopRequest
from ursa_minor.base.wording import pluralize, shorten
from ursa_minor.checkpoint.state import RunState
from ursa_minor.data.loading.corpus import Corpus
from ursa_minor.evaluation.encoded_task import EncodedTask
from ursa_minor.evaluation.evaluator import Evaluator, encode_items, read_items
from ursa_minor.evaluation.task import Task
from ursa_minor.export import stock as stock_export
from ursa_minor.machine.accelerator import compiler_of, prepare
from ursa_minor.machine.device import versions
from ursa_minor.machine.full_model import FullModel
from ursa_minor.machine.micro_batch import fit_micro_batch
from ursa_minor.machine.run_info import RunInfo, run_info_of
from ursa_minor.model.attention import find_kernel
from ursa_minor.model.build import build
from ursa_minor.model.dtypes import HALF_DTYPES
from ursa_minor.model.loss import loss_module
from ursa_minor.optim import optimizers
from ursa_minor.preflight import estimate, run_estimate
from ursa_minor.preflight.estimate import shape_of
from ursa_minor.recipe import kept_steps, keys
from ursa_minor.recipe.batching import Plan
from ursa_minor.reporting.clock import Clock
from ursa_minor.reporting.report import Report
from ursa_minor.run.publish import Publisher
from ursa_minor.run.resume import Checkpoints

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A run that is ready to train.

    Attributes:
        model: the model of Transformers, unwrapped. It is saved, evaluated, sampled and exported.
        module: computes the loss with the same weights. Accelerate has wrapped it (DDP or FSDP2),
            compiled it and set its precision.
        optimizer: the optimizer, wrapped by Accelerate.
        plan: the division of a step into micro-batches.
        state: the progress of the run, which is the entire state of the training loop.
        clock: measures training time and throughput.
        report: writes metrics, samples and curves.
        evaluator: computes losses, scores and samples.
        checkpoints: loads and saves checkpoints.
        publish: pushes to the Hub.
        attention_kernel: the kernel of a training step on a GPU, or None on a CPU.
    """

    model: PreTrainedModel
    module: nn.Module
    optimizer: torch.optim.Optimizer
    plan: Plan
    state: RunState
    clock: Clock
    report: Report
    evaluator: Evaluator
    checkpoints: Checkpoints
    publish: Publisher
    attention_kernel: str | None


def open_run(
    recipe: keys.Recipe,
    corpus: Corpus,
    tests: Mapping[Task, EncodedTask],
    accelerator: Accelerator,
    stop: StopRequest,
    repo_id: str | None,
) -> Run:
    """Build the model, resume from the newest checkpoint, choose the micro-batch, log the header.

    Args:
        recipe: the complete recipe.
        corpus: the opened data.
        tests: the tasks on which the run is scored.
        accelerator: of this process.
        stop: reports whether the run was asked to stop.
        repo_id: the repository of the Hub to push to, or None for a run that pushes nothing.
    """
    tokenizer = corpus.tokenizer
    device = accelerator.device
    is_main = accelerator.is_main_process

    model = build(recipe.model, eos_token_id=tokenizer.eos_token_id).to(device)
    shard = uses_zero1(recipe, accelerator)
    optimizer = optimizers.build(model, recipe.optimizer, shard=shard)
    loss = loss_module(model, recipe.loss, tokenizer.eos_token_id)
    module, optimizer = prepare(loss, optimizer, accelerator)

    run_info = run_info_of(recipe, model, tokenizer, accelerator)
    publish = Publisher(recipe, repo_id, run_info)

    model_files = stock_export.describe(model, tokenizer)
    checkpoints = Checkpoints(
        recipe, corpus, model, optimizer, accelerator, model_files, publish.saved
    )
    state, notes = checkpoints.resume()
    plan = fit_micro_batch(
        recipe,
        module,
        accelerator,
        stop,
        first_size=state.micro_batch,
        exchange_each=state.exchange_each,
        moments_exist=state.step > 0,
    )
    state.micro_batch = plan.per_device_train_batch_size
    state.exchange_each = plan.exchange_each
    tests = tests_of_run(recipe, tests, state, corpus, accelerator)

    kernel = attention_kernel(recipe, plan, accelerator)
    lines = header(recipe, plan, corpus, tests, run_info, accelerator, kernel=kernel)
    for line in (*lines, *kept_checkpoints(recipe, state), *notes):
        log.info(line)
    if is_main and not state.has_ended(recipe.evaluation.early_stopping_patience):
        # It exists if early stopping has ended the run, which now continues.
        files.remove(recipe.saving.run_dir / FINISH)

    peak_flops = gpus.peak_flops(run_info.hardware, accelerator.mixed_precision)
    if peak_flops:
        peak_flops *= plan.num_processes
    clock = Clock(run_info.flops_per_token, peak_flops, state.elapsed_seconds)
    report = Report(recipe, state, clock, is_main=is_main)
    full_model = FullModel(model, recipe.model, device)
    evaluator = Evaluator(recipe, corpus, tests, full_model, accelerator, lambda: stop.requested)
    return Run(
        model=model,
        module=module,
        optimizer=optimizer,
        plan=plan,
        state=state,
        clock=clock,
        report=report,
        evaluator=evaluator,
        checkpoints=checkpoints,
        publish=publish,
        attention_kernel=kernel,
    )


def tests_of_run(
    recipe: keys.Recipe,
    tests: Mapping[Task, EncodedTask],
    state: RunState,
    corpus: Corpus,
    accelerator: Accelerator,
) -> Mapping[Task, EncodedTask]:
    """Return the tasks with the items on which the run has been scored, and store their commits.

    ``tests`` was read at the commits of the newest local checkpoint. If the run has resumed from
    another checkpoint that names other commits, the items are read again, so that all scores of a
    run are of the same items.
    """
    has_other_commit = False
    for task, test in tests.items():
        if test.commit and state.tasks.get(task.name, test.commit) != test.commit:
            has_other_commit = True
    if has_other_commit:
        items = read_items(recipe.evaluation, accelerator, state.tasks)
        tests = encode_items(items, corpus.tokenizer, recipe.model.sequence_length)
    for task, test in tests.items():
        if test.commit:
            state.tasks[task.name] = test.commit
    return tests


def uses_zero1(recipe: keys.Recipe, accelerator: Accelerator) -> bool:
    """Return whether each process stores only its shard of the optimizer's moments (ZeRO-1)."""
    return (
        recipe.optimizer.shard_optimizer
        and accelerator.num_processes > 1
        and not accelerator.is_fsdp2  # FSDP2 shards the moments itself
    )


def header(
    recipe: keys.Recipe,
    plan: Plan,
    corpus: Corpus,
    tests: Mapping[Task, EncodedTask],
    run_info: RunInfo,
    accelerator: Accelerator,
    *,
    kernel: str | None,
) -> Iterator[str]:
    """Yield the first lines of a run: the model, the data, the division of a step, the hardware."""
    sequence_length = recipe.model.sequence_length
    tokens_per_step = recipe.batch.tokens_per_step
    yield f"run      {recipe.saving.name} in {recipe.saving.output_dir}"
    yield f"model    {_describe_model(recipe.model, run_info)}"
    yield from corpus.describe(plan)

    processes = pluralize(plan.num_processes, "process", "processes")
    micro_batches = pluralize(plan.gradient_accumulation_steps, "micro-batch", "micro-batches")
    sequences = pluralize(plan.per_device_train_batch_size, "sequence", "sequences")
    yield (
        f"step     {tokens_per_step:,} tokens = {processes} x {micro_batches} x {sequences} x "
        f"{sequence_length} tokens"
    )

    yield f"device   {run_info.hardware}, {_options(recipe, run_info, accelerator)}"
    if kernel:
        yield f"kernels  attention {kernel}; {versions()}"
        gpu = gpus.find(run_info.hardware)
        if gpu:
            yield f"speed    {run_estimate.expectation(gpu)}"
    for task, test in tests.items():
        yield f"score    {_describe_test(task, test, recipe)}"

    flops = run_info.flops_per_token
    total_flops = flops * recipe.schedule.total_steps * tokens_per_step
    yield f"compute  {flops / 1e6:,.1f} MFLOP per token, {total_flops:.2e} in total"


def last_step_of(recipe: keys.Recipe, state: RunState) -> int:
    """Return the step at which a run ends, which is the current one if it has ended."""
    if state.has_ended(recipe.evaluation.early_stopping_patience):
        return state.step
    return state.max_steps


def kept_checkpoints(recipe: keys.Recipe, state: RunState) -> Iterator[str]:
    """Yield lines on the checkpoints that ``keep_checkpoints`` keeps.

    The number is that of the checkpoints in the run folder, and of those that are still to come.
    """
    points = recipe.saving.keep_checkpoints
    if not points:
        return
    kept = estimate.kept_checkpoints(
        recipe,
        first_step=state.step,
        last_step=last_step_of(recipe, state),
        existing=checkpoint_files.kept_contents(recipe.saving.checkpoints),
    )
    yield f"keep     {run_estimate.describe_kept(recipe, kept)}"
    tokens_per_step = recipe.batch.tokens_per_step
    beyond = kept_steps.beyond(points, state.max_steps, tokens_per_step)
    if beyond:
        tokens = state.max_steps * tokens_per_step
        yield (
            f"note: keep_checkpoints = {shorten(beyond)} is not reached, because the run ends "
            f"after {state.max_steps:,} steps and {tokens:,} tokens"
        )
    if recipe.data.stream_keep == "consumed" and recipe.saving.keep_optimizer:
        yield (
            "note: with stream_keep = consumed and keep_optimizer = true, the shards after the "
            "oldest kept checkpoint stay on disk, because the run can be resumed from it. To "
            "delete them, use --keep_optimizer false"
        )


def _describe_model(model: keys.Model, run_info: RunInfo) -> str:
    """Return the size of the model, its shape and its vocabulary."""
    layers = pluralize(model.n_layer or 0, "layer", "layers")
    heads = pluralize(model.n_head or 0, "head", "heads")
    key_heads = model.num_key_value_heads or model.n_head
    if key_heads != model.n_head:
        heads += f" ({key_heads} of keys)"
    text = (
        f"{shape_of(model).definition.label}, {run_info.parameters / 1e6:.1f}M parameters: "
        f"{layers}, {heads}, {model.n_embd} wide, context {model.sequence_length}, "
        f"vocabulary {model.vocab_size} ({run_info.tokenizer_size} used)"
    )
    if model.init_from:
        text += f"; from {model.init_from}"
    return text


def _describe_test(task: Task, test: EncodedTask, recipe: keys.Recipe) -> str:
    """Return the number of items of a task, their source, and how many do not fit the context."""
    text = f"{len(test.items):,} {task.label} items"
    if test.commit:
        text += f" of {task.dataset[0]} at {test.commit[:7]}"
    text += f" every {recipe.evaluation.task_steps} steps"
    num_cut = test.longer_than(recipe.model.sequence_length)
    if num_cut:
        text += f"; cut at the beginning to fit the context: {num_cut}"
    if test.left_out:
        text += f"; left out, with an ending longer than the context: {test.left_out}"
    return text


def attention_kernel(recipe: keys.Recipe, plan: Plan, accelerator: Accelerator) -> str | None:
    """Return the attention kernel of a training step, or None on a CPU.

    It is one of cudnn, flash, efficient, math and flex.
    """
    if accelerator.device.type != "cuda":
        return None
    return find_kernel(
        recipe.model,
        plan.per_device_train_batch_size,
        accelerator.device,
        HALF_DTYPES.get(accelerator.mixed_precision, torch.float32),
        document_mask=recipe.loss.document_mask,
        compiled=compiler_of(accelerator) != "no",
    )


def _options(recipe: keys.Recipe, run_info: RunInfo, accelerator: Accelerator) -> str:
    """Return the options of the computation that are in effect."""
    compiler = f"compile {compiler_of(accelerator)}"
    if recipe.machine.compile_mode != "default":
        compiler += f" ({recipe.machine.compile_mode})"
    checkpointing = recipe.model.gradient_checkpointing
    options = [f"precision {run_info.precision}"]
    if torch.get_float32_matmul_precision() == "high":
        options.append("TF32")
    if recipe.machine.deterministic:
        options.append("deterministic")
    options.append(compiler)
    if checkpointing != "none":
        options.append(f"{checkpointing} gradient checkpointing")
    if accelerator.is_fsdp2:
        options.append("FSDP2")
    if uses_zero1(recipe, accelerator):
        options.append("ZeRO-1")
    return ", ".join(options)
