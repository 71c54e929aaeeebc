"""Mutate recipes like a typing error, an editor or an attacker could.

Each recipe must be accepted or rejected within seconds, with a message that names the file or flag.
"""

import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import commands

TIMEOUT = 10.0  # on two busy cores; a user would not wait longer for an error message
# An invalid option that is checked after the recipe. If it is reported, the recipe was accepted.
LAST_FLAGS = ("--source", "99")
ACCEPTED = "--source 99"
# Separated by "|".
YAML_VALUES = (
    r"null|true|''|-1|0|1e309|-1e400|.nan|.inf|1_000|[]|{}|[[[]]]|{a: 1}|[1, 2]|6e-4|1e5|~"
    r"|''''|'|+|-|=|>|@x|auto|1:20:30|0o9|2001-99-99|2001-01-01 00:00:00 +99:99|&a [*a]|*x|<<"
    r"|? x|%YAML 1.2|!!binary aGk=|!!bool x|!!python/object/apply:os.system ['true']|!!set {a}"
    r"|!!timestamp x|../../x|/dev/zero|hub://x"
)
OTHER_VALUES = ("é" * 3000, "🦣" * 2000, "- a\n- b", "|\n  text\n", "\t")
VALUES = [*YAML_VALUES.split("|"), *OTHER_VALUES]
FIRST_LINES = (
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
FLAG_VALUES = (
    *("", "nan", "inf", "-inf", "-1", "1e999"),
    *("true", "null", "none", "auto", "é" * 300),
)


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[commands.Case]:
    """Yield 500 mutations of the recipes."""
    recipes = sorted((commands.HERE.parents[1] / "recipes").glob("*.yaml"))
    recipes.append(base / "tiny.yaml")
    for _ in range(500):
        path = rng.choice(recipes)
        mutation = rng.choice(list(MUTATIONS))
        run = partial(read_mutated, path, mutation, random.Random(rng.random()))
        yield commands.Case(f"{path.name}: {mutation}", run)


def read_mutated(path: Path, mutation: str, rng: random.Random, folder: Path) -> str | None:
    """Read a mutated recipe with prepare_data.py."""
    flags: list[str] = []
    mutated = MUTATIONS[mutation](path.read_bytes(), rng, flags)
    (folder / "mutated.yaml").write_bytes(mutated)
    command = ("prepare_data.py", "--recipe", "mutated.yaml", *flags, *LAST_FLAGS)
    result = commands.run(command, folder, TIMEOUT)
    keys = [flag.removeprefix("--") for flag in flags[::2]]
    return commands.command_problem(result, ACCEPTED, "mutated.yaml", *keys)


# Mutations. They return the new contents of the recipe, and may add flags.


def change_value(data: bytes, rng: random.Random, flags: list[str]) -> bytes:
    """Replace the value of a key."""
    lines = data.decode().splitlines()
    indices = [index for index, line in enumerate(lines) if re.match(r"\w+:", line)]
    index = rng.choice(indices)
    key, _, _ = lines[index].partition(":")
    lines[index] = f"{key}: {rng.choice(VALUES)}"
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def change_lines(data: bytes, rng: random.Random, flags: list[str]) -> bytes:
    """Delete, duplicate, move or indent some lines."""
    lines = data.splitlines(keepends=True)
    for _ in range(rng.randint(1, 4)):
        line = lines.pop(rng.randrange(len(lines)))
        indented = b" " * rng.randint(1, 3) + line
        inserted = rng.choice(([], [line, line], [line], [indented]))
        index = rng.randrange(len(lines) + 1)
        lines[index:index] = inserted
    return b"".join(lines)


def insert_first_line(data: bytes, rng: random.Random, flags: list[str]) -> bytes:
    """Insert an unusual first line."""
    return f"{rng.choice(FIRST_LINES)}\n".encode() + data


def flip_bits(data: bytes, rng: random.Random, flags: list[str]) -> bytes:
    """Flip some bits."""
    mutated = bytearray(data)
    for _ in range(rng.randint(1, 20)):
        mutated[rng.randrange(len(mutated))] ^= 1 << rng.randrange(8)
    return bytes(mutated)


def insert_noise(data: bytes, rng: random.Random, flags: list[str]) -> bytes:
    """Insert random bytes."""
    index = rng.randrange(len(data))
    return data[:index] + rng.randbytes(99) + data[index:]


def misspell_key(data: bytes, rng: random.Random, flags: list[str]) -> bytes:
    """Replace a letter of a key, or insert one."""
    key = rng.choice(re.findall(rb"^\w+(?=:)", data, re.MULTILINE))
    index = rng.randrange(len(key))
    letter = bytes([rng.choice(b"abcdefgxyz_-. ")])
    rest = key[index + rng.randrange(2) :]
    misspelled = key[:index] + letter + rest
    return data.replace(key + b":", misspelled + b":", 1)


def add_flag(data: bytes, rng: random.Random, flags: list[str]) -> bytes:
    """Override a key with a flag."""
    keys = re.findall(r"^\w+(?=:)", data.decode(), re.MULTILINE)
    flags.append(f"--{rng.choice(keys)}")
    flags.append(rng.choice(FLAG_VALUES))
    return data


def replace_sources(data: bytes, rng: random.Random, flags: list[str]) -> bytes:
    """Replace data_files by unusual sources."""
    weighted = f"{{weight: {rng.choice(VALUES)}, data_files: {rng.choice(VALUES)}}}"
    fixed = ("{weight: .nan}", "{weight: 1, data_files: x}", "3", "null", "{1: 2}", "{[a]: b}")
    source = rng.choice((*fixed, weighted))
    sources = f"\nsources:\n- {source}\n- {source}\n"
    return data.replace(b"data_files:", b"old_files:") + sources.encode()


MUTATIONS: dict[str, Callable[[bytes, random.Random, list[str]], bytes]] = {
    "a value": change_value,
    "lines": change_lines,
    "a first line": insert_first_line,
    "bits": flip_bits,
    "noise": insert_noise,
    "a misspelled key": misspell_key,
    "a flag": add_flag,
    "a source": replace_sources,
}
