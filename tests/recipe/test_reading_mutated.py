"""Whatever stands in a recipe, it is read, or refused in lines that name the file."""

import contextlib
import random

import pytest
from conftest import ROOT

from pretrain.base.errors import BadInput
from pretrain.recipe import keys, reading

RECIPES = [path.read_bytes() for path in sorted((ROOT / "recipes").glob("*.yaml"))]
VALUES = r"""null|[]|{}|[[[]]]|true|-1|1e400|.inf|.nan|''|"\0"|"\ud800"|!!binary aGk=|!!python/object:os.system x|!!bool x
2001-13-45|{a: 1}|[1, 2]|&a [*a]|*x|<<|? x|!!set {a}|!!timestamp x|0o9|1:60:60|1_000|=|>|%YAML 1.2|@x|auto|../../x|/dev/zero
2001-01-01 00:00:00 +99:99|hub://x|+|-|'"""
VALUES = [value for line in VALUES.splitlines() for value in line.split("|")]
VALUES += ["9" * 6000, "0x" + "f" * 6000, "[" * 5000, "{a: " * 300, "a" * 100_000, "é" * 3000, "\t", "\u2028", "\0"]
HEADS = ("<<: {a: 1}", "<<: [1]", "? [a]\n: 1", "? {a: 1}\n: 2", "---", "...", "1: 2", "null: 3", "=: 1", "\ufeff")


def mutate(chance: random.Random) -> bytes:
    data = bytearray(chance.choice(RECIPES))
    for _ in range(chance.randint(1, 3)):
        lines, at = bytes(data).split(b"\n"), chance.randrange(len(data))
        line, value = chance.randrange(len(lines)), chance.choice(VALUES)
        match chance.randrange(8):
            case 0:
                for at in chance.choices(range(len(data)), k=chance.randint(1, 20)):
                    data[at] ^= 1 << chance.randrange(8)
            case 1:
                chance.shuffle(lines)
                data = bytearray(b"\n".join(lines))
            case 2:
                data = data[: at + 1]
            case 3:
                data[at:at] = chance.randbytes(chance.randint(1, 30))
            case 4:
                lines.insert(chance.randrange(len(lines)), lines[line])
                data = bytearray(b"\n".join(lines))
            case 5:
                mixture = f"sources: [{{weight: {value}, data_files: {chance.choice(VALUES)}}}]"
                data = bytearray(f"{chance.choice([*HEADS, mixture])}\n".encode() + data)
            case _:
                lines[line] = lines[line].split(b":")[0] + b": " + value.encode()
                data = bytearray(b"\n".join(lines))
    return bytes(data)


@pytest.mark.parametrize(
    "seeds", [range(80), pytest.param(range(80, 2080), marks=pytest.mark.slow)], ids=["80", "2000"]
)
def test_a_mutated_recipe_is_read_or_refused_in_a_few_lines(tmp_path, seeds):
    path, refused = tmp_path / "mine.yaml", 0
    for seed in seeds:
        chance = random.Random(seed)
        path.write_bytes(mutate(chance))
        flag = chance.choice([name for name, wanted in keys.TYPES.items() if wanted != list[dict]])
        flags = [f"--{flag}", chance.choice(VALUES).replace("\0", "")] if chance.random() < 0.3 else []
        try:
            recipe, _, _ = reading.parse_training(["--recipe", str(path), *flags])
            (tmp_path / "copy.yaml").write_text(keys.as_yaml(recipe), encoding="utf-8")
            assert keys.as_yaml(reading.load_recipe(tmp_path / "copy.yaml")) == keys.as_yaml(recipe), seed
        except BadInput as error:
            refused += 1
            assert all("\n" not in line and len(line) < 1000 for line in error.lines), seed
    assert 0.5 * len(seeds) < refused < len(seeds)


def test_what_would_take_minutes_or_all_memory_is_refused_with_its_line(tmp_path):
    laughs = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{here}: &{here} [{','.join([f'*{last}'] * 10)}]\n" for last, here in zip("abcdefgh", "bcdefghi", strict=True)
    )
    cases = {
        laughs: "line 5: stands for more than 100,000 values",
        "a: &a [*a]": "line 1: stands for more than 100,000 values, or nests more than 10 deep",
        "a: &a [x]\nb: [[[[[[[[*a]]]]]]]]": "line 2: stands for",
        "x: " + "[" * 5000: "line 1: stands for",
        "x: 1\nmax_steps: " + "9" * 6000: "line 2: 999",
        "seed: 1\0": "unacceptable character #x0000",
        "x: 1\ny: !!python/object/apply:os.system [ls]": "line 2: !!python/object/apply:os.system is a tag",
        "x: 2001-13-45": "line 1: 2001-13-45: month must be in 1..12",
        "#" * 2**21: "has more than 1,048,576 bytes",
    }
    for text, words in cases.items():
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        with pytest.raises(BadInput) as caught:
            reading.load_recipe(path)
        (line,) = caught.value.lines
        assert line.startswith(f"{path}: not a recipe: {words}") and "\n" not in line and len(line) < 500, line


@pytest.mark.parametrize(
    "name", ["output_dir", "init_from", "data_files", "tokenizer", "run_name", "resume_from_checkpoint"]
)
def test_a_name_that_no_file_can_have_is_refused_before_it_is_used(tmp_path, name):
    for value in (r"a\0b", r"\ud800", "a" * 100_000):
        path, value = tmp_path / "mine.yaml", f'["{value}"]' if name == "data_files" else f'"{value}"'
        path.write_bytes(RECIPES[0] + f"\n{name}: {value}\n".encode())
        text = path.read_text()
        if text.count(f"\n{name}:") > 1:
            path.write_text(
                "\n".join(line for line in text.splitlines() if line.split(":")[0] != name) + f"\n{name}: {value}"
            )
        with contextlib.suppress(BadInput):
            assert "aaa" in str(
                keys.flat(reading.load_recipe(path))[name]
            )  # how long a name may be is the disk's matter
