"""A recipe file and flags become a Recipe, checked as a whole before anything is written. No torch: --help is instant."""

import argparse
import contextlib
import dataclasses
import logging
import os
import re
import shlex
import sys
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pretrain.base import console, layout
from pretrain.base.entry import exit_on_bad_input
from pretrain.base.errors import BadInput
from pretrain.recipe import rules, translate
from pretrain.recipe.keys import ABSENT, AUTO, FIELDS, MODEL_KEYS, OPTIONAL, SIZES, SLICES, TYPES, Recipe, deal, fixed
from pretrain.recipe.rules import either, nearest, shown

log = logging.getLogger(__name__)

# A value, where argparse before Python 3.14 takes -1e-3 for a flag.
NEGATIVE = re.compile(r"-(\.?[0-9].*|inf(inity)?|nan)$", re.IGNORECASE)
SECRET = re.compile(r"token$|secret|password|api_?key", re.IGNORECASE)
RECIPE = "recipes/gpt2_124m.yaml"  # where none is given
RUN_RECIPE = "recipe.yaml"  # the name of a run folder's
METAVARS = {int: "N", float: "X", bool: "true|false"}
USUAL = ["data_files", "dataset_name", "data_dir", "run_name", "max_steps", "max_hours", "learning_rate", "optimizer"]
USUAL += ["per_device_train_batch_size"]


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice; PyYAML keeps the last one silently."""

    def construct_mapping(self, node, deep=False):
        seen: dict[str, yaml.Node] = {}
        for name, _ in node.value:
            if (first := seen.setdefault(str(name.value), name)) is not name:
                twice = f"{name.value} is given twice (first in line {first.start_mark.line + 1}); keep one of them"
                raise yaml.MarkedYAMLError(problem=twice, problem_mark=name.start_mark)
        return super().construct_mapping(node, deep)


def _with_numbers(values: dict[Any, Any]) -> dict[Any, Any]:
    """Return keys with those values as numbers that are to be numbers, in a mixture's sources too."""
    numbers = {"weight"} | {name for name, wanted in TYPES.items() if wanted in (int, float)}
    found = {name: rules.number_of(value) if name in numbers else value for name, value in values.items()}
    if isinstance(found.get("sources"), list):
        found["sources"] = [_with_numbers(each) if isinstance(each, dict) else each for each in found["sources"]]
    return found


PROFILE_UPDATES = 13  # what --profile takes: the first ones are left out (pretrain/run/profile.py)
# Flags of train.py that are not recipe keys, as read_flags takes them.
TRAIN_MODES = {
    "eval_only": (bool, "score the newest checkpoint (or init_from): validation split, tasks; then stop"),
    "profile": (bool, "record a few updates, the main process's, into profile/ of the run folder"),
    "extend_steps": (int, "train a finished wsd run so many steps longer, from before its decay phase, as another run"),
    "push_pending": (str, "send what waits in this run folder's hub/ to the Hub; then stop"),
    "translate": (str, "print another trainer's command in our words, and what has no counterpart; then stop"),
}


@exit_on_bad_input
def refuse_at_once(argv: Sequence[str]) -> None:
    """Answer ``--help``, and a command of train.py that flags and recipe alone make wrong; needs no torch.

    Returns the exit status, 0 where the command may continue.
    """
    parse_training(argv)


def parse_training(argv: Sequence[str]) -> tuple[Recipe | None, dict[str, Any], list[str]]:
    """Read the command line of train.py.

    Returns: the recipe, None with push_pending, which needs none; the modes given; and the argv by which another script
    reads the same recipe. Raises BadInput with every fault found.
    """
    if argv[:1] == ["--translate"] and len(argv) > 1:
        show_translation(argv[1] if len(argv) == 2 else shlex.join(argv[1:]))
        raise SystemExit(0)
    flags, modes = read_flags(argv, "Pre-train GPT-2 from a recipe.", TRAIN_MODES)
    if "translate" in modes:
        raise BadInput("--translate: stands alone, before the whole command between quotes")
    if "push_pending" in modes:
        if flags or len(modes) > 1:
            raise BadInput(f"--push_pending {modes['push_pending']}: stands alone; leave the other flags out")
        return None, modes, []
    reader_argv = argv_of(flags)
    recipe = load_recipe(Path(flags.pop("recipe", RECIPE)), flags)
    if "eval_only" not in modes:
        refuse_idle_tasks(recipe, flags)
    max_steps = recipe.schedule.max_steps
    if "profile" in modes and "extend_steps" not in modes and max_steps < PROFILE_UPDATES:
        raise BadInput(
            f"--profile: max_steps = {max_steps}, and a profile takes {PROFILE_UPDATES} updates; use --max_steps "
            f"{PROFILE_UPDATES} or more, or leave out --profile"
        )
    return recipe, modes, reader_argv


def refuse_idle_tasks(recipe: Recipe, flags: Mapping[str, Any]) -> None:
    """Raise BadInput for tasks that a command names and no step scores."""
    if "tasks" in flags and not recipe.evaluation.task_steps:
        raise BadInput(f"--tasks {shown(flags['tasks'])}: has no effect with task_steps = 0; add --task_steps 250")


def show_translation(text: str) -> None:
    """Write another program's command in our words, and a line for each word that has no counterpart.

    Raises BadInput where nothing of it is known.
    """
    command, notes = translate.translate(sys.stdin.read() if text == "-" else text)
    try:
        parse_training(shlex.split(command.partition(" train.py ")[2]))
    except BadInput as error:
        notes += [f"it is refused: {line}" for line in error.lines]
    console.write("\n".join([command, *notes, ""]))


def argv_of(flags: Mapping[str, str | list[str]]) -> list[str]:
    """Return the argv that gives these flags, whatever their values are."""
    argv = []
    for name, value in flags.items():
        texts = [value] if isinstance(value, str) else value
        argv += [f"--{name}={texts[0]}"] if len(texts) == 1 else [f"--{name}", *texts]
    return argv


def read_flags(
    argv: Sequence[str], description: str, extras: Mapping[str, tuple[type, str]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read ``--recipe FILE --key value ...``.

    Args:
        argv: what stands after the script's name.
        description: first line of ``--help``.
        extras: flags that are not recipe keys: type (bool: no value follows) and help.

    Returns: the recipe's flags given, and ``recipe``, the file, as typed; and the extras given, by name.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--recipe FILE] [--key value ...]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    usual = parser.add_argument_group("usual")
    usual.add_argument("--recipe", metavar="FILE", help=f"default: {RECIPE}")
    for name in USUAL:
        _add_flag(usual, name)
    usual.add_argument("--size", metavar="|".join(SIZES), help="n_layer, n_head and n_embd of this GPT-2")
    modes = parser.add_argument_group("instead, or beside")  # not shown where it is empty
    for name, (wanted, help) in extras.items():
        if wanted is bool:
            modes.add_argument(f"--{name}", help=help, action="store_true")
        else:
            modes.add_argument(f"--{name}", help=help, type=wanted, metavar=METAVARS.get(wanted, "TEXT"))
    for title, part in SLICES.items():
        group = parser.add_argument_group(title, part.__doc__)
        for field in dataclasses.fields(part):
            if field.name not in USUAL and TYPES[field.name] != list[dict]:  # mappings do not fit into a flag
                _add_flag(group, field.name)
    given = vars(parse_flags(parser, argv))
    if "size" in given:
        given |= shape_of_size(given.pop("size"), given)
    return given, {name: given.pop(name) for name in extras.keys() & given.keys()}


def shape_of_size(size: str, given: Collection[str] = (), sizes: Mapping[str, tuple] = SIZES) -> dict[str, str]:
    """Return the flags that a size stands for; raises BadInput for an unknown one, or beside other flags of the shape."""
    names = ("n_layer", "n_head", "n_embd")
    faults = [f"--size {size} and --{name}: both give the shape; leave one out" for name in names if name in given]
    if size not in sizes:
        faults.append(f"--size {size}: must be {either(list(sizes))}")
    if faults:
        raise BadInput(faults)
    return dict(zip(names, map(str, sizes[size]), strict=True))


def _add_flag(group: argparse._ArgumentGroup, name: str) -> None:
    field, wanted = FIELDS[name], TYPES[name]
    about, choices = field.metadata, () if wanted in (int, float) else field.metadata["allowed"]
    words = "|".join(choices[: rules.MANY]) or METAVARS.get(wanted, "TEXT") + "|auto" * (name in AUTO)
    default = "" if field.default is ABSENT else f" (default: {shown(field.default)})"
    many: dict[str, Any] = {"nargs": "+"} if rules.is_list(wanted) else {}
    group.add_argument(f"--{name}", metavar=words, help=(about["help"] + default).replace("%", "%%"), **many)


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed flags; ``--a-b`` is ``--a_b``.

    Raises BadInput for a flag that the parser does not know, naming the nearest one, and for one given twice.
    """
    parser._negative_number_matcher = NEGATIVE
    parser.error = _refuse  # type: ignore[method-assign]  # its own would exit with a usage text
    words = [re.sub("^--[^=]+", lambda flag: "--" + flag[0][2:].replace("-", "_"), word) for word in argv]
    given = [word.partition("=")[0] for word in words if word.startswith("--")]
    if twice := [flag for flag in dict.fromkeys(given) if given.count(flag) > 1]:
        raise BadInput(f"{', '.join(twice)}: given twice; keep one of them")
    names = [flag[2:] for flag in parser._option_string_actions if flag.startswith("--")]
    # A misspelt flag is named before argparse misses the right one.
    unknown = [flag for flag in given if flag[2:] not in names and " " not in flag]
    if not unknown:
        known, unknown = parser.parse_known_args(words)
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]  # a value may be a secret
    faults = [_unknown(flag, names, "--") for flag in flags]
    if any(map(translate.answer, flags)) and (command := translate.command_of(parser.prog, argv)):
        faults.append(f"without what is named above the command here is: {command}")
    if unknown:
        raise BadInput(
            faults
            or f"{unknown[0]}: is not a flag; every value follows a --key (another trainer's command: --translate)"
        )
    return known


def load_recipe(path: Path, flags: Mapping[str, Any] | None = None) -> Recipe:
    """Read a recipe file, lay ``flags`` (as typed, text) over it, and check the whole.

    Raises BadInput with every fault found: file, key, value, rule, remedy.
    """
    values, flags = _with_numbers(read_file(path)), flags or {}
    if path.name == RUN_RECIPE:
        _bring_up_to_date(values)
    values |= {name: rules.from_text(text, name) for name, text in flags.items()}
    _begin_from_model(values)
    split_is_stated = "tokenizer_split" in values
    faults = [_unknown(str(name), FIELDS) for name in values if name not in FIELDS]
    for name, field in FIELDS.items():
        needed = field.default is ABSENT and not (values.get("init_from") and name in MODEL_KEYS)
        if needed and (name not in values or values[name] is None and name in OPTIONAL):
            faults.append(f"{name} is missing: {field.metadata['help']}. It has no default; state it")
        elif name in values and (rule := rules.key_fault(name, values[name])):
            faults.append(f"{name} = {shown(values[name])}: {rule}")
    if not faults:
        values = {name: values.get(name, field.default) for name, field in FIELDS.items()}
        values |= {name: float(values[name]) for name in values if TYPES[name] is float and values[name] is not None}
        values["run_name"] = path.stem if values["run_name"] is None else values["run_name"]
        values["output_dir"] = values["output_dir"] or f"runs/{values['run_name']}"
        _settle_warmup(values)
        if path.name != RUN_RECIPE:  # said as the run began
            _advise(values)
        faults = list(rules.recipe_faults(values, flags))
    if faults:
        raise BadInput(_blamed(path, fault, flags) for fault in faults)
    if values["tokenizer"] == "bpe" and not split_is_stated:
        with contextlib.suppress(BadInput):  # the run does not exist yet
            there = load_recipe(Path(values["output_dir"]) / RUN_RECIPE)
            values["tokenizer_split"] = there.data.tokenizer_split  # its ids stay
    return deal(values)


def _unknown(name: str, known: Collection[str], dashes: str = "") -> str:
    """Return the fault of a key, or flag with its ``dashes``, that nothing has; a secret is not repeated."""
    if SECRET.search(name):
        return f"{name}: no such key; secrets come from the environment or a login only"
    kind = "flag" if dashes else "key"
    return translate.answer(name) or f"{name}: no such {kind}{nearest(name.lstrip('-'), known, dashes)}"


def _settle_warmup(values: dict[str, Any]) -> None:
    """Shorten a warm-up that is longer than the run."""
    asked, steps = values["warmup_steps"], values["max_steps"]
    if asked > steps:
        values["warmup_steps"] = quarter = max(1, steps // 4)
        log.info(
            f"warmup_steps = {asked} is longer than the run, max_steps = {steps}: shortened to a quarter, {quarter}"
        )


def _advise(values: Mapping[str, Any]) -> None:
    """Log what is allowed and seldom meant."""
    warmup, steps, evaluations = values["warmup_steps"], values["max_steps"], values["eval_steps"]
    if 2 * warmup >= steps > 1:
        usual = f"a tenth is usual: --warmup_steps {-(-steps // 10)}"
        log.info(f"warmup_steps = {warmup} is at least half of max_steps = {steps}; {usual}")
    if 20 <= steps < 2 * evaluations:  # a shorter run is a trial
        few = "the curve of the validation loss has few points"
        log.info(f"eval_steps = {evaluations}, max_steps = {steps}: {few}; for ten: --eval_steps {steps // 10}")


def _blamed(path: Path, fault: str, flags: Mapping[str, Any]) -> str:
    """Return a fault behind what has brought it: the flags that its text names, else the file."""
    named = {name: f"--{name} {shown(value)}" for name, value in flags.items() if re.search(rf"\b{name} = ", fault)}
    if fault.partition(" = ")[0] in named and len(named) == 1:  # the flag has said it
        fault = fault.partition(": ")[2]
    return f"{', '.join(named.values()) or path}: {fault}"


def refuse_changed_science(where: Path, before: dict[str, Any], recipe: Recipe) -> None:
    """Raise BadInput with each key whose value is not the one that the run at ``where`` began with."""
    defaults = {name: field.default for name, field in FIELDS.items() if field.default is not ABSENT}
    then = {name: before.get(name, defaults.get(name)) for name in fixed(recipe)}  # a key may be younger than the run
    changed = {name: now for name, now in fixed(recipe).items() if then[name] != now}
    if changed:
        raise BadInput(
            f"{where}: {name} = {shown(then[name])}, asked for {shown(now)}: fixed for a run. "
            f"{_way_on(name, then, now, recipe)}"
            for name, now in changed.items()
        )


def _way_on(name: str, then: Mapping[str, Any], now: Any, recipe: Recipe) -> str:
    """Return what to do about a key that is fixed; a finished run is trained longer by another command."""
    run = recipe.saving.run_dir
    if name != "max_steps" or now <= (then[name] or now) or not (run / layout.MODEL_FOLDER).is_dir():
        return "Give another --run_name, or set it back"
    command = f"python train.py --recipe {shlex.quote(f'{run}/recipe.yaml')}"
    more = now - then[name]
    has_checkpoint = any(layout.STEP.fullmatch(path.name) for path in recipe.saving.checkpoints.glob("step-*"))
    if has_checkpoint and then["lr_scheduler_type"] in ("wsd", "constant"):
        return f"To train it on: {command} --extend_steps {more}"

    finish = layout.read_finish(run)
    if finish and finish.stopped_early:
        reason = f"Early stopping ended it at step {finish.step}. "
        if has_checkpoint:
            reason += f"To continue it to step {then[name]}: {command} --early_stopping_patience 0. "
    elif has_checkpoint or then["lr_scheduler_type"] not in ("wsd", "constant"):
        reason = "Its learning rate has ended. "
    else:
        reason = "It has no checkpoint to continue from. "
    new = shlex.join(["--init_from", str(run), "--run_name", f"{recipe.saving.name}-2", "--output_dir", f"{run}-2"])
    return f"{reason}A new run from its weights: {command} {new} --max_steps {more}"


def read_file(path: Path) -> dict[str, Any]:
    """Return the keys and values of a YAML file, unchecked. Raises BadInput where it is not a mapping."""
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        places = (str(path), f"recipes/{path.stem}.yaml")
        near = [rules.nearest_beside(place, lambda file: file.suffix == ".yaml") for place in places]
        raise BadInput(f"{path}: no such recipe{near[0] or near[1]}") from None
    except (OSError, yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date, another encoding
        where = str(error)
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
            where = f"line {error.problem_mark.line + 1}: {error.problem}"
        raise BadInput(f"{path}: not a recipe: {where}") from None
    if not isinstance(values, dict):
        raise BadInput(f"{path}: a recipe is a mapping of `key: value` lines, this is {type(values).__name__}")
    return values


def _bring_up_to_date(values: dict[str, Any]) -> None:
    """Give a run folder's recipe today's names and values: HellaSwag had keys of its own, a bpe had GPT-2's split."""
    if values.get("tokenizer") == "bpe":
        values.setdefault("tokenizer_split", "gpt2")
    steps, files = values.pop("hellaswag_steps", 0), values.pop("hellaswag_files", None) or []
    if steps or files:
        values |= {"tasks": ["hellaswag"], "task_steps": steps, "task_files": [f"hellaswag={file}" for file in files]}


def _begin_from_model(values: dict[str, Any]) -> None:
    """With init_from: name the model within a run folder, its tokenizer, and leave out what it brings along."""
    source = values.get("init_from")
    if not isinstance(source, str):
        values["architecture"] = values.get("architecture") or FIELDS["architecture"].default
        return
    if os.path.isdir(f"{source}/model"):  # noqa: PTH112  (of a name that is too long Path's own raises)
        source = values["init_from"] = str(Path(source) / "model")
    values.setdefault("tokenizer", source)
    for name in MODEL_KEYS:
        values.setdefault(name, None)


def _refuse(message: str) -> typing.NoReturn:
    raise BadInput(message)
