"""All that a run has before its first step: model and optimizer, where it resumes, what it reports to."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from pretrain.base import cards
from pretrain.base.stopping import StopRequest
from pretrain.data.corpus import Corpus
from pretrain.evaluation.encoding import Encoded
from pretrain.evaluation.evaluator import Evaluator, encode_items, read_items
from pretrain.evaluation.record import Task
from pretrain.machine.accelerator import prepare
from pretrain.machine.facts import facts_of
from pretrain.machine.fit import fit_micro_batch
from pretrain.machine.sharding import WholeModel
from pretrain.model.build import build
from pretrain.model.loss import loss_module
from pretrain.optim import optimizers
from pretrain.recipe import keys
from pretrain.recipe.plan import Plan
from pretrain.run.clock import Clock
from pretrain.run.header import header
from pretrain.run.publisher import Publisher
from pretrain.run.report import Report
from pretrain.run.resume import Checkpoints, resume
from pretrain.run.state import RunState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """A run that is about to train.

    Attributes:
        model: Transformers' own, unwrapped: it is saved, evaluated, sampled and exported.
        whole_model: the same, whole on each process while it is used.
        module: over the same weights; Accelerate wraps (DDP, FSDP2), compiles and autocasts it, and it returns the loss.
        optimizer: Accelerate's.
        plan: how a step is divided into micro-batches.
        state: how far the run is; the whole of the loop's state.
    """

    model: PreTrainedModel
    whole_model: WholeModel
    module: nn.Module
    optimizer: torch.optim.Optimizer
    plan: Plan
    state: RunState
    clock: Clock
    report: Report
    evaluator: Evaluator
    checkpoints: Checkpoints
    publish: Publisher


def open_run(
    recipe: keys.Recipe,
    corpus: Corpus,
    tests: Mapping[Task, Encoded],
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
    zero1 = recipe.optimizer.shard_optimizer and accelerator.num_processes > 1 and not accelerator.is_fsdp2
    optimizer = optimizers.build(model, recipe.optimizer, shard=zero1)
    module, optimizer = prepare(loss_module(model, recipe.loss, tokenizer.eos_token_id), optimizer, accelerator)
    state, notes = resume(recipe, corpus, model, optimizer, accelerator)
    tried = state.micro_batch, state.exchange_each
    plan = fit_micro_batch(recipe, module, accelerator, stop, begin=tried, moments_exist=state.step > 0)
    state.micro_batch, state.exchange_each = plan.per_device_train_batch_size, plan.exchange_each
    if any(test.commit and state.tasks.get(task.name, test.commit) != test.commit for task, test in tests.items()):
        items = read_items(recipe.evaluation, accelerator, state.tasks)  # scores stay comparable: of the same items
        tests = encode_items(items, tokenizer, recipe.model.sequence_length)
    state.tasks |= {task.name: test.commit for task, test in tests.items() if test.commit}

    facts = facts_of(recipe, model, tokenizer, accelerator)
    for line in [*header(recipe, plan, corpus, tests, facts, accelerator), *notes]:
        log.info(line)
    peak = cards.peak_flops(facts.hardware, accelerator.mixed_precision)
    clock = Clock(facts.flops_per_token, peak and peak * plan.num_processes, state.elapsed_seconds)
    whole_model = WholeModel(model, recipe.model, device)
    publish = Publisher(recipe, repo_id, state, facts, model, tokenizer)
    return Run(
        model=model,
        whole_model=whole_model,
        module=module,
        optimizer=optimizer,
        plan=plan,
        state=state,
        clock=clock,
        report=Report(recipe, state, clock, is_main=accelerator.is_main_process),
        evaluator=Evaluator(recipe, corpus, tests, whole_model, accelerator, lambda: stop.requested),
        checkpoints=Checkpoints(recipe, corpus, model, optimizer, accelerator, publish.saved, first_step=state.step),
        publish=publish,
    )
