"""The commands of other trainers in our words, by the rules of translations.yaml beside this file."""

import dataclasses
import fnmatch
import functools
import itertools
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pretrain.base import cards
from pretrain.base.errors import BadInput
from pretrain.recipe import rules
from pretrain.recipe.keys import FIELDS, TYPES
from pretrain.recipe.rules import shown

ROOT = Path(__file__).parents[2]
SCRIPTS = {path.name for path in ROOT.glob("*.py")}
SETTING = re.compile(r"""["']?(\w+)["']?\s*[:=]\s*("[^"]*"|'[^']*'|[^,}\n#]+)""")  # of a pasted dict or file
MODES = ("eval_only", "profile")  # switches of train.py that are not recipe keys


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


class Rule(NamedTuple):
    """What stands for a flag of a trainer.

    Attributes:
        cases: for each of its values ("*" is any other) our keys and their values; none: nothing stands for it.
        note: what to know beside, or why nothing stands for it.
    """

    trainer: str
    cases: dict[str, dict[str, str]]
    note: str


@functools.cache
def book() -> dict[str, Any]:
    """Return translations.yaml, its values as text."""
    return yaml.load(Path(__file__).with_name("translations.yaml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)


def find(flag: str, trainers: Iterable[str]) -> Rule | None:
    """Return the rule of a flag (with or without dashes) of the first of the trainers that has it; None: none has it."""
    for trainer in trainers:
        for names, row in book()["trainers"][trainer].items():
            if any(fnmatch.fnmatchcase(_name(flag), name) for name in names.split(", ")):
                row = dict.fromkeys(row.split(), "{value}") if isinstance(row, str) else row
                puts = {key: put for key, put in row.items() if key not in ("when", "note")}
                return Rule(trainer, row.get("when", {"*": puts} if puts else {}), row.get("note", ""))
    return None


def answer(flag: str) -> str | None:
    """Return whose flag this is (with or without dashes) and what stands for it here; None: nobody's that is known."""
    if (rule := find(flag, book()["trainers"])) is None:
        return None
    puts = itertools.chain.from_iterable(case.items() for case in rule.cases.values())
    ours = {key: f"{key} {put}" if put.startswith("=") else key for key, put in puts}
    named = ", ".join(ours.values()).replace("launch.yaml", "a YAML of accelerate_configs/").replace("launch.", "YAML ")
    here = f"it is: {named}" if ours else "not needed"
    return f"{flag}: a flag of {rule.trainer}; here {here}" + (f"; {rule.note}" if rule.note else "")


def command_of(script: str, argv: Sequence[str]) -> str | None:
    """Return the command ``python script argv`` in our words, None where it has none."""
    try:
        return translate(shlex.join(["python", script, *argv]))[0]
    except BadInput:
        return None


def translate(text: str) -> tuple[str, list[str]]:
    """Return our command for another program's, and a line for each word of it that has no counterpart.

    Args:
        text: the whole command, with its launcher; or a block of settings, as ``"batch_size": 8, "max_length": 768``.

    Raises BadInput where neither its program nor any of its flags is known.
    """
    typed = _parse(text)
    typed.flags = _last_of_each(typed.flags)
    program, ours = _program_of(typed), Path(typed.program).name
    script = ours if ours in SCRIPTS and not program else program.get("script", "train.py")
    known = {name: sum(find(flag, [name]) is not None for flag, _ in typed.flags) for name in book()["trainers"]}
    trainer = program.get("trainer") or max(known, key=lambda name: known[name])
    if not program and not any(known.values()):
        raise BadInput(f"{shown(text)}: neither this program nor any of its flags is known here")
    notes: dict[str, str] = {}
    if typed.first and " " not in program.get("program", ""):
        notes["first"] = f"{typed.first}: not known here; give its settings as flags"
    numbers = program.get("defaults", {}) | {_name(flag): value for flag, value in typed.flags}
    given = {_name(flag) for flag, _ in typed.flags}
    defaults = [(name, value) for name, value in numbers.items() if name not in given]
    values = _values(defaults, trainer, script, notes)
    values |= _values(typed.flags, trainer, script, notes)
    of_launcher = [key for key in values if key.startswith("launch.")]
    launch = typed.launch | {key.removeprefix("launch."): values.pop(key) for key in of_launcher}
    recipe = _recipe_of(values, program)
    path = next((path for path in (Path(recipe), ROOT / recipe) if path.is_file()), Path(os.devnull))
    here = {name: field.default for name, field in FIELDS.items()}
    here |= yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    values = _computed(values, {"processes": launch.get("processes", "1"), **numbers}, here, notes)
    words = [*typed.environment, *(_launcher(launch, notes) if script == "train.py" else ["python"]), script]
    if script in ("train.py", "prepare_data.py"):
        words += ["--recipe", recipe]
    elif script == "check_setup.py" and "card" in launch:
        words += ["--card", launch["card"]]
    elif script in ("eval_hellaswag.py", "generate.py"):
        values.setdefault("model", "openai-community/gpt2")
    for key, value in values.items():
        if key not in MODES:
            words += [f"--{key}", *value.splitlines()]
        elif rules.boolean_of(value) is not False:
            words.append(f"--{key}")
    return shlex.join(words), list(notes.values())


# A command's parts.


def _parse(text: str) -> Command:
    text = re.sub(r"\\\r?\n", " ", text.strip())
    if re.match(r"""[{"']|\w+\s*[:=]\s""", text):
        settings = SETTING.findall(text)
        return Command(flags=[(f"--{name}", value.strip().strip("\"'")) for name, value in settings])
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadInput(f"{shown(text)}: {error}: put the whole command between two quotes of one kind") from None
    place = next((place for place, word in enumerate(words) if _is_program(word)), len(words))
    found = Command(program=words[place].removeprefix("./") if place < len(words) else "")
    for word, after in itertools.pairwise(words[: place + 1]):
        flag, equals, value = word.partition("=")
        if word.startswith("-") and (key := book()["launch"].get(_name(flag))):
            found.launch[key] = value if equals else after
        elif equals and not word.startswith("-"):
            found.environment.append(word)
    is_open = False
    for word in itertools.takewhile(lambda word: not re.match(r"\d?[;&|<>]", word), words[place + 1 :]):
        flag, equals, value = word.partition("=")
        if re.match("-+[A-Za-z]", word) or equals and not is_open:  # as of `make train NGPUS=8`
            found.flags.append((flag, value))
            is_open = not equals
        elif is_open:
            flag, before = found.flags.pop()
            found.flags.append((flag, f"{before}\n{word}".strip()))
        else:
            found.first = found.first or word
    return found


def _is_program(word: str) -> bool:
    names = [row["program"].partition(" ")[0] for row in book()["programs"]]
    return word.endswith(".py") or any(fnmatch.fnmatch(f"/{word}", f"*/{name}") for name in names)


def _program_of(typed: Command) -> Mapping[str, Any]:
    """Return the program's row, an empty one where it has none."""
    names = [f"/{typed.program}", f"/{typed.program} {typed.first}"]
    return next((row for row in book()["programs"] if fnmatch.filter(names, f"*/{row['program']}")), {})


def _last_of_each(flags: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the flags without those that a later one of the same name replaces."""
    last = {}
    for flag, value in flags:
        last.pop(_name(flag), None)
        last[_name(flag)] = (flag, value)
    return list(last.values())


def _name(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")


def _values(given: Sequence[tuple[str, str]], trainer: str, script: str, notes: dict[str, str]) -> dict[str, str]:
    """Return values by our keys, "= ..." where one is to be computed; flags without a counterpart get a note."""
    formulas, plain = {}, {}
    for flag, value in given:
        name, rule = _name(flag), find(flag, (trainer, *book()["trainers"]))
        is_ours = name in FIELDS or name in ("recipe", "size", *MODES) or script != "train.py"
        if is_ours and (rule is None or rule.trainer != trainer):
            is_bare_switch = not value and TYPES.get(name) is bool
            plain[name] = "true" if is_bare_switch else value
            continue
        cases, note = rule[1:] if rule else ({}, "not known here; left out")
        value = value or "true"
        case = cases.get(value.lower(), cases.get("*"))
        if case is None:
            must = f"must be {rules.either([*cases])}" if cases else ""
            notes[flag] = f"{' '.join([flag, *value.splitlines()])}: {'; '.join(filter(None, (must, note)))}"
            continue
        folder = os.path.dirname(value)  # noqa: PTH120
        for key, put in case.items():
            put = put.replace("{value}", value).replace("{folder}", folder)
            (formulas if put.startswith("= ") else plain)[key] = put
    return formulas | plain  # a value goes before a formula that gives the same key


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
    values: Mapping[str, str], numbers: Mapping[str, str], here: Mapping[str, Any], notes: dict[str, str]
) -> dict[str, str]:
    """Return the values without those that are ``here`` too, formulas computed.

    A formula whose numbers are not all given, here, as values or in ``numbers``, becomes a note.
    """
    known, found = {**here, **values, **numbers}, {}
    for key, value in values.items():
        if value.startswith("= "):
            try:
                result = _evaluate(value.removeprefix("= "), known)
                value = str(round(result)) if TYPES[key] is int else f"{result:.6g}"
            except (ValueError, ArithmeticError):
                notes[key] = f"{key} {value}: set it yourself; not all of these numbers are known here"
                continue
        if key in FIELDS:
            words = value.splitlines() if rules.is_list(TYPES[key]) else value
            if rules.from_text(words, key) == rules.number_of(here[key]):
                continue
        found[key] = value
    return found


def _evaluate(formula: str, known: Mapping[str, Any]) -> float:
    """Return the value of ``a * b / 100``, from left to right; raises ValueError for what is not a number."""
    result, words = 1.0, ["*", *formula.split()]
    for sign, name in zip(words[::2], words[1::2], strict=True):
        number = float(str(known.get(name, name)))
        result = result * number if sign == "*" else result / number
    return result


def _launcher(launch: Mapping[str, str], notes: dict[str, str]) -> list[str]:
    """Return the words before train.py."""
    asked, count = launch.get("card", "auto"), launch.get("processes", "1")
    processes = int(count) if count.isdecimal() else 1
    stem = launch.get("yaml")
    if stem is None and cards.find(asked):
        stem = cards.preset(asked, processes)
    elif asked != "auto":
        notes["card"] = f"{asked}: not a known card; of its kind are known: {', '.join(cards.of_its_kind(asked))}"
    if launch.get("num_machines", "1") != "1":
        notes["machines"] = (
            f"{launch['num_machines']} machines: this command is for one; docs/cluster.md has the others"
        )
    precision = launch.get("mixed_precision")
    if not stem and precision in ("fp16", "no"):
        stem = "conservative"  # plain python train.py chooses all else by itself
    file = launch.get("config_file") or (f"accelerate_configs/{stem}.yaml" if stem else "")
    if not file:
        return ["torchrun", "--standalone", "--nproc_per_node", count] if processes > 1 else ["python"]
    words = ["accelerate", "launch", "--config_file", file]
    if processes > 1:
        words += [*["--multi_gpu"] * ("_x" not in file), "--num_processes", count]
    return [*words, "--mixed_precision", precision] if precision else words
