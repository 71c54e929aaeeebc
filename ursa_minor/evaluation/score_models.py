"""Score several models or checkpoints on tasks, for eval_tasks.py.

The scores of a model on a task are written as soon as they are known, so that a repeated command
continues where the first one ended.
"""

import argparse
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from ursa_minor.base import files
from ursa_minor.base.cli import catch_interrupts
from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import pluralize
from ursa_minor.data.tokens import pretrained_tokenizer
from ursa_minor.evaluation import likelihood, score_model, task_data
from ursa_minor.evaluation.encoded_task import EncodedTask
from ursa_minor.evaluation.score_file import ScoreFile, ScoreKey, ScoreLine
from ursa_minor.evaluation.task import Task
from ursa_minor.evaluation.task_data import Items
from ursa_minor.machine import device as hardware
from ursa_minor.machine.accelerator import make_accelerator
from ursa_minor.model import model_list, pretrained
from ursa_minor.model.adapters import check_no_hub_adapter
from ursa_minor.model.model_list import ListedModel
from ursa_minor.model.precision import precision_of
from ursa_minor.model.vocabulary import check_embedding_rows

log = logging.getLogger(__name__)

# The files of a model folder that decide the ids of a text.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)


class EncodedTasks(NamedTuple):
    """A tokenizer and the items that it has encoded.

    Attributes:
        tests: the encoded items by the name of the task.
    """

    tokenizer: PreTrainedTokenizerBase
    tests: dict[str, EncodedTask]


@dataclass
class Scores:
    """The result of scoring several models.

    Attributes:
        tasks: the tasks in order.
        lines: the scores of each model on each complete task, in order. Those of an earlier command
            are included. Empty on all processes but the main process.
        part_lines: the scores on the parts of tasks, with ``--by_part``.
        num_failed: the number of models that could not be scored.
    """

    tasks: list[Task]
    lines: list[ScoreLine] = field(default_factory=list)
    part_lines: list[ScoreLine] = field(default_factory=list)
    num_failed: int = 0


class PlannedModel(NamedTuple):
    """What remains to be done for a model.

    Attributes:
        weights: its fingerprint, or None for a model of the Hub.
        tasks: the names of the tasks on which it was not scored before.
        problem: why it cannot be scored, or None.
    """

    weights: str | None
    tasks: list[str]
    problem: str | None = None


def run(args: argparse.Namespace, models: Sequence[ListedModel], score_file: ScoreFile) -> Scores:
    """Score models on the tasks of a command line, except for those that ``score_file`` contains.

    A model that cannot be scored is reported, and the others are scored.

    Args:
        args: the result of ``eval_tasks.parse``.
        models: the models to score.
        score_file: the main process adds the scores to it.

    Raises:
        BadInput: a task cannot be loaded, or the user has interrupted the program.
    """
    disable_progress_bar()  # Transformers shows one while it loads a single file
    items = {}
    for name in args.tasks:
        task = task_data.all_tasks()[name]
        items[task] = task_data.read(task, args.task_files.get(name), args.limit)
    if args.by_part:
        task_data.check_parts(items)
    accelerator = make_accelerator(hardware.this_device(), precision="no")
    scorer = _Scorer(args, items, accelerator, score_file)

    plans = scorer.plan(models)
    num_models = sum(bool(plan.tasks) for plan in plans)
    num_finished = sum(not plan.tasks and plan.problem is None for plan in plans)
    if num_finished:
        log.info(
            f"{pluralize(num_finished, 'model is', 'models are')} not scored again, because "
            f"{score_file.path} contains the scores"
        )
    num_failed = 0
    reported_problems = set()  # a problem of a task is the same for all models
    number = 0
    catch_interrupts()
    try:
        for model, plan in zip(models, plans, strict=True):
            problem = plan.problem
            if plan.tasks:
                number += 1
                problem = scorer.score(model, plan, f"{number} of {num_models}")
            if problem is not None:
                num_failed += 1
                if problem not in reported_problems:
                    log.warning(problem)
                reported_problems.add(problem)
    except KeyboardInterrupt:
        raise BadInput(
            f"interrupted. The scores of the models before are in {score_file.path}. The same "
            f"command scores the others",
            130,
        ) from None
    scores = Scores(list(items), num_failed=num_failed)
    if accelerator.is_main_process:
        scorer.collect(scores, models, plans)
    return scores


class _Scorer:
    """Score models one after the other.

    Attributes:
        encoded: the encoded items of each tokenizer and context length that occurred.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        items: dict[Task, Items],
        accelerator: Accelerator,
        score_file: ScoreFile,
    ):
        self.args = args
        self.items = items
        self.accelerator = accelerator
        self.score_file = score_file
        self.encoded: dict[tuple[str, int | None], EncodedTasks] = {}
        self.item_hashes = {
            task.name: task_data.hash_items(task_items) for task, task_items in items.items()
        }

    def plan(self, models: Sequence[ListedModel]) -> list[PlannedModel]:
        """Return what remains to be done for each model, the same on all processes."""
        plans: list[PlannedModel] = []
        if self.accelerator.is_main_process:
            plans = [self._plan_model(model) for model in models]
        shared = [plans]
        broadcast_object_list(shared)
        return shared[0]

    def _plan_model(self, model: ListedModel) -> PlannedModel:
        try:
            weights = model_list.fingerprint(model)
        except BadInput as error:
            return PlannedModel(None, [], str(error))
        remaining = []
        for task in self.items:
            if not self._is_finished(task, self._key(model, weights, task.name)):
                remaining.append(task.name)
        return PlannedModel(weights, remaining)

    def _key(self, model: ListedModel, weights: str | None, task_name: str) -> ScoreKey:
        autocast = self.accelerator.mixed_precision
        return ScoreKey(model.name, weights, task_name, self.item_hashes[task_name], autocast)

    def _is_finished(self, task: Task, key: ScoreKey) -> bool:
        line = self.score_file.find(key)
        if line is None or key.weights is None:  # a model of the Hub may have changed
            return False
        if self.args.by_part and task.part_field:
            return line.get("parts") == len(self.score_file.find_parts(key))
        return True

    def score(self, model: ListedModel, plan: PlannedModel, number: str) -> str | None:
        """Score a model on the remaining tasks, and write its scores.

        Args:
            number: which of the models this is, for the log.

        Returns:
            The reason why the model cannot be scored, or None. It is the same on all processes.
        """
        problem = None
        try:
            encoded = self._encoded(model)
            network = self._load(model, encoded.tokenizer)
        except BadInput as error:
            problem = str(error)
        problem = self._first_problem(problem)
        if problem is not None:
            return problem
        for name in plan.tasks:
            key = self._key(model, plan.weights, name)
            try:
                self._score_task(model, network, encoded.tests[name], key)
            except BadInput as error:
                problem = f"{model_list.OPTION}{model.name}: {error}"
            problem = self._first_problem(problem)
            if problem is not None:
                return problem
        log.info(f"{number}: {model.name}")
        return None

    def _first_problem(self, problem: str | None) -> str | None:
        """Return the problem of the first process that has one."""
        problems = [text for text in gather_object([problem]) if text is not None]
        return problems[0] if problems else None

    def _load(self, model: ListedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        check_no_hub_adapter(model.location, f"{model_list.OPTION}{model.name}")
        network = pretrained.load(model.location)
        check_embedding_rows(network, tokenizer, f"{model_list.OPTION}{model.name}")
        return network.to(self.accelerator.device)

    def _encoded(self, model: ListedModel) -> EncodedTasks:
        """Return the items, encoded for a model. Models with the same tokenizer share them."""
        option = f"{model_list.OPTION}{model.name}"
        config = pretrained.from_pretrained(option, AutoConfig, model.location)
        context_length = likelihood.context_length(config)
        key = (_tokenizer_id(model.location), context_length)
        if key not in self.encoded:
            tokenizer = pretrained_tokenizer.load(model.location, of_model=True)
            tests = {
                task.name: EncodedTask(task, task_items, tokenizer, context_length)
                for task, task_items in self.items.items()
            }
            self.encoded[key] = EncodedTasks(tokenizer, tests)
        return self.encoded[key]

    def _score_task(
        self, model: ListedModel, network: PreTrainedModel, test: EncodedTask, key: ScoreKey
    ) -> None:
        start = time.perf_counter()
        accelerator = self.accelerator
        answers = score_model.compute_answers(
            test, network, self.args.batch_size, accelerator, keeps_bar=False
        )
        seconds = time.perf_counter() - start
        if not accelerator.is_main_process:
            return
        task = test.task
        shared = {**key._asdict(), "run": model.run, "step": model.step, "tokens": model.tokens}
        line = {
            **shared,
            "dataset": score_model.describe_data(test, self.args.task_files.get(task.name)),
            "items": len(test.items),
            "cut": test.longer_than(likelihood.context_length(network.config)),
            "left_out": test.left_out,
            "precision": precision_of(network, accelerator.mixed_precision),
            **test.result(answers, score_model.by_evaluate()),
            "seconds": round(seconds, 2),
        }
        part_lines = []
        if self.args.by_part and task.part_field:
            part_lines = score_model.lines_of_parts(test, answers, shared)
            line["parts"] = len(part_lines)
        self.score_file.add(key, [*part_lines, line])

    def collect(
        self, scores: Scores, models: Sequence[ListedModel], plans: Sequence[PlannedModel]
    ) -> None:
        """Add the scores of all models to the result."""
        for model, plan in zip(models, plans, strict=True):
            for task in self.items:
                key = self._key(model, plan.weights, task.name)
                line = self.score_file.find(key)
                if line is None:
                    continue
                scores.lines.append(line)
                if self.args.by_part:
                    scores.part_lines += self.score_file.find_parts(key)


def _tokenizer_id(location: str) -> str:
    """Return a text that is the same for models with the same tokenizer."""
    folder = Path(location)
    if not (folder / TOKENIZER_FILES[0]).is_file():
        return location
    hashes = [
        (name, files.sha256(folder / name)) for name in TOKENIZER_FILES if (folder / name).is_file()
    ]
    return repr(hashes)
