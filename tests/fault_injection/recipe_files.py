"""Recipes that a slip of the hand, an editor or a stranger has changed: accepted, or refused by name, at once."""

import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import commands

SECONDS = 10.0  # on two busy cores; a user waits no longer for a typo
# An option that is refused after the recipe was read: an error with this text means that the recipe was accepted.
ENDS = ("--source", "99")
ACCEPTED = "--source 99"
VALUES = r"""null|true|''|-1|0|1e309|-1e400|.nan|.inf|1_000|[]|{}|[[[]]]|{a: 1}|[1, 2]|6e-4|1e5|~|''''|'|+|-|=|>|@x|auto
1:20:30|0o9|2001-99-99|2001-01-01 00:00:00 +99:99|&a [*a]|*x|<<|? x|%YAML 1.2|!!binary aGk=|!!bool x
!!python/object/apply:os.system ['true']|!!set {a}|!!timestamp x|../../x|/dev/zero|hub://x"""
VALUES = [value for line in VALUES.splitlines() for value in line.split("|")]
VALUES += ["é" * 3000, "🦣" * 2000, "- a\n- b", "|\n  text\n", "\t"]
HEADS = (
    "<<: {a: 1}",
    "<<: [1]",
    "? [a]\n: 1",
    "? {a: 1}\n: 2",
    "---",
    "...",
    "1: 2",
    "null: 3",
    "=: 1",
    "\ufeff",
)


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """500 recipes: values of other types and sizes, lines that came, went or moved, bits, YAML's own traps, flags."""
    recipes = [*sorted((commands.HERE.parents[1] / "recipes").glob("*.yaml")), base / "tiny.yaml"]
    for _ in range(500):
        path, how = rng.choice(recipes), rng.choice(list(WAYS))
        yield f"{path.name}: {how}", partial(attacked, path, how, random.Random(rng.random()))


def attacked(path: Path, how: str, dice: random.Random, folder: Path) -> str | None:
    """Be a case: the recipe is accepted, or refused by the name of the file or of a flag."""
    flags: list[str] = []
    (folder / "attacked.yaml").write_bytes(WAYS[how](path.read_bytes(), dice, flags))
    done = commands.run(
        ("prepare_data.py", "--recipe", "attacked.yaml", *flags, *ENDS), folder, SECONDS
    )
    return commands.command_problem(
        done, ACCEPTED, "attacked.yaml", *(word[2:] for word in flags[::2])
    )


def _value(data: bytes, dice: random.Random, flags: list) -> bytes:
    lines = data.decode().splitlines()
    keys = [i for i, line in enumerate(lines) if re.match(r"\w+:", line)]
    place = dice.choice(keys)
    lines[place] = f"{lines[place].partition(':')[0]}: {dice.choice(VALUES)}"
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _lines(data: bytes, dice: random.Random, flags: list) -> bytes:
    lines = data.splitlines(keepends=True)
    for _ in range(dice.randint(1, 4)):
        line = lines.pop(dice.randrange(len(lines)))  # it goes, comes twice, moves, or is indented
        again = dice.choice(([], [line, line], [line], [b" " * dice.randint(1, 3) + line]))
        place = dice.randrange(len(lines) + 1)
        lines[place:place] = again
    return b"".join(lines)


def _bits(data: bytes, dice: random.Random, flags: list) -> bytes:
    found = bytearray(data)
    for _ in range(dice.randint(1, 20)):
        found[dice.randrange(len(found))] ^= 1 << dice.randrange(8)
    return bytes(found)


def _names(data: bytes, dice: random.Random, flags: list) -> bytes:
    keys = re.findall(rb"^\w+(?=:)", data, re.MULTILINE)
    key = dice.choice(keys)
    place = dice.randrange(len(key))
    other = key[:place] + bytes([dice.choice(b"abcdefgxyz_-. ")]) + key[place + dice.randrange(2) :]
    return data.replace(key + b":", other + b":", 1)


def _flag(data: bytes, dice: random.Random, flags: list) -> bytes:
    keys = re.findall(r"^\w+(?=:)", data.decode(), re.MULTILINE)
    values = ("", "nan", "inf", "-inf", "-1", "1e999", "true", "null", "none", "auto", "é" * 300)
    flags += [f"--{dice.choice(keys)}", dice.choice(values)]
    return data


def _source(data: bytes, dice: random.Random, flags: list) -> bytes:
    weight = f"{{weight: {dice.choice(VALUES)}, data_files: {dice.choice(VALUES)}}}"
    each = dice.choice(
        ("{weight: .nan}", "{weight: 1, data_files: x}", "3", "null", "{1: 2}", "{[a]: b}", weight)
    )
    return (
        data.replace(b"data_files:", b"old_files:") + f"\nsources:\n- {each}\n- {each}\n".encode()
    )


WAYS: dict[str, Callable[[bytes, random.Random, list], bytes]] = {
    "a value": _value,
    "lines": _lines,
    "a head": lambda data, dice, flags: f"{dice.choice(HEADS)}\n".encode() + data,
    "bits": _bits,
    "noise": lambda data, dice, flags: (
        data[: (place := dice.randrange(len(data)))] + dice.randbytes(99) + data[place:]
    ),
    "a key's name": _names,
    "a flag": _flag,
    "a source": _source,
}
