"""Text from a model, with Transformers' generate, beyond the model's context and never of padding or special tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import sdpa_kernel
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from pretrain.data.tokenization import CUT
from pretrain.evaluation.likelihood import KERNELS, context_length


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
@sdpa_kernel(KERNELS)  # the shape changes with each token
def sample(
    model: PreTrainedModel,
    prompt_ids: list[int],
    tokenizer: PreTrainedTokenizerBase,
    how: Sampling,
    streamer: "Streamer | None" = None,
) -> list[int]:
    """Return new ids that continue ``prompt_ids``, up to and without the end of text, or of a chat's answer.

    Args:
        streamer: gets the new ids as they come.

    Text longer than the context is continued from a sliding window: its last half, whenever the context is full.
    The global random state is left as it was. Of the model's own generation_config only the ids that end a text count.
    """
    context = context_length(model.config) or len(prompt_ids) + how.max_new_tokens + 1  # some models set no limit
    is_drawn = how.temperature > 0
    choice = {"temperature": how.temperature, "top_k": how.top_k, "top_p": how.top_p} if is_drawn else {}
    ids, made = list(prompt_ids), 0
    was_training, own = model.training, model.generation_config
    ends = end_ids(model, tokenizer)
    # Padding, and marks of a chat that no answer holds: a model that saw none may still draw them.
    never = {*range(len(tokenizer), model.config.vocab_size), *tokenizer.all_special_ids} - set(ends)
    model.generation_config = GenerationConfig(  # the model's own may ask for beams or stop strings
        eos_token_id=ends,
        pad_token_id=tokenizer.eos_token_id,
        suppress_tokens=sorted(never) or None,
        use_cache=True,
        do_sample=is_drawn,
        **choice,
    )
    model.eval()
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(how.seed)
        while made < how.max_new_tokens:
            keep = context - 1 if made == 0 else max(1, context // 2)
            window = torch.tensor([ids[-keep:]], device=model.device)
            room = min(how.max_new_tokens - made, context - window.shape[1])
            out = model.generate(window, attention_mask=torch.ones_like(window), max_new_tokens=room, streamer=streamer)
            new = out[0, window.shape[1] :].tolist()
            ids += new
            made += len(new)
            if new[-1] in ends:
                ids.pop()
                break
    model.train(was_training).generation_config = own
    if streamer:
        streamer.finish()
    return ids[len(prompt_ids) :]


def end_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids that end a text: the tokenizer's, and those that the model's generation_config names."""
    own = model.generation_config.eos_token_id
    return sorted({tokenizer.eos_token_id, *(own if isinstance(own, list) else [] if own is None else [own])})


class Streamer(TextStreamer):
    """Hands generated text to ``write``, a word at a time, and a line break at its end; special tokens are left out."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], None]):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write

    def end(self) -> None:
        """Go on: ``generate`` calls this at the end of a window, and the next one begins with what is known."""
        self.next_tokens_are_prompt = True

    def finish(self) -> None:
        """Pass on the rest of a text, and a line break."""
        super().end()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Pass on what no later token changes."""
        self.write(text.rstrip(CUT) + "\n" if stream_end else text)
