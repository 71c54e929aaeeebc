"""Export a run or a model: other precisions, int8, pruning, a chat template, GGUF.

    python export_model.py runs/gpt2_124m --out exports/gpt2-bf16 --dtype bf16 --trim_vocab
    python export_model.py runs/gpt2_124m --out exports/gpt2-int8 --dtype int8 --prune 0.3
    python export_model.py runs/gpt2_124m --out exports/gpt2-chat --chat
    python export_model.py runs/gpt2_124m --out exports/gpt2 --gguf f16

The loss is measured before and after the export, on the run's validation split or on --text PATH.
"""

import argparse
import json
import sys
from pathlib import Path

from ursa_minor.base import console, paths
from ursa_minor.base.cli import exit_on_bad_input
from ursa_minor.base.errors import BadInput
from ursa_minor.base.shell import ollama_name, path_word
from ursa_minor.model.resolve import check_source_exists
from ursa_minor.recipe import command_line


@exit_on_bad_input
def main(argv: list[str] | None = None) -> int:
    """Export the model, and print the measurements and the commands that use the export."""
    args = parse(sys.argv[1:] if argv is None else argv)
    console.start()
    check_source_exists(args.model, "")
    console.announce_imports()
    # These imports take seconds, so they come after the check of the flags.
    from ursa_minor.export import convert
    from ursa_minor.export import gguf as gguf_export
    from ursa_minor.hub import client
    from ursa_minor.post import chat

    client.set_timeouts()
    checks = []
    add_chat = None
    if args.chat:
        checks.append(chat.check_chat)
        add_chat = chat.add_chat
    if args.gguf:
        checks.append(gguf_export.check_supported)
    print(convert.convert(args, checks, add_chat))

    out = Path(args.out)
    if args.chat:
        print(chat_commands(out))
    if args.gguf:
        gguf_file = next(out.glob("*.gguf"))
        megabytes = gguf_file.stat().st_size / 1e6
        print(
            f"\n{gguf_file} is a GGUF file in {args.gguf} for llama.cpp, {megabytes:,.2f} MB. "
            f"Its loss was not measured."
        )
        print(ollama_commands(out))
    return 0


def chat_commands(out: Path) -> str:
    """Return the commands that fine-tune an exported model on chats and talk to it."""
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    context = config.get("n_positions") or config["max_position_embeddings"]
    recipe = "sft_smoltalk"
    data = ""
    if context < 1024:  # sft_smoltalk.yaml is for models that read 1,024 tokens
        recipe = "sft_own_text"
        data = " --dataset_name MY_CHATS"
    tuned = path_word(unused_run_folder(f"{out.resolve().name}-sft"))
    return (
        "\nThe model has the tokens of a chat now, but cannot use them yet. Train it on chats "
        "with TRL (docs/post_training.md):\n"
        "pip install -r requirements/post.txt\n"
        f"trl sft --config recipes/post/{recipe}.yaml{data} --model_name_or_path {path_word(out)} "
        f"--output_dir {tuned} --max_length {context}\n"
        f"python generate.py --model {tuned} --chat"
    )


def unused_run_folder(name: str) -> Path:
    """Return runs/NAME, or runs/NAME-2 and so on if that folder exists."""
    folder = Path("runs", name)
    number = 1
    while folder.exists():
        number += 1
        folder = Path("runs", f"{name}-{number}")
    return folder


def ollama_commands(out: Path) -> str:
    """Return the commands that load an exported GGUF file into Ollama and run it."""
    name = ollama_name(out.resolve().name)
    return (
        "Load it into Ollama with the Modelfile next to it (these commands were not tested):\n"
        f"cd {path_word(out)}\n"
        f"ollama create {name} -f Modelfile\n"
        f"ollama run {name}"
    )


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse and check the command line.

    Raises:
        BadInput: with every error that was found.
    """
    args = command_line.parse_flags(argument_parser(), argv)
    problems = []
    if args.gguf and args.dtype == "int8":
        problems.append(
            "--gguf cannot be combined with --dtype int8, because llama.cpp has its own int8. "
            "Use --gguf q8_0 without --dtype"
        )
    if not 0 <= args.prune < 1:
        problems.append(
            f"--prune {args.prune}: the share of weights to set to zero must be at least 0 and "
            f"below 1"
        )
    if args.eval_tokens < 0:
        problems.append(f"--eval_tokens {args.eval_tokens}: must be 0 (all tokens) or more")
    if problems:
        raise BadInput(problems)
    if args.gguf:
        args.trim_vocab = True
    return args


def argument_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        description="Export a run or a model for use in other programs.", allow_abbrev=False
    )
    source = parser.add_argument_group("model and output")
    source.add_argument(
        "model",
        type=paths.argument,
        help="Model to export: a run folder, a checkpoint, a model folder, or a Hub id (ID or "
        "ID@REVISION).",
    )
    source.add_argument(
        "--out",
        required=True,
        type=paths.argument,
        metavar="PATH",
        help="Folder to write the export into (required).",
    )
    command_line.add_switch(
        source,
        "--overwrite",
        "Replace an earlier export in the folder of --out. (default: false)",
    )

    formats = parser.add_argument_group("format")
    formats.add_argument(
        "--dtype",
        default="fp32",
        choices=("fp32", "bf16", "fp16", "int8"),
        help="Precision of the weights. With int8, only the matrices of the transformer blocks are "
        "in int8, and the other weights are in fp16. (default: %(default)s)",
    )
    formats.add_argument(
        "--prune",
        type=float,
        default=0.0,
        metavar="X",
        help="Share of the weights in the blocks' matrices to set to zero, from 0 to below 1. The "
        "smallest weights are chosen. (default: 0)",
    )
    command_line.add_switch(
        formats,
        "--trim_vocab",
        "Leave out the vocabulary rows that are padding. (default: false)",
    )
    command_line.add_switch(
        formats,
        "--chat",
        "Add a chat template and its tokens, so that the model can be trained on chats. (default: "
        "false)",
    )
    formats.add_argument(
        "--gguf",
        choices=("f32", "f16", "q8_0"),
        help="Also write a GGUF file for llama.cpp and Ollama in this precision. It implies "
        "--trim_vocab. (default: no GGUF file)",
    )

    measurement = parser.add_argument_group("measurement of the loss")
    measurement.add_argument(
        "--text",
        nargs="+",
        type=paths.argument,
        metavar="PATH",
        help="Text files to measure the loss on. (default: the run's validation split)",
    )
    measurement.add_argument(
        "--eval_tokens",
        type=int,
        default=65536,
        metavar="N",
        help="Approximate number of tokens to measure the loss on. 0 means all. (default: "
        "%(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
