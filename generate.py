"""Generate text with a model: a run, a model folder, or any causal language model of the Hub.

python generate.py --model runs/quickstart --prompt "def " --num_samples 3
python generate.py --model runs/smoltalk --chat
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator

from ursa_minor.base import console, paths
from ursa_minor.base.cli import catch_interrupts, exit_on_bad_input
from ursa_minor.base.errors import BadInput
from ursa_minor.model.resolve import resolve_model
from ursa_minor.recipe import command_line, rules

# Options that must be in the range of a recipe key.
KEY_OF_OPTION = {
    "max_new_tokens": "sample_tokens",
    "temperature": "sample_temperature",
    "top_k": "sample_top_k",
    "top_p": "sample_top_p",
    "seed": "seed",
}


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Print samples while they are generated, and return the exit status."""
    args = parse(sys.argv[1:] if argv is None else argv)
    console.start()
    try:
        print_samples(args)
    except KeyboardInterrupt:  # during a sample or an answer
        return 130
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line. Raise BadInput with every error that was found."""
    parser = argparse.ArgumentParser(
        description="Generate text with a model, or chat with it.", allow_abbrev=False
    )
    _add_options(parser)
    args = command_line.parse_flags(parser, argv)

    errors = []
    for option, key in KEY_OF_OPTION.items():
        value = getattr(args, option)
        problem = rules.key_problem(key, value)
        if problem:
            errors.append(f"--{option} {value}: {problem}")
    if args.num_samples < 1:
        errors.append(f"--num_samples {args.num_samples}: must be 1 or more")
    if args.chat and (args.prompt or args.num_samples > 1):
        errors.append(
            "--chat: messages are read from the terminal. Leave out --prompt and --num_samples"
        )
    if errors:
        raise BadInput(errors)
    return args


def _add_options(parser: argparse.ArgumentParser) -> None:
    model_group = parser.add_argument_group("model")
    model_group.add_argument(
        "--model",
        type=paths.argument,
        required=True,
        metavar="NAME_OR_PATH",
        help="Model that generates text (required): a run folder, a checkpoint, a model folder, or "
        "a Hub id (ID or ID@REVISION).",
    )

    prompt_group = parser.add_argument_group("prompt")
    prompt_group.add_argument(
        "--prompt",
        default="",
        metavar="TEXT",
        help="Text to continue. (default: empty, which starts a new document)",
    )
    command_line.add_switch(
        prompt_group,
        "--chat",
        "Chat with the model: read one message per line and print the answer, which takes the "
        "earlier messages into account. (default: false)",
    )

    generation_group = parser.add_argument_group("generation")
    generation_group.add_argument(
        "--num_samples",
        type=int,
        default=1,
        metavar="N",
        help="Number of samples, each with the next seed. (default: %(default)s)",
    )
    generation_group.add_argument(
        "--max_new_tokens",
        type=int,
        default=200,
        metavar="N",
        help="Maximum number of tokens to generate for a sample or an answer. (default: "
        "%(default)s)",
    )
    generation_group.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="Number by which logits are divided. Lower values give more likely text, and 0 "
        "always takes the most likely token. (default: %(default)s)",
    )
    generation_group.add_argument(
        "--top_k",
        type=int,
        default=200,
        metavar="N",
        help="Number of most likely tokens to sample from. 0 means all tokens. (default: "
        "%(default)s)",
    )
    generation_group.add_argument(
        "--top_p",
        type=float,
        default=1.0,
        metavar="X",
        help="Total probability of the most likely tokens to sample from. 1.0 means all tokens. "
        "(default: %(default)s)",
    )
    generation_group.add_argument(
        "--seed",
        type=int,
        default=1337,
        metavar="N",
        help="Random seed for the first sample. (default: %(default)s)",
    )


def print_samples(args: argparse.Namespace) -> None:
    """Load the model, then print the continuations of the prompt, or chat."""
    name = resolve_model(args.model)
    console.announce_imports()
    # These imports take seconds, so they come after the checks of the command line.
    import torch
    from transformers.utils.logging import disable_progress_bar

    from ursa_minor.data.tokens import pretrained_tokenizer
    from ursa_minor.data.tokens import tokenizer as tokenization
    from ursa_minor.evaluation import sampling
    from ursa_minor.hub import client
    from ursa_minor.model import pretrained
    from ursa_minor.model.adapters import check_no_hub_adapter
    from ursa_minor.model.vocabulary import check_embedding_rows
    from ursa_minor.post import chat

    client.set_timeouts()
    disable_progress_bar()
    model_option = f"--model {args.model}"
    check_no_hub_adapter(name, model_option)
    tokenizer = pretrained_tokenizer.load(name, of_model=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = pretrained.load(name).to(device)
    check_embedding_rows(model, tokenizer, model_option)

    settings = sampling.Sampling(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    streamer = sampling.Streamer(tokenizer, console.write, with_prompt=not args.chat)
    if args.chat:
        if tokenizer.chat_template is None:
            command = f"python export_model.py {paths.quoted(args.model)} --chat --out exports/chat"
            raise BadInput(
                f"--chat: {args.model} has no chat template. Make a model that has one ({command}) "
                f"and fine-tune it (docs/post_training.md)"
            )
        chat.converse(model, tokenizer, messages(), settings, streamer)
        return

    prompt_ids = tokenization.encode_prompt(tokenizer, args.prompt)
    for number in range(args.num_samples):
        if args.num_samples > 1:
            console.write(f"---- sample {number + 1} of {args.num_samples}\n")
        sample_settings = dataclasses.replace(settings, seed=args.seed + number)
        sampling.sample(model, prompt_ids, tokenizer, sample_settings, streamer)


def messages() -> Iterator[str]:
    """Yield each line of standard input without outer spaces, until its end (Ctrl-D) or Ctrl-C.

    An empty line starts a new chat.
    """
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        print(
            "Each answer takes the earlier messages into account. An empty line starts a new chat, "
            "and Ctrl-D ends the program.",
            file=sys.stderr,
        )
    catch_interrupts()
    while True:
        try:
            line = input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        yield line


if __name__ == "__main__":
    sys.exit(main())
