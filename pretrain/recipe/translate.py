"""The commands of other trainers in our words, by the rules of translations.yaml beside this file."""

import contextlib
import dataclasses
import fnmatch
import functools
import itertools
import operator
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pretrain.base import cards
from pretrain.base.errors import BadInput
from pretrain.recipe import rules
from pretrain.recipe.keys import FIELDS
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
    """Return translations.yaml, its values as text."""
    return yaml.load(Path(__file__).with_name("translations.yaml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)


def answer(flag: str) -> str | None:
    """Return whose ``flag`` (with or without dashes) is and what stands for it here; None: nobody's that is known."""
    trainer, rule = _find(flag, book()["trainers"])
    if rule is None:
        return None
    if "none" in rule:
        return f"{flag}: a flag of {trainer}; here not needed: {rule['none']}"
    puts = [put for case in (*rule.get("when", {}).values(), rule) for put in case.items()]
    ours = {key: f"{key} {text}" if text[0] == "=" else key for key, text in puts if key not in ("when", "note")}
    named = ", ".join(ours.values()).replace("launch.", "YAML ")
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
    known = {name: sum(_find(flag, [name])[1] is not None for flag, _ in typed.flags) for name in book()["trainers"]}
    trainer = program.get("trainer") or max(known, key=lambda name: known[name])
    if not program and not (any(known.values()) and (ours.endswith(".py") or not ours)):  # settings have no program
        raise BadInput(f"{shown(text)}: neither this program nor any of its flags is known here")
    given = {_name(flag) for flag, _ in typed.flags}
    defaults = [(name, value) for name, value in program.get("defaults", {}).items() if name not in given]
    notes: dict[str, str] = {}
    if typed.first and " " not in program.get("program", ""):
        notes["first"] = f"{typed.first}: not known here; give its settings as flags"
    values = {f"launch.{key}": value for key, value in typed.launch.items()}
    for flags in (defaults, typed.flags):
        values |= _values(flags, trainer, script, notes)
    recipe = _recipe_of(values, program)
    path = next((path for path in (Path(recipe), ROOT / recipe) if path.is_file()), Path(os.devnull))
    numbers = {_name(flag): value for flag, value in [*defaults, *typed.flags]}
    values = _computed(values, numbers, notes, yaml.safe_load(path.read_text(encoding="utf-8")) or {})
    launch = {key.removeprefix("launch."): values.pop(key) for key in list(values) if key.startswith("launch.")}
    words = [*typed.environment, *(_launcher(launch, notes) if script == "train.py" else ["python"]), script]
    if script in ("train.py", "prepare_data.py"):
        words += ["--recipe", recipe]
    elif script == "check_setup.py" and "card" in launch:
        words += ["--card", launch["card"]]
    elif script in ("eval_hellaswag.py", "generate.py"):
        values.setdefault("model", "openai-community/gpt2")
    for key, value in values.items():
        words += [f"--{key}", *(value.splitlines() if key not in MODES else ())]
    return shlex.join(words), list(notes.values())


# A command's parts.


def _parse(text: str) -> Command:
    text = re.sub(r"\\\r?\n", " ", text.strip()).removeprefix("$ ")
    found, launch, launched, is_open = Command(), book()["launch"], False, False
    if re.match(r"""[{"']|\w+\s*[:=]\s""", text):
        return Command(flags=_settings(text))
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    try:
        typed = list(lexer)
    except ValueError as error:
        raise BadInput(f"{shown(text)}: {error}: put the whole command between two quotes of one kind") from None
    parts = itertools.groupby(typed, lambda word: word in (";", "&&"))  # as behind `cd folder &&`
    *_, last = [], *(list(part) for ends, part in parts if not ends)
    words = itertools.takewhile(lambda word: not re.fullmatch(r"[;&|<>]+", word), last)
    for word in words:
        flag, equals, value = word.partition("=")
        if word.startswith("-"):
            if launched and _name(flag) not in launch["bare"] and word != "-m":
                value = value if equals else next(words, "")
                found.launch |= {launch["flags"][_name(flag)]: value} if _name(flag) in launch["flags"] else {}
        elif equals:
            found.environment.append(word)
        elif Path(word).name in launch["names"]:
            launched = True
        elif not re.fullmatch(r"uv|run|launch|nohup|time|python[\d.]*", Path(word).name):
            found.program = word.removeprefix("./")
            break
    for word in words:
        flag, equals, value = word.partition("=")
        if re.match("-+[A-Za-z]", word) or equals and found.program == "make":
            found.flags.append((flag, value))
            is_open = not equals
        elif is_open:
            flag, before = found.flags.pop()
            found.flags.append((flag, f"{before}\n{word}".strip()))
        else:
            found.first = found.first or word
    for flag, value in found.flags:
        if _name(flag) == "config_overrides":
            found.flags.remove((flag, value))
            found.flags += _settings(value.replace(",", "\n"))
    return found


def _settings(text: str) -> list[tuple[str, str]]:
    return [(f"--{name}", value.strip().strip("\"'")) for name, value in SETTING.findall(text)]


def _program_of(typed: Command) -> Mapping[str, Any]:
    """Return the program's row, an empty one where it has none."""
    names = [f"/{name}" for name in (typed.program, f"{typed.program} {typed.first}")]
    return next((row for row in book()["programs"] if fnmatch.filter(names, f"*/{row['program']}")), {})


# Its flags.


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _note(rule: Rule) -> list[str]:
    return [rule["note"]] if "note" in rule else []


def _find(flag: str, trainers: Iterable[str]) -> tuple[str, Rule | None]:
    """Return the first of the trainers that has a flag, and its rule; None where none has it."""
    for trainer in trainers:
        for names, rule in book()["trainers"][trainer].items():
            if any(fnmatch.fnmatchcase(_name(flag), name) for name in names.split(", ")):
                return trainer, dict.fromkeys(rule.split(), "{value}") if isinstance(rule, str) else rule
    return "", None


def _values(given: Sequence[tuple[str, str]], trainer: str, script: str, notes: dict[str, str]) -> dict[str, str]:
    """Return values by our keys, "= ..." where one is to be computed; flags without a counterpart get a note."""
    formulas, plain = {}, {}
    for flag, value in given:
        name = _name(flag)
        owner, rule = _find(flag, (trainer, *book()["trainers"]))
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
    cases, value = rule.get("when", {"*": {}}), value or "true"
    chosen = cases.get(value.lower(), cases.get("*"))
    if chosen is None:
        return {"none": "; ".join([f"must be {rules.either(list(cases))}", *_note(rule)])}
    found = {key: put for key, put in (rule | chosen).items() if key not in ("when", "note")}
    folder = os.path.dirname(value)  # noqa: PTH120
    return {key: put.replace("{value}", value).replace("{folder}", folder) for key, put in found.items()}


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
    values: Mapping[str, str], numbers: Mapping[str, str], notes: dict[str, str], base: dict[str, Any]
) -> dict[str, str]:
    """Return the values as text, formulas computed, without those that the recipe ``base`` has, too.

    A formula whose numbers are not all given, there, as values or in ``numbers``, becomes a note.
    """
    stated = {key.removeprefix("launch."): value for key, value in values.items() if not value.startswith("= ")}
    known, found = {**base, "processes": "1", **stated, **numbers}, {}
    for key, value in values.items():
        if value.startswith("= "):
            try:
                result = _evaluate(value.split()[1:], known)
            except KeyError as error:
                notes[key] = f"{key} {value}: {error.args[0]} is not given; the recipe's value stays"
                continue
            value = known[key] = f"{result:.6g}" if result % 1 else str(int(result))
        found[key] = value
    here = {name: field.default for name, field in FIELDS.items()} | base
    return {key: value for key, value in found.items() if key not in here or _number(value) != _number(here[key])}


def _number(value: Any) -> Any:
    """Return the number that a value is, all else as a flag's text."""
    text = str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
    text = "\n".join(value) if isinstance(value, list) else text
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _evaluate(words: Sequence[str], names: Mapping[str, Any]) -> float:
    """Return the value of ``a * b / 100``, from left to right; raises KeyError with a name that is not a number."""
    result = 1
    for sign, word in zip(["*", *words[1::2]], words[::2], strict=False):
        number = _number(word if word[0].isdigit() else names[word])
        if isinstance(number, str):
            raise KeyError(word)
        result = OPERATORS[sign](result, number)
    return result


# Ours.


def _launcher(launch: Mapping[str, str], notes: dict[str, str]) -> list[str]:
    """Return the words before train.py."""
    counts = [launch.get(key, "1") for key in ("processes", "num_machines")]
    processes, machines = (int(count) if count.isdecimal() else 1 for count in counts)
    asked, stem = launch.get("card", "auto"), launch.get("yaml")
    if stem is None and cards.find(asked):
        stem = cards.preset(asked, processes)
    elif asked != "auto":
        notes["card"] = f"{asked}: not a known card; of its kind are known: {', '.join(cards.of_its_kind(asked))}"
    chosen = {key: launch[key] for key in ("mixed_precision", "dynamo_backend") if key in launch}
    if not stem and "config_file" not in launch and {"fp16", "no"} & set(chosen.values()):
        stem = "conservative"  # plain python train.py chooses all else by itself
        if "mixed_precision" not in chosen:
            notes["precision"] = "conservative.yaml has fp16: for a card from Ampere on, add --mixed_precision bf16"
    file = launch.get("config_file") or (f"accelerate_configs/{stem}.yaml" if stem else "")
    names = {key: key if file else name for key, name in book()["launch"]["torchrun"].items()}
    where = [word for key, name in names.items() if key in launch for word in (f"--{name}", launch[key])]
    if not file:
        several = ["torchrun", *(where or ["--standalone"]), "--nproc_per_node", str(processes)]
        return several if processes * machines > 1 else ["python"]
    words = ["accelerate", "launch", "--config_file", file]
    if processes * machines > 1:
        words += [*["--multi_gpu"] * ("_x" not in file), "--num_processes", str(processes * machines)]
    return [*words, *(word for key, value in chosen.items() for word in (f"--{key}", value)), *where]
