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
Rule = dict[str, Any]


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
    """Return translations.yaml, with a row for each name of a flag: trainer -> name -> rule, a mapping."""
    found = yaml.safe_load(Path(__file__).with_name("translations.yaml").read_text(encoding="utf-8"))

    def each(rows: Mapping) -> dict[str, Any]:
        return {name: rule for names, rule in rows.items() for name in str(names).split(", ")}

    found["launch"]["flags"] = each(found["launch"]["flags"])
    for trainer, rows in found["trainers"].items():
        found["trainers"][trainer] = {
            name: dict.fromkeys(rule.split(), "{value}") if isinstance(rule, str) else rule
            for name, rule in each(rows).items()
        }
    return found


def answer(flag: str) -> str | None:
    """Return whose ``flag`` (as typed, with its dashes) is and what stands for it here; None: nobody's that is known."""
    trainer, rule = _rule_of(flag)
    if rule is None:
        return None
    if "none" in rule:
        return f"{flag}: a flag of {trainer}; here not needed: {rule['none']}"
    ours = {}
    for put in (*rule.get("when", {}).values(), rule):
        ours |= {key: f"{key} {text}" if str(text).startswith("= ") else key for key, text in put.items()}
    named = ", ".join(text for key, text in ours.items() if key not in ("when", "note")).replace("launch.", "YAML ")
    return f"{flag}: a flag of {trainer}; here it is: {'; '.join([named, *_note(rule)])}"


def command_of(script: str, argv: Sequence[str]) -> str | None:
    """Return the command that started this process in our words, None where it has none.

    Its launcher is what the parent process was started with, where the system shows that.
    """
    words = ["python", script]
    with contextlib.suppress(OSError):
        launched = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().decode(errors="replace").split("\0")
        if script in (names := [Path(word).name for word in launched]):
            words = [*launched[: names.index(script)], script]
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
    program, ours = _program_of(typed), Path(typed.program).name
    script = ours if ours in SCRIPTS and not program else program.get("script", "train.py")
    known = {name: sum(_row(name, flag) is not None for flag, _ in typed.flags) for name in book()["trainers"]}
    trainer = program.get("trainer") or max(known, key=lambda name: known[name])
    if not program and not (any(known.values()) and (ours.endswith(".py") or not ours)):  # settings have no program
        raise BadInput(f"{shown(text)}: neither this program nor any of its flags is known here")
    defaults = {
        f"{'-' if trainer == 'llm.c' else '--'}{name}": _text(value)
        for name, value in program.get("defaults", {}).items()
        if name not in {_name(flag) for flag, _ in typed.flags}
    }
    notes: dict[str, str] = {}
    values = {f"launch.{key}": value for key, value in typed.launch.items()}
    for given in (list(defaults.items()), typed.flags):
        values |= _values(given, trainer, script, notes)
    recipe = _recipe_of(values, program)
    path = next((path for path in (Path(recipe), ROOT / recipe) if path.is_file()), Path(os.devnull))
    numbers = {_name(flag): _number(value) for flag, value in [*defaults.items(), *typed.flags]}
    values = _computed(values, numbers, notes, yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    launch = {key.removeprefix("launch."): values.pop(key) for key in list(values) if key.startswith("launch.")}
    words = [*typed.environment, *(_launcher(launch, program, notes) if script == "train.py" else ["python"]), script]
    if script in ("train.py", "prepare_data.py"):
        words += ["--recipe", recipe]
    elif script == "check_setup.py" and "card" in launch:
        words += ["--card", launch["card"]]
    elif script in ("eval_hellaswag.py", "generate.py"):
        values.setdefault("model", "openai-community/gpt2")
    for key, value in values.items():
        words += [f"--{key}"] if key in MODES or not value else [f"--{key}", *value.splitlines()]
    return shlex.join(words), list(notes.values())


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
        raise BadInput(f"{shown(text)}: {error}: put the whole command between two quotes of one kind") from None
    for number, word in enumerate(words):
        if word in (";", "&&") and number + 1 < len(words):  # as behind `cd folder &&`
            return _parse(shlex.join(words[number + 1 :]))
        if re.fullmatch(r"[;&|<>]+", word):
            words = words[:number]
            break
    found, launched, launch = Command(), False, book()["launch"]
    while words and not found.program:
        word, name = words[0], Path(words[0]).name
        flag, equals, value = words.pop(0).partition("=")
        if word.startswith("-"):
            if launched and _name(flag) not in launch["bare"] and word != "-m":
                value = value if equals else words.pop(0) if words else ""
                found.launch |= {launch["flags"][_name(flag)]: value} if _name(flag) in launch["flags"] else {}
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


def _program_of(typed: Command) -> Mapping[str, Any]:
    """Return the program's row, an empty one where it has none."""
    names = (typed.program, f"{typed.program} {typed.first}")
    for row in book()["programs"]:
        if any(fnmatch.fnmatchcase(f"/{name}", f"*/{row['program']}") for name in names):
            return row
    return {}


# Its flags.


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _note(rule: Rule) -> list[str]:
    return [rule["note"]] if "note" in rule else []


def _row(trainer: str, flag: str) -> Rule | None:
    """Return a trainer's rule for a flag, or None; only llm.c's have one dash. A key of a recipe has none."""
    if flag.startswith("-") and flag.startswith("--") == (trainer == "llm.c"):
        return None
    rows = book()["trainers"][trainer]
    return next((rule for name, rule in rows.items() if fnmatch.fnmatchcase(_name(flag), name)), None)


def _rule_of(flag: str, first: str | None = None) -> tuple[str, Rule | None]:
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


def _values(given: Sequence[tuple[str, str]], trainer: str, script: str, notes: dict[str, str]) -> dict[str, str]:
    """Return values by our keys, "= ..." where one is to be computed; flags without a counterpart get a note."""
    formulas, plain = {}, {}
    for flag, value in given:
        name = _name(flag)
        owner, rule = _rule_of(flag, trainer)
        if owner != trainer and (name in FIELDS or name in ("recipe", "size", *MODES) or script != "train.py"):
            rule = {name: "{value}"}
        for key, put in _puts(rule, value).items():
            if key == "none":
                notes[flag] = f"{' '.join([flag, *value.splitlines()])}: {put}"
            else:
                (formulas if put.startswith("= ") else plain)[key] = put
    return formulas | plain  # a value goes before a formula that gives the same key


def _puts(rule: Rule | None, value: str) -> dict[str, str]:
    """Return our keys and values for one flag; ``none``: the reason why there is nothing."""
    if rule is None:
        return {"none": "not known here; left out"}
    cases = {_text(case): put for case, put in rule.get("when", {}).items()}
    chosen = cases.get((value or "true").lower(), cases.get("*"))
    if cases and chosen is None:
        return {"none": "; ".join([f"must be {rules.either(list(cases))}", *_note(rule)])}
    found = {key: _text(put) for key, put in (rule | (chosen or {})).items() if key not in ("when", "note")}
    folder = os.path.dirname(value)  # noqa: PTH120
    return {key: put.replace("{value}", value or "true").replace("{folder}", folder) for key, put in found.items()}


def _recipe_of(values: dict[str, str], program: Mapping[str, Any]) -> str:
    """Return the path of the recipe that was given, or that fits the values, or the program's."""
    if "recipe" in values:
        return values.pop("recipe")
    row = program if "recipe" in program else book()["default"]
    for words, recipe in row.get("fits", {}).items():
        key, *value = words.split()
        if values.get(key, "null") != "null" and value in ([], [values[key]]):
            return f"recipes/{recipe}.yaml"
    return f"recipes/{row['recipe']}.yaml"


def _computed(
    values: Mapping[str, str], numbers: Mapping[str, Any], notes: dict[str, str], base: Mapping[str, Any]
) -> dict[str, str]:
    """Return the values as text, formulas computed, without those that the recipe ``base`` has, too.

    A formula whose numbers are not all given, there, as values or in ``numbers``, becomes a note.
    """
    stated = {key.removeprefix("launch."): value for key, value in values.items() if not value.startswith("= ")}
    given = {name: _number(value) for name, value in (dict(base) | {"processes": 1} | stated | dict(numbers)).items()}
    found = {}
    for key, value in values.items():
        if value.startswith("= "):
            try:
                given[key] = result = _evaluate(value.split()[1:], given)
            except KeyError as error:
                notes[key] = f"{key} {value}: {error.args[0]} is not given; the recipe's value stays"
                continue
            value = f"{result:.6g}" if result % 1 else str(int(result))
        found[key] = value

    def same(key: str) -> bool:
        if key == "size":
            return SIZES.get(found[key]) == tuple(base.get(name) for name in ("n_layer", "n_head", "n_embd"))
        its = base.get(key, FIELDS[key].default) if key in FIELDS else None
        return _number(found[key]) == _number(its[0] if isinstance(its, list) and len(its) == 1 else its)

    return {key: value for key, value in found.items() if not same(key)}


def _evaluate(words: Sequence[str], names: Mapping[str, Any]) -> float:
    """Return the value of ``a * b / 100``, from left to right; raises KeyError with a name that is not a number."""
    numbers, result = {name: value for name, value in names.items() if isinstance(value, (int, float))}, 1
    for sign, word in zip(["*", *words[1::2]], words[::2], strict=False):
        result = OPERATORS[sign](result, _number(word) if word[0].isdigit() else numbers[word])
    return result


# Ours.


def _launcher(launch: Mapping[str, str], program: Mapping[str, Any], notes: dict[str, str]) -> list[str]:
    """Return the words before train.py."""
    counts = [launch.get(key, "1") for key in ("processes", "num_machines")]
    processes, machines = (int(count) if count.isdecimal() else 1 for count in counts)
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
    names = {key: name if not file else key for key, name in book()["launch"]["torchrun"].items()}
    where = [word for key, name in names.items() if key in launch for word in (f"--{name}", launch[key])]
    if not file:
        notes["card"] = "no card is named; with its YAML the command begins: accelerate launch --config_file "
        notes["card"] += f"accelerate_configs/CARD.yaml --multi_gpu --num_processes {processes * machines} train.py"
        return ["torchrun", *(where or ["--standalone"]), "--nproc_per_node", str(processes)]
    words = ["accelerate", "launch", "--config_file", file]
    if processes * machines > 1:
        words += [*["--multi_gpu"] * ("_x" not in file), "--num_processes", str(processes * machines)]
    return [*words, *(word for key, value in chosen.items() for word in (f"--{key}", value)), *where]
