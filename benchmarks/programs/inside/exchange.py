"""Read the request of the comparison, and write the answers of a program.

A script of this folder is started with two arguments: request.json and a folder for the answers.
The answer of a model is a JSON file and, for arrays of numbers, a file of 32-bit floats.
"""

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np


def answer_all(answer: Callable[[dict], dict]) -> None:
    """Call ``answer`` for each model of the request, and write the results.

    Args:
        answer: takes the request of one model; returns values for JSON and numpy arrays.
    """
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for model in request["models"]:
        folder = Path(sys.argv[2], model["name"])
        folder.mkdir(parents=True, exist_ok=True)
        try:
            values = answer(model)
        except Exception as error:  # the other models are tried all the same
            traceback.print_exc()
            values = {"error": error_line(error)}
        write(folder, values)


def write(folder: Path, values: dict) -> None:
    """Write the values of one model. An array of logits is (prompts, tokens, vocabulary)."""
    if "logits" in values:
        values["num_tokens"] = values["logits"].shape[1]
    for name in [name for name, value in values.items() if isinstance(value, np.ndarray)]:
        array = values.pop(name)
        array.astype("<f4").tofile(folder / f"{name}.f32")
    text = json.dumps(values, ensure_ascii=False)
    (folder / "answer.json").write_text(text, encoding="utf-8")


def error_line(error: Exception) -> str:
    """Return the type and the first line of the message of an exception."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
