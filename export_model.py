"""Export a run or a model: other precisions, int8, pruning, a chat template, GGUF.

    python export_model.py runs/gpt2_124m --out exports/gpt2-bf16 --dtype bf16 --trim_vocab
    python export_model.py runs/gpt2_124m --out exports/gpt2-int8 --dtype int8 --prune 0.3
    python export_model.py runs/gpt2_124m --out exports/gpt2-chat --chat
    python export_model.py runs/gpt2_124m --out exports/gpt2 --gguf f16

The loss is measured before and after the export, on the run's validation split or on --text PATH.
Each export has a model card (README.md).
"""

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path

from ursa_minor.base import console, paths
from ursa_minor.base.cli import exit_on_bad_input
from ursa_minor.base.errors import BadInput
from ursa_minor.base.shell import ollama_name, path_word, unused_path
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
        add_chat = partial(add_chat_template, args.model)
    if args.gguf:
        checks.append(gguf_export.check_supported)
    print(convert.convert(args, checks, add_chat, partial(make_card, args)))

    out = Path(args.out)
    print(describe_card(args.model, out))
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


def add_chat_template(source: str, model, tokenizer) -> None:
    """Add a chat template to a model in place, and the name of its source to its config.

    A model that TRL trains from the export keeps this name, so that its card can name its base
    model.
    """
    from ursa_minor.hub import origin
    from ursa_minor.post import chat

    chat.add_chat(model, tokenizer)
    setattr(model.config, origin.BASE_MODEL_KEY, origin.base_model_value(source))


def make_card(args: argparse.Namespace, exported) -> str:
    """Return the model card of an export.

    Args:
        args: the flags.
        exported: ``convert.Exported``.
    """
    from ursa_minor.hub import export_card, origin
    from ursa_minor.post import chat

    base_model = None
    if not args.chat:  # otherwise the exported model is its base model
        base_model = getattr(exported.model.config, origin.BASE_MODEL_KEY, None)
    tokens = exported.tokenizer.get_vocab()
    export = export_card.Export(
        name=Path(args.out).resolve().name,
        origin=origin.find(args.model, base_model, tokens),
        dtype=args.dtype,
        prune=args.prune,
        gguf=args.gguf,
        description=args.description,
        has_chat_template=exported.tokenizer.chat_template is not None,
        can_chat=chat.is_trained(exported.model, exported.tokenizer),
        loss_before=exported.before.loss,
        loss_after=exported.after.loss,
        measured_on=args.text or (),
    )
    return export_card.export_card(export, exported.model, exported.tokenizer)


def describe_card(source: str, out: Path) -> str:
    """Return lines about missing or invalid metadata of the model card of an export.

    Args:
        source: the exported model.
        out: the folder of the export.
    """
    from ursa_minor.base.checkpoint_files import run_folder_of
    from ursa_minor.base.run_files import RECIPE
    from ursa_minor.hub import card_metadata, export_card

    card_file = out / card_metadata.CARD_FILE
    card = card_file.read_text(encoding="utf-8")
    lines = [f"The model card is {card_file}."]
    missing = export_card.missing_metadata(card)
    if missing:
        names = " and ".join(missing)
        run_dir = run_folder_of(Path(source))
        fix = f"Add {names} to the first lines of the file"
        if run_dir is not None:
            recipe = Path(os.path.relpath(run_dir)) / RECIPE
            fix = f"Set {names} in {recipe}, and export the model again with --overwrite"
        lines.append(f"It does not state the {names} of the model. {fix}.")
    problem = export_card.find_problem(card)
    if problem:
        lines.append(f"{problem}.")
    return "\n".join(lines)


def chat_commands(out: Path) -> str:
    """Return the commands that fine-tune an exported model on chats and talk to it."""
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    context = config.get("n_positions") or config["max_position_embeddings"]
    recipe = "sft_smoltalk"
    data = ""
    if context < 1024:  # sft_smoltalk.yaml is for models that read 1,024 tokens
        recipe = "sft_own_text"
        data = " --dataset_name MY_CHATS"
    tuned = path_word(unused_path(Path("runs"), f"{out.resolve().name}-sft"))
    return (
        "\nThe model has the tokens of a chat now, but cannot use them yet. Train it on chats "
        "with TRL (docs/post_training.md):\n"
        "pip install -r requirements/post.txt\n"
        f"trl sft --config recipes/post/{recipe}.yaml{data} --model_name_or_path {path_word(out)} "
        f"--output_dir {tuned} --max_length {context}\n"
        f"python generate.py --model {tuned} --chat"
    )


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

    source.add_argument(
        "--description",
        default="",
        metavar="TEXT",
        help="Text for the model card, in Markdown, for example about the data. (default: empty)",
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
