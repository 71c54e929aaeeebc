"""Whatever stands in a recipe, it is read, or refused in lines that name the file."""

import contextlib
import random

import pytest
import recipe_files
import yaml
from conftest import ROOT

from pretrain.base.errors import BadInput
from pretrain.recipe import keys, reading

RECIPES = [path.read_bytes() for path in sorted((ROOT / "recipes").glob("*.yaml"))]


@pytest.mark.parametrize(
    "seeds", [range(40), pytest.param(range(40, 2080), marks=pytest.mark.slow)], ids=["40", "2000"]
)
def test_a_mutated_recipe_is_read_or_refused_in_a_few_lines(tmp_path, seeds):
    path, refused = tmp_path / "mine.yaml", 0
    for seed in seeds:
        chance = random.Random(seed)
        way = chance.choice(list(recipe_files.WAYS.values()))
        path.write_bytes(way(chance.choice(RECIPES), chance, []))
        flag = chance.choice([name for name, wanted in keys.TYPES.items() if wanted != list[dict]])
        flags = [f"--{flag}", chance.choice(recipe_files.VALUES).replace("\0", "")] if chance.random() < 0.3 else []
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


@pytest.mark.parametrize("name", ["output_dir", "init_from", "data_files", "run_name"])
def test_a_name_that_no_file_can_have_is_refused_before_it_is_used(tmp_path, name):
    path, values = tmp_path / "mine.yaml", yaml.safe_load(RECIPES[0])
    for value in ("a\0b", "\ud800", "a" * 5000):
        path.write_text(yaml.safe_dump(values | {name: [value] if name == "data_files" else value}))
        with contextlib.suppress(BadInput):  # how long a name may be is the disk's matter
            assert "aaa" in str(keys.flat(reading.load_recipe(path))[name])
