"""A run's evaluations: the loss of a split, tasks, samples; all processes share the work."""

from collections.abc import Callable, Mapping

from accelerate import Accelerator
from transformers import PreTrainedTokenizerFast

from pretrain.base.errors import BadInput
from pretrain.data.corpus import Corpus
from pretrain.data.tokenization import encode_prompt
from pretrain.evaluation import hellaswag, likelihood, sampling, validation
from pretrain.evaluation.record import Encoded, Task
from pretrain.machine.accelerator import autocast
from pretrain.machine.sharding import WholeModel
from pretrain.model.loss import loss_module
from pretrain.recipe import keys


def read_items(evaluation: keys.Evaluation) -> dict[Task, list]:
    """Return the items of each task that the run scores itself on."""
    scored = evaluation.hellaswag_steps or evaluation.hellaswag_files  # files alone are for eval_only
    return {hellaswag.TASK: hellaswag.TASK.read(evaluation.hellaswag_files)} if scored else {}


def encode_items(
    items: Mapping[Task, list], tokenizer: PreTrainedTokenizerFast, sequence_length: int
) -> dict[Task, Encoded]:
    """Return each task's items, encoded. Raises BadInput where the context does not hold the longest ending."""
    tests = {task: task.encode(of_task, tokenizer) for task, of_task in items.items()}
    for test in tests.values():
        test.longer_than(sequence_length)
    return tests


def refuse_prompts(evaluation: keys.Evaluation, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise BadInput with the first prompt of samples that the tokenizer has no ids for."""
    for prompt in evaluation.sample_prompts if evaluation.sample_steps else ():
        try:
            encode_prompt(tokenizer, prompt)
        except BadInput as error:
            remedy = "give other words: --sample_prompts TEXT..., or --sample_steps 0"
            raise BadInput(f"sample_prompts = {prompt!r}: {error}; {remedy}") from None


class Evaluator:
    """Evaluates the model as it is when it is asked.

    Args:
        tests: the tasks that are scored.
        model: whole on each process for as long as it is used.
        stopped: whether this process was asked to stop: an evaluation ends early then, on every process.
    """

    def __init__(
        self,
        recipe: keys.Recipe,
        corpus: Corpus,
        tests: Mapping[Task, Encoded],
        model: WholeModel,
        accelerator: Accelerator,
        stopped: Callable[[], bool] = lambda: False,
    ):
        self._recipe, self._corpus, self._tests, self._model = recipe, corpus, tests, model
        self._accelerator, self._stopped = accelerator, stopped

    def loss(self, split: str, batch_size: int) -> dict[str, float] | None:
        """Return ``loss`` (nats per token) and ``bits_per_byte`` of a split, or None when stopped."""
        accelerator, corpus = self._accelerator, self._corpus
        batches = corpus.eval_batches(
            split,
            max_tokens=self._recipe.evaluation.eval_tokens,
            batch_size=batch_size,
            device=accelerator.device,
            rank=accelerator.process_index,
            num_processes=accelerator.num_processes,
        )
        with self._model() as model, autocast(accelerator):
            return validation.validation_loss(
                loss_module(model, self._recipe.loss, corpus.tokenizer.eos_token_id),
                batches,
                device=accelerator.device,
                bytes_per_token=corpus.bytes_per_token,
                accelerator=accelerator,
                stop=self._stopped,
            )

    def score(self, task: Task) -> dict[str, float] | None:
        """Return a task's scores, their errors and ``items``, or None when stopped."""
        accelerator, test = self._accelerator, self._tests[task]
        with self._model() as model, autocast(accelerator):
            found = likelihood.log_likelihoods(
                model,
                test.questions,
                context_length=self._recipe.model.sequence_length,
                accelerator=accelerator,
                stop=self._stopped,
            )
        return None if found is None else test.result(found)

    def samples(self) -> list[tuple[str, str]]:
        """Return a text for each prompt, with it; the main process's (the others return none)."""
        evaluation, tokenizer = self._recipe.evaluation, self._corpus.tokenizer
        found = []
        with self._model() as model:
            for number, prompt in enumerate(evaluation.sample_prompts if self._accelerator.is_main_process else ()):
                ids = encode_prompt(tokenizer, prompt)
                how = sampling.Sampling(
                    max_new_tokens=evaluation.sample_tokens,
                    temperature=evaluation.sample_temperature,
                    top_k=evaluation.sample_top_k,
                    top_p=evaluation.sample_top_p,
                    seed=self._recipe.model.seed + number,
                )
                new = sampling.sample(model, ids, tokenizer, how)
                found.append((prompt, tokenizer.decode(new, skip_special_tokens=True)))
        return found


def describe_loss(split: str, result: dict[str, float]) -> str:
    """Return a validation result in one line."""
    bits = f", {result['bits_per_byte']:.3f} bits per byte" if "bits_per_byte" in result else ""
    return f"{split} loss {result['loss']:.4f} nats per token{bits}"


def describe_scores(task: Task, result: dict[str, float]) -> str:
    """Return a task's scores in one line, in per cent."""
    each = (f"{score} {100 * result[score]:.2f}% ± {100 * result[f'{score}_stderr']:.2f}" for score in task.scores)
    return f"{task.label} {', '.join(each)}"
