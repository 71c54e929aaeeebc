"""Export a run or a model for use: another precision, int8, pruned, without vocabulary padding; and report what that cost.

    python export_model.py runs/gpt2_124m --out exports/gpt2-bf16 --dtype bf16 --trim_vocab
    python export_model.py runs/gpt2_124m --out exports/gpt2-int8 --dtype int8 --prune 0.3
    python export_model.py runs/gpt2_124m --out exports/gpt2-chat --chat
    python export_model.py runs/gpt2_124m --out exports/gpt2 --gguf f16

The loss before and after is measured on the run's validation split, or on --text FILE.
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
    """Export, read back, measure; print one table."""
    args = parse(sys.argv[1:] if argv is None else argv)
    console.start()
    check_source_exists(args.model, "")
    console.announce_imports()
    # Here, for they take seconds: a wrong flag is answered at once.
    from ursa_minor.export import convert
    from ursa_minor.export import gguf as gguf_export
    from ursa_minor.hub import client
    from ursa_minor.post import chat

    client.bound_client()
    refusals = [chat.check_chat] * args.chat + [gguf_export.refuse] * bool(args.gguf)
    print(convert.convert(args, refusals, chat.add_chat if args.chat else None))
    if args.chat:
        print(chat_commands(Path(args.out)))
    if args.gguf:
        path = next(Path(args.out).glob("*.gguf"))
        print(
            f"\n{path}, for llama.cpp: {args.gguf}, {path.stat().st_size / 1e6:,.2f} MB; its loss is not measured"
        )
        print(ollama_commands(Path(args.out)))
    return 0


def chat_commands(out: Path) -> str:
    """Return the commands that tune an exported model on chats and talk to it."""
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    context = config.get("n_positions") or config["max_position_embeddings"]
    recipe, data = "sft_smoltalk", ""
    if context < 1024:
        recipe, data = "sft_own_text", " --dataset_name MY_CHATS"
    tuned = path_word(f"runs/{out.resolve().name}")
    return (
        "\nthe tokens of a chat have taken rows of the padding, set to the others' mean; to make it chat "
        "(docs/post_training.md):\n"
        f"trl sft --config recipes/post/{recipe}.yaml{data} --model_name_or_path {path_word(out)} "
        f"--output_dir {tuned} --max_length {context}\n"
        f"python generate.py --model {tuned} --chat"
    )


def ollama_commands(out: Path) -> str:
    """Return the commands that load an exported GGUF file into Ollama and run it."""
    name = ollama_name(out.resolve().name)
    return (
        "with the Modelfile next to it, in Ollama (not run by us):\n"
        f"cd {path_word(out)}\n"
        f"ollama create {name} -f Modelfile\n"
        f"ollama run {name}"
    )


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags; raises BadInput for any that makes no sense."""
    parser = argparse.ArgumentParser(
        description="Export a run or a model for use.", allow_abbrev=False
    )
    add = parser.add_argument
    model_help = "a run folder, a model folder, or a Hub id (ID or ID@REVISION)"
    add("model", type=paths.argument, help=model_help)
    add("--out", required=True, type=paths.argument, metavar="FOLDER", help="the folder to write")
    add(
        "--dtype",
        default="fp32",
        choices=("fp32", "bf16", "fp16", "int8"),
        help="(default: %(default)s)",
    )
    command_line.add_switch(parser, "--trim_vocab", "leave the padding of the vocabulary out")
    command_line.add_switch(
        parser, "--chat", "add a chat template and its tokens, to be tuned on chats"
    )
    add(
        "--gguf",
        choices=("f32", "f16", "q8_0"),
        help="also write a GGUF file for llama.cpp and Ollama, without padding",
    )
    prune_help = "set this share of the blocks' matrices to zero"
    add("--prune", type=float, default=0.0, metavar="SHARE", help=prune_help)
    text_help = "measure on this text, not on the run's validation split"
    add("--text", nargs="+", type=paths.argument, metavar="FILE", help=text_help)
    tokens_help = "tokens to measure on; 0 = all (default: %(default)s)"
    add("--eval_tokens", type=int, default=65536, metavar="N", help=tokens_help)
    command_line.add_switch(parser, "--overwrite", "replace an earlier export")
    args = command_line.parse_flags(parser, argv)
    problems = []
    if args.gguf and args.dtype == "int8":
        problems.append(
            "--gguf, --dtype int8: llama.cpp has an int8 of its own; use --gguf q8_0 without --dtype"
        )
    if not 0 <= args.prune < 1:
        problems.append(
            f"--prune {args.prune}: must be 0 or more and below 1: the share of weights to set to zero"
        )
    if args.eval_tokens < 0:
        problems.append(f"--eval_tokens {args.eval_tokens}: must be 0 (all) or more")
    if problems:
        raise BadInput(problems)
    args.trim_vocab |= bool(args.gguf)
    return args


if __name__ == "__main__":
    sys.exit(main())
