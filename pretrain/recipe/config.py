"""The recipe: every number of a run, from a YAML file and flags, checked as a whole before anything is written.

A recipe is one flat mapping. Its science has no defaults: the file states it. Places, cadence and reports have
the defaults seen below. A flag ``--key value`` wins over the file.
"""

import argparse
import contextlib
import dataclasses
import difflib
import math
import re
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from pretrain.base.errors import BadInput, exit_on_bad_input
from pretrain.base.redaction import redact

ABSENT = dataclasses.MISSING
Auto = Literal["auto"]
SECRET = re.compile(r"token$|secret|password|api_?key", re.IGNORECASE)
RUN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
TRACKERS = ("wandb", "tensorboard", "trackio")


def key(help: str, *, default: Any = ABSENT, kind: str = "science", low=None, high=None, choices=None) -> Any:
    """Describe one recipe key. ``kind``: science (fixed for a run), data (fixed by its contents), run (may change)."""
    about = {"help": help, "kind": kind, "low": low, "high": high, "choices": choices}
    return dataclasses.field(default=default, metadata=about)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run. Keys keep the order of meaning: data, model, batch, optimizer, schedule, looking, saving."""

    # Data: `data_dir`, else `data_files`, else `sources` (a mixture), else `dataset_name`.
    dataset_name: str | None = key(
        "data set of the Hub, or python_stdlib (the running Python's own source)", default=None, kind="data"
    )
    dataset_config_name: str | None = key("subset of the data set, for example sample-10BT", default=None, kind="data")
    dataset_revision: str | None = key(
        "branch, tag or commit of the data set; pinned to a commit at first contact", default=None, kind="data"
    )
    text_column: str = key(
        "column of the data set, or field of the JSON lines, with the text", default="text", kind="data"
    )
    data_files: list[str] | None = key(
        "files: paths, globs or https URLs. Text (UTF-8): each file is one document. Parquet, JSON lines, CSV: each row "
        "is one",
        default=None,
        kind="data",
    )
    validation_files: list[str] | None = key(
        "files of the same kind that are the validation split; else validation_fraction (text) or validation_tokens",
        default=None,
        kind="data",
    )
    validation_fraction: float = key(
        "text files, python_stdlib: share kept for validation", default=0.1, kind="data", low=0.0, high=0.9
    )
    validation_tokens: int = key(
        "data sets, Parquet, JSON lines: the first documents, to this many tokens, are kept for validation",
        default=10_485_760,
        kind="data",
        low=1,
        high=2**40,
    )
    data_dir: str | None = key(
        "folder of token shards: ours, llm.c's .bin, build-nanogpt's .npy, nanoGPT's train.bin and val.bin",
        default=None,
        kind="data",
    )
    sources: list[dict] | None = key(
        "a mixture: a list of mappings, each a weight and the data keys above (recipe file only)",
        default=None,
        kind="data",
    )
    tokenizer: str = key(
        "bpe or characters (made from the text), or a Hub id or folder; left out with init_from: the model's",
        kind="data",
    )
    tokenizer_vocab_size: int = key(
        "size of the bpe made from the text", default=4096, kind="data", low=257, high=1_000_000
    )
    limit_tokens: int = key(
        "stop preparing after about this many train tokens; 0 = all", default=0, kind="data", low=0, high=2**50
    )
    shard_tokens: int = key(
        "tokens of a shard; training begins when the first ones are there",
        default=100_000_000,
        kind="data",
        low=2,
        high=2**31 - 1,
    )
    stream_keep: str = key(
        "all, or consumed: delete train shards that no kept checkpoint needs (one epoch only)",
        default="all",
        kind="run",
        choices=("all", "consumed"),
    )
    data_device: str = key(
        "where the ids lie: cpu (memory-mapped files), cuda (whole on the card), auto (cuda when small)",
        default="auto",
        kind="run",
        choices=("auto", "cpu", "cuda"),
    )
    # Model: GPT2Config's own names where it has one, else LlamaConfig's. Left out with init_from: the model's.
    architecture: str | None = key(
        "gpt2, or llama: RMSNorm, rotary positions, SwiGLU, grouped queries", default="gpt2", choices=("gpt2", "llama")
    )
    n_layer: int | None = key("blocks", low=1, high=1000)
    n_head: int | None = key("attention heads", low=1, high=1000)
    num_key_value_heads: int | None = key(
        "llama: heads of keys and values; groups of attention heads share one", default=None, low=1, high=1000
    )
    n_embd: int | None = key("width", low=1, high=100_000)
    intermediate_size: int | None = key(
        "width within the MLP; gpt2: 4 n_embd unless given", default=None, low=1, high=1_000_000
    )
    vocab_size: int | None = key(
        "rows of the embedding: the tokenizer's size, padded for speed", low=2, high=10_000_000
    )
    tie_word_embeddings: bool | None = key("llama: the head is the embedding, as gpt2's always is", default=None)
    rope_theta: float | None = key("llama: base of the rotary positions", default=None, low=1.0, high=1e9)
    sequence_length: int = key("context, in tokens (n_positions)", low=2, high=1_000_000)
    resid_pdrop: float = key("dropout after attention and MLP", low=0.0, high=0.99)
    embd_pdrop: float = key("dropout after the embeddings", low=0.0, high=0.99)
    attn_pdrop: float = key("dropout of attention weights", low=0.0, high=0.99)
    document_mask: bool = key("attention stays within a document, and positions begin again in each", default=False)
    init_from: str | None = key(
        "start from the weights of this GPT-2 or Llama-type model (a run, a folder or a Hub id), not from noise",
        default=None,
    )
    # Batch.
    tokens_per_step: int = key("tokens in one update, over all processes", low=1, high=2**40)
    max_steps: int = key("updates", low=1, high=10**9)
    max_hours: float = key(
        "plan fewer updates, from the speed of the first ones, so that training takes at most this long (looking and "
        "saving come on top); 0 = max_steps as it stands",
        default=0.0,
        low=0.0,
        high=1e6,
    )
    per_device_train_batch_size: int | Auto = key(
        "ceiling for the sequences of one micro-batch; auto = as many as the memory holds, tried before the first step",
        default="auto",
        kind="run",
        low=1,
        high=2**20,
    )
    # Optimizer and schedule.
    optimizer: str = key(
        "adamw; adamw_8bit: its moments in 8 bits; muon: Muon for the blocks' matrices, AdamW for the rest",
        default="adamw",
        choices=("adamw", "adamw_8bit", "muon"),
    )
    learning_rate: float = key("peak learning rate, of both where there are two", low=0.0, high=10.0)
    min_lr_ratio: float = key("last learning rate / peak", low=0.0, high=1.0)
    warmup_steps: int = key("updates of linear warm-up", low=0, high=10**9)
    lr_scheduler_type: str = key(
        "shape after the warm-up; wsd: the peak, then a line down", choices=("cosine", "linear", "wsd", "constant")
    )
    decay_ratio: float = key("wsd: the line down, as a share of max_steps", default=0.2, low=0.0, high=1.0)
    weight_decay: float = key("on tensors of two or more dimensions only", low=0.0, high=10.0)
    muon_momentum: float = key("Muon's momentum", default=0.95, low=0.0, high=0.9999999)
    adam_beta1: float = key("AdamW's beta1", low=0.0, high=0.9999999)
    adam_beta2: float = key("AdamW's beta2", low=0.0, high=0.9999999)
    adam_epsilon: float = key("AdamW's epsilon", low=0.0, high=1.0)
    max_grad_norm: float = key("clip the gradient's norm here; 0 = no clipping", low=0.0, high=1e9)
    label_smoothing: float = key(
        "share of the target's probability that is spread over the whole vocabulary, in training only",
        default=0.0,
        low=0.0,
        high=0.99,
    )
    z_loss: float = key(
        "weight of the mean squared log of softmax's denominator, added in training only",
        default=0.0,
        low=0.0,
        high=1.0,
    )
    seed: int = key("weights and dropout", low=0, high=2**31 - 1)
    data_seed: int = key("order of the windows", low=0, high=2**31 - 1)
    shuffle_block_tokens: int = key(
        "windows are shuffled within blocks of this many tokens; a stream trains when the first block is there",
        default=2**26,
        low=1,
        high=2**40,
    )
    # Machine: what the accelerate YAML has no key for. Nothing here changes what is learned.
    tf32: bool | Auto = key(
        "fp32 matrix products with 10 bits of mantissa; auto = on cards from Ampere on", default="auto", kind="run"
    )
    deterministic: bool = key(
        "only kernels that give the same bits each time: a card, too, then resumes to the bit; slower",
        default=False,
        kind="run",
    )
    gradient_checkpointing: str = key(
        "what the backward pass computes again instead of keeping it: none; mlp: the activation between the MLP's "
        "products; full: whole blocks, about a third more work",
        default="none",
        kind="run",
        choices=("none", "mlp", "full"),
    )
    compile_mode: str = key(
        "torch.compile's mode where the run is compiled; default: what the accelerate YAML says",
        default="default",
        kind="run",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    shard_optimizer: bool = key(
        "each process keeps its share of AdamW's moments (ZeRO-1) instead of all of them", default=False, kind="run"
    )
    ddp_timeout: int = key(
        "seconds after which a process that others wait for counts as lost", default=600, kind="run", low=1, high=10**6
    )
    # Looking: every so many steps; 0 = never.
    logging_steps: int = key("steps between metrics rows", default=10, kind="run", low=0, high=10**9)
    eval_steps: int = key("steps between validations", default=250, kind="run", low=0, high=10**9)
    eval_tokens: int = key("tokens of a validation; 0 = the whole split", default=0, kind="run", low=0, high=2**40)
    sample_steps: int = key("steps between samples", default=0, kind="run", low=0, high=10**9)
    sample_prompts: list[str] = key("what the samples go on from", default=(), kind="run")
    sample_tokens: int = key("new tokens of a sample", default=100, kind="run", low=1, high=10**6)
    hellaswag_steps: int = key("steps between HellaSwag scores", default=0, kind="run", low=0, high=10**9)
    hellaswag_files: list[str] | None = key(
        "HellaSwag's items as JSON lines or Parquet; none: its validation split from the Hub", default=None, kind="run"
    )
    # Saving.
    save_steps: int = key("steps between checkpoints", default=1000, kind="run", low=0, high=10**9)
    save_total_limit: int = key("checkpoints kept: 0 = all, else 2 or more", default=2, kind="run", low=0, high=10**6)
    output_dir: str | None = key("run folder; default runs/<run_name>", default=None, kind="run")
    run_name: str | None = key(
        "name of the run folder, and of the run in trackers; default the recipe's", default=None, kind="run"
    )
    resume_from_checkpoint: str = key(
        "auto, none, a checkpoint's path, or hub://ID (hub://ID@REVISION): one that was pushed",
        default="auto",
        kind="run",
    )
    # Trackers and the Hub: beside metrics.jsonl, which is always written.
    report_to: list[str] | None = key(
        "none, or some of wandb, tensorboard, trackio", default=None, kind="run", choices=("none", *TRACKERS)
    )
    project_name: str = key("of the trackers", default="ursa-minor", kind="run")
    tags: list[str] = key("of the run in wandb, and of the model on the Hub", default=(), kind="run")
    push_to_hub: bool = key("push the model to the Hugging Face Hub, in the background", default=False, kind="run")
    hub_model_id: str | None = key("NAME, or OWNER/NAME; default the run's name, yours", default=None, kind="run")
    hub_private_repo: bool = key("whether a repository that is made is private", default=True, kind="run")
    hub_strategy: str = key(
        "what is pushed: the model at the end; at every_save; with the newest full checkpoint, to resume from; or with "
        "all_checkpoints",
        default="every_save",
        kind="run",
        choices=("end", "every_save", "checkpoint", "all_checkpoints"),
    )
    license: str = key("of the model, for its card: an identifier of the Hub", default="unknown", kind="run")
    language: list[str] = key("of the text, for the card: ISO 639 codes, or code", default=(), kind="run")


FIELDS = {field.name: field for field in dataclasses.fields(Recipe)}
TYPES = typing.get_type_hints(Recipe)
# What a source of a mixture may say. The first line says which source it is; the rest it has from the recipe otherwise.
SOURCE_NAMES = ("data_dir", "data_files", "dataset_name", "dataset_config_name", "dataset_revision", "validation_files")
SOURCE_RULES = ("text_column", "validation_fraction", "validation_tokens", "limit_tokens", "shard_tokens")
MADE = ("bpe", "characters")  # tokenizers that are made from the text
# What a model that is trained on brings along.
LLAMA_KEYS = ("num_key_value_heads", "intermediate_size", "tie_word_embeddings", "rope_theta")
MODEL_KEYS = ("architecture", "n_layer", "n_head", "n_embd", "vocab_size", *LLAMA_KEYS)
OLDER = {"gradient_checkpointing": {False: "none", True: "full"}}  # values of recipes before 2026-11-22


@dataclass(frozen=True)
class Plan:
    """How one step of ``tokens_per_step`` is shared: derived from recipe and machine, printed, never set."""

    num_processes: int
    sequences_per_step: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int


# PyYAML, which follows YAML 1.1, reads 6e-4 and 1e5 as text: it asks for a point and a sign.
EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice (PyYAML keeps the last one silently)."""

    def construct_mapping(self, node, deep=False):
        seen = {}
        for key_node, _ in node.value:
            name = self.construct_object(key_node, deep=True)
            if not isinstance(name, typing.Hashable):
                raise yaml.YAMLError(f"line {key_node.start_mark.line + 1}: a key must be a plain word")
            if name in seen:
                raise yaml.YAMLError(
                    f"line {key_node.start_mark.line + 1}: {name} stands twice (first in line {seen[name]}); "
                    f"keep one of them"
                )
            seen[name] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)


def _exponent(value: Any) -> Any:
    """Return the number that a text such as 6e-4 stands for, an int where it is whole; all else as it is."""
    if not isinstance(value, str) or not EXPONENT.fullmatch(value) or not math.isfinite(number := float(value)):
        return value
    return int(number) if number.is_integer() else number


def _with_numbers(values: dict[Any, Any]) -> dict[Any, Any]:
    """Return keys with those values as numbers that are to be numbers, in a mixture's sources too."""
    numbers = {"weight"} | {name for name, wanted in TYPES.items() if _bare(wanted) in (int, float)}
    found = {name: _exponent(value) if name in numbers else value for name, value in values.items()}
    if isinstance(found.get("sources"), list):
        found["sources"] = [_with_numbers(each) if isinstance(each, dict) else each for each in found["sources"]]
    return found


TRAINS = "Pre-train GPT-2 from a recipe."
# Flags of train.py that are no recipe keys, as parse_command takes them.
TRAIN_MODES = {
    "eval_only": (bool, "score the newest checkpoint (or init_from): validation split, HellaSwag; then stop"),
    "profile": (bool, "record a few updates, the main process's, into profile/ of the run folder"),
    "push_pending": (str, "send what waits in this run folder's hub/ to the Hub; then stop"),
}


@exit_on_bad_input
def refuse_at_once(argv: Sequence[str]) -> None:
    """Answer ``--help``, and a command of train.py that flags and recipe alone make wrong; needs no torch.

    Returns the exit status, 0 where the command may go on.
    """
    if argv[:1] != ["--push_pending"]:  # it stands alone, and needs no recipe
        parse_command(argv, TRAINS, TRAIN_MODES)


def parse_command(
    argv: Sequence[str], description: str, extras: dict[str, tuple[type, str]]
) -> tuple[Recipe, dict[str, Any]]:
    """Read ``--recipe FILE --key value ...``: the file, then the flags over it.

    Args:
        argv: the words after the script's name.
        description: first line of ``--help``.
        extras: flags that are not recipe keys: type (bool: no value follows) and help.

    Returns: the checked recipe (``run_name`` and ``output_dir`` filled in) and the extras given, by name.
    Raises BadInput with every fault found.
    """
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--recipe", default="recipes/gpt2_124m.yaml", metavar="FILE", help="default: %(default)s")
    for name, (wanted, help) in extras.items():
        value = {"action": "store_true"} if wanted is bool else {"metavar": _type_name(wanted).upper()}
        parser.add_argument(f"--{name}", help=help, **value)
    for name, field in FIELDS.items():
        if _is_mappings(TYPES[name]):
            continue  # too much for a flag
        many = {"nargs": "+"} if _is_list(TYPES[name]) else {}
        default = "" if field.default is ABSENT else f" (default: {_shown(field.default)})"
        help = (field.metadata["help"] + default).replace("%", "%%")
        parser.add_argument(f"--{name}", metavar=_type_name(TYPES[name]).upper(), help=help, **many)
    given = vars(parse_flags(parser, argv))
    path = Path(given.pop("recipe"))
    chosen = {}
    for name in extras.keys() & given.keys():
        text = given.pop(name)
        try:
            chosen[name] = text if extras[name][0] is bool else extras[name][0](text)
        except ValueError:
            raise BadInput(f"--{name} {text}: must be {_type_name(extras[name][0])}") from None
    return load_recipe(path, given), chosen


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Return what ``argv`` gives; raises BadInput for a flag that the parser does not know, naming the nearest one."""
    parser.error = _refuse
    known, unknown = parser.parse_known_args(list(argv))
    if unknown:
        names = [flag[2:] for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
        flags = [word.split("=")[0] for word in unknown if word.startswith("-")]  # their values may be secrets
        raise BadInput(
            [f"{flag}: no such flag{_nearest(flag.lstrip('-'), names, '--')}" for flag in flags]
            or f"{unknown[0]}: is no flag; every value follows a --key"
        )
    return known


def load_recipe(path: Path, flags: dict[str, Any] | None = None) -> Recipe:
    """Read a recipe file, lay ``flags`` (as typed, text) over it, and check the whole.

    Raises BadInput with every fault found: file, key, value, rule, remedy.
    """
    values, faults = _read_file(path)
    values = _with_numbers(values)
    for name, text in (flags or {}).items():
        try:
            values[name] = _from_text(text, TYPES[name])
        except ValueError:
            faults.append(f"--{name} {_shown(text)}: must be {_type_name(TYPES[name])}")
    for name, renamed in OLDER.items():
        if isinstance(values.get(name), bool):
            values[name] = renamed[values[name]]
    _begin_from_model(values)
    for name in values:
        if name not in FIELDS:
            secret = "; secrets come from the environment or a login only" if SECRET.search(str(name)) else ""
            faults.append(f"{path}: {name}: no such key{secret or _nearest(str(name), FIELDS)}")
    for name, field in FIELDS.items():
        needed = field.default is ABSENT and not (values.get("init_from") and name in MODEL_KEYS)
        if needed and (name not in values or values[name] is None and _is_optional(TYPES[name])):
            faults.append(f"{path}: {name} is missing: {field.metadata['help']}. It has no default; state it")
        elif name in values:
            faults += _field_faults(path, name, values[name])
    if faults:
        raise BadInput(faults)
    for name, value in values.items():
        if TYPES[name] is float:
            values[name] = float(value)
    recipe = Recipe(**values)
    if faults := _cross_faults(path, recipe):
        raise BadInput(faults)
    run_name = path.stem if recipe.run_name is None else recipe.run_name
    return dataclasses.replace(recipe, run_name=run_name, output_dir=recipe.output_dir or f"runs/{run_name}")


def fill(recipe: Recipe, model: dict[str, Any]) -> Recipe:
    """Return the recipe with the keys of the model that it begins from (MODEL_KEYS) where it does not state them."""
    return dataclasses.replace(recipe, **{name: model[name] for name in MODEL_KEYS if getattr(recipe, name) is None})


def make_plan(recipe: Recipe, num_processes: int, ceiling: int | None = None) -> Plan:
    """Share a step over the processes: the largest micro-batch at or below the ceiling that divides it.

    Args:
        ceiling: instead of the recipe's; without any (auto) a process takes its whole share at once.

    Raises BadInput with the process counts and token counts that work when none does.
    """
    sequences = recipe.tokens_per_step // recipe.sequence_length
    if sequences % num_processes:
        counts = [n for n in range(1, 65) if sequences % n == 0]
        step = recipe.sequence_length * num_processes
        nearest = max(1, round(recipe.tokens_per_step / step)) * step
        raise BadInput(
            f"tokens_per_step = {recipe.tokens_per_step} is {sequences} sequences of {recipe.sequence_length} "
            f"tokens, which {num_processes} processes cannot share equally. Use {_or(counts)} processes, or "
            f"--tokens_per_step {nearest}"
        )
    share = sequences // num_processes
    if ceiling is None and recipe.per_device_train_batch_size != "auto":
        ceiling = recipe.per_device_train_batch_size
    micro_batch = next(size for size in range(min(ceiling or share, share), 0, -1) if share % size == 0)
    return Plan(num_processes, sequences, micro_batch, share // micro_batch)


def public(recipe: Recipe) -> dict[str, Any]:
    """Return every key and value as others may see them: URLs without user, password and query."""
    return {
        name: _public(getattr(recipe, name)) if about.metadata["kind"] == "data" else getattr(recipe, name)
        for name, about in FIELDS.items()
    }


def as_yaml(recipe: Recipe) -> str:
    """Return the public recipe as a YAML file that ``load_recipe`` reads back to the same values."""
    stated = {name: value for name, value in public(recipe).items() if value not in (None, ())}  # these are defaults
    return yaml.safe_dump(stated, sort_keys=False, allow_unicode=True)


def science(recipe: Recipe) -> dict[str, Any]:
    """Return the keys that may not change within a run (data is compared by its contents instead)."""
    return {name: getattr(recipe, name) for name, field in FIELDS.items() if field.metadata["kind"] == "science"}


def refuse_changed_science(where: Path, before: dict[str, Any], recipe: Recipe) -> None:
    """Raise BadInput with each key whose value is not the one that the run at ``where`` began with."""
    younger = {name: field.default for name, field in FIELDS.items() if field.default is not ABSENT}  # than the run
    then = {name: before.get(name, younger.get(name)) for name in science(recipe)}
    faults = [
        f"{where}: {name} = {_shown(then[name])}, asked for {_shown(now)}: fixed for a run. Give another --run_name, "
        f"or set it back"
        for name, now in science(recipe).items()
        if then[name] != now
    ]
    if faults:
        raise BadInput(faults)


def sources(recipe: Recipe) -> list[dict[str, Any]]:
    """Return what the run reads, one dict a source: ``weight``, ``data_dir``, and the arguments of ``find_source``."""
    mixture = [{"weight": 1.0, **{name: getattr(recipe, name) for name in SOURCE_NAMES}}]
    if recipe.sources and not recipe.data_dir and not recipe.data_files:
        mixture = recipe.sources
    size = recipe.tokenizer_vocab_size if recipe.tokenizer == "bpe" else None
    found = []
    for given in mixture:
        rules = {name: given.get(name, getattr(recipe, name)) for name in SOURCE_RULES}
        names = {name: given.get(name) for name in SOURCE_NAMES}
        find = rules | names | {"tokenizer": {"tokenizer": recipe.tokenizer, "size": size}}
        found.append({"weight": float(given["weight"]), "data_dir": find.pop("data_dir"), "find": find})
    return found


def _read_file(path: Path) -> tuple[dict[str, Any], list[str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        folder = path.parent if path.parent != Path() or any(Path().glob("*.yaml")) else Path("recipes")
        near = sorted(str(p) for p in folder.glob("*.yaml"))
        raise BadInput(f"{path}: no such recipe{_nearest(str(folder / f'{path.stem}.yaml'), near)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read as text: {error}") from None
    try:
        values = yaml.load(text, Loader=_StrictLoader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: {error.problem}" if mark else str(error)
        raise BadInput(f"{path}: not a recipe: {where}") from None
    if not isinstance(values, dict):
        raise BadInput(f"{path}: a recipe is a mapping of `key: value` lines, this is {type(values).__name__}")
    return values, []


def _begin_from_model(values: dict[str, Any]) -> None:
    """With init_from: name the model within a run folder, its tokenizer, and leave out what it brings along."""
    source = values.get("init_from")
    if not isinstance(source, str):
        if values.get("architecture", "") is None:  # none is no architecture: the default
            del values["architecture"]
        return
    if (Path(source) / "model").is_dir():
        source = values["init_from"] = str(Path(source) / "model")
    values.setdefault("tokenizer", source)
    for name in MODEL_KEYS:
        values.setdefault(name, None)


def _field_faults(path: Path, name: str, value: Any) -> list[str]:
    field, wanted = FIELDS[name].metadata, TYPES[name]
    where = f"{path}: {name} = {_shown(value)}"
    if (value is None and _is_optional(wanted)) or (value == "auto" and _may_be_auto(wanted)):
        return []
    if not _fits(value, wanted):
        hint = ""
        if isinstance(value, str) and _bare(wanted) in (int, float):
            with contextlib.suppress(ValueError):
                if math.isfinite(number := float(value)):
                    hint = f"; YAML reads this as text, write {_number_text(number, _bare(wanted))}"
        if isinstance(value, str) and _is_list(wanted) and not _is_mappings(wanted):
            hint = f"; write [{value}]"
        return [f"{where}: must be {_type_name(wanted)}, is {_type_name(type(value))}{hint}"]
    for chosen in (value if isinstance(value, list) else [value]) if field["choices"] else ():
        if chosen not in field["choices"]:
            return [f"{where}: must be {_or(field['choices'])}{_nearest(chosen, field['choices'])}"]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        low, high = field["low"], field["high"]
        if not low <= value <= high:  # NaN lies between nothing
            return [f"{where}: must lie between {low} and {high} ({field['help']})"]
    return []


def _cross_faults(path: Path, r: Recipe) -> list[str]:
    faults = []
    if r.tokens_per_step % r.sequence_length:
        nearest = max(1, round(r.tokens_per_step / r.sequence_length)) * r.sequence_length
        faults.append(
            f"{path}: tokens_per_step = {r.tokens_per_step} must be a multiple of sequence_length = "
            f"{r.sequence_length}; the nearest is {nearest}"
        )
    if r.n_embd and r.n_head and r.n_embd % r.n_head:
        heads = [n for n in range(1, r.n_embd + 1) if r.n_embd % n == 0]
        near = min(heads, key=lambda n: abs(n - r.n_head))
        faults.append(f"{path}: n_embd = {r.n_embd} must be a multiple of n_head = {r.n_head}; n_head {near} is")
    faults += _architecture_faults(path, r)
    if r.shard_optimizer and r.optimizer == "adamw_8bit":
        faults.append(
            f"{path}: optimizer = adamw_8bit with shard_optimizer = true: 8-bit moments are not shared out. They are a "
            f"quarter as large; use --shard_optimizer false, or --optimizer adamw"
        )
    if r.warmup_steps > r.max_steps:
        faults.append(
            f"{path}: warmup_steps = {r.warmup_steps} is more than max_steps = {r.max_steps}: the peak would "
            f"never be reached. Use --warmup_steps {max(1, r.max_steps // 20)}"
        )
    if r.lr_scheduler_type == "wsd" and r.warmup_steps + r.decay_ratio * r.max_steps > r.max_steps:
        faults.append(
            f"{path}: warmup_steps = {r.warmup_steps} and the decay, decay_ratio = {r.decay_ratio} of max_steps = "
            f"{r.max_steps}, overlap. Use --decay_ratio {math.floor(100 * (1 - r.warmup_steps / r.max_steps)) / 100}"
        )
    if r.save_total_limit == 1:
        faults.append(
            f"{path}: save_total_limit = 1: two checkpoints are the least that survive damage to the newest one. "
            f"Use 2 or more, or 0 for all"
        )
    if r.sample_steps and not r.sample_prompts:
        faults.append(f"{path}: sample_steps = {r.sample_steps} needs sample_prompts: at least one text")
    if r.sources is not None and not (r.data_dir or r.data_files):
        faults += _mixture_faults(path, r)
    mixture = () if r.data_dir or r.data_files else r.sources or ()
    if r.stream_keep == "consumed" and (r.data_dir or any(source.get("data_dir") for source in mixture)):
        faults.append(
            f"{path}: stream_keep = consumed deletes shards that training has read, and data_dir holds yours. Use "
            f"--stream_keep all"
        )
    if "none" in (r.report_to or ()) and len(r.report_to) > 1:
        faults.append(f"{path}: report_to = {_shown(r.report_to)}: none stands alone; leave it out, or the others")
    run_name = path.stem if r.run_name is None else r.run_name
    if not RUN_NAME.fullmatch(run_name):
        faults.append(f"{path}: run_name = {run_name!r}: letters, digits and . _ - only, no leading dot, at most 64")
    return faults


def _architecture_faults(path: Path, r: Recipe) -> list[str]:
    """Return what of the model's keys the architecture has not, lacks, or cannot do; with init_from the model tells."""
    faults = []
    if r.architecture == "gpt2":
        for name in LLAMA_KEYS:
            if name != "intermediate_size" and getattr(r, name) is not None:
                given = f"{name} = {_shown(getattr(r, name))}"
                faults.append(f"{path}: {given}: GPT-2 has none; leave it out, or use --architecture llama")
    elif r.architecture == "llama" and not r.init_from:
        wide = -(-8 * r.n_embd // 192) * 64
        common = {"num_key_value_heads": r.n_head, "intermediate_size": wide, "tie_word_embeddings": "true"}
        for name, value in (common | {"rope_theta": 10000.0}).items():
            if getattr(r, name) is None:
                help = FIELDS[name].metadata["help"].removeprefix("llama: ")
                faults.append(f"{path}: architecture = llama needs {name} ({help}); usual: --{name} {value}")
        if r.num_key_value_heads and r.n_head % r.num_key_value_heads:
            fits = [n for n in range(1, r.n_head + 1) if r.n_head % n == 0]
            faults.append(
                f"{path}: num_key_value_heads = {r.num_key_value_heads} must divide n_head = {r.n_head}; {_or(fits)} does"
            )
        if r.n_embd % r.n_head == 0 and r.n_embd // r.n_head % 2:
            faults.append(
                f"{path}: n_embd / n_head = {r.n_embd // r.n_head}: rotary positions turn pairs, so it must be even"
            )
    if r.architecture == "llama":
        faults += [
            f"{path}: {name} = {getattr(r, name)}: a Llama-type model has attn_pdrop only; use --{name} 0"
            for name in ("resid_pdrop", "embd_pdrop")
            if getattr(r, name)
        ]
    return faults


def _mixture_faults(path: Path, r: Recipe) -> list[str]:
    """Return what is wrong with ``sources``; each is checked as the recipe's own keys are."""
    faults = []
    if not r.sources:
        faults.append(f"{path}: sources is empty: list at least one mapping with weight and dataset_name or data_files")
    if r.sources and r.tokenizer in MADE:
        faults.append(
            f"{path}: tokenizer = {r.tokenizer}: a mixture needs one tokenizer for all its sources: give a Hub id or a "
            f"folder, for example the tokenizer/ that prepare_data.py made for one of them"
        )
    for number, source in enumerate(r.sources or (), 1):
        where = f"{path}: sources, number {number}"
        for name, value in source.items():
            if name == "weight":
                if not _fits(value, float) or not 0 < value < 1e300:  # YAML has integers that no float holds
                    faults.append(f"{where}: weight = {_shown(value)}: must be a number above 0")
            elif name not in (*SOURCE_NAMES, *SOURCE_RULES):
                faults.append(
                    f"{where}: {name}: no such key{_nearest(str(name), ('weight', *SOURCE_NAMES, *SOURCE_RULES))}"
                )
            else:
                faults += [fault.replace(f"{path}:", f"{where}:", 1) for fault in _field_faults(path, name, value)]
        if "weight" not in source:
            faults.append(f"{where}: weight is missing: its share of the windows, relative to the other weights")
        if not any(source.get(name) for name in ("data_dir", "data_files", "dataset_name")):
            faults.append(f"{where}: give data_dir, data_files or dataset_name")
    return faults


def _refuse(message: str) -> typing.NoReturn:
    raise BadInput(message)


def _bare(wanted: Any) -> Any:
    """``int`` of ``int | None`` and of ``int | Auto``."""
    if _is_optional(wanted) or _may_be_auto(wanted):
        return next(arg for arg in typing.get_args(wanted) if arg not in (type(None), Auto))
    return wanted


def _is_optional(wanted: Any) -> bool:
    return type(None) in typing.get_args(wanted)


def _may_be_auto(wanted: Any) -> bool:
    return Auto in typing.get_args(wanted)


def _is_list(wanted: Any) -> bool:
    return typing.get_origin(_bare(wanted)) is list


def _is_mappings(wanted: Any) -> bool:
    return _bare(wanted) == list[dict]


def _fits(value: Any, wanted: Any) -> bool:
    wanted = _bare(wanted)
    if _is_mappings(wanted):
        return isinstance(value, list) and all(isinstance(item, dict) for item in value)
    if _is_list(wanted):
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if wanted is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))


def _from_text(text: str | list[str], wanted: Any) -> Any:
    """Read a flag's text; raises ValueError where it is not of the wanted type."""
    bare = _bare(wanted)
    if _is_optional(wanted) and text in ("null", "none", ["null"], ["none"]):
        return None
    if _may_be_auto(wanted) and text == "auto":
        return text
    if _is_list(wanted):
        return text
    if bare is bool:
        if text not in ("true", "false"):
            raise ValueError(text)
        return text == "true"
    if bare is int and isinstance(number := _exponent(text), int):
        return number
    return bare(text)


def _type_name(wanted: Any) -> str:
    if _is_mappings(wanted):
        return "a list of mappings"
    if _is_list(wanted):
        return "a list of texts"
    names = {int: "an integer", float: "a number", str: "text", bool: "true or false"}
    name = names.get(_bare(wanted), getattr(wanted, "__name__", str(wanted)))
    return f"{name}, or auto" if _may_be_auto(wanted) else name


def _number_text(number: float, wanted: type) -> str:
    if wanted is int:
        return str(int(number)) if number.is_integer() else "a whole number"
    text = repr(number)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return text


def _nearest(word: str, names, prefix: str = "") -> str:
    match = difflib.get_close_matches(str(word), list(names), n=1)
    return f"; did you mean {prefix}{match[0]}?" if match else ""


def _or(values: Sequence) -> str:
    texts = [str(value) for value in values]
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " or " + texts[-1]


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _public(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_public(one) for one in value]
    return redact(value) if isinstance(value, str) else value


def _shown(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
