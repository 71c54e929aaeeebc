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

from pretrain.base.entry import exit_on_bad_input
from pretrain.base.errors import BadInput
from pretrain.recipe import rules, translate
from pretrain.recipe.keys import ABSENT, AUTO, FIELDS, MODEL_KEYS, OPTIONAL, SIZES, SLICES, TYPES, Recipe, deal, fixed
from pretrain.recipe.rules import either, nearest, shown, type_name

log = logging.getLogger(__name__)

# Of a recipe, that it may take no minutes to read: lists and mappings within each other, values, bytes.
DEEPEST, MOST_VALUES, MOST_BYTES = 10, 100_000, 2**20
SECRET = re.compile(r"token$|secret|password|api_?key", re.IGNORECASE)
# A value, where argparse before Python 3.14 takes -1e-3 for a flag.
NEGATIVE = re.compile(r"-(\.?[0-9].*|inf(inity)?|nan)$", re.IGNORECASE)
RECIPE = "recipes/gpt2_124m.yaml"  # where none is given
RUN_RECIPE = "recipe.yaml"  # the name of a run folder's
METAVARS = {int: "N", float: "X", bool: "true|false"}
USUAL: tuple[str, ...] = (
    "data_files",
    "dataset_name",
    "data_dir",
    "run_name",
    "max_steps",
    "max_hours",
    "learning_rate",
    "optimizer",
)
USUAL += ("per_device_train_batch_size",)


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice (PyYAML keeps the last one silently), tags, and what takes minutes.

    A few aliases of aliases stand for more values than any memory holds, and PyYAML fails at tags in many ways.
    """

    def __init__(self, text: str):
        super().__init__(text)
        self._depth = 0
        # Of each composed node: its values and depth, aliases expanded.
        self._extents: dict[object, tuple[int, int]] = {}

    def compose_node(self, parent, index):
        event = self.peek_event()
        if tag := getattr(event, "tag", None):
            self._refuse(event, f"{shown(tag.replace('tag:yaml.org,2002:', '!!'))} is a tag; write the value itself")
        self._depth += 1
        node = super().compose_node(parent, index) if self._depth <= DEEPEST else None
        self._depth -= 1
        if node is not None and not isinstance(event, yaml.AliasEvent):
            pairs = node.value if isinstance(node, yaml.MappingNode) else ()
            inner = node.value if isinstance(node, yaml.SequenceNode) else [each for pair in pairs for each in pair]
            below = [self._extents[each] for each in inner]
            self._extents[node] = 1 + sum(n for n, _ in below), 1 + max((depth for _, depth in below), default=0)
        values, depth = self._extents.get(node, (0, DEEPEST + 1))  # an alias within itself has none
        if self._depth + depth > DEEPEST or values > MOST_VALUES:
            self._refuse(event, f"stands for more than {MOST_VALUES:,} values, or nests more than {DEEPEST} deep")
        return node

    def construct_object(self, node, deep=False):
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:  # an impossible date, an integer of 5,000 digits
            self._refuse(node, f"{shown(node.value)}: {str(error).partition(';')[0]}")

    def _refuse(self, place, why: str) -> typing.NoReturn:
        raise yaml.YAMLError(f"line {place.start_mark.line + 1}: {why}")

    def construct_mapping(self, node, deep=False):
        seen = {}
        for key_node, _ in node.value:
            name = self.construct_object(key_node, deep=True)
            if not isinstance(name, typing.Hashable):
                self._refuse(key_node, "a key must be a plain word")
            if name in seen:
                self._refuse(key_node, f"{shown(name)} is given twice (first in line {seen[name]}); keep one of them")
            seen[name] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)


def _with_numbers(values: dict[Any, Any]) -> dict[Any, Any]:
    """Return keys with those values as numbers that are to be numbers, in a mixture's sources too."""
    numbers = {"weight"} | {name for name, wanted in TYPES.items() if wanted in (int, float)}
    found = {name: rules.number_of(value) if name in numbers else value for name, value in values.items()}
    if isinstance(found.get("sources"), list):
        found["sources"] = [_with_numbers(each) if isinstance(each, dict) else each for each in found["sources"]]
    return found


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
    return recipe, modes, reader_argv


def refuse_idle_tasks(recipe: Recipe, flags: Mapping[str, Any]) -> None:
    """Raise BadInput for tasks that a command names and no step scores."""
    if "tasks" in flags and not recipe.evaluation.task_steps:
        raise BadInput(f"--tasks {shown(flags['tasks'])}: has no effect with task_steps = 0; add --task_steps 250")


def show_translation(text: str) -> None:
    """Write another program's command in our words, and a line for each word that has no counterpart.

    Raises BadInput where nothing of it is known.
    """
    from pretrain.base import console  # here, for a refusal at the start needs no package

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
        value: dict[str, Any] = {"action": "store_true"} if wanted is bool else {"metavar": type_name(wanted).upper()}
        modes.add_argument(f"--{name}", help=help, **value)
    for title, part in SLICES.items():
        group = parser.add_argument_group(title, part.__doc__)
        for field in dataclasses.fields(part):
            if field.name not in USUAL and TYPES[field.name] != list[dict]:  # mappings do not fit into a flag
                _add_flag(group, field.name)
    given = vars(parse_flags(parser, argv))
    if "size" in given:
        given |= shape_of_size(given.pop("size"), given)
    chosen = {}
    for name in extras.keys() & given.keys():
        text = given.pop(name)
        try:
            chosen[name] = text if extras[name][0] is bool else extras[name][0](text)
        except ValueError:
            raise BadInput(f"--{name} {text}: must be {type_name(extras[name][0])}") from None
    return given, chosen


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
    words = "|".join(list(field.metadata["choices"] or ())[: rules.MANY]) or METAVARS.get(wanted, "TEXT") + "|auto" * (
        name in AUTO
    )
    default = "" if field.default is ABSENT else f" (default: {shown(field.default)})"
    many: dict[str, Any] = {"nargs": "+"} if rules.is_list(wanted) else {}
    group.add_argument(f"--{name}", metavar=words, help=(field.metadata["help"] + default).replace("%", "%%"), **many)


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Return the parsed flags; ``--a-b`` is ``--a_b``.

    Raises BadInput for a flag that the parser does not know, naming the nearest one, and for one given twice.
    """
    actions = parser._option_string_actions
    names = [flag[2:] for flag in actions if flag.startswith("--")]
    actions |= {flag.replace("_", "-"): action for flag, action in actions.items()}
    parser._negative_number_matcher = NEGATIVE
    parser.error = _refuse  # type: ignore[method-assign]  # its own would exit with a usage text
    read, first = parser._get_values, {}

    def read_once(action: argparse.Action, words: list[str]) -> Any:
        if action.option_strings and first.setdefault(action.dest, words) is not words:
            both = [shown([action.option_strings[-1], *each]) for each in (first[action.dest], words)]
            raise BadInput(f"{', '.join(both)}: given twice; keep one of them")
        return read(action, words)

    parser._get_values = read_once  # type: ignore[method-assign, assignment]  # called each time that a flag is given
    if re.search(r"\0-h\0[01]\0", "\0".join(["", *argv, ""])):  # llm.c's HellaSwag, which would print the help instead
        command = translate.command_of(parser.prog, argv)
        raise BadInput([translate.answer("-h") or "", f"the whole command here: {command}"])
    known, unknown = parser.parse_known_args(list(argv))
    if unknown:
        faults, foreign = [], False
        for word in unknown:
            flag = word.split("=")[0]  # its value may be a secret
            if word.startswith("-"):
                answer = translate.answer(flag)
                foreign |= answer is not None
                faults.append(answer or f"{flag}: no such flag{nearest(flag.lstrip('-'), names, '--')}")
        if foreign and (command := translate.command_of(parser.prog, argv)):
            faults.append(f"the whole command here: {command}")
        raise BadInput(faults or f"{unknown[0]}: is not a flag; every value follows a --key")
    return known


def load_recipe(path: Path, flags: dict[str, Any] | None = None) -> Recipe:
    """Read a recipe file, lay ``flags`` (as typed, text) over it, and check the whole.

    Raises BadInput with every fault found: file, key, value, rule, remedy.
    """
    values, wrong, faults = _with_numbers(read_file(path)), [], []
    if path.name == RUN_RECIPE:
        _bring_up_to_date(values)
    flags = flags or {}
    for name, text in flags.items():
        try:
            values[name] = rules.from_text(text, name)
        except ValueError:
            wrong.append(f"--{name} {shown(text)}: must be {rules.wanted_name(name)}")
    _begin_from_model(values)
    split_is_stated = "tokenizer_split" in values
    for name in [name for name in values if name not in FIELDS]:
        secret = "; secrets come from the environment or a login only" if SECRET.search(shown(name)) else ""
        unknown = f"{shown(name)}: no such key{secret or nearest(shown(name), FIELDS)}"
        faults.append((not secret and translate.answer(str(name))) or unknown)
    for name, field in FIELDS.items():
        needed = field.default is ABSENT and not (values.get("init_from") and name in MODEL_KEYS)
        if needed and (name not in values or values[name] is None and name in OPTIONAL):
            faults.append(f"{name} is missing: {field.metadata['help']}. It has no default; state it")
        elif name in values:
            found = rules.key_faults(name, values[name])
            if name in flags:  # the file is not to blame
                wrong += [fault.replace(f"{name} = ", f"--{name} ", 1) for fault in found]
            else:
                faults += found
    if not faults and not wrong:
        for name, field in FIELDS.items():
            value = values.get(name, field.default)
            values[name] = float(value) if TYPES[name] is float and name not in OPTIONAL else value
        if values["warmup_steps"] > values["max_steps"]:
            asked, values["warmup_steps"] = values["warmup_steps"], max(1, values["max_steps"] // 4)
            log.info(
                f"warmup_steps = {asked} is longer than the run, max_steps = {values['max_steps']}: the learning rate "
                f"rises over the first {values['warmup_steps']}, a quarter of it"
            )
        elif 2 * values["warmup_steps"] >= values["max_steps"] > 1 and path.name != RUN_RECIPE:  # said as the run began
            log.info(
                f"warmup_steps = {values['warmup_steps']} is half of max_steps = {values['max_steps']} or more: the "
                f"learning rate rises for so long; a tenth is usual: --warmup_steps {-(-values['max_steps'] // 10)}"
            )
        few = 20 <= values["max_steps"] < 2 * values["eval_steps"]  # a shorter run is a trial
        if few and path.name != RUN_RECIPE:
            log.info(
                f"eval_steps = {values['eval_steps']} is more than half of max_steps = {values['max_steps']}: the curve of "
                f"the validation loss has few points; for ten: --eval_steps {values['max_steps'] // 10}"
            )
        faults += rules.recipe_faults(path, values, flags)
    if faults or wrong:
        raise BadInput(wrong + [f"{_blamed(path, fault, flags)}: {fault}" for fault in faults])
    run_name = path.stem if values["run_name"] is None else values["run_name"]
    run_dir = values["output_dir"] or f"runs/{run_name}"
    if values["tokenizer"] == "bpe" and not split_is_stated:
        with contextlib.suppress(BadInput):  # the run does not exist yet
            values["tokenizer_split"] = load_recipe(Path(run_dir) / RUN_RECIPE).data.tokenizer_split  # its ids stay
    return deal(values | {"run_name": run_name, "output_dir": run_dir})


def _blamed(path: Path, fault: str, flags: Mapping[str, Any]) -> str:
    """Return what has brought a fault: the flags that its text names, else the file."""
    named = [f"--{name} {shown(value)}" for name, value in flags.items() if re.search(rf"\b{name} = ", fault)]
    return ", ".join(named) or str(path)


def refuse_changed_science(where: Path, before: dict[str, Any], recipe: Recipe) -> None:
    """Raise BadInput with each key whose value is not the one that the run at ``where`` began with."""
    defaults = {name: field.default for name, field in FIELDS.items() if field.default is not ABSENT}
    then = {name: before.get(name, defaults.get(name)) for name in fixed(recipe)}  # a key may be younger than the run
    changed = {name: now for name, now in fixed(recipe).items() if then[name] != now}
    faults = [f"{name} = {shown(then[name])}, asked for {shown(now)}" for name, now in changed.items()]
    if len(faults) > 1:
        words = (
            f"{where}: another run, {len(faults)} keys of which are fixed. Give another --run_name, or set them back:"
        )
        raise BadInput([words, *(f"  {fault}" for fault in faults)])
    for name, now in changed.items():
        raise BadInput(f"{where}: {faults[0]}: fixed for a run. {_way_on(name, then, now, recipe)}")


def _way_on(name: str, then: Mapping[str, Any], now: Any, recipe: Recipe) -> str:
    """Return what to do about a key that is fixed; a finished run is trained longer by another command."""
    run = recipe.saving.run_dir
    if name != "max_steps" or now <= (then[name] or now) or not (run / "model").is_dir():
        return "Give another --run_name, or set it back"
    command, more = f"python train.py --recipe {shlex.quote(f'{run}/recipe.yaml')}", now - then[name]
    if then["lr_scheduler_type"] in ("wsd", "constant"):
        return f"To train it on: {command} --extend_steps {more}"
    new = shlex.join(["--init_from", str(run), "--run_name", f"{recipe.saving.name}-2", "--output_dir", f"{run}-2"])
    return f"Its learning rate has ended. A new run from its weights: {command} {new} --max_steps {more}"


def read_file(path: Path) -> dict[str, Any]:
    """Return the keys and values of a YAML file, unchecked. Raises BadInput where it is not a mapping."""
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
        text = data.decode("utf-8") if len(data) <= MOST_BYTES else ""
    except FileNotFoundError:
        folder = path.parent if path.parent != Path() or any(Path().glob("*.yaml")) else Path("recipes")
        near = sorted(str(p) for p in folder.glob("*.yaml"))
        raise BadInput(f"{path}: no such recipe{nearest(str(folder / f'{path.stem}.yaml'), near)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{shown(path)}: cannot be read as text: {getattr(error, 'strerror', error)}") from None
    if len(data) > MOST_BYTES:
        raise BadInput(f"{path}: not a recipe: has more than {MOST_BYTES:,} bytes; name many files by a glob")
    try:
        values = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        where = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
            where = f"line {error.problem_mark.line + 1}: {error.problem}"
        raise BadInput(f"{path}: not a recipe: {where:.300}") from None
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
        if values.get("architecture", "") is None:  # none stands for the default
            del values["architecture"]
        return
    if os.path.isdir(f"{source}/model"):  # noqa: PTH112  (of a name that is too long Path's own raises)
        source = values["init_from"] = str(Path(source) / "model")
    values.setdefault("tokenizer", source)
    for name in MODEL_KEYS:
        values.setdefault(name, None)


def _refuse(message: str) -> typing.NoReturn:
    raise BadInput(message)
