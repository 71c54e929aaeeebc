"""Text from a model, with Transformers' generate, beyond the model's context and never of padding or special tokens."""

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
    """How a text is continued.

    Attributes:
        temperature: 0 takes the likeliest id each time.
        top_k: choose among this many likeliest ids; 0 = all.
        top_p: choose among the fewest likeliest ids that hold this probability; 1.0 = all.
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
    """Return new ids that continue ``prompt_ids``, up to and without the end of text, or of a chat's answer.

    Args:
        streamer: gets the new ids as they come.

    Text longer than the context is continued from a sliding window: its last half, whenever the context is full.
    The global random state is left as it was. Of the model's own generation_config only the ids that end a text count.

    Raises:
        BadInput: the model computes a logit that is NaN or infinite.
    """
    # Some models have no limit.
    context = context_length(model.config) or len(prompt_ids) + settings.max_new_tokens + 1
    is_drawn = settings.temperature > 0
    choice = (
        {"temperature": settings.temperature, "top_k": settings.top_k, "top_p": settings.top_p}
        if is_drawn
        else {}
    )
    ids, made = list(prompt_ids), 0
    was_training, generation_config = model.training, model.generation_config
    ends = end_ids(model, tokenizer)
    # Padding, and marks of a chat that no answer holds: a model that saw none may still draw them.
    never = {*range(len(tokenizer), model.config.vocab_size), *tokenizer.all_special_ids} - set(
        ends
    )
    model.generation_config = GenerationConfig(  # the model's own may ask for beams or stop strings
        eos_token_id=ends,
        pad_token_id=tokenizer.eos_token_id,
        suppress_tokens=sorted(never) or None,
        use_cache=True,
        do_sample=is_drawn,
        **choice,
    )
    if streamer:
        streamer.begin(prompt_ids, ends)
    model.eval()
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            torch.manual_seed(settings.seed)
            while made < settings.max_new_tokens:
                keep = context - 1 if made == 0 else max(1, context // 2)
                window = torch.tensor([ids[-keep:]], device=model.device)
                room = min(settings.max_new_tokens - made, context - window.shape[1])
                out = model.generate(
                    window,
                    attention_mask=torch.ones_like(window),
                    max_new_tokens=room,
                    logits_processor=checks_logits(),
                    streamer=streamer,
                )
                new = out[0, window.shape[1] :].tolist()
                ids += new
                made += len(new)
                if new[-1] in ends:
                    ids.pop()
                    break
    finally:
        model.train(was_training).generation_config = generation_config
    if streamer:
        streamer.finish()
    return ids[len(prompt_ids) :]


class FiniteLogits(LogitsProcessor):
    """Raises BadInput if the logits of the next token are not finite.

    A single logit may be -inf: that token is never chosen.
    """

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the logits as they are; ``scores``: (batch, vocabulary)."""
        largest = scores.amax(dim=-1)  # NaN if any is NaN
        invalid = largest[~largest.isfinite()]
        if invalid.numel():
            raise not_finite("generating text", invalid[0].item())
        return scores


def checks_logits() -> LogitsProcessorList:
    """Return the argument ``logits_processor`` of ``generate`` with which it rejects NaN."""
    return LogitsProcessorList([FiniteLogits()])


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that end a text: the tokenizer's, and those that the model's generation_config names."""
    model_ids = model.generation_config.eos_token_id
    if model_ids is None:
        model_ids = []
    elif not isinstance(model_ids, list):
        model_ids = [model_ids]
    return sorted({tokenizer.eos_token_id, *model_ids})


class Streamer(BaseStreamer):
    """Writes generated text as soon as no later token changes it, and a line break at its end.

    ``sample`` calls ``begin``, ``generate`` calls ``put`` and ``end``, ``sample`` calls ``finish``.

    Args:
        write: is called with each piece of text.
        with_prompt: whether the prompt is written before the first piece, as the tokenizer reads it.
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
        self._next_is_known = True  # what generate passes next is the window, not a new token

    def begin(self, prompt_ids: Sequence[int], end_ids: Collection[int] = ()) -> None:
        """Begin a text that continues a prompt; an id of ``end_ids`` is not written."""
        self._continuation = Continuation(self._tokenizer, prompt_ids)
        self._prompt = decode(self._tokenizer, prompt_ids) if self._with_prompt else ""
        self._end_ids = end_ids
        self._next_is_known = True

    def put(self, value: torch.Tensor) -> None:
        """Write the text that a new token completes.

        Args:
            value: first the ids of the window, (1, T), then each new id, (1,).
        """
        ids = value.flatten().tolist()
        if self._continuation is None:
            self.begin(ids)
        if self._next_is_known:
            self._next_is_known = False
            return
        assert self._continuation is not None
        self._write(self._continuation.add([i for i in ids if i not in self._end_ids]))

    def end(self) -> None:
        """Note that a window is full: the next one repeats tokens that have been written."""
        self._next_is_known = True

    def finish(self) -> None:
        """Write the rest of the text and a line break."""
        rest = self._continuation.finish() if self._continuation else ""
        self._write(rest + "\n")
        self._continuation = None
        self._next_is_known = True

    def _write(self, text: str) -> None:
        text = self._prompt + text
        self._prompt = ""
        if text:
            self.write(text)
