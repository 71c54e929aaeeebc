"""Post-training from files that are odd: settings, prompts, and rewards that raise, exit, recurse and print escapes.

Settings are accepted, or refused by name; the file of prompts is the one that was named; a reward's fault counts 0.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import commands
import damage
import data_files
import post_child
import recipe_files

OF_TRL = ("num_generations", "max_completion_length")
GOOD = '{"prompt": "well"}\n{"prompt": "ill"}\n'
PROMPTS: dict[str, bytes | str] = {
    "empty": "",
    "blank lines": "\n\n\n",
    "cut": GOOD[:25],
    "no column": '{"text": "a"}\n',
    "null": '{"prompt": null}\n',
    "a number": '{"prompt": 3}\n',
    "a list of texts": '{"prompt": ["a", "b"]}\n',
    "an empty list": '{"prompt": [[]]}\n',
    "a message without content": '{"prompt": [{"role": "user"}]}\n',
    "content is null": '{"prompt": [{"role": "user", "content": null}]}\n',
    "messages, then a text": '{"prompt": [{"role": "user", "content": "a"}]}\n{"prompt": "a"}\n',
    "an empty text": '{"prompt": ""}\n',
    "a list": "[1, 2]\n",
    "deep": "[" * 100_000,
    "NULs": "\0" * 500,
    "UTF-16": GOOD.encode("utf-16"),
    "not UTF-8": b'{"prompt": "\xff"}\n',
    "half a surrogate": '{"prompt": "\\ud800"}\n',
    "a long prompt": '{"prompt": "' + "a " * 5000 + '"}\n',
    "a number of 6,000 digits": '{"prompt": ' + "9" * 6000 + "}\n",
}
NAMES = (
    "p[1].jsonl",
    "q*.jsonl",
    "r?.jsonl",
    "s{a,b}.jsonl",
    "my prompts.jsonl",
    "-x.jsonl",
    "a::b.jsonl",
    "#?token=x.jsonl",
    "%d{x}.jsonl",
)
REWARDS = {  # the body of a reward for the prompt "ill"; "well" is worth 1
    "raises": "raise ValueError('\\x1b[2J')",
    "exits": "import sys; sys.exit(3)",
    "recurses": "return cat(prompt, completion)",
    "prints": "print('\\x1b[2J'); return 0.0",
    "writes": "import sys; sys.stderr.write('\\x1b[2J'); return 0.0",
    "warns": "import warnings; warnings.warn('\\x1b[2J'); return 0.0",
    "ends a generator": "raise StopIteration",
    "returns nan": "return float('nan')",
    "returns nothing": "return None",
    "returns text": "return 'much'",
    "returns a list": "return [1.0]",
    "returns too much": "return 10 ** 400",
    "has a message that raises": "raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})()",
    "needs memory": "return float(len(bytearray(1 << 60)))",
}
FILES = {
    "a syntax error": "def cat(:\n",
    "an import that is missing": "import nothing_of_that_name\n",
    "no function": "dog = 1\n",
    "a number": "cat = 3\n",
    "an exit": "import sys\nsys.exit(0)\n",
    "a loop of itself": "def f(): return f()\nf()\n",
    "binary": "\0\1",
    "an exception with escapes": "raise ValueError('\\x1b[2J')\n",
}


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """100 files of settings, each kind of prompts, names, rewards, and prompts of each format with a bit or a part gone."""
    whole, _ = damage.finished(base, shared)
    model = str(whole / damage.RUN / "model")
    recipes = sorted((commands.HERE.parents[1] / "recipes" / "post").glob("*.yaml"))
    for _ in range(100):
        path, how = rng.choice(recipes), rng.choice(sorted({*recipe_files.WAYS} - {"a source"}))
        yield f"{path.name}: {how}", _settings(path, how, rng.random())
    for title, data in PROMPTS.items():
        data = data if isinstance(data, bytes) else data.encode()
        yield f"prompts: {title}", _scored(model, {"prompts.jsonl": data}, "prompts.jsonl", wanted=None)
    for name in NAMES:
        others = {"p1.jsonl": GOOD * 2, "q1.jsonl": GOOD * 2, "ra.jsonl": GOOD * 2, "sa.jsonl": GOOD * 2}
        files = {other: data.encode() for other, data in others.items()} | {name: GOOD.encode()}
        wanted = None if "::" in name else "2 prompts: 0.500; 0 of 2"  # to datasets it is a chain of file systems
        yield f"prompts named {name!r}", _scored(model, files, name, wanted)
    for kind in (".parquet", ".jsonl", ".csv"):
        data = data_files.FORMATS[kind][0](["well", "ill"] * 20).replace(b"text", b"prompt")
        for how in ("bit", "cut", "slice", "random") if kind != ".parquet" else ("bit", "cut", "random"):
            harmed = data_files.MUTATIONS[how](data, random.Random(rng.random()))
            yield f"prompts: {how}: {kind}", _scored(model, {f"prompts{kind}": harmed}, f"prompts{kind}", wanted=None)
    for title, body in REWARDS.items():
        well = title in ("prints", "writes", "warns")
        wanted = f"2 prompts: 0.500; {0 if well else 1} of 2"
        yield f"a reward {title}", _scored(model, {"prompts.jsonl": GOOD.encode()}, "prompts.jsonl", wanted, body)
    for title, text in FILES.items():
        files = {"prompts.jsonl": GOOD.encode(), "reward.py": text.encode()}
        yield f"a reward's file: {title}", _scored(model, files, "prompts.jsonl", wanted=None, own_reward=True)


def _settings(path: Path, how: str, seed: float) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        dice, flags = random.Random(seed), []
        lines = path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if post_child.TRL or not line.startswith(OF_TRL)]
        data = recipe_files.WAYS[how]("".join(kept).encode(), dice, flags)
        (folder / "attacked.yaml").write_bytes(data)
        flags = [flag for flag in flags if "\0" not in flag]
        done = commands.run("post_child.py", "--config", "attacked.yaml", *flags, cwd=folder)
        names = [word.removeprefix("--") for word in flags if word.startswith("--")]
        if list(folder.iterdir()) != [folder / "attacked.yaml"] and post_child.ACCEPTED not in done.stderr:
            return f"refused, and leaves {[path.name for path in folder.iterdir()]}"
        return commands.fault_of(done, post_child.ACCEPTED, "attacked.yaml", "TRL", *names)

    return hit


def _scored(
    model: str,
    files: dict[str, bytes],
    prompts: str,
    wanted: str | None,
    body: str = "return 0.0",
    own_reward: bool = False,
) -> Callable[[Path], str | None]:
    """``wanted``: what is printed at the end; None: whatever, or a line that names the file."""

    def hit(folder: Path) -> str | None:
        reward = f"def cat(prompt, completion):\n    if prompt == 'well': return 1.0\n    {body}\n"
        for name, data in ({"reward.py": reward.encode()} | files).items():
            (folder / name).write_bytes(data)
        done = commands.run("post_child.py", model, prompts, "reward.py:cat", cwd=folder)
        if "\x1b" in done.stdout + done.stderr:
            return "an escape is printed"
        if done.code == 0 and "Traceback" not in done.stderr and not own_reward:
            last = f"it ends with {done.stderr.strip()[-200:]!r}"
            if wanted is None:
                return None if " calls failed" in done.stderr else last
            return None if wanted in done.stderr else last
        if wanted is not None:
            return commands.fault_of(done, "") or f"refused: {done.errors[0][:300]}"
        return commands.fault_of(done, "reward.py", prompts, "prompts", "max_completion_length")

    return hit
