"""Sample text from a model: a run's ``model/`` folder, or any causal language model of the Hub.

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

# The key of a recipe whose range a flag has.
RANGES = {
    "max_new_tokens": "sample_tokens",
    "temperature": "sample_temperature",
    "top_k": "sample_top_k",
}
RANGES |= {"top_p": "sample_top_p", "seed": "seed"}


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Print samples as they are made."""
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        print_samples(args)
    except KeyboardInterrupt:  # within a sample or an answer
        return 130
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags; raises BadInput for every one that makes no sense."""
    parser = argparse.ArgumentParser(description="Sample text from a model.", allow_abbrev=False)
    model_help = "a run folder, its model/, any model folder, or a Hub id (ID or ID@REVISION)"
    parser.add_argument("--model", type=paths.argument, required=True, help=model_help)
    parser.add_argument("--prompt", default="", help="text to continue; empty begins a document")
    command_line.add_switch(
        parser, "--chat", "a conversation: answer messages, a line each, that see those before"
    )
    parser.add_argument("--num_samples", type=int, default=1)
    parser.add_argument("--max_new_tokens", type=int, default=200)
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 = always the likeliest token"
    )
    parser.add_argument(
        "--top_k", type=int, default=200, help="among this many likeliest tokens; 0 = all"
    )
    parser.add_argument(
        "--top_p", type=float, default=1.0, help="among the likeliest that hold this probability"
    )
    parser.add_argument("--seed", type=int, default=1337)
    args = command_line.parse_flags(parser, argv)
    checked = [(flag, rules.key_problem(key, getattr(args, flag))) for flag, key in RANGES.items()]
    problems = [
        f"--{flag} {getattr(args, flag)}: {problem}" for flag, problem in checked if problem
    ]
    if args.num_samples < 1:
        problems.append(f"--num_samples {args.num_samples}: must be 1 or more")
    if args.chat and (args.prompt or args.num_samples > 1):
        problems.append(
            "--chat: reads messages from the terminal; leave --prompt and --num_samples out"
        )
    if problems:
        raise BadInput(problems)
    return args


def print_samples(args: argparse.Namespace) -> None:
    """Load the model; write on from the prompt, as often as asked, or chat."""
    name = resolve_model(args.model)
    console.announce_imports()
    # Here, for they take seconds: a wrong flag is answered at once.
    import torch
    from transformers.utils.logging import disable_progress_bar

    from ursa_minor.data.tokens import tokenizer as tokenization
    from ursa_minor.evaluation import sampling
    from ursa_minor.hub import client
    from ursa_minor.model import pretrained
    from ursa_minor.model.adapters import check_no_hub_adapter
    from ursa_minor.model.vocabulary import check_embedding_rows
    from ursa_minor.post import chat

    client.bound_client()

    disable_progress_bar()
    check_no_hub_adapter(name, f"--model {args.model}")
    tokenizer = tokenization.load(name, of_model=True)
    model = pretrained.load(name).to("cuda" if torch.cuda.is_available() else "cpu")
    check_embedding_rows(model, tokenizer, f"--model {args.model}")
    settings = sampling.Sampling(
        **{field.name: getattr(args, field.name) for field in dataclasses.fields(sampling.Sampling)}
    )
    streamer = sampling.Streamer(tokenizer, console.write, with_prompt=not args.chat)
    if args.chat:
        if tokenizer.chat_template is None:
            model = paths.quoted(args.model)
            fix = f"python export_model.py {model} --chat --out exports/chat makes a model that has"
            raise BadInput(
                f"--chat: {args.model} has no chat template; {fix}; tune it then (docs/post_training.md)"
            )
        chat.converse(model, tokenizer, messages(), settings, streamer)
        return
    prompt_ids = tokenization.encode_prompt(tokenizer, args.prompt)
    for number in range(args.num_samples):
        if args.num_samples > 1:
            console.write(f"---- sample {number + 1} of {args.num_samples}\n")
        sampling.sample(
            model,
            prompt_ids,
            tokenizer,
            dataclasses.replace(settings, seed=args.seed + number),
            streamer,
        )


def messages() -> Iterator[str]:
    """Give each line that is typed, or piped in, until the end of the input (Ctrl-D) or Ctrl-C; "": a new chat begins."""
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        print(
            "each answer sees what was said before; an empty line begins a new chat, Ctrl-D ends",
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
