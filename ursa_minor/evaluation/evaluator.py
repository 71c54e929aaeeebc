"""Evaluate the model of a run: the loss of a split, the scores of tasks, and samples.

All processes share the work on losses and scores.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
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
MAX_SKIPS = 3  # number of skips in a row after which a score is no longer computed


def read_items(
    evaluation: keys.Evaluation, accelerator: Accelerator, commits: Mapping[str, str] | None = None
) -> dict[Task, Items]:
    """Return the items of each task that the run is scored on, the same on all processes.

    A task whose data set is unavailable is left out with a warning.

    Args:
        commits: for each name of a task, the commit of the data set that the run has used before.

    Raises:
        BadInput: the user's own files of a task cannot be read.
    """
    items: dict[Task, Items] = {}
    known_commits = commits or {}
    with accelerator.local_main_process_first():  # other processes find the files in the cache
        for name in dict.fromkeys(evaluation.tasks):
            task = task_data.all_tasks()[name]
            task_files = evaluation.files_of(name)
            try:
                items[task] = task_data.read(
                    task, task_files, evaluation.task_limit, known_commits.get(name)
                )
            except BadInput as error:
                if task_files:
                    raise
                log.warning(f"The task {name} is not scored: {error}")

    commits_of_process = {task.name: task_items.commit for task, task_items in items.items()}
    commits_by_process = gather_object([commits_of_process])
    return {
        task: task_items
        for task, task_items in items.items()
        if _have_commit(commits_by_process, task, task_items.commit)
    }


def _have_commit(
    commits_by_process: Iterable[Mapping[str, str | None]], task: Task, commit: str | None
) -> bool:
    """Return whether all processes have read a task, and from the same commit."""
    return all(
        task.name in commits and commits[task.name] == commit for commits in commits_by_process
    )


def encode_items(
    items: Mapping[Task, Items], tokenizer: PreTrainedTokenizerFast, sequence_length: int
) -> dict[Task, EncodedTask]:
    """Return the encoded items of each task. Items that do not fit into the context are left out.

    Raises:
        BadInput: no item of a task fits, or the tokenizer cannot encode an item.
    """
    return {
        task: EncodedTask(task, task_items, tokenizer, sequence_length)
        for task, task_items in items.items()
    }


def check_prompts(evaluation: keys.Evaluation, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise BadInput for the first sample prompt that the tokenizer cannot encode."""
    if not evaluation.sample_steps:
        return
    for prompt in evaluation.sample_prompts:
        try:
            encode_prompt(tokenizer, prompt)
        except BadInput as error:
            raise BadInput(
                f"sample_prompts = {prompt!r}: {error}. Use other prompts with --sample_prompts "
                f"TEXT..., or disable samples with --sample_steps 0"
            ) from None


@dataclass(frozen=True)
class Evaluator:
    """Evaluate the model of a run in its current state.

    Attributes:
        tests: the encoded items of the tasks that are scored.
        model: context manager that gives each process the complete model while it is used.
        stopped: function that returns whether this process was asked to stop. If so, an evaluation
            ends early on all processes.
    """

    recipe: keys.Recipe
    corpus: Corpus
    tests: Mapping[Task, EncodedTask]
    model: FullModel
    accelerator: Accelerator
    stopped: Callable[[], bool] = lambda: False
    # How often each score, or the samples, was skipped in a row.
    _skips: Counter[str] = field(default_factory=Counter, init=False)

    def loss(self, split: str, batch_size: int) -> dict[str, float] | None:
        """Return ``loss`` (nats per token) and ``bits_per_byte`` of a split, or None if stopped.

        Args:
            split: validation or test.
            batch_size: the number of windows per batch of each process.
        """
        accelerator = self.accelerator
        corpus = self.corpus
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
        """Return a task's scores, their standard errors and ``items``, or None if stopped.

        Raises:
            BadInput: a log-likelihood is not finite. Every process raises it.
        """
        accelerator = self.accelerator
        test = self.tests[task]
        with self.model() as model, autocast(accelerator):
            answers = likelihood.log_likelihoods(
                model,
                test.questions,
                context_length=self.recipe.model.sequence_length,
                accelerator=accelerator,
                stop=self.stopped,
            )
        if answers is None:
            return None
        return test.result(answers)

    def score_or_skip(self, task: Task) -> dict[str, float] | None:
        """Return a task's scores as ``score`` does, or None if it is skipped.

        A score is skipped with a warning if a log-likelihood is not finite. After ``MAX_SKIPS``
        skips in a row it is skipped until the process ends. All processes skip the same scores.
        """
        return self._unless_not_finite(task.label, lambda: self.score(task))

    def samples(self) -> list[tuple[str, str]]:
        """Return each prompt and its continuation on the main process, and [] on the others.

        The prompt is the text that the tokenizer reads, which its normalizer may have changed.
        Samples are skipped under the same conditions as scores (see ``score_or_skip``).
        """
        with self.model() as model:  # all processes gather the model together
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
            prompt_text = decode(tokenizer, prompt_ids)
            samples.append((prompt_text, continuation))
        return samples

    def _unless_not_finite(self, name: str, evaluate: Callable[[], T]) -> T | None:
        """Return the result of ``evaluate``, or None if it raises BadInput.

        After ``MAX_SKIPS`` errors in a row ``evaluate`` is no longer called.
        """
        if self._skips[name] == MAX_SKIPS:
            return None
        try:
            result = evaluate()
        except BadInput as error:
            self._skips[name] += 1
            log.warning(f"{name} could not be computed at this step: {error}")
            if self._skips[name] == MAX_SKIPS:
                log.warning(
                    f"{name} will not be computed again until the run is restarted, "
                    f"because {MAX_SKIPS} attempts in a row have failed"
                )
            return None
        self._skips[name] = 0
        return result


def describe_loss(split: str, result: dict[str, float]) -> str:
    """Return the loss of a split as one line of text."""
    text = f"{split} loss {result['loss']:.4f} nats per token"
    if "bits_per_byte" in result:
        text += f", {result['bits_per_byte']:.3f} bits per byte"
    return text


def describe_scores(task: Task, result: dict[str, float]) -> str:
    """Return a task's scores with their standard errors as one line of text."""
    values = task.format_with_errors(result, "%")
    scores = [f"{score} {value}" for score, value in zip(task.scores, values, strict=True)]
    return f"{task.label} {', '.join(scores)}"
