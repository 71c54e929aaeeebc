"""A run's evaluations: the loss of a split, tasks, samples; all processes share the work."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from ursa_minor.base.errors import BadInput
from ursa_minor.data.loading.corpus import Corpus
from ursa_minor.data.tokens.tokenizer import decode, decode_continuation, encode_prompt
from ursa_minor.evaluation import likelihood, sampling, task_data, validation
from ursa_minor.evaluation.encoded_task import EncodedTask
from ursa_minor.evaluation.task import Task
from ursa_minor.evaluation.task_data import Items
from ursa_minor.machine.accelerator import autocast
from ursa_minor.machine.full_model import FullModel
from ursa_minor.model.loss import loss_module
from ursa_minor.recipe import keys

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_SKIPS = 3  # in a row, after which a score is off


def read_items(
    evaluation: keys.Evaluation, accelerator: Accelerator, commits: Mapping[str, str] | None = None
) -> dict[Task, Items]:
    """Return the items of each task that the run is scored on, the same on all processes.

    A score is optional: a task whose data set cannot be had is left out, with a warning.

    Args:
        commits: of data sets, that an earlier process of the run has read.
    """
    items, known = {}, commits or {}
    with accelerator.local_main_process_first():  # the others find its files in the cache
        for name in dict.fromkeys(evaluation.tasks):
            task = task_data.all_tasks()[name]
            try:
                items[task] = task_data.read(
                    task, evaluation.files_of(name), evaluation.task_limit, known.get(name)
                )
            except BadInput as problem:
                if evaluation.files_of(name):
                    raise
                log.warning(f"left out: {problem}")
    everywhere = gather_object([{task.name: rows.commit for task, rows in items.items()}])
    return {
        task: rows
        for task, rows in items.items()
        if all(
            commits_of_process.get(task.name, 0) == rows.commit for commits_of_process in everywhere
        )
    }


def encode_items(
    items: Mapping[Task, Items], tokenizer: PreTrainedTokenizerFast, sequence_length: int
) -> dict[Task, EncodedTask]:
    """Return each task's items, encoded, those whose endings the context holds. Raises BadInput where it holds none."""
    return {
        task: EncodedTask(task, rows, tokenizer, sequence_length) for task, rows in items.items()
    }


def check_prompts(evaluation: keys.Evaluation, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise BadInput with the first prompt of samples that the tokenizer has no ids for."""
    for prompt in evaluation.sample_prompts if evaluation.sample_steps else ():
        try:
            encode_prompt(tokenizer, prompt)
        except BadInput as error:
            fix = "give other words: --sample_prompts TEXT..., or --sample_steps 0"
            raise BadInput(f"sample_prompts = {prompt!r}: {error}; {fix}") from None


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the model as it is when it is asked.

    Attributes:
        tests: the tasks that are scored.
        model: whole on each process for as long as it is used.
        stopped: whether this process was asked to stop: an evaluation ends early then, on every process.
    """

    recipe: keys.Recipe
    corpus: Corpus
    tests: Mapping[Task, EncodedTask]
    model: FullModel
    accelerator: Accelerator
    stopped: Callable[[], bool] = lambda: False
    _skips: Counter[str] = field(default_factory=Counter, init=False)  # in a row, by name

    def loss(self, split: str, batch_size: int) -> dict[str, float] | None:
        """Return ``loss`` (nats per token) and ``bits_per_byte`` of a split, or None when stopped."""
        accelerator, corpus = self.accelerator, self.corpus
        batches = corpus.eval_batches(
            split,
            max_tokens=self.recipe.evaluation.eval_tokens,
            batch_size=batch_size,
            device=accelerator.device,
            rank=accelerator.process_index,
            num_processes=accelerator.num_processes,
        )
        with self.model() as model, autocast(accelerator):
            return validation.validation_loss(
                loss_module(model, self.recipe.loss, corpus.tokenizer.eos_token_id),
                batches,
                device=accelerator.device,
                bytes_per_token=corpus.bytes_per_token,
                accelerator=accelerator,
                stop=self.stopped,
            )

    def score(self, task: Task) -> dict[str, float] | None:
        """Return a task's scores, their errors and ``items``, or None when stopped.

        Raises:
            BadInput: a log-likelihood is not finite. Every process raises it.
        """
        accelerator, test = self.accelerator, self.tests[task]
        with self.model() as model, autocast(accelerator):
            answers = likelihood.log_likelihoods(
                model,
                test.questions,
                context_length=self.recipe.model.sequence_length,
                accelerator=accelerator,
                stop=self.stopped,
            )
        return None if answers is None else test.result(answers)

    def score_or_skip(self, task: Task) -> dict[str, float] | None:
        """Return a task's scores as ``score`` does, or None if it is skipped.

        It is skipped, with a warning, if the model's log-likelihoods are not finite, and for the
        rest of the run after ``MAX_SKIPS`` times in a row. All processes skip the same scores.
        """
        return self._unless_not_finite(task.label, lambda: self.score(task))

    def samples(self) -> list[tuple[str, str]]:
        """Return each prompt and its continuation, on the main process; the others return none.

        The prompt is the text that the tokenizer reads, which its normalizer may have changed.
        Samples are skipped as scores are in ``score_or_skip``.
        """
        with self.model() as model:  # on every process
            if not self.accelerator.is_main_process:
                return []
            return self._unless_not_finite("samples", lambda: self._samples(model)) or []

    def _samples(self, model: PreTrainedModel) -> list[tuple[str, str]]:
        evaluation = self.recipe.evaluation
        tokenizer = self.corpus.tokenizer
        samples = []
        for number, prompt in enumerate(evaluation.sample_prompts or self.corpus.beginnings()):
            settings = sampling.Sampling(
                max_new_tokens=evaluation.sample_tokens,
                temperature=evaluation.sample_temperature,
                top_k=evaluation.sample_top_k,
                top_p=evaluation.sample_top_p,
                seed=self.recipe.model.seed + number,
            )
            prompt_ids = encode_prompt(tokenizer, prompt)
            new_ids = sampling.sample(model, prompt_ids, tokenizer, settings)
            continuation = decode_continuation(tokenizer, prompt_ids, new_ids)
            samples.append((decode(tokenizer, prompt_ids), continuation))
        return samples

    def _unless_not_finite(self, name: str, evaluate: Callable[[], T]) -> T | None:
        """Return the result of ``evaluate``, or None if it raises BadInput or is off."""
        if self._skips[name] == MAX_SKIPS:
            return None
        try:
            result = evaluate()
        except BadInput as error:
            self._skips[name] += 1
            log.warning(f"{name}: skipped. {error}")
            if self._skips[name] == MAX_SKIPS:
                log.warning(
                    f"{name}: off until the next start, because it was skipped {MAX_SKIPS} times in a row"
                )
            return None
        self._skips[name] = 0
        return result


def describe_loss(split: str, result: dict[str, float]) -> str:
    """Return a validation result in one line."""
    bits = f", {result['bits_per_byte']:.3f} bits per byte" if "bits_per_byte" in result else ""
    return f"{split} loss {result['loss']:.4f} nats per token{bits}"


def describe_scores(task: Task, result: dict[str, float]) -> str:
    """Return a task's scores in one line, in per cent."""
    values = task.with_errors(result, "%")
    scores = [f"{name} {value}" for name, value in zip(task.scores, values, strict=True)]
    return f"{task.label} {', '.join(scores)}"
