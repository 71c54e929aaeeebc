"""All that a run has before its first step: model and optimizer, where it resumes, what it reports to, its first lines."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from ursa_minor.base import files, gpus
from ursa_minor.base.run_files import FINISH
from ursa_minor.base.stopping import StopRequest
from ursa_minor.base.wording import pluralize
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
from ursa_minor.preflight import run_estimate
from ursa_minor.preflight.estimate import shape_of
from ursa_minor.recipe import keys
from ursa_minor.recipe.batching import Plan
from ursa_minor.reporting.clock import Clock
from ursa_minor.reporting.report import Report
from ursa_minor.run.publish import Publisher
from ursa_minor.run.resume import Checkpoints

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A run that is about to train.

    Attributes:
        model: Transformers' own, unwrapped: it is saved, evaluated, sampled and exported.
        module: over the same weights; Accelerate wraps (DDP, FSDP2), compiles and autocasts it, and it returns the loss.
        optimizer: Accelerate's.
        plan: how a step is divided into micro-batches.
        state: how far the run is; the whole of the loop's state.
        attention_kernel: that of a training step on a GPU (``attention_kernel``), or None on a CPU.
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
    """Build the model, resume from the newest checkpoint, find the micro-batch, and log what will be trained.

    Args:
        tests: the tasks that the run scores itself on.
        repo_id: the Hub's repository that it pushes to; None: it does not.
    """
    tokenizer, device = corpus.tokenizer, accelerator.device
    model = build(recipe.model, eos_token_id=tokenizer.eos_token_id).to(device)
    shard = uses_zero1(recipe, accelerator)
    optimizer = optimizers.build(model, recipe.optimizer, shard=shard)
    module, optimizer = prepare(
        loss_module(model, recipe.loss, tokenizer.eos_token_id), optimizer, accelerator
    )
    facts = run_info_of(recipe, model, tokenizer, accelerator)
    described = stock_export.describe(model.config, tokenizer) if repo_id else {}
    publish = Publisher(recipe, repo_id, facts, described)
    checkpoints = Checkpoints(recipe, corpus, model, optimizer, accelerator, publish.saved)
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
    state.micro_batch, state.exchange_each = plan.per_device_train_batch_size, plan.exchange_each
    if any(
        test.commit and state.tasks.get(task.name, test.commit) != test.commit
        for task, test in tests.items()
    ):
        # Scores stay comparable: of the same items.
        items = read_items(recipe.evaluation, accelerator, state.tasks)
        tests = encode_items(items, tokenizer, recipe.model.sequence_length)
    state.tasks |= {task.name: test.commit for task, test in tests.items() if test.commit}

    kernel = attention_kernel(recipe, plan, accelerator)
    for line in [*header(recipe, plan, corpus, tests, facts, accelerator, kernel), *notes]:
        log.info(line)
    peak = gpus.peak_flops(facts.hardware, accelerator.mixed_precision)
    if accelerator.is_main_process and not state.has_ended(
        recipe.evaluation.early_stopping_patience
    ):
        # Of a run that early stopping ended and that now continues.
        files.remove(recipe.saving.run_dir / FINISH)
    clock = Clock(facts.flops_per_token, peak and peak * plan.num_processes, state.elapsed_seconds)
    report = Report(recipe, state, clock, is_main=accelerator.is_main_process)
    whole_model = FullModel(model, recipe.model, device)
    evaluator = Evaluator(recipe, corpus, tests, whole_model, accelerator, lambda: stop.requested)
    return Run(
        model,
        module,
        optimizer,
        plan,
        state,
        clock,
        report,
        evaluator,
        checkpoints,
        publish,
        kernel,
    )


def uses_zero1(recipe: keys.Recipe, accelerator: Accelerator) -> bool:
    """Return whether each process keeps only its shard of the moments. FSDP2 shards them itself."""
    return (
        recipe.optimizer.shard_optimizer
        and accelerator.num_processes > 1
        and not accelerator.is_fsdp2
    )


def header(
    recipe: keys.Recipe,
    plan: Plan,
    corpus: Corpus,
    tests: Mapping[Task, EncodedTask],
    facts: RunInfo,
    accelerator: Accelerator,
    kernel: str | None,
) -> Iterator[str]:
    """Yield what is trained, on what, in which steps and where."""
    flops, tokens = facts.flops_per_token, recipe.schedule.max_steps * recipe.batch.tokens_per_step
    model, shared = recipe.model, recipe.model.num_key_value_heads or recipe.model.n_head
    yield f"run      {recipe.saving.name} in {recipe.saving.output_dir}"
    yield (
        f"model    {shape_of(model).definition.label}, {facts.parameters / 1e6:.1f}M parameters: "
        f"{pluralize(model.n_layer or 0, 'layer', 'layers')}, {pluralize(model.n_head or 0, 'head', 'heads')}"
        f"{f' ({shared} of keys)' if shared != model.n_head else ''}, {model.n_embd} wide, "
        f"context {model.sequence_length}, vocabulary {model.vocab_size} ({facts.tokenizer_size} used)"
        f"{f'; from {model.init_from}' if model.init_from else ''}"
    )
    yield from corpus.describe(plan)
    yield (
        f"step     {recipe.batch.tokens_per_step:,} tokens = {pluralize(plan.num_processes, 'process', 'processes')} x "
        f"{pluralize(plan.gradient_accumulation_steps, 'micro-batch', 'micro-batches')} x "
        f"{pluralize(plan.per_device_train_batch_size, 'sequence', 'sequences')} x {recipe.model.sequence_length} tokens"
    )
    yield f"device   {facts.hardware}, {_options(recipe, facts, accelerator)}"
    if kernel:
        yield f"kernels  attention {kernel}; {versions()}"
        if card := gpus.find(facts.hardware):
            yield f"card     {run_estimate.expectation(card)}"
    for task, test in tests.items():
        number = test.longer_than(recipe.model.sequence_length)
        cut = f"; {number} texts lose their beginning to the context" if number else ""
        cut += f"; {test.left_out} with a longer ending are left out" if test.left_out else ""
        where = f" of {task.dataset[0]} at {test.commit[:7]}" if test.commit else ""
        yield f"score    {len(test.items):,} {task.label} items{where} every {recipe.evaluation.task_steps} steps{cut}"
    yield f"compute  {flops / 1e6:,.1f} MFLOP per token, {flops * tokens:.2e} in all"


def attention_kernel(recipe: keys.Recipe, plan: Plan, accelerator: Accelerator) -> str | None:
    """Return the attention kernel of a training step (cudnn, flash, efficient, math or flex), or None on a CPU."""
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


def _options(recipe: keys.Recipe, facts: RunInfo, accelerator: Accelerator) -> str:
    mode, layers = recipe.machine.compile_mode, recipe.model.gradient_checkpointing
    options = {
        f"precision {facts.precision}": True,
        "TF32": torch.get_float32_matmul_precision() == "high",
        "deterministic": recipe.machine.deterministic,
        f"compile {compiler_of(accelerator)}{f' ({mode})' if mode != 'default' else ''}": True,
        f"{layers} gradient checkpointing": layers != "none",
        "FSDP2": accelerator.is_fsdp2,
        "ZeRO-1": uses_zero1(recipe, accelerator),
    }
    return ", ".join(option for option, holds in options.items() if holds)
