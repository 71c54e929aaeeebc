"""Sample text from a model: a run's ``model/`` folder, or any causal language model of the Hub.

python generate.py --model runs/quickstart --prompt "def " --num_samples 3
"""

import argparse
import difflib
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, TextStreamer
from transformers.utils.logging import disable_progress_bar

from pretrain import sampling, tokenization
from pretrain.errors import BadInput, exit_on_bad_input


def refuse(message: str):
    """Say what is wrong as every script of ours does."""
    raise BadInput(f"generate.py: {message}")


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Print samples as they are made."""
    parser = argparse.ArgumentParser(description="Sample text from a model.", allow_abbrev=False)
    parser.error = refuse
    parser.add_argument("--model", required=True, help="a run folder, its model/, any model folder, or a Hub id")
    parser.add_argument("--prompt", default="", help="text to go on from; empty begins a document")
    parser.add_argument("--num_samples", type=int, default=1)
    parser.add_argument("--max_new_tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 = always the likeliest token")
    parser.add_argument("--top_k", type=int, default=200, help="among this many likeliest tokens; 0 = all")
    parser.add_argument("--top_p", type=float, default=1.0, help="among the likeliest that hold this probability")
    parser.add_argument("--seed", type=int, default=1337)
    asked, unknown = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    for word in unknown:
        near = difflib.get_close_matches(word, [f"--{name}" for name in vars(asked)], n=1)
        refuse(f"{word}: no such flag" + (f"; did you mean {near[0]}?" if near else ""))
    refuse_out_of_range(asked)

    model, tokenizer = load(asked.model)
    prompt_ids = tokenization.encode_prompt(tokenizer, asked.prompt)
    for number in range(asked.num_samples):
        if asked.num_samples > 1:
            print(f"---- sample {number + 1} of {asked.num_samples}")
        print(asked.prompt, end="", flush=True)
        sampling.sample(
            model,
            prompt_ids,
            tokenizer,
            max_new_tokens=asked.max_new_tokens,
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            seed=asked.seed + number,
            streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        )
    return 0


def refuse_out_of_range(asked: argparse.Namespace) -> None:
    """Raise BadInput for every value that makes no sense."""
    rules = {
        "num_samples": (asked.num_samples >= 1, "1 or more"),
        "max_new_tokens": (asked.max_new_tokens >= 1, "1 or more"),
        "temperature": (0 <= asked.temperature <= 100, "0 to 100"),
        "top_k": (asked.top_k >= 0, "0 (all) or more"),
        "top_p": (0 < asked.top_p <= 1, "above 0, at most 1"),
        "seed": (0 <= asked.seed < 2**63, "0 or more"),
    }
    if faults := [f"--{name} {getattr(asked, name)}: must be {rule}" for name, (ok, rule) in rules.items() if not ok]:
        raise BadInput(faults)


def load(name: str):
    """Return the model (on the GPU where there is one) and its tokenizer; a run folder stands for its ``model/``."""
    path = Path(name)
    if (path / "model").is_dir():
        path = path / "model"
    elif path.is_dir() and (path / "checkpoints").is_dir():
        raise BadInput(f"--model {name}: the run has not written model/ yet; it does so at its end")
    if not path.exists() and (path.parent.parent != Path() or path.parent.is_dir() and path.parent != Path()):
        raise BadInput(f"--model {name}: no such folder (a Hub id is owner/name)")
    name = str(path) if path.exists() else name
    disable_progress_bar()
    tokenizer = tokenization.load(name)
    try:
        model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise BadInput(f"--model {name}: cannot be loaded: {str(error).splitlines()[0]}") from None
    return model.to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


if __name__ == "__main__":
    sys.exit(main())
