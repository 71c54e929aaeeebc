"""The lines that describe a run, before its first step."""

from collections.abc import Iterator, Mapping

import torch
from accelerate import Accelerator

from pretrain.base import cards
from pretrain.data.corpus import Corpus
from pretrain.evaluation.encoding import Encoded
from pretrain.evaluation.record import Task
from pretrain.machine import forecast
from pretrain.machine.accelerator import compiler_of
from pretrain.machine.estimate import shape_of
from pretrain.machine.facts import Facts
from pretrain.machine.hardware import versions
from pretrain.model.attention import kernel_taken
from pretrain.recipe import keys
from pretrain.recipe.plan import Plan
from pretrain.recipe.rules import counted


def header(
    recipe: keys.Recipe,
    plan: Plan,
    corpus: Corpus,
    tests: Mapping[Task, Encoded],
    facts: Facts,
    accelerator: Accelerator,
) -> Iterator[str]:
    """Yield what is trained, on what, in which steps and where."""
    flops, tokens = facts.flops_per_token, recipe.schedule.max_steps * recipe.batch.tokens_per_step
    yield f"run      {recipe.saving.name} in {recipe.saving.output_dir}"
    yield _model(recipe.model, facts)
    yield from corpus.describe(corpus.order(plan))
    yield (
        f"step     {recipe.batch.tokens_per_step:,} tokens = {counted(plan.num_processes, 'process', 'processes')} x "
        f"{counted(plan.gradient_accumulation_steps, 'micro-batch', 'micro-batches')} x "
        f"{counted(plan.per_device_train_batch_size, 'sequence', 'sequences')} x {recipe.model.sequence_length} tokens"
    )
    yield f"device   {facts.hardware}, {_options(recipe, facts, accelerator)}"
    if accelerator.device.type == "cuda":
        kernel = kernel_taken(
            recipe.model,
            plan.per_device_train_batch_size,
            accelerator.device,
            {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision, torch.float32),
            document_mask=recipe.loss.document_mask,
            compiled=compiler_of(accelerator) != "no",
        )
        yield f"kernels  attention {kernel}; {versions()}"
        if card := cards.find(facts.hardware):
            yield f"card     {forecast.expectation(card)}"
    for task, test in tests.items():
        number = test.longer_than(recipe.model.sequence_length)
        cut = f"; {number} texts lose their beginning to the context" if number else ""
        cut += f"; {test.left_out} with a longer ending are left out" if test.left_out else ""
        where = f" of {task.dataset[0]} at {test.commit[:7]}" if test.commit else ""
        yield f"score    {len(test.items):,} {task.label} items{where} every {recipe.evaluation.task_steps} steps{cut}"
    yield f"compute  {flops / 1e6:,.1f} MFLOP per token, {flops * tokens:.2e} in all"


def _model(model: keys.Model, facts: Facts) -> str:
    shared = model.num_key_value_heads or model.n_head
    return (
        f"model    {shape_of(model).record.label}, {facts.parameters / 1e6:.1f}M parameters: {model.n_layer} "
        f"layers, {model.n_head} heads{f' ({shared} of keys)' if shared != model.n_head else ''}, {model.n_embd} wide, "
        f"context {model.sequence_length}, vocabulary {model.vocab_size} ({facts.tokenizer_size} used)"
        f"{f'; from {model.init_from}' if model.init_from else ''}"
    )


def _options(recipe: keys.Recipe, facts: Facts, accelerator: Accelerator) -> str:
    mode, layers = recipe.machine.compile_mode, recipe.model.gradient_checkpointing
    zero1 = recipe.optimizer.shard_optimizer and accelerator.num_processes > 1 and not accelerator.is_fsdp2
    options = {
        f"precision {facts.precision}": True,
        "TF32": torch.get_float32_matmul_precision() == "high",
        "deterministic": recipe.machine.deterministic,
        f"compile {compiler_of(accelerator)}{f' ({mode})' if mode != 'default' else ''}": True,
        f"{layers} gradient checkpointing": layers != "none",
        "FSDP2": accelerator.is_fsdp2,
        "ZeRO-1": zero1,
    }
    return ", ".join(option for option, holds in options.items() if holds)
