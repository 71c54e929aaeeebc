"""Every key of a recipe: its type, range, default, and what it is for, in the slices that the rooms take.

The YAML file is one flat mapping; key names are unique, so ``deal`` knows each one's slice. The science has no
defaults: the file states it. Places, cadence and reports have the defaults below.
"""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from pretrain.base.redaction import redact

ABSENT = dataclasses.MISSING
Auto = Literal["auto"]
TRACKERS = ("wandb", "tensorboard", "trackio")
TRAINED_TOKENIZERS = ("bpe", "characters")  # trained on the text of the run
# What a model that is trained on brings along.
LLAMA_KEYS = ("num_key_value_heads", "intermediate_size", "tie_word_embeddings", "rope_theta")
MODEL_KEYS = ("architecture", "n_layer", "n_head", "n_embd", "vocab_size", *LLAMA_KEYS)
# Names of the architectures (records in model/architectures.py), each with the keys that it needs beside all models'.
ARCHITECTURES: dict[str, tuple[str, ...]] = {"gpt2": (), "llama": LLAMA_KEYS}
OPTIMIZERS = ("adamw", "adamw_8bit", "muon")  # records in optim/optimizers.py
UNSHARDED = ("adamw_8bit",)  # those whose moments cannot be shared out
# What a source of a mixture may state: which one it is, and what else it has from the recipe.
SOURCE_NAMES = ("data_dir", "data_files", "dataset_name", "dataset_config_name", "dataset_revision", "validation_files")
SOURCE_RULES = ("text_column", "validation_fraction", "validation_tokens", "limit_tokens", "shard_tokens")


def key(
    help: str, *, default: Any = ABSENT, kind: str = "science", low=None, high=None, choices=None, only=None
) -> Any:
    """Describe one key.

    Args:
        kind: science (fixed for a run), data (fixed by its contents), run (may change when a run goes on).
        low, high: the range of a number, both ends allowed.
        only: another key and its values, without which this one has no effect.
    """
    about = {"help": help, "kind": kind, "low": low, "high": high, "choices": choices, "only": only}
    return dataclasses.field(default=default, metadata=about)


def _needing(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the ``only`` of a key that some architectures need and the others have not."""
    return "architecture", tuple(each for each, needed in ARCHITECTURES.items() if name in needed)


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is read, and in which order. `data_dir`, else `data_files`, else `sources` (a mixture), else `dataset_name`."""

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
    data_seed: int = key("order of the windows", low=0, high=2**31 - 1)
    shuffle_block_tokens: int = key(
        "windows are shuffled within blocks of this many tokens; a stream trains when the first block is there",
        default=2**26,
        low=1,
        high=2**40,
    )


@dataclass(frozen=True, kw_only=True)
class Model:
    """GPT2Config's own names where it has one, else LlamaConfig's. What init_from's model brings along may be left out."""

    architecture: str | None = key(
        "gpt2, or llama: RMSNorm, rotary positions, SwiGLU, grouped queries",
        default="gpt2",
        choices=tuple(ARCHITECTURES),
    )
    n_layer: int | None = key("blocks", low=1, high=1000)
    n_head: int | None = key("attention heads", low=1, high=1000)
    num_key_value_heads: int | None = key(
        "llama: heads of keys and values; groups of attention heads share one",
        default=None,
        low=1,
        high=1000,
        only=_needing("num_key_value_heads"),
    )
    n_embd: int | None = key("width", low=1, high=100_000)
    intermediate_size: int | None = key(
        "width within the MLP; gpt2: 4 n_embd unless given", default=None, low=1, high=1_000_000
    )
    vocab_size: int | None = key(
        "rows of the embedding: the tokenizer's size, padded for speed", low=2, high=10_000_000
    )
    tie_word_embeddings: bool | None = key(
        "llama: the head is the embedding, as gpt2's always is", default=None, only=_needing("tie_word_embeddings")
    )
    rope_theta: float | None = key(
        "llama: base of the rotary positions", default=None, low=1.0, high=1e9, only=_needing("rope_theta")
    )
    sequence_length: int = key("context, in tokens (n_positions)", low=2, high=1_000_000)
    resid_pdrop: float = key("dropout after attention and MLP", low=0.0, high=0.99, only=("architecture", ("gpt2",)))
    embd_pdrop: float = key("dropout after the embeddings", low=0.0, high=0.99, only=("architecture", ("gpt2",)))
    attn_pdrop: float = key("dropout of attention weights", low=0.0, high=0.99)
    init_from: str | None = key(
        "start from the weights of this GPT-2 or Llama-type model (a run, a folder or a Hub id), not from noise",
        default=None,
    )
    seed: int = key("weights and dropout", low=0, high=2**31 - 1)
    gradient_checkpointing: str = key(
        "what the backward pass computes again instead of keeping it: none; mlp: the activation between the MLP's "
        "products; full: whole blocks, about a third more work",
        default="none",
        kind="run",
        choices=("none", "mlp", "full"),
    )


@dataclass(frozen=True, kw_only=True)
class Loss:
    """What is made small in training; evaluation is the mean of -log p always."""

    document_mask: bool = key("attention stays within a document, and positions begin again in each", default=False)
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


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How much text one update sees."""

    tokens_per_step: int = key("tokens in one update, over all processes", low=1, high=2**40)
    per_device_train_batch_size: int | Auto = key(
        "ceiling for the sequences of one micro-batch; auto = as many as the memory holds, tried before the first step",
        default="auto",
        kind="run",
        low=1,
        high=2**20,
    )


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What makes an update of gradients."""

    optimizer: str = key(
        "adamw; adamw_8bit: its moments in 8 bits; muon: Muon for the blocks' matrices, AdamW for the rest",
        default="adamw",
        choices=OPTIMIZERS,
    )
    weight_decay: float = key("on tensors of two or more dimensions only", low=0.0, high=10.0)
    muon_momentum: float = key("Muon's momentum", default=0.95, low=0.0, high=0.9999999, only=("optimizer", ("muon",)))
    adam_beta1: float = key("AdamW's beta1", low=0.0, high=0.9999999)
    adam_beta2: float = key("AdamW's beta2", low=0.0, high=0.9999999)
    adam_epsilon: float = key("AdamW's epsilon", low=0.0, high=1.0)
    max_grad_norm: float = key("clip the gradient's norm here; 0 = no clipping", low=0.0, high=1e9)
    shard_optimizer: bool = key(
        "each process keeps its share of AdamW's moments (ZeRO-1) instead of all of them", default=False, kind="run"
    )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How many updates, and the learning rate of each."""

    max_steps: int = key("updates", low=1, high=10**9)
    max_hours: float = key(
        "plan fewer updates, from the speed of the first ones, so that training takes at most this long (evaluating and "
        "saving come on top); 0 = max_steps as it stands",
        default=0.0,
        low=0.0,
        high=1e6,
    )
    learning_rate: float = key("peak learning rate, of both where there are two", low=0.0, high=10.0)
    min_lr_ratio: float = key(
        "last learning rate / peak", low=0.0, high=1.0, only=("lr_scheduler_type", ("cosine", "linear", "wsd"))
    )
    warmup_steps: int = key("updates of linear warm-up", low=0, high=10**9)
    lr_scheduler_type: str = key(
        "shape after the warm-up; wsd: the peak, then a line down", choices=("cosine", "linear", "wsd", "constant")
    )
    decay_ratio: float = key(
        "wsd: the line down, as a share of max_steps",
        default=0.2,
        low=0.0,
        high=1.0,
        only=("lr_scheduler_type", ("wsd",)),
    )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is measured during training, every so many steps; 0 = never."""

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


@dataclass(frozen=True, kw_only=True)
class Saving:
    """The run folder and its checkpoints."""

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

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.output_dir or f"runs/{self.name}")

    @property
    def name(self) -> str:
        """The run's name, which a loaded recipe always has."""
        return self.run_name or ""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the accelerate YAML has no key for. Nothing here changes what is learned."""

    tf32: bool | Auto = key(
        "fp32 matrix products with 10 bits of mantissa; auto = on cards from Ampere on", default="auto", kind="run"
    )
    deterministic: bool = key(
        "only kernels that give the same bits each time: a card, too, then resumes to the bit; slower",
        default=False,
        kind="run",
    )
    compile_mode: str = key(
        "torch.compile's mode where the run is compiled; default: what the accelerate YAML says",
        default="default",
        kind="run",
        choices=("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    ddp_timeout: int = key(
        "seconds after which a process that others wait for counts as lost", default=600, kind="run", low=1, high=10**6
    )


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Trackers, beside metrics.jsonl, which is always written."""

    report_to: list[str] | None = key(
        "none, or some of wandb, tensorboard, trackio", default=None, kind="run", choices=("none", *TRACKERS)
    )
    project_name: str = key("of the trackers", default="ursa-minor", kind="run")
    tags: list[str] = key("of the run in wandb, and of the model on the Hub", default=(), kind="run")


@dataclass(frozen=True, kw_only=True)
class Hub:
    """What is pushed to the Hugging Face Hub."""

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


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One run: every key, in slices."""

    data: Data
    model: Model
    loss: Loss
    batch: Batch
    optimizer: Optimizer
    schedule: Schedule
    evaluation: Evaluation
    saving: Saving
    machine: Machine
    tracking: Tracking
    hub: Hub


SLICES = typing.get_type_hints(Recipe)
FIELDS = {field.name: field for part in SLICES.values() for field in dataclasses.fields(part)}
TYPES = {name: wanted for part in SLICES.values() for name, wanted in typing.get_type_hints(part).items()}


def deal(values: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a flat mapping of keys."""
    parts = {
        name: part(**{field.name: values[field.name] for field in dataclasses.fields(part) if field.name in values})
        for name, part in SLICES.items()
    }
    return Recipe(**parts)


def flat(recipe: Recipe) -> dict[str, Any]:
    """Return every key and its value."""
    return {name: value for part in SLICES for name, value in vars(getattr(recipe, part)).items()}


def replace(recipe: Recipe, **changes: Any) -> Recipe:
    """Return the recipe with other values of some keys."""
    return deal(flat(recipe) | changes)


def public(recipe: Recipe) -> dict[str, Any]:
    """Return every key and value as others may see them: URLs without user, password and query."""
    return {
        name: _public(value) if FIELDS[name].metadata["kind"] == "data" else value
        for name, value in flat(recipe).items()
    }


def as_yaml(recipe: Recipe) -> str:
    """Return the public recipe as a YAML file that ``load_recipe`` reads back to the same values."""
    stated = {name: value for name, value in public(recipe).items() if value not in (None, ())}  # these are defaults
    return yaml.safe_dump(stated, sort_keys=False, allow_unicode=True)


def science(recipe: Recipe) -> dict[str, Any]:
    """Return the keys that may not change within a run (data is compared by its contents instead)."""
    return {name: value for name, value in flat(recipe).items() if FIELDS[name].metadata["kind"] == "science"}


@dataclass(frozen=True, kw_only=True)
class WantedSource:
    """A source that a run reads: its own keys, and the recipe's where it states none.

    Attributes:
        weight: its share of the windows, relative to the others'.
        data_dir: a folder of shards; None: its text is found by the other keys.
        tokenizer: what decides the ids: its name and, where it is trained on the text, its size.
    """

    weight: float
    data_dir: str | None
    data_files: list[str] | None
    validation_files: list[str] | None
    dataset_name: str | None
    dataset_config_name: str | None
    dataset_revision: str | None
    text_column: str
    validation_fraction: float
    validation_tokens: int
    limit_tokens: int
    shard_tokens: int
    tokenizer: dict[str, Any]


def sources(data: Data) -> list[WantedSource]:
    """Return what the run reads: one source, or those of a mixture."""
    mixture: list[dict[str, Any]] = [{"weight": 1.0, **{name: getattr(data, name) for name in SOURCE_NAMES}}]
    if data.sources and not data.data_dir and not data.data_files:
        mixture = data.sources
    tokenizer = {"tokenizer": data.tokenizer, "size": data.tokenizer_vocab_size if data.tokenizer == "bpe" else None}
    found = []
    for given in mixture:
        rules = {name: given.get(name, getattr(data, name)) for name in SOURCE_RULES}
        names: dict[str, Any] = {name: given.get(name) for name in SOURCE_NAMES}
        found.append(WantedSource(weight=float(given["weight"]), tokenizer=tokenizer, **names, **rules))
    return found


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _public(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_public(one) for one in value]
    return redact(value) if isinstance(value, str) else value
