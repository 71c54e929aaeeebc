"""Every key of a recipe: its type, range, default, and what it is for, in the sections that packages use.

The YAML file is one flat mapping; key names are unique, so ``deal`` knows each one's slice. The science has no
defaults: the file states it. Places, cadence and reports have the defaults below.
"""

import dataclasses
import functools
import os
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from glob import escape, has_magic
from pathlib import Path
from typing import Any, Literal

import yaml

from ursa_minor.base import paths, run_files
from ursa_minor.base.redaction import redact_url
from ursa_minor.recipe.effects import (
    AnyOf,
    Condition,
    KeyIs,
    KeyIsSet,
    ListIncludes,
    ModeIs,
    SourceIs,
)
from ursa_minor.recipe.source_kind import STDLIB, SourceKind

ABSENT = dataclasses.MISSING
Auto = Literal["auto"]
# Names of trackers: of Accelerate's classes (accelerate.tracking).
TRACKERS = (
    "aim",
    "clearml",
    "comet_ml",
    "dvclive",
    "mlflow",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
)
TRAINED_TOKENIZERS = ("bpe", "characters")  # trained on the text of the run
# What a model that is trained on brings along.
LLAMA_KEYS = ("num_key_value_heads", "intermediate_size", "tie_word_embeddings", "rope_theta")
MODEL_KEYS = ("architecture", "n_layer", "n_head", "n_embd", "vocab_size", *LLAMA_KEYS)
# Names of the architectures (definitions in model/architectures.py), each with the keys that it needs beside all models'.
ARCHITECTURE_KEYS: dict[str, tuple[str, ...]] = {
    "gpt2": (),
    "llama": LLAMA_KEYS,
}
# Names of the optimizers (definitions in optim/optimizers.py), and whether moments (ZeRO-1) and weights (FSDP2) may be sharded.
OPTIMIZER_CAN_SHARD = {"adamw": True, "adamw_8bit": False, "muon": True}
# A data_dir that is fetched from the Hub: id, revision (%2F stands for /) and folder.
REPOSITORY = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+?))?/?")
# MultiBLiMP's languages, ISO 639-3, and how many pairs each has (lm-evaluation-harness 0.4.13, multiblimp/README.md).
_ROWS = Path(__file__).with_name("multiblimp.csv").read_text(encoding="utf-8").split()[1:]
MULTIBLIMP = {language: int(pairs) for language, pairs in (row.split(",") for row in _ROWS)}
# Tasks that a model can be scored on (definitions in evaluation/tasks/).
TASK_NAMES: tuple[str, ...] = (
    "arc_challenge",
    "arc_easy",
    "blimp",
    "hellaswag",
    "lambada_openai",
    "piqa",
    "winogrande",
    *(f"multiblimp_{code}" for code in MULTIBLIMP),
)
# Keys of a source in a mixture: those that say which source it is, and those that default to the recipe's values.
SOURCE_NAMES = (
    "data_dir",
    "data_files",
    "dataset_name",
    "dataset_config_name",
    "dataset_revision",
    "validation_files",
)
SOURCE_RULES: tuple[str, ...] = (
    "text_column",
    "token_column",
    "validation_fraction",
    "validation_tokens",
)
SOURCE_RULES += ("limit_tokens", "shard_tokens")
# Keys that choose the data source, of which a recipe has one, and keys that describe only that source.
SOURCE_CHOICES = ("data_dir", "data_files", "sources", "dataset_name")
SOURCE_KEYS: tuple[str, ...] = (*SOURCE_CHOICES, "dataset_config_name", "dataset_revision")
SOURCE_KEYS += ("validation_files", "text_column", "token_column")
# Keys of a recipe that --init_from replaces: the model's shape and its tokenizer.
REPLACED_BY_INIT_FROM: tuple[str, ...] = ("tokenizer", "tokenizer_vocab_size", "tokenizer_split")
REPLACED_BY_INIT_FROM += ("initializer_range", *MODEL_KEYS)


# Kinds of keys whose value is a path; all but "folder" also take a URL.
PathKind = Literal[
    "folder",  # a folder on this machine, and no URL
    "path",  # a file, a folder or a glob
    "name",  # a file or folder that exists; any other value is a Hub id or a word such as auto
    "repository file",  # the same, also looked up in the repository
    "assignment",  # NAME=FILE
]
WORDS = ("auto", "none", *TRAINED_TOKENIZERS)  # no paths, where the kind is "name"


def key(
    kind: str,
    default: Any,
    help: str,
    allowed: tuple = (),
    *,
    effect: tuple[Condition, ...] = (),
    off: Any = None,
    path: PathKind | None = None,
) -> Any:
    """Describe one key.

    Args:
        kind: science (fixed for a run), data (fixed by its contents), run (may change when a run is resumed).
        allowed: (min, max) for numbers; the permitted values for strings.
        effect: the conditions under which the key has an effect; empty if it always has one.
        off: the value that switches the key off, which is permitted even where the key has no effect. A default of
            0, false or none is such a value, too.
        path: what kind of path the value is; None if it is not a path.
    """
    off_values = (None, off) if default else (None, off, default)
    metadata = {
        "help": help,
        "kind": kind,
        "allowed": allowed,
        "effect": effect,
        "off": off_values,
        "path": path,
    }
    return dataclasses.field(default=default, metadata=metadata)


hyperparameter, data_key, run_key = (
    functools.partial(key, kind) for kind in ("science", "data", "run")
)
required_key = functools.partial(key, "science", ABSENT)  # science that the file states
FALLING = ("cosine", "linear", "wsd")  # learning rates

# Conditions that several keys share.
GPT2_ONLY = (KeyIs("architecture", ("gpt2", None)),)
_LLAMA_TYPES = [name for name, names in ARCHITECTURE_KEYS.items() if names]
LLAMA_ONLY = (KeyIs("architecture", (*_LLAMA_TYPES, None)),)
MUON = (KeyIs("optimizer", ("muon",)),)
HUB_DATASET = (SourceIs((SourceKind.DATASET,)),)
TABULAR = SourceIs((SourceKind.DATASET, SourceKind.TABLES))
TOKENIZED = SourceIs((SourceKind.TEXT, SourceKind.TABLES, SourceKind.STDLIB, SourceKind.DATASET))
NEEDS_PREPARATION = SourceIs((*TOKENIZED.kinds, SourceKind.TOKEN_FILES))
BPE = (KeyIs("tokenizer", ("bpe",)), TOKENIZED)
NO_VALIDATION_FILES = KeyIs("validation_files", (None,))
VALIDATED = (KeyIsSet("eval_steps", "250"),)
VALIDATED_OR_EVAL_ONLY = (AnyOf((*VALIDATED, ModeIs("eval_only"))),)
SCORED = (AnyOf((KeyIsSet("task_steps", "250"), ModeIs("eval_only"))),)
SAMPLED = (KeyIsSet("sample_steps", "500"),)
SAMPLED_AT_RANDOM = (*SAMPLED, KeyIsSet("sample_temperature", "0.8"))
EVALUATED = (AnyOf((*VALIDATED, KeyIsSet("task_steps", "250"), *SAMPLED)),)
PUSHED = (KeyIsSet("push_to_hub", "true"),)
TRACKED = (ListIncludes("report_to", TRACKERS, "a tracker"),)
TAGGED = (AnyOf((ListIncludes("report_to", ("wandb",), "wandb"), *PUSHED)),)

llama_key = functools.partial(hyperparameter, None, effect=LLAMA_ONLY)


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data and their order. The source is one of `data_dir`, `data_files`, `sources` (a mixture), `dataset_name`."""

    dataset_name: str | None = data_key(
        None, "data set of the Hub, or python_stdlib (the running Python's own source)"
    )
    dataset_config_name: str | None = data_key(
        None, "subset of the data set, for example sample-10BT of fineweb-edu", effect=HUB_DATASET
    )
    dataset_revision: str | None = data_key(
        None, "branch, tag or commit of the data set; a run stays at one commit", effect=HUB_DATASET
    )
    text_column: str = data_key(
        "text",
        "column (or JSON field) that holds the text, where it is not text",
        effect=(TABULAR, KeyIs("token_column", (None,))),
    )
    token_column: str | None = data_key(
        None,
        "column with lists of the tokenizer's ids, for data that is tokenized",
        effect=(TABULAR,),
    )
    data_files: list[str] | None = data_key(
        None, "files: paths, globs, URLs; a text file or a table's row is a document", path="path"
    )
    validation_files: list[str] | None = data_key(
        None,
        "files to validate on; without them a part of data_files is",
        effect=(SourceIs((SourceKind.TEXT, SourceKind.TABLES)),),
        path="path",
    )
    validation_fraction: float = data_key(
        0.1,
        "text, python_stdlib: share kept for validation; 0.01 of a gigabyte",
        (0.0, 0.9),
        effect=(SourceIs((SourceKind.TEXT, SourceKind.STDLIB)), NO_VALIDATION_FILES),
        off=0.0,
    )
    validation_tokens: int = data_key(
        10_485_760,
        "data sets, tables: validation is the first documents, to so many tokens",
        (1, 2**40),
        effect=(TABULAR, NO_VALIDATION_FILES),
    )
    data_dir: str | None = data_key(
        None,
        "folder of token shards: ours, llm.c's .bin, build-nanogpt's .npy, nanoGPT's train.bin and val.bin; "
        "or hf://datasets/OWNER/NAME[@REVISION][/FOLDER], from where they are fetched",
        path="path",
    )
    sources: list[dict] | None = data_key(
        None, "a mixture, in the recipe file: mappings of a weight and the keys above"
    )
    tokenizer: str = data_key(
        ABSENT,
        "bpe or characters (made from your text), a Hub id or a folder; else init_from's",
        path="name",
    )
    tokenizer_vocab_size: int = data_key(
        4096, "size of a bpe made from your text; small for a small model", (257, 10**6), effect=BPE
    )
    tokenizer_split: str = data_key(
        "qwen35",
        "where a bpe splits words: qwen35: for every script; gpt2: also at vowel signs",
        ("qwen35", "gpt2"),
        effect=BPE,
    )
    limit_tokens: int = data_key(
        0,
        "prepare about this many train tokens and no more; 0 = all",
        (0, 2**50),
        effect=(NEEDS_PREPARATION,),
    )
    shard_tokens: int = data_key(
        100_000_000,
        "tokens of a shard; training begins with the first ones",
        (2, 2**31 - 1),
        effect=(TOKENIZED,),
    )
    stream_keep: str = run_key(
        "all",
        "consumed: delete train shards that no kept checkpoint needs (one epoch)",
        ("all", "consumed"),
    )
    prepared_data_dir: str = run_key(
        "data", "where prepared shards are kept", effect=(NEEDS_PREPARATION,), path="folder"
    )
    data_device: str = run_key(
        "auto",
        "where the ids lie: cpu: mapped files; cuda: whole; auto: cuda if small",
        ("auto", "cpu", "cuda"),
    )
    data_seed: int = required_key("order of the windows", (0, 2**31 - 1))
    shuffle_block_tokens: int = hyperparameter(
        2**26, "windows are shuffled within blocks of so many tokens", (1, 2**40)
    )

    @functools.cached_property
    def resolved_sources(self) -> tuple["DataSource", ...]:
        """The sources of the run: those of the mixture, or the single one.

        A source of a mixture has the recipe's value of each key that it does not state, except for
        the keys that identify a source (``SOURCE_NAMES``).
        """
        if not self.sources:
            return (DataSource(**_field_values(self)),)
        shared = _field_values(self) | dict.fromkeys(SOURCE_NAMES)
        return tuple(
            DataSource(**shared | source | {"weight": float(source["weight"])})
            for source in self.sources
        )


@dataclass(frozen=True, kw_only=True)
class DataSource(Data):
    """One source of a run's data, with all keys that apply to it.

    Attributes:
        weight: share of the training windows, relative to the weights of the other sources.
    """

    weight: float = 1.0

    @property
    def is_token_folder(self) -> bool:
        """Whether the source is a local folder of token shards, which needs no preparation."""
        return self.data_dir is not None and not self.data_dir.startswith("hf://")

    @property
    def hub_id(self) -> str | None:
        """The id of the Hub's data set that the source comes from, or None if it is not one."""
        if self.data_dir:
            match = REPOSITORY.fullmatch(self.data_dir)
            return match[1] if match else None
        if self.data_files or self.dataset_name == STDLIB:
            return None
        return self.dataset_name


@dataclass(frozen=True, kw_only=True)
class Model:
    """GPT2Config's own names where it has one, else LlamaConfig's. What init_from's model brings along may be left out."""

    architecture: str | None = hyperparameter(
        "gpt2",
        "gpt2; or llama: RMSNorm, rotary positions, SwiGLU, grouped queries",
        tuple(ARCHITECTURE_KEYS),
    )
    n_layer: int | None = required_key("number of blocks; GPT-2 has 12, 24, 36 or 48", (1, 1000))
    n_head: int | None = required_key("attention heads; n_embd / 64 is usual", (1, 1000))
    num_key_value_heads: int | None = llama_key(
        "llama: heads of keys and values; fewer: a smaller cache in use", (1, 1000)
    )
    n_embd: int | None = required_key("width; GPT-2 has 768, 1024, 1280 or 1600", (1, 100_000))
    intermediate_size: int | None = hyperparameter(
        None, "width within the MLP; gpt2: else 4 n_embd; llama: 8/3 n_embd", (1, 1_000_000)
    )
    vocab_size: int | None = required_key(
        "rows of the embedding: the tokenizer's, padded for speed", (2, 10_000_000)
    )
    tie_word_embeddings: bool | None = llama_key(
        "llama: the head is the embedding, as gpt2's always is"
    )
    rope_theta: float | None = llama_key(
        "llama: base of the rotary positions; 10000 is good", (1.0, 1e9)
    )
    sequence_length: int = required_key(
        "context in tokens, as long as the documents need (n_positions)", (2, 1_000_000)
    )
    resid_pdrop: float = required_key(
        "dropout after attention and MLP; 0 is good, for many epochs try 0.1",
        (0.0, 0.99),
        effect=GPT2_ONLY,
        off=0.0,
    )
    embd_pdrop: float = required_key(
        "dropout after the embeddings", (0.0, 0.99), effect=GPT2_ONLY, off=0.0
    )
    attn_pdrop: float = required_key("dropout of attention weights", (0.0, 0.99))
    init_from: str | None = hyperparameter(
        None,
        "start from this GPT-2 or Llama-type model: a run, a folder or a Hub id (ID@REVISION)",
        path="name",
    )
    initializer_range: float = hyperparameter(
        0.02,
        "standard deviation of the first weights; AdamW on a model 128 wide wants 0.08",
        (1e-6, 1.0),
        effect=(KeyIs("init_from", (None,)),),
    )
    seed: int = required_key("first weights and dropout", (0, 2**31 - 1))
    gradient_checkpointing: str = run_key(
        "none",
        "saves memory: mlp: its activations are computed again; full: blocks, a third more work",
        ("none", "mlp", "full"),
    )


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The training loss; evaluation is always the mean of -log p."""

    document_mask: bool = hyperparameter(
        False, "attention stays within a document; for many short documents a window"
    )
    label_smoothing: float = hyperparameter(
        0.0, "share of a target's probability, spread over the vocabulary", (0.0, 0.99)
    )
    z_loss: float = hyperparameter(
        0.0, "weight of the mean squared log of softmax's denominator; try 1e-4", (0.0, 1.0)
    )

    @property
    def has_objective(self) -> bool:
        """Whether training minimizes something other than the plain cross entropy."""
        return self.label_smoothing > 0 or self.z_loss > 0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How much text one update sees."""

    tokens_per_step: int = required_key(
        "tokens in one update, over all processes; few for a small model", (1, 2**40)
    )
    per_device_train_batch_size: int | Auto = run_key(
        "auto", "most sequences of a micro-batch; auto = what the memory holds", (1, 2**20)
    )


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer of an update."""

    optimizer: str = hyperparameter(
        "adamw",
        "adamw_8bit: moments in 8 bits; muon: Muon for the blocks' matrices, else AdamW; fewer tokens",
        tuple(OPTIMIZER_CAN_SHARD),
    )
    weight_decay: float = required_key(
        "decay of tensors of two or more dimensions; 0.1 is usual", (0.0, 10.0)
    )
    muon_momentum: float = hyperparameter(0.95, "Muon's momentum", (0.0, 0.9999999), effect=MUON)
    adam_beta1: float = required_key("AdamW's beta1; 0.9 is usual", (0.0, 0.9999999))
    adam_beta2: float = required_key(
        "AdamW's beta2; 0.95 is usual, 0.99 where an update sees few tokens", (0.0, 0.9999999)
    )
    adam_epsilon: float = required_key("AdamW's epsilon; 1e-8 is usual", (0.0, 1.0))
    max_grad_norm: float = required_key(
        "clip the gradient's norm here; 1.0 is usual, 0 = no clipping", (0.0, 1e9)
    )
    shard_optimizer: bool = run_key(
        False, "each process keeps its share of the moments (ZeRO-1), to save memory"
    )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How many updates, and the learning rate of each."""

    max_steps: int = required_key("number of updates", (1, 10**9))
    max_hours: float = run_key(
        0.0,
        "wall time from the first update, in hours; fewer updates are planned to fit; 0 = no limit",
        (0.0, 1e6),
    )
    learning_rate: float = required_key(
        "peak learning rate; smaller for a larger model (6e-4 for 124M)", (0.0, 10.0)
    )
    min_lr_ratio: float = required_key(
        "learning rate at step max_steps / peak; 0.1 is usual",
        (0.0, 1.0),
        effect=(KeyIs("lr_scheduler_type", FALLING),),
    )
    warmup_steps: int = required_key(
        "updates of linear warm-up; more than max_steps: a quarter of it", (0, 10**9)
    )
    lr_scheduler_type: str = required_key(
        "shape after the warm-up; wsd: the peak, then a linear decay", (*FALLING, "constant")
    )
    decay_ratio: float = hyperparameter(
        0.2,
        "wsd: the decay phase's share of max_steps, its last steps",
        (0.0, 1.0),
        effect=(KeyIs("lr_scheduler_type", ("wsd",)),),
    )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluations during training, every so many steps; 0 = never."""

    logging_steps: int = run_key(10, "steps between rows of metrics.jsonl", (0, 10**9))
    eval_steps: int = run_key(250, "steps between validations", (0, 10**9))
    eval_on_start: bool = run_key(
        True, "also validate, score and sample before the first update", effect=EVALUATED
    )
    eval_tokens: int = run_key(
        0, "tokens of a validation; 0 = the whole split", (0, 2**40), effect=VALIDATED_OR_EVAL_ONLY
    )
    early_stopping_patience: int = run_key(
        0,
        "end after so many validations without a lower loss; 0 = no",
        (0, 10**6),
        effect=VALIDATED,
    )
    sample_steps: int = run_key(0, "steps between samples", (0, 10**9))
    sample_prompts: list[str] = run_key(
        (),
        "texts that the samples continue; none: beginnings of validation documents",
        effect=SAMPLED,
    )
    sample_tokens: int = run_key(100, "new tokens of a sample", (1, 10**6), effect=SAMPLED)
    sample_temperature: float = run_key(
        0.8, "sampling temperature; 0 = greedy", (0.0, 100.0), effect=SAMPLED
    )
    sample_top_k: int = run_key(
        200,
        "sample among this many likeliest tokens; 0 = all",
        (0, 10**6),
        effect=SAMPLED_AT_RANDOM,
    )
    sample_top_p: float = run_key(
        1.0,
        "sample among the likeliest that hold this probability; 1.0 = all",
        (1e-6, 1.0),
        effect=SAMPLED_AT_RANDOM,
    )
    tasks: list[str] = run_key(
        (), "tasks that the run is scored on (docs/evaluation.md)", TASK_NAMES, effect=SCORED
    )
    task_steps: int = run_key(
        0, "steps between scores of the tasks; small models stay near chance", (0, 10**9)
    )
    task_limit: int = run_key(
        0, "the first so many items of each task; 0 = all", (0, 10**9), effect=SCORED
    )
    task_files: list[str] | None = run_key(
        None,
        "NAME=FILE: a task's items, JSON lines, Parquet or TSV; else the Hub's",
        effect=SCORED,
        path="assignment",
    )

    def files_of(self, task: str) -> list[str] | None:
        """Return the files of a task's items; None: the Hub's."""
        return [
            file.partition("=")[2] for file in self.task_files or () if file.startswith(f"{task}=")
        ] or None


@dataclass(frozen=True, kw_only=True)
class Saving:
    """The run folder and its checkpoints."""

    save_steps: int = run_key(1000, "steps between checkpoints: what a crash can cost", (0, 10**9))
    load_best_model_at_end: bool = run_key(
        False,
        "model/ has the weights of the lowest validation loss, not the last",
        effect=VALIDATED,
    )
    save_total_limit: int = run_key(
        2, "newest checkpoints that are kept: 2 or more; 0 = all", (0, 10**6)
    )
    output_dir: str | None = run_key(None, "run folder; without it runs/<run_name>", path="folder")
    run_name: str | None = run_key(
        None, "name of the run, its folder and in trackers; else the recipe's"
    )
    resume_from_checkpoint: str = run_key(
        "auto", "auto, none, a checkpoint's path, or hub://ID (hub://ID@REVISION)", path="name"
    )

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.output_dir or f"runs/{self.name}")

    @property
    def option_of_another_run(self) -> str:
        """The option that gives a new run another folder: --output_dir where the folder is not runs/<run_name>."""
        usual = Path("runs", self.name)
        return "--run_name" if self.run_dir.absolute() == usual.absolute() else "--output_dir"

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints lie."""
        return self.run_dir / run_files.CHECKPOINTS

    @property
    def name(self) -> str:
        """The run's name, which a loaded recipe always has."""
        return self.run_name or ""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Settings of the machine that the accelerate YAML has no key for. Nothing here changes the result."""

    tf32: bool | Auto = run_key(
        "auto", "fp32 matrix products with 10 bits of mantissa, faster; auto = from Ampere on"
    )
    deterministic: bool = run_key(
        False, "only kernels that repeat their bits: a card, too, resumes to the bit; slower"
    )
    compile_mode: str = run_key(
        "default",
        "torch.compile's mode where the run is compiled; default: the accelerate YAML's",
        ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    ddp_timeout: int = run_key(
        600, "seconds after which a process that others wait for counts as lost", (1, 10**6)
    )


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Trackers, beside metrics.jsonl, which is always written."""

    report_to: list[str] | None = run_key(
        None, "none, or trackers beside metrics.jsonl", ("none", *TRACKERS)
    )
    project_name: str = run_key("ursa-minor", "project name in trackers", effect=TRACKED)
    reference_curve: str | None = run_key(
        None,
        "a published run's losses, drawn beside this one's: a file of recipes/references/",
        path="repository file",
    )
    tags: list[str] = run_key(
        (), "tags of the run in wandb, and of the model on the Hub", effect=TAGGED
    )

    @property
    def names(self) -> list[str]:
        """Which trackers a run reports to."""
        return [name for name in dict.fromkeys(self.report_to or ()) if name != "none"]


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Pushes to the Hugging Face Hub."""

    push_to_hub: bool = run_key(False, "push the model to the Hugging Face Hub, in the background")
    hub_model_id: str | None = run_key(
        None, "repository: NAME, or OWNER/NAME; without it the run's name, yours", effect=PUSHED
    )
    hub_private_repo: bool = run_key(
        True, "whether a repository that is made is private", effect=PUSHED
    )
    hub_strategy: str = run_key(
        "every_save",
        "when the model is pushed; or with the newest full checkpoint, to resume from, or with all of them",
        ("end", "every_save", "checkpoint", "all_checkpoints"),
        effect=PUSHED,
    )
    license: str = run_key(
        "unknown", "license of the model, for its card: an identifier of the Hub"
    )
    language: list[str] = run_key((), "language of the text, for the card: ISO 639 codes, or code")

    @property
    def pushes_checkpoints(self) -> bool:
        """Whether a run can be resumed from what is pushed."""
        return self.push_to_hub and self.hub_strategy in ("checkpoint", "all_checkpoints")


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


SECTIONS = typing.get_type_hints(Recipe)
FIELDS = {field.name: field for part in SECTIONS.values() for field in dataclasses.fields(part)}
# The type of each key, and whether it may also be none or auto.
_HINTS = {
    name: hint for part in SECTIONS.values() for name, hint in typing.get_type_hints(part).items()
}
OPTIONAL_KEYS = {name for name, hint in _HINTS.items() if type(None) in typing.get_args(hint)}
AUTO_KEYS = {name for name, hint in _HINTS.items() if Auto in typing.get_args(hint)}
KEY_TYPES: dict[str, Any] = {
    name: typing.get_args(hint)[0] if name in OPTIONAL_KEYS | AUTO_KEYS else hint
    for name, hint in _HINTS.items()
}


def from_dict(values: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a flat mapping of keys."""
    parts = {
        name: part(
            **{
                field.name: values[field.name]
                for field in dataclasses.fields(part)
                if field.name in values
            }
        )
        for name, part in SECTIONS.items()
    }
    return Recipe(**parts)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return every key and its value."""
    values: dict[str, Any] = {}
    for section in SECTIONS:
        values |= _field_values(getattr(recipe, section))
    return values


def _field_values(section: Any) -> dict[str, Any]:
    """Return the keys of a section and their values, without what it has computed from them."""
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}


def replace(recipe: Recipe, **changes: Any) -> Recipe:
    """Return the recipe with other values of some keys."""
    return from_dict(to_dict(recipe) | changes)


def map_paths(values: Mapping[str, Any], change: Callable[[str, str], str]) -> dict[str, Any]:
    """Return keys and values with ``change(key, path)`` in place of each path, those of ``sources`` included.

    ``change`` also gets URLs, Hub ids and words such as ``auto``. Of NAME=FILE it gets the file. A value of
    another type than the key's is left as it is.
    """

    def changed(name: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [changed(name, item) for item in value]
        if name == "sources" and isinstance(value, dict):
            return map_paths(value, change)
        kind = _path_kind(name)
        if kind is None or not isinstance(value, str):
            return value
        if kind != "assignment":
            return change(name, value)
        task, equals, file = value.partition("=")
        return f"{task}={change(name, file)}" if equals else value

    return {
        name: changed(name, value) if name == "sources" or _path_kind(name) else value
        for name, value in values.items()
    }


def is_local(name: str, path: str) -> bool:
    """Return whether a value of the key ``name`` is a path on this machine, and not a URL, a Hub id or a word."""
    if not path or paths.is_url(path):
        return False
    if _path_kind(name) in ("folder", "path", "assignment"):
        return True
    return path not in WORDS and (Path(path).is_absolute() or os.path.lexists(path))


def absolute(name: str, path: str) -> str:
    """Return the value of a key that is a path so that it means the same in another folder; globs stay globs."""
    if not is_local(name, path) or _is_in_repository(name, path):
        return path
    folder = os.getcwd()  # noqa: PTH109  (a text, to be escaped)
    if has_magic(path) and not os.path.lexists(path):
        folder = escape(folder)
    return str(Path(folder, path))


def shortened(name: str, path: str) -> str:
    """Return the value of a key that is a path as others may see it: the last component of a local path.

    A run's ``model/`` is known by the name of the run.
    """
    if not is_local(name, path) or _is_in_repository(name, path):
        return path
    place = Path(path)
    if place == Path(os.path.expanduser("~")):  # noqa: PTH111  (Path.home raises without a home)
        return "~"
    is_model_folder = place.name == run_files.MODEL_FOLDER
    if is_model_folder and (place.parent / run_files.RECIPE).is_file():
        place = place.parent
    return place.name or path


def _path_kind(name: str) -> PathKind | None:
    return FIELDS[name].metadata["path"] if name in FIELDS else None


def _is_in_repository(name: str, path: str) -> bool:
    """Return whether a path is relative and names a file of the repository, which is found from any folder."""
    if _path_kind(name) != "repository file" or Path(path).is_absolute():
        return False
    file = paths.ROOT / path
    return file.is_file() and (not os.path.lexists(path) or file.samefile(path))


def redacted(recipe: Recipe) -> dict[str, Any]:
    """Return every key and value as others may see them.

    URLs have no user, password and query, and of a local path there is the last component only.
    """
    return map_paths(_without_secrets(recipe), shortened)


def as_yaml(recipe: Recipe) -> str:
    """Return the recipe as the YAML file of a run folder: URLs without secrets, local paths absolute.

    ``load_recipe`` reads it back to the same run from any folder.
    """
    values = map_paths(
        _without_secrets(recipe), lambda name, path: paths.literal(absolute(name, path))
    )
    return _to_yaml(values)


def redacted_yaml(recipe: Recipe) -> str:
    """Return the recipe as a YAML file for others; it does not state output_dir, a place on this machine."""
    values = map_paths(redacted(recipe), lambda name, path: paths.literal(path))
    return _to_yaml(values | {"output_dir": None})


def hyperparameters(recipe: Recipe) -> dict[str, Any]:
    """Return the keys that may not change within a run (data is compared by its contents instead).

    A checkpoint states them and may be pushed or moved, so a local path is shortened.
    """
    science = {
        name: value
        for name, value in to_dict(recipe).items()
        if FIELDS[name].metadata["kind"] == "science"
    }
    return map_paths(science, shortened)


def _without_secrets(recipe: Recipe) -> dict[str, Any]:
    """Return every key and value, URLs without user, password and query."""
    return {
        name: _with_redacted_urls(value) if FIELDS[name].metadata["kind"] == "data" else value
        for name, value in to_dict(recipe).items()
    }


def _to_yaml(values: Mapping[str, Any]) -> str:
    # These are defaults.
    stated = {name: value for name, value in values.items() if value not in (None, ())}
    return yaml.safe_dump(stated, sort_keys=False, allow_unicode=True)


def _with_redacted_urls(value: Any) -> Any:
    """Return the value of a key with each URL in it redacted. A list of sources is a list of dicts."""
    if isinstance(value, dict):
        return {name: _with_redacted_urls(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_redacted_urls(item) for item in value]
    if isinstance(value, str) and paths.is_url(value):
        return redact_url(value)
    return value
