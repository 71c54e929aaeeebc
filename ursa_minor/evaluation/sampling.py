"""Generate text with the ``generate`` method of Transformers.

A text may be longer than the model's context. It contains no padding and no special tokens.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch.nn.attention import sdpa_kernel
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation.streamers import BaseStreamer

from ursa_minor.data.tokens.tokenizer import Continuation, decode
from ursa_minor.evaluation.likelihood import SCORING_KERNELS, context_length, not_finite


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings with which a text is continued.

    Attributes:
        max_new_tokens: the largest number of tokens that are generated.
        temperature: divides the logits; 0 always takes the most likely token.
        top_k: the number of most likely tokens to choose from, or 0 for all.
        top_p: the total probability of the most likely tokens to choose from, or 1.0 for all.
        seed: the seed of the random numbers.
    """

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int


@torch.inference_mode()
@sdpa_kernel(SCORING_KERNELS)  # the shape changes with each token
def sample(
    model: PreTrainedModel,
    prompt_ids: list[int],
    tokenizer: PreTrainedTokenizerBase,
    settings: Sampling,
    streamer: "Streamer | None" = None,
) -> list[int]:
    """Generate new ids after a prompt, until the end of the text or of an answer in a chat.

    A text that exceeds the model's context is continued in a sliding window: whenever the context
    is full, its last half becomes the new window. The global random state and the model are left as
    they were. Of the model's generation_config only the ids that end a text are used.

    Args:
        streamer: object that receives the new ids while they are generated.

    Returns:
        The new ids, without the id that ends the text.

    Raises:
        BadInput: the model computes a logit that is NaN or infinite.
    """
    # A model without a limit gets a context that is large enough for the complete text.
    context = context_length(model.config) or len(prompt_ids) + settings.max_new_tokens + 1
    text_end_ids = end_ids(model, tokenizer)
    ids = list(prompt_ids)
    num_new = 0

    was_training = model.training
    saved_generation_config = model.generation_config
    # The model's own configuration may contain beam search or stop strings.
    model.generation_config = _generation_config(model, tokenizer, settings, text_end_ids)
    if streamer:
        streamer.begin(prompt_ids, text_end_ids)
    model.eval()
    random_devices = [model.device] if model.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(random_devices):
            torch.manual_seed(settings.seed)
            while num_new < settings.max_new_tokens:
                # The first window is as much of the prompt as leaves space for one new token.
                window_length = context - 1 if num_new == 0 else max(1, context // 2)
                window = torch.tensor([ids[-window_length:]], device=model.device)
                num_read = window.shape[1]
                output = model.generate(
                    window,
                    attention_mask=torch.ones_like(window),
                    max_new_tokens=min(settings.max_new_tokens - num_new, context - num_read),
                    logits_processor=checks_logits(),
                    streamer=streamer,
                )
                new_ids = output[0, num_read:].tolist()
                ids += new_ids
                num_new += len(new_ids)
                if new_ids[-1] in text_end_ids:
                    ids.pop()
                    break
    finally:
        model.train(was_training)
        model.generation_config = saved_generation_config
    if streamer:
        streamer.finish()
    return ids[len(prompt_ids) :]


def _generation_config(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: Sampling,
    text_end_ids: list[int],
) -> GenerationConfig:
    """Return the arguments of ``generate``. Only ids that occur in a text can be generated."""
    sampling_options: dict[str, float] = {}
    if settings.temperature > 0:
        sampling_options["temperature"] = settings.temperature
        sampling_options["top_k"] = settings.top_k
        sampling_options["top_p"] = settings.top_p

    # The rows that pad the vocabulary, and special tokens such as the marks of a chat, never occur
    # in a text. A model that was not trained on them may still give them a high probability.
    padding_ids = range(len(tokenizer), model.config.vocab_size)
    suppressed_ids = {*padding_ids, *tokenizer.all_special_ids} - set(text_end_ids)
    return GenerationConfig(
        eos_token_id=text_end_ids,
        pad_token_id=tokenizer.eos_token_id,
        suppress_tokens=sorted(suppressed_ids) or None,
        use_cache=True,
        do_sample=settings.temperature > 0,
        **sampling_options,
    )


class FiniteLogits(LogitsProcessor):
    """Raise BadInput if the logits of the next token are not finite.

    Single logits may be -inf, as long as the largest one is finite: such a token is never chosen.
    """

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the logits ``scores`` (batch, vocabulary) unchanged."""
        largest = scores.amax(dim=-1)  # NaN if any is NaN
        invalid = largest[~largest.isfinite()]
        if invalid.numel():
            raise not_finite("generating text", invalid[0].item())
        return scores


def checks_logits() -> LogitsProcessorList:
    """Return a ``logits_processor`` with which ``generate`` raises BadInput for logits of NaN."""
    return LogitsProcessorList([FiniteLogits()])


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that end a text, from the tokenizer and from the model's generation_config."""
    model_ids = model.generation_config.eos_token_id
    if model_ids is None:
        model_ids = []
    elif not isinstance(model_ids, list):
        model_ids = [model_ids]
    return sorted({tokenizer.eos_token_id, *model_ids})


class Streamer(BaseStreamer):
    """Write generated text as soon as no later token can change it, and a line break at its end.

    The methods are called in this order:

    1. ``sample`` calls ``begin``.
    2. For each window, ``generate`` calls ``put`` with the ids of the window, then ``put`` with
       each new id, then ``end``.
    3. ``sample`` calls ``finish``.

    Args:
        write: function that is called with each piece of text.
        with_prompt: whether the prompt, as the tokenizer reads it, is written before the first
            piece.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        write: Callable[[str], None],
        *,
        with_prompt: bool = False,
    ):
        self.write = write
        self._tokenizer = tokenizer
        self._with_prompt = with_prompt
        self._continuation: Continuation | None = None
        self._prompt = ""
        self._end_ids: Collection[int] = ()
        self._next_is_window = True  # the next call of put passes the window, not a new id

    def begin(self, prompt_ids: Sequence[int], end_ids: Collection[int] = ()) -> None:
        """Begin a text after a prompt. The ids in ``end_ids`` are not written."""
        self._continuation = Continuation(self._tokenizer, prompt_ids)
        self._prompt = decode(self._tokenizer, prompt_ids) if self._with_prompt else ""
        self._end_ids = end_ids
        self._next_is_window = True

    def put(self, value: torch.Tensor) -> None:
        """Write the text that a new token completes.

        Args:
            value: the ids of the window, (1, T), in the first call for a window, then each new id,
                (1,).
        """
        ids = value.flatten().tolist()
        if self._continuation is None:
            self.begin(ids)
        if self._next_is_window:
            self._next_is_window = False
            return
        assert self._continuation is not None
        text_ids = [token_id for token_id in ids if token_id not in self._end_ids]
        self._write(self._continuation.add(text_ids))

    def end(self) -> None:
        """Expect a new window, which repeats ids that have already been written."""
        self._next_is_window = True

    def finish(self) -> None:
        """Write the rest of the text and a line break."""
        rest = ""
        if self._continuation is not None:
            rest = self._continuation.finish()
        self._write(rest + "\n")
        self._continuation = None
        self._next_is_window = True

    def _write(self, text: str) -> None:
        text = self._prompt + text
        self._prompt = ""
        if text:
            self.write(text)
