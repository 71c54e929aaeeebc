"""The answer to a flag of another trainer: its row in the tables at the end of docs/knobs.md."""

import contextlib
import fnmatch
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# A trainer's name, or a row: its names for a thing, then what stands for it here; * is any end of a name.
LINES = re.compile(r"^## (.+)$|^\| (.*?) \| (.*) \|$", re.MULTILINE)


def answer(flag: str, value: str | None = None) -> str | None:
    """Return whose ``flag`` (as typed, with its dashes) is and what stands for it here; None: it is nobody's known.

    Args:
        value: the word behind it; only a card's name, which leads to its YAML, is used.
    """
    names = (flag, flag.lstrip("-").replace("-", "_"))  # llm.c's have their dash
    page, trainer = "", ""
    with contextlib.suppress(OSError):  # without the page, as in a copy of the code alone, no flag is known
        page = (ROOT / "docs/knobs.md").read_text(encoding="utf-8").partition("\n# From the flags")[2]
    for heading, theirs, ours in LINES.findall(page):
        trainer = heading or trainer
        words = [word.split()[0] for word in re.findall(r"`([^`]+)`", theirs)]
        if any(fnmatch.fnmatchcase(name, word) for name in names for word in words):
            plain = re.sub(r"\[(.*?)\]\(.*?\)", r"docs/\1", ours.replace("`", ""))
            plain = plain.replace("CARD.yaml", _yaml_of(value or ""))
            begin = "not needed" if plain.startswith("none: ") else "it is"
            return f"{flag}: a flag of {trainer}; here {begin}: {plain.removeprefix('none: ')}"
    return None


def _yaml_of(card: str) -> str:
    """Return the YAML of a card in other people's words (rtx_a6000, NVIDIA H100, 4090), CARD.yaml for any other word."""
    found = [path.name for path in (ROOT / "accelerate_configs").glob("*.yaml")]
    return next((name for name in found if _bare(name.removesuffix(".yaml")) == _bare(card)), "CARD.yaml")


def _bare(card: str) -> str:
    return re.sub("^(nvidia|geforce|quadro|tesla|rtx)*", "", re.sub(r"[^a-z0-9]", "", card.lower()))
