"""The commands of other trainers in our words, by the rules of translations.yaml beside this file."""

import contextlib
import dataclasses
import fnmatch
import functools
import operator
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pretrain.base import cards
from pretrain.base.errors import BadInput
from pretrain.recipe import rules
from pretrain.recipe.keys import FIELDS, SIZES
from pretrain.recipe.rules import shown

ROOT = Path(__file__).parents[2]
SCRIPTS = {path.name for path in ROOT.glob("*.py")}
SETTING = re.compile(r"""["']?(\w+)["']?\s*[:=]\s*("[^"]*"|'[^']*'|[^,}\n#]+)""")  # of a pasted dict or file
OPERATORS = {"*": operator.mul, "/": operator.truediv, "//": operator.floordiv}
MODES = ("eval_only", "profile")  # flags of train.py that take no value


@dataclasses.dataclass
class Command:
    """A command as it was typed.

    Attributes:
        environment: words as ``CUDA_VISIBLE_DEVICES=0`` before it.
        launch: what its launcher was told, by the names of accelerate launch.
        first: the first word behind the program, where it is not a flag.
        flags: with their dashes, and their values; of a list the values are lines, "" is none.
    """

    environment: list[str] = dataclasses.field(default_factory=list)
    launch: dict[str, str] = dataclasses.field(default_factory=dict)
    program: str = ""
    first: str = ""
    flags: list[tuple[str, str]] = dataclasses.field(default_factory=list)


@functools.cache
def book() -> dict[str, Any]:
    """Return translations.yaml, with a row for each name of a flag: trainer -> name -> rule."""
    found = yaml.safe_load(Path(__file__).with_name("translations.yaml").read_text(encoding="utf-8"))
    for name, rows in [*found["trainers"].items(), ("flags", found["launch"]["flags"])]:
        place = found["launch"] if name == "flags" else found["trainers"]
        place[name] = {one: rule for names, rule in rows.items() for one in str(names).split(", ")}
    return found


def answer(flag: str) -> str | None:
    """Return whose ``flag`` (as typed, with its dashes) is and what stands for it here; None: nobody's that is known."""
    trainer, rule = _rule_of(flag)
    if rule is None:
        return None
    rule = {"is": rule} if isinstance(rule, str) else rule
    if "none" in rule:
        return f"{flag}: a flag of {trainer}; here not needed: {rule['none']}"
    keys = [key for put in (rule, *rule.get("when", {}).values()) for key in put if key not in ("is", "when", "note")]
    named = ", ".join(dict.fromkeys([*rule.get("is", "").split(), *keys])).replace("launch.", "YAML ")
    formulas = [f"{key} {put}" for key, put in rule.items() if str(put).startswith("= ")]
    said = "; ".join([*(formulas or [named]), *([rule["note"]] if "note" in rule else [])])
    return f"{flag}: a flag of {trainer}; here it is: {said}"


def command_of(script: str, argv: Sequence[str]) -> str | None:
    """Return the command that started this process in our words, None where it has none.

    Its launcher is what the parent process was started with, where the system shows that.
    """
    words = ["python", script]
    parent = Path(f"/proc/{os.getppid()}/cmdline")
    if parent.is_file():
        launched = parent.read_bytes().decode(errors="replace").split("\0")
        names = [Path(word).name for word in launched]
        words = [*launched[: names.index(script)], script] if script in names else words
    try:
        return translate(shlex.join([*words, *argv]))[0]
    except BadInput:
        return None


def translate(text: str) -> tuple[str, list[str]]:
    """Return our command for another program's, and a line for each word of it that has no counterpart.

    Args:
        text: the whole command, with its launcher; or a block of settings, as ``"batch_size": 8, "max_length": 768``.

    Raises BadInput where neither its program nor any of its flags is known.
    """
    typed = _parse(text)
    program = _program_of(typed)
    ours = Path(typed.program).name
    script = ours if ours in SCRIPTS and not program else program.get("script", "train.py")
    known = {name: [flag for flag, _ in typed.flags if _row(name, flag) is not None] for name in book()["trainers"]}
    trainer = program.get("trainer") or max(known, key=lambda name: len(known[name]))
    scripted = ours in SCRIPTS or ours.endswith(".py") or not ours  # a block of settings has no program
    if not program and not (scripted and any(known.values())):
        raise BadInput(f"{shown(text)[:200]}: neither this program nor any of its flags is known here")
    values, notes = _values(typed, trainer, program, script)
    recipe = _recipe_of(values, program)
    path = next((path for path in (Path(recipe), ROOT / recipe) if path.is_file()), Path(os.devnull))
    values = _computed(values, notes, yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    return _composed(typed, program, script, recipe, values, notes), list(notes.values())


# A command's parts.


def _parse(text: str) -> Command:
    text = re.sub(r"\\\r?\n", " ", text.strip()).removeprefix("$ ")
    if re.match(r"""[{"']|\w+\s*[:=]\s""", text):
        return Command(flags=[(f"--{name}", value.strip().strip("\"'")) for name, value in SETTING.findall(text)])
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError as error:
        raise BadInput(f"{shown(text)[:200]}: {error}: put the whole command between two quotes of one kind") from None
    ends = [number for number, word in enumerate(words) if re.fullmatch(r"[;&|<>]+", word)]
    if ends and words[ends[0]] in (";", "&&") and ends[0] + 1 < len(words):  # as behind `cd folder &&`
        return _parse(shlex.join(words[ends[0] + 1 :]))
    words = words[: ends[0]] if ends else words
    found, launched, launch = Command(), False, book()["launch"]
    while words and not found.program:
        word, name = words[0], Path(words[0]).name
        flag, equals, value = words.pop(0).partition("=")
        flag = flag.lstrip("-").replace("-", "_")
        if word.startswith("-"):
            if launched and flag not in launch["bare"] and word != "-m":
                value = value if equals else words.pop(0) if words else ""
                found.launch |= {launch["flags"][flag]: value} if flag in launch["flags"] else {}
        elif equals:
            found.environment.append(word)
        elif name in launch["names"]:
            launched = True
        elif name == "make":
            found.program = " ".join([name, *words[:1]])
            words = words[1:]
        elif name not in ("uv", "run", "launch", "nohup", "time") and not re.fullmatch(r"python[\d.]*", name):
            found.program = word.removeprefix("./")
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if equals and found.program.startswith("make "):
            flag = f"--{flag}"
        if not flag.startswith("-"):
            found.first = found.first or flag
            continue
        while not equals and words and not re.match(r"-+[A-Za-z]", words[0]):
            value = f"{value}\n{words.pop(0)}".strip()
        settings = SETTING.findall(value.replace(",", "\n")) if _name(flag) == "config_overrides" else []
        found.flags += [(f"--{name}", setting.strip()) for name, setting in settings] or [(flag, value)]
    return found


def _program_of(typed: Command) -> dict[str, Any]:
    """Return the program's row, an empty one where it has none."""
    for row in book()["programs"]:
        for pattern in (row["program"], f"*/{row['program']}"):
            fits = fnmatch.fnmatchcase(typed.program, pattern)
            if fits or fnmatch.fnmatchcase(f"{typed.program} {typed.first}", pattern):
                return row
    return {}


# Its flags.


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _row(trainer: str, flag: str) -> Any:
    """Return a trainer's rule for a flag, or None; only llm.c's have one dash. A key of a recipe has none."""
    if flag.startswith("-") and flag.startswith("--") == (trainer == "llm.c"):
        return None
    rows = book()["trainers"][trainer]
    return next((rule for name, rule in rows.items() if fnmatch.fnmatchcase(_name(flag), name)), None)


def _rule_of(flag: str, first: str | None = None) -> tuple[str, Any]:
    """Return whose flag it is, of trainer ``first`` before the others, and its rule; None where it is nobody's."""
    for trainer in filter(None, (first, *book()["trainers"])):
        if (rule := _row(trainer, flag)) is not None:
            return trainer, rule
    return "", None


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: Any) -> Any:
    """Return the number that a text is, all else as text."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(_text(value))
    return _text(value)


def _values(
    typed: Command, trainer: str, program: Mapping[str, Any], script: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return values by our keys, a (formula, names) where one is to be computed; and notes by flag."""
    dash = "-" if trainer == "llm.c" else "--"
    stated = {_name(flag) for flag, _ in typed.flags}
    defaults = [(f"{dash}{k}", _text(v)) for k, v in program.get("defaults", {}).items() if k not in stated]
    names = {_name(flag): _number(value) for flag, value in [*defaults, *typed.flags]}
    values: dict[str, Any] = {f"launch.{key}": value for key, value in typed.launch.items()}
    notes: dict[str, str] = {}
    for given in (defaults, typed.flags):
        plain: dict[str, Any] = {}  # goes before a formula that gives the same key
        for flag, value in given:
            owner, rule = _rule_of(flag, trainer)
            known = _name(flag) in FIELDS or _name(flag) in ("recipe", "size", *MODES) or script != "train.py"
            for key, put in _puts(_name(flag) if known and owner != trainer else rule, value).items():
                if key == "none":
                    notes[flag] = f"{' '.join([flag, *value.splitlines()])}: {put}"
                elif isinstance(put, tuple):
                    values[key] = (*put, names | {"value": _number(value)})
                else:
                    plain[key] = put
        values |= plain
    return values, notes


def _puts(rule: Any, value: str) -> dict[str, Any]:
    """Return our keys and values for one flag; a tuple holds a formula, ``none`` the reason why there is nothing."""
    if rule is None:
        return {"none": "not known here; left out"}
    if isinstance(rule, str):
        return dict.fromkeys(rule.split(), value or "true")
    cases = {_text(case): put for case, put in rule.get("when", {}).items()}
    chosen = cases.get((value or "true").lower(), cases.get("*"))
    if cases and chosen is None:
        return {
            "none": "; ".join([f"must be {rules.either(list(cases))}", *([rule["note"]] if "note" in rule else [])])
        }
    found = {key: _text(put) for key, put in (rule | (chosen or {})).items() if key not in ("when", "note")}
    folder = os.path.dirname(value)  # noqa: PTH120
    filled = {key: put.replace("{value}", value or "true").replace("{folder}", folder) for key, put in found.items()}
    return {key: (put[2:],) if put.startswith("= ") else put for key, put in filled.items()}


def _recipe_of(values: dict[str, Any], program: Mapping[str, Any]) -> str:
    """Return the path of the recipe that was given, or that fits the values, or the program's."""
    if "recipe" in values:
        return values.pop("recipe")
    row = program if "recipe" in program else book()["default"]
    for words, recipe in row.get("fits", {}).items():
        key, *value = words.split()
        if values.get(key, "null") != "null" and value in ([], [values[key]]):
            return f"recipes/{recipe}.yaml"
    return f"recipes/{row['recipe']}.yaml"


def _computed(values: Mapping[str, Any], notes: dict[str, str], base: Mapping[str, Any]) -> dict[str, str]:
    """Return the values as text, formulas computed, without those that the recipe ``base`` has, too.

    A formula whose numbers are not all given becomes a note.
    """
    plain = {key.removeprefix("launch."): value for key, value in values.items() if not isinstance(value, tuple)}
    given = {name: _number(value) for name, value in (dict(base) | {"processes": 1} | plain).items()}
    found = {}
    for key, value in values.items():
        if isinstance(value, tuple):
            formula, theirs = value
            names = {name: n for name, n in (given | theirs).items() if isinstance(n, (int, float))}
            try:
                given[key] = result = _evaluate(formula.split(), names)
            except KeyError as error:
                notes[key] = f"{key} = {formula}: {error.args[0]} is not given; the recipe's value stays"
                continue
            value = f"{result:.6g}" if result % 1 else str(int(result))
        found[key] = value

    def same(key: str) -> bool:
        if key == "size":
            return SIZES.get(found[key]) == tuple(base.get(name) for name in ("n_layer", "n_head", "n_embd"))
        stated = base.get(key, FIELDS[key].default) if key in FIELDS else None
        return _number(found[key]) == _number(stated[0] if isinstance(stated, list) and len(stated) == 1 else stated)

    return {key: value for key, value in found.items() if not same(key)}


def _evaluate(words: Sequence[str], names: Mapping[str, float]) -> float:
    """Return the value of ``a * b / 100``, from left to right; raises KeyError with a name that is not a number."""
    first, *more = (_number(word) if word[0].isdigit() else names[word] for word in words[::2])
    return functools.reduce(
        lambda left, pair: OPERATORS[pair[0]](left, pair[1]), zip(words[1::2], more, strict=True), first
    )


# Ours.


def _composed(
    typed: Command, program: Mapping[str, Any], script: str, recipe: str, values: dict[str, str], notes: dict[str, str]
) -> str:
    """Return the whole command of ours."""
    launch = {key.removeprefix("launch."): values.pop(key) for key in list(values) if key.startswith("launch.")}
    words = [*typed.environment, "python", script]
    if script == "train.py":
        words = [*typed.environment, *_launcher(launch, program, notes), script]
    if script in ("train.py", "prepare_data.py"):
        words += ["--recipe", recipe]
    elif script == "check_setup.py" and (card := launch.get("card")):
        words += ["--card", card]
    elif script in ("eval_hellaswag.py", "generate.py") and "model" not in values:
        words += ["--model", "openai-community/gpt2"]
    for key, value in values.items():
        words += [f"--{key}"] if key in MODES or not value else [f"--{key}", *value.splitlines()]
    return shlex.join(words)


def _launcher(launch: Mapping[str, str], program: Mapping[str, Any], notes: dict[str, str]) -> list[str]:
    """Return the words before train.py."""

    def count(key: str) -> int:
        return int(launch.get(key, "1")) if launch.get(key, "1").isdecimal() else 1

    machines, processes = count("num_machines"), count("processes")
    asked = launch.get("card", program.get("card", "auto"))
    card = cards.find(asked)
    if card is None and asked != "auto":
        notes["card"] = f"{asked}: not a known card; of its kind are known: {', '.join(cards.of_its_kind(asked))}"
    elif card and "card" not in launch:
        notes["card"] = f"the command names no card; {asked} is that of its authors: give your own card's YAML"
    stem = launch.get("yaml") or (cards.preset(asked, processes) if card else "")
    file = launch.get("config_file") or (f"accelerate_configs/{stem}.yaml" if stem else "")
    chosen = {key: launch[key] for key in ("mixed_precision", "dynamo_backend") if key in launch}
    if not file and {"fp16", "no"} & set(chosen.values()):  # plain python train.py chooses all else by itself
        file = "accelerate_configs/conservative.yaml"
        if "mixed_precision" not in chosen:
            notes["precision"] = (
                f"{file} has fp16: for a card from Ampere on, write --mixed_precision bf16 before train.py"
            )
    if not file and processes * machines == 1:
        return ["python"]
    names = book()["launch"]["torchrun"]
    where = [word for key in names if key in launch for word in (f"--{key}", launch[key])]
    if not file:
        notes["card"] = "no card is named; with its YAML the command begins: accelerate launch --config_file "
        notes["card"] += f"accelerate_configs/CARD.yaml --multi_gpu --num_processes {processes * machines} train.py"
        there = [word for key, name in names.items() if key in launch for word in (f"--{name}", launch[key])]
        return ["torchrun", *(there or ["--standalone"]), "--nproc_per_node", str(processes)]
    several = ["--multi_gpu"] * ("_x" not in file)
    more = [*several, "--num_processes", str(processes * machines)] if processes * machines > 1 else []
    more += [word for key, value in chosen.items() for word in (f"--{key}", value)]
    return ["accelerate", "launch", "--config_file", file, *more, *where]
