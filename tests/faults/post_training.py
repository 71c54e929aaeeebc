"""Post-training from files that are odd: settings, prompts, and rewards that raise, exit, recurse and print escapes.

Settings are accepted, or refused by name; the file of prompts is the one that was named; a reward's fault counts 0.
"""

import contextlib
import functools
import io
import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import commands
import damage
import data_files
import outside_words
import post_child
import pyarrow.ipc
import pyarrow.parquet
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

# Which of post_child.VALUES a setting must not take, by its kind and where its border lies; any other it takes.
LONG, BIG = "x" * 5000, str(10**30)
NO_NUMBER = {"''", "[]", "null", "true", BIG, "1e400", ".nan", "-.inf", LONG}
NO_INTEGER = NO_NUMBER | {"-0.0", "1.5"}
NO_TEXT = {"0", "-0.0", "1", "-1", "2", "1.5", "''", "[]", "null", "true", BIG, ".nan", "-.inf", LONG}
REFUSED = {
    **dict.fromkeys(
        ("held_out_steps", "gradient_accumulation_steps", "max_completion_length"), NO_INTEGER | {"0", "-1"}
    ),
    "per_device_train_batch_size": NO_INTEGER | {"0", "-1"},
    "num_generations": NO_INTEGER | {"0", "1", "-1"},
    **dict.fromkeys(("seed", "max_steps", "dataloader_num_workers", "per_device_eval_batch_size"), NO_INTEGER),
    **dict.fromkeys(("data_seed", "save_total_limit", "eval_accumulation_steps"), NO_INTEGER - {"null"}),
    **dict.fromkeys(("learning_rate", "temperature"), NO_NUMBER | {"0", "-0.0", "-1"}),
    **dict.fromkeys(("beta", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"), NO_NUMBER),
    **dict.fromkeys(("num_train_epochs", "warmup_steps", "logging_steps", "save_steps", "eval_delay"), NO_NUMBER),
    **dict.fromkeys(("eval_steps", "neftune_noise_alpha"), NO_NUMBER - {"null"}),
    **dict.fromkeys(("model", "reward", "prompts", "held_out", "output_dir"), NO_TEXT),
    **dict.fromkeys(("stop", "run_name", "hub_model_id", "resume_from_checkpoint"), NO_TEXT - {"null", "''"}),
    **dict.fromkeys(("bf16", "fp16", "push_to_hub", "save_only_model"), {*post_child.VALUES} - {"true"}),
}
MESSAGE = {"role": "user", "content": "well"}
SHAPES = {  # a column of prompts, and whether it is one
    "an empty text": (["", "well"], False),
    "empty texts only": (["", ""], False),
    "nothing but spaces": (["  ", "well"], True),
    "null beside a text": ([None, "well"], False),
    "nulls": ([None, None], False),
    "numbers": ([1, 2], False),
    "numbers with a point": ([0.5, -0.0], False),
    "truth": ([True, False], False),
    "an empty list of messages": ([[], [MESSAGE]], False),
    "empty lists": ([[], []], False),
    "texts in a list": ([["a"], ["b"]], False),
    "a mapping": ([MESSAGE, MESSAGE], False),
    "no role": ([[{"content": "a"}]], False),
    "role is null": ([[{"role": None, "content": "a"}]], False),
    "role is a number": ([[{"role": 1, "content": "a"}]], False),
    "role is odd": ([[{"role": "no such", "content": "a"}]], None),
    "content is null": ([[{"role": "user", "content": None}]], False),
    "content is a list": ([[{"role": "user", "content": ["a"]}]], False),
    "content is a number": ([[{"role": "user", "content": 1}]], False),
    "lists in lists": ([[[MESSAGE]]], False),
    "content is empty": ([[{"role": "user", "content": ""}]], True),
    "only the assistant speaks": ([[{"role": "assistant", "content": "a"}]], True),
    "a message with more": ([[MESSAGE | {"name": "x"}]], True),
    "many messages": ([[MESSAGE] * 3], True),
    "no rows": ([], False),
    "what a terminal obeys": (["\x1b[2J\x07", "well"], None),
}
STATES = {  # of the folder out/, which output_dir names, and whether a model may be written there
    "absent": (lambda out: None, True),
    "empty": (lambda out: out.mkdir(), True),
    "a file": (lambda out: out.write_text("mine"), False),
    "a link to a folder": (lambda out: _beside(out, out.symlink_to), True),
    "a link to a file": (lambda out: out.symlink_to("reward.py"), False),
    "a link to nothing": (lambda out: out.symlink_to("nothing"), None),
    "a link to itself": (lambda out: out.symlink_to(out.name), False),
    "a finished model": (lambda out: _within(out, "model/model.safetensors"), False),
    "an empty model/": (lambda out: (out / "model").mkdir(parents=True), False),
    "half of a model": (lambda out: _within(out, "model/config.json"), False),
    "model is a file": (lambda out: _within(out, "model"), False),
    "model is a link to nothing": (lambda out: (out.mkdir(), (out / "model").symlink_to("nothing")), False),
    "model is a link to a folder": (lambda out: (out.mkdir(), _beside(out, (out / "model").symlink_to)), False),
    "files of another": (lambda out: _within(out, "notes.txt", "model.safetensors", ".hidden", "data/a.txt"), True),
    "metrics.jsonl is a folder": (lambda out: (out / "metrics.jsonl" / "a").mkdir(parents=True), None),
    "reward.png is a link": (lambda out: (out.mkdir(), (out / "reward.png").symlink_to("../reward.py")), None),
    "a checkpoint of TRL": (lambda out: _within(out, "checkpoint-2/trainer_state.json"), True),
}
OURS = ("metrics.jsonl", "reward.png")  # of a run that wrote no model: nobody's result
# Bytes that are typed into a chat, and whether they are answered: a message that is not must change no other's answer.
GOOD_MESSAGE, OTHER = b"hello there", b"what 1 2"
BAD_MESSAGES = {
    "not UTF-8": b"\xff\xfe",
    "half of a letter": b"a \xc3",
    "a surrogate": b"\xed\xa0\x80",
    "latin-1": "gr\u00fc\u00df".encode("latin-1"),
    "empty": b"",
    "spaces": b" \t ",
    "not in the vocabulary": "\u4e2d".encode(),
    "a NUL": b"a\0b",
}
TOO_LONG = b"x" * 5000
LOCALES = (("utf-8", "strict"), ("ascii", "surrogateescape"), ("ascii", "strict"), ("iso8859-9", "strict"))


def cases(base: Path, rng: random.Random, shared: Path) -> Iterator[tuple[str, Callable]]:
    """100 files of settings, each kind of prompts, names, rewards, and prompts of each format with a bit or a part gone.

    Then the borders of settings, columns of odd shapes, what stands at output_dir, and chats.
    """
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
    chatty = shared / "chatty"
    if commands.run("post_child.py", "chatty", str(chatty), cwd=shared).code != 0:
        raise RuntimeError("the tree cannot make a chat model")
    keys = rng.sample([*REFUSED], len(REFUSED))
    for start in range(0, len(keys), 5):
        yield f"borders of {', '.join(keys[start : start + 5])}", _borders(keys[start : start + 5])
    for title, (column, well) in SHAPES.items():
        for kind in (".jsonl", ".json", ".parquet", ".csv", ".arrow") if title != "no rows" else (".jsonl",):
            texts = all(isinstance(one, str) for one in column)
            if (data := _table(column, kind)) and (texts or kind != ".csv"):
                for whose in (model, str(chatty)):
                    may = well and (texts or whose != model)  # messages need a template
                    yield f"prompts{kind}: {title}, {Path(whose).name}", _shape(whose, f"prompts{kind}", data, may)
    for title, (make, well) in STATES.items():
        for again in (False, True):
            yield f"output_dir: {title}{', twice' * again}", _state(model, make, well, again)
    for title, typed in BAD_MESSAGES.items():
        for locale in LOCALES:
            if title != "latin-1" or locale[0] in ("utf-8", "ascii"):
                yield f"chat, {' '.join(locale)}: {title}", _chat(chatty, typed, locale)
    yield "chat: too long", _chat(chatty, TOO_LONG, LOCALES[0])
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


def _borders(keys: list[str]) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        done = commands.run("post_child.py", "borders", *keys, cwd=folder)
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        if done.code or len(found) != len(keys) * len(post_child.VALUES):
            return f"exit status {done.code}: {done.stderr[-300:]}"
        for key, value, lines in found:
            if (value in REFUSED[key]) != bool(lines) and not (lines and "TRL refuses" in lines[0]):
                return f"{key} = {value:.50}: {lines or 'is taken'}"
            if lines and not any(key in line or "TRL refuses" in line for line in lines):
                return f"{key} = {value:.50} is not named: {lines}"
        made = [path.name for path in folder.iterdir() if path.name != "borders.yaml"]
        return f"leaves {made}" if made else None

    return hit


def _table(column: list, kind: str) -> bytes | None:
    """Return a file of a column of prompts; None: this format has no such thing."""
    rows = [{"prompt": one} for one in column]
    if kind in (".jsonl", ".json"):
        return "".join(json.dumps(row) + "\n" for row in rows).encode() or b"\n"
    if kind == ".csv":
        return ("prompt\n" + "".join(f'"{one}"\n' for one in column)).encode()
    out = io.BytesIO()
    with contextlib.suppress(pyarrow.ArrowException):
        table = pyarrow.Table.from_pylist(rows)
        if kind == ".parquet":
            pyarrow.parquet.write_table(table, out)
        else:
            with pyarrow.ipc.new_stream(out, table.schema) as file:
                file.write_table(table)
        return out.getvalue()
    return None


def _shape(model: str, name: str, data: bytes, well: bool | None) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        (folder / name).write_bytes(data)
        (folder / "reward.py").write_text("def cat(prompt, completion):\n    return float(isinstance(prompt, str))\n")
        done = commands.run("post_child.py", model, name, "reward.py:cat", cwd=folder)
        if "\x1b" in done.stdout + done.stderr:
            return "an escape is printed"
        if done.code == 0 and "Traceback" not in done.stderr:
            last = f"it ends with {done.stderr.strip()[-200:]!r}"
            return last if well is False or "prompts: 1.000; 0 of " not in done.stderr else None
        why = commands.fault_of(done, name, "prompts", "prompt")
        return why or (f"is refused: {done.errors[0][:300]}" if well else None)

    return hit


def _within(out: Path, *names: str) -> None:
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("mine")


def _beside(out: Path, link: Callable) -> None:
    out.with_name("beside").mkdir()
    (out.with_name("beside") / "a.txt").write_text("mine")
    link(out.with_name("beside"))


def _standing(folder: Path) -> dict[str, object]:
    """Return what lies in a folder, by name."""
    return {
        str(path.relative_to(folder)): (
            os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        )
        for path in folder.rglob("*")
        if path.name not in OURS or path.is_dir()
    }


def _state(model: str, make: Callable, well: bool | None, again: bool) -> Callable[[Path], str | None]:
    """``again``: the same command a second time, which finds the model of the first."""

    def hit(folder: Path) -> str | None:
        (folder / "reward.py").write_text("def cat(prompt, completion):\n    return 1.0\n")
        (folder / "prompts.jsonl").write_text(GOOD)
        (folder / "post.yaml").write_text(outside_words.POST.replace("runs/post", "out") + f"model: {model}\n")
        make(folder / "out")
        for number in range(1 + again):
            before = _standing(folder)
            done = commands.run("post_child.py", "whole", "--config", "post.yaml", cwd=folder)
            after = _standing(folder)
            if gone := [name for name in before if name not in after or after[name] != before[name]]:
                return f"replaces, or removes, {', '.join(gone)}"
            may = well if not number else False if (folder / "out" / "model").exists() else well
            if done.code == 0:
                if may is False:
                    return "is not refused"
                if (
                    "out/model/model.safetensors" not in after
                    and not (folder / "out/model/model.safetensors").is_file()
                ):
                    return "writes no model"
                continue
            if why := commands.fault_of(done, "out", "output_dir"):
                return why
            if may:
                return f"is refused: {done.errors[0][:300]}"
            if well is False and after != before:
                return f"is refused, and leaves {sorted(after.keys() - before.keys())}"
        return None

    return hit


@functools.cache
def _answers(
    chatty: Path, messages: tuple[bytes, ...], locale: tuple[str, str] = LOCALES[0]
) -> tuple[bytes, commands.Done]:
    """Return what a chat answers to messages."""
    folder = Path(tempfile.mkdtemp(dir=chatty.parent))
    flags = ("--model", str(chatty), "--chat", "--temperature", "0", "--max_new_tokens", "6")
    lines = b"".join(message + b"\n" for message in messages)
    started = commands.Started("generate.py", *flags, cwd=folder, typed=(lines, *locale))
    done = started.wait()
    return started.out.read_bytes().removesuffix(b"\n"), done


def _chat(chatty: Path, typed: bytes, locale: tuple[str, str]) -> Callable[[Path], str | None]:
    def hit(folder: Path) -> str | None:
        alone, both = (_answers(chatty, messages)[0] for messages in ((GOOD_MESSAGE,), (GOOD_MESSAGE, OTHER)))
        if not alone or alone == both:
            return f"the model does not answer: {both!r}"
        if typed == TOO_LONG:  # what was said before is forgotten
            both = alone + _answers(chatty, (OTHER,))[0]
        for messages, wanted in {(typed, GOOD_MESSAGE): alone, (GOOD_MESSAGE, typed, OTHER): both}.items():
            found, done = _answers(chatty, messages, locale)
            if found != wanted:
                return f"{[one[:20] for one in messages]!r} is answered {found!r}, not {wanted!r}: {done.stderr[-200:]}"
            if done.code != 0 or "Traceback" in done.stderr:
                return commands.fault_of(done, "") or f"exit status {done.code}"
            if "\x1b" in done.stderr:
                return "an escape is printed"
        return None

    return hit
