"""Definitions of all recipe keys: name, type, range, default and help text.

A recipe file is one flat mapping with unique key names. In Python, a ``Recipe`` has one frozen
dataclass for each group of keys (``recipe.data``, ``recipe.model``, ...); ``from_dict`` and
``to_dict`` convert between the two forms.

Hyperparameters without a default must be stated in the recipe file. All other keys have the
defaults that are defined here.
"""

# hyperparameter, data_key and runtime_key return a dataclasses.field, which ruff cannot see.
# ruff: noqa: RUF009

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
from ursa_minor.recipe.source_kind import AUTO, DATA_FORMATS, STDLIB, SourceKind

ABSENT = dataclasses.MISSING  # the default of a key that a recipe must state
Auto = Literal["auto"]
# The trackers of Accelerate (accelerate.tracking).
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
# Keys that the model of init_from determines.
LLAMA_KEYS = ("num_key_value_heads", "intermediate_size", "tie_word_embeddings", "rope_theta")
MODEL_KEYS = ("architecture", "n_layer", "n_head", "n_embd", "vocab_size", *LLAMA_KEYS)
# Each architecture (defined in model/architectures.py) and the additional keys that it needs.
ARCHITECTURE_KEYS: dict[str, tuple[str, ...]] = {
    "gpt2": (),
    "llama": LLAMA_KEYS,
}
# Each optimizer (defined in optim/optimizers.py), and whether its state (ZeRO-1) and the weights
# (FSDP2) may be sharded.
OPTIMIZER_CAN_SHARD = {"adamw": True, "adamw_8bit": False, "muon": True}
# A data_dir on the Hub. Groups: id, revision (with %2F for /) and folder.
REPOSITORY = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+?))?/?")
DEFAULT_SPLIT = "train"  # of a data set of the Hub
SPLIT_NAME = re.compile(r"\w+(\.\w+)*")  # as in datasets
BLANK_LINE = "blank_line"  # the document_separator that stands for lines without text


def _read_multiblimp() -> dict[str, int]:
    """Return the languages of MultiBLiMP (ISO 639-3) and the number of sentence pairs of each.

    Source: lm-evaluation-harness 0.4.13, multiblimp/README.md.
    """
    text = Path(__file__).with_name("multiblimp.csv").read_text(encoding="utf-8")
    _header, *rows = text.split()
    pairs_of = {}
    for row in rows:
        language, pairs = row.split(",")
        pairs_of[language] = int(pairs)
    return pairs_of


MULTIBLIMP = _read_multiblimp()
# Benchmark tasks (defined in evaluation/tasks/).
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
# Keys of a source in a mixture that identify the source.
SOURCE_NAMES = (
    "data_dir",
    "data_files",
    "dataset_name",
    "dataset_config_name",
    "dataset_revision",
    "validation_split",
    "validation_files",
)
# Keys of a source in a mixture that default to the value of the recipe.
SOURCE_RULES: tuple[str, ...] = (
    "dataset_split",
    "data_format",
    "text_column",
    "token_column",
    "document_separator",
    "validation_fraction",
    "validation_tokens",
    "limit_tokens",
    "shard_tokens",
)
# Keys that select the data source. A recipe has one data source.
SOURCE_CHOICES = ("data_dir", "data_files", "sources", "dataset_name")
# The same keys, and those that describe only that source.
SOURCE_KEYS: tuple[str, ...] = (
    *SOURCE_CHOICES,
    "dataset_config_name",
    "dataset_revision",
    "dataset_split",
    "validation_split",
    "validation_files",
    "data_format",
    "text_column",
    "token_column",
    "document_separator",
)
# Keys that --init_from replaces: the tokenizer, and what determines the shape and the initial
# weights of the model.
REPLACED_BY_INIT_FROM: tuple[str, ...] = (
    "tokenizer",
    "tokenizer_vocab_size",
    "tokenizer_split",
    "initializer_range",
    *MODEL_KEYS,
)

# When a key may change.
KeyKind = Literal[
    "hyperparameter",  # fixed for a run
    "data",  # fixed for a run through the contents of the data, which are compared instead
    "length",  # fixed for a run through max_steps, which follows from it and is compared instead
    "runtime",  # may change when a run is resumed
]
# Kinds of paths. All but "folder" may also be a URL.
PathKind = Literal[
    "folder",  # a folder on this machine
    "path",  # a file, a folder or a glob
    "name",  # a file or folder that exists; any other value is a Hub id or a word such as auto
    "repository file",  # the same, but a relative path may also be one of the repository
    "assignment",  # NAME=PATH
]
WORDS = ("auto", "none", *TRAINED_TOKENIZERS)  # values of kind "name" that are never paths


def key(
    kind: KeyKind,
    default: Any,
    help: str,
    allowed: tuple = (),
    *,
    effect: tuple[Condition, ...] = (),
    off: Any = None,
    path: PathKind | None = None,
) -> Any:
    """Define one key as a field of a dataclass.

    Args:
        kind: when the key may change.
        default: ``ABSENT`` if a recipe must state the key.
        help: a full sentence for ``--help`` and the documentation.
        allowed: (min, max) for numbers; the permitted values for strings.
        effect: the conditions under which the key has an effect. Empty if it always has one.
        off: the value that disables the key. It is permitted even where the key has no effect, and
            so are None and a default of 0 or false.
        path: the kind of path that the value is, or None if it is not a path.
    """
    off_values = [None, off]
    if not default:
        off_values.append(default)
    metadata = {
        "help": help,
        "kind": kind,
        "allowed": allowed,
        "effect": effect,
        "off": tuple(off_values),
        "path": path,
    }
    return dataclasses.field(default=default, metadata=metadata)


hyperparameter = functools.partial(key, "hyperparameter")
required_hyperparameter = functools.partial(key, "hyperparameter", ABSENT)
data_key = functools.partial(key, "data")
runtime_key = functools.partial(key, "runtime")

MOST_STEPS = 10**9
DECAYING_SCHEDULES = ("cosine", "linear", "wsd")
_MORE_ARCHITECTURES = tuple(name for name, names in ARCHITECTURE_KEYS.items() if names)

# Conditions that several keys share.
GPT2_ONLY = (KeyIs("architecture", ("gpt2", None)),)
LLAMA_ONLY = (KeyIs("architecture", (*_MORE_ARCHITECTURES, None)),)
MUON = (KeyIs("optimizer", ("muon",)),)
HUB_DATASET = (SourceIs((SourceKind.DATASET,)),)
TABULAR = SourceIs((SourceKind.DATASET, SourceKind.TABLES))
TOKENIZED = SourceIs((SourceKind.TEXT, SourceKind.TABLES, SourceKind.STDLIB, SourceKind.DATASET))
NEEDS_PREPARATION = SourceIs((*TOKENIZED.kinds, SourceKind.TOKEN_FILES))
BPE = (KeyIs("tokenizer", ("bpe",)), TOKENIZED)
TEXT_FILES = (SourceIs((SourceKind.TEXT,)),)
NO_VALIDATION_FILES = KeyIs("validation_files", (None,))
NO_VALIDATION_SPLIT = KeyIs("validation_split", (None,))
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


def separator_text(value: str) -> str:
    """Return a document_separator with line breaks and tabs instead of the escapes."""
    text = value.replace("\\n", "\n").replace("\\t", "\t")
    return text.replace("\r\n", "\n")


@dataclass(frozen=True, kw_only=True)
class Data:
    """Data source, tokenizer and order of the data.

    A run has one data source: data_dir, data_files, dataset_name, or a mixture (the key sources of
    a recipe file).
    """

    dataset_name: str | None = data_key(
        None,
        "Name of a data set on the Hub, or python_stdlib for the source code of the Python that "
        "runs the program.",
    )
    dataset_config_name: str | None = data_key(
        None,
        "Configuration (subset) of the Hub data set, for example sample-10BT of fineweb-edu.",
        effect=HUB_DATASET,
    )
    dataset_revision: str | None = data_key(
        None,
        "Branch, tag or commit of the Hub data set. A run keeps the commit that it started with.",
        effect=HUB_DATASET,
    )
    dataset_split: str = data_key(
        DEFAULT_SPLIT,
        "Split of the Hub data set to train on. Slices such as train[:10%] are not supported; "
        "limit_tokens limits the amount of text.",
        effect=HUB_DATASET,
    )
    validation_split: str | None = data_key(
        None,
        "Split of the Hub data set to validate on, for example validation. Without it, the first "
        "documents of dataset_split are used for validation.",
        effect=HUB_DATASET,
    )
    text_column: str = data_key(
        "text",
        "Column of a table, or field of a JSON object, that contains the text.",
        effect=(TABULAR, KeyIs("token_column", (None,))),
    )
    token_column: str | None = data_key(
        None,
        "Column that contains lists of token ids, if the data is already tokenized with the "
        "recipe's tokenizer.",
        effect=(TABULAR,),
    )
    data_files: list[str] | None = data_key(
        None,
        "Text files or tables (Parquet, JSON, CSV, Arrow) to train on, as paths, globs or URLs. "
        "Each text file and each row of a table is one document; see document_separator.",
        path="path",
    )
    document_separator: str | None = data_key(
        None,
        "Text between the documents of a text file, for example <|endoftext|>, in which \\n and "
        "\\t are escapes, or blank_line. null makes each text file one document.",
        effect=TEXT_FILES,
    )
    validation_files: list[str] | None = data_key(
        None,
        "Files to validate on. Without them, a part of data_files is used for validation.",
        effect=(SourceIs((SourceKind.TEXT, SourceKind.TABLES)),),
        path="path",
    )
    data_format: str = data_key(
        AUTO,
        "Format of data_files and validation_files. With auto, the suffix of each name decides; "
        "json_lines is one JSON object per line.",
        (AUTO, *DATA_FORMATS),
        effect=(SourceIs((SourceKind.TEXT, SourceKind.TABLES)),),
        off=AUTO,
    )
    validation_fraction: float = data_key(
        0.1,
        "Fraction of the text that is used for validation (text files and python_stdlib only). "
        "0.01 is enough for a gigabyte of text.",
        (0.0, 0.9),
        effect=(SourceIs((SourceKind.TEXT, SourceKind.STDLIB)), NO_VALIDATION_FILES),
        off=0.0,
    )
    validation_tokens: int = data_key(
        10_485_760,
        "Number of tokens that are used for validation (Hub data sets and tables only). They are "
        "taken from the first documents.",
        (1, 2**40),
        effect=(TABULAR, NO_VALIDATION_FILES, NO_VALIDATION_SPLIT),
    )
    data_dir: str | None = data_key(
        None,
        "Folder of token shards from prepare_data.py, llm.c (.bin), build-nanogpt (.npy), nanoGPT "
        "(train.bin and val.bin), datatrove (.ds) or Megatron-LM (.bin with .idx). Shards are "
        "downloaded from the Hub for hf://datasets/OWNER/NAME[@REVISION][/FOLDER].",
        path="path",
    )
    sources: list[dict] | None = data_key(
        None,
        "Mixture of data sources, which only a recipe file can state. Each source is a mapping "
        "with a weight and the keys of that source.",
    )
    tokenizer: str = data_key(
        ABSENT,
        "Tokenizer to use: bpe or characters (trained on the text of the run), a Hub id, or a "
        "folder. With init_from it defaults to the tokenizer of that model.",
        path="name",
    )
    tokenizer_vocab_size: int = data_key(
        4096,
        "Vocabulary size of a bpe tokenizer that is trained on the text of the run. A small model "
        "needs a small vocabulary.",
        (257, 10**6),
        effect=BPE,
    )
    tokenizer_split: str = data_key(
        "qwen35",
        "Rule by which a trained bpe tokenizer splits text into words. qwen35 suits every script; "
        "gpt2 also splits words at vowel signs.",
        ("qwen35", "gpt2"),
        effect=BPE,
    )
    limit_tokens: int = data_key(
        0,
        "Approximate number of training tokens to prepare. 0 prepares all of them.",
        (0, 2**50),
        effect=(NEEDS_PREPARATION,),
    )
    shard_tokens: int = data_key(
        100_000_000,
        "Number of tokens per shard. Training starts as soon as the first shards are ready.",
        (2, 2**31 - 1),
        effect=(TOKENIZED,),
    )
    stream_keep: str = runtime_key(
        "all",
        "Training shards to keep on disk. consumed deletes shards that no checkpoint needs any "
        "more, and permits one epoch only.",
        ("all", "consumed"),
    )
    prepared_data_dir: str = runtime_key(
        "data",
        "Folder in which prepared shards are stored.",
        effect=(NEEDS_PREPARATION,),
        path="folder",
    )
    data_device: str = runtime_key(
        "auto",
        "Where batches are read from. cpu reads memory-mapped files, cuda copies the training "
        "tokens to the GPU, and auto does so if they take at most 1 GiB.",
        ("auto", "cpu", "cuda"),
    )
    data_seed: int = required_hyperparameter(
        "Random seed for the order of the data.", (0, 2**31 - 1)
    )
    shuffle_block_tokens: int = hyperparameter(
        2**26,
        "Size in tokens of the blocks within which training sequences are shuffled.",
        (1, 2**40),
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
        """The id of the Hub data set that the source comes from, or None if it is not one."""
        if self.data_dir:
            match = REPOSITORY.fullmatch(self.data_dir)
            return match[1] if match else None
        if self.data_files or self.dataset_name == STDLIB:
            return None
        return self.dataset_name


@dataclass(frozen=True, kw_only=True)
class Model:
    """Architecture and initialization of the model.

    Keys have the names of Transformers' GPT2Config or, where it has none, of LlamaConfig. With
    init_from, keys that the loaded model determines may be omitted.
    """

    architecture: str | None = hyperparameter(
        "gpt2",
        "Architecture of the model: gpt2, or llama with RMSNorm, rotary position embeddings, "
        "SwiGLU and grouped-query attention.",
        tuple(ARCHITECTURE_KEYS),
    )
    n_layer: int | None = required_hyperparameter(
        "Number of transformer blocks. GPT-2 models have 12, 24, 36 or 48.", (1, 1000)
    )
    n_head: int | None = required_hyperparameter(
        "Number of attention heads. n_embd / 64 is usual.", (1, 1000)
    )
    num_key_value_heads: int | None = llama_key(
        "Number of key and value heads (llama only). With fewer heads, generation needs a smaller "
        "cache.",
        (1, 1000),
    )
    n_embd: int | None = required_hyperparameter(
        "Width of the hidden states. GPT-2 models have 768, 1024, 1280 or 1600.", (1, 100_000)
    )
    intermediate_size: int | None = hyperparameter(
        None,
        "Width of the MLP. gpt2 uses 4 * n_embd if it is not set; 8/3 * n_embd is usual for llama.",
        (1, 1_000_000),
    )
    vocab_size: int | None = required_hyperparameter(
        "Number of rows of the embedding: the vocabulary size of the tokenizer, padded for speed.",
        (2, 10_000_000),
    )
    tie_word_embeddings: bool | None = llama_key(
        "Whether the output layer shares the weights of the embedding (llama only; gpt2 always "
        "shares them)."
    )
    rope_theta: float | None = llama_key(
        "Base of the rotary position embeddings (llama only). 10000 is usual.", (1.0, 1e9)
    )
    sequence_length: int = required_hyperparameter(
        "Context length in tokens (n_positions). Choose it by the length of the documents.",
        (2, 1_000_000),
    )
    resid_pdrop: float = required_hyperparameter(
        "Dropout probability after attention and MLP. 0 is usual; try 0.1 for many epochs.",
        (0.0, 0.99),
        effect=GPT2_ONLY,
        off=0.0,
    )
    embd_pdrop: float = required_hyperparameter(
        "Dropout probability after the embeddings.", (0.0, 0.99), effect=GPT2_ONLY, off=0.0
    )
    attn_pdrop: float = required_hyperparameter(
        "Dropout probability of the attention weights.", (0.0, 0.99)
    )
    init_from: str | None = hyperparameter(
        None,
        "Initialize the model from a GPT-2 or Llama model: a run folder, a checkpoint, a model "
        "folder, or a Hub id (ID or ID@REVISION).",
        path="name",
    )
    initializer_range: float = hyperparameter(
        0.02,
        "Standard deviation of the initial weights. With AdamW, a model of width 128 reaches a "
        "lower loss with 0.08.",
        (1e-6, 1.0),
        effect=(KeyIs("init_from", (None,)),),
    )
    seed: int = required_hyperparameter(
        "Random seed for the initial weights and dropout.", (0, 2**31 - 1)
    )
    gradient_checkpointing: str = runtime_key(
        "none",
        "Activations to recompute in the backward pass, to save memory. mlp recomputes those of "
        "the MLPs; full recomputes whole blocks, which takes a third more compute.",
        ("none", "mlp", "full"),
    )


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Training loss. The evaluation loss is always the mean cross-entropy."""

    document_mask: bool = hyperparameter(
        False,
        "Restrict attention to tokens of the same document. This suits training sequences that "
        "contain many short documents.",
    )
    label_smoothing: float = hyperparameter(
        0.0,
        "Share of the target's probability that is distributed over the vocabulary.",
        (0.0, 0.99),
    )
    z_loss: float = hyperparameter(
        0.0,
        "Weight of the z-loss, the mean squared logarithm of the softmax denominator. Try 1e-4.",
        (0.0, 1.0),
    )

    @property
    def has_objective(self) -> bool:
        """Whether training minimizes something other than the plain cross entropy."""
        return self.label_smoothing > 0 or self.z_loss > 0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens per update. The number of gradient accumulation steps is computed from them."""

    tokens_per_step: int = required_hyperparameter(
        "Number of tokens per update, over all processes. Small models train well with few tokens "
        "per update.",
        (1, 2**40),
    )
    per_device_train_batch_size: int | Auto = runtime_key(
        "auto",
        "Maximum number of sequences in a micro-batch of one process. auto finds the largest "
        "micro-batch that fits in memory.",
        (1, 2**20),
    )


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """Optimizer and its hyperparameters."""

    optimizer: str = hyperparameter(
        "adamw",
        "Optimizer to use. adamw_8bit stores the moments in 8 bits. muon uses Muon for the "
        "matrices of the blocks and AdamW for all other weights, and needs fewer tokens.",
        tuple(OPTIMIZER_CAN_SHARD),
    )
    weight_decay: float = required_hyperparameter(
        "Weight decay of tensors with two or more dimensions. 0.1 is usual.", (0.0, 10.0)
    )
    muon_momentum: float = hyperparameter(0.95, "Momentum of Muon.", (0.0, 0.9999999), effect=MUON)
    adam_beta1: float = required_hyperparameter(
        "Coefficient beta1 of AdamW. 0.9 is usual.", (0.0, 0.9999999)
    )
    adam_beta2: float = required_hyperparameter(
        "Coefficient beta2 of AdamW. 0.95 is usual; 0.99 suits updates with few tokens.",
        (0.0, 0.9999999),
    )
    adam_epsilon: float = required_hyperparameter(
        "Constant epsilon in the denominator of AdamW. 1e-8 is usual.", (0.0, 1.0)
    )
    max_grad_norm: float = required_hyperparameter(
        "Maximum norm of the gradient; a larger gradient is clipped. 1.0 is usual. 0 disables "
        "clipping.",
        (0.0, 1e9),
    )
    shard_optimizer: bool = runtime_key(
        False, "Shard the optimizer's moments over the processes (ZeRO-1), to save memory."
    )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Length of the run, and learning rate of each update.

    The length is stated by max_steps or by num_train_epochs.
    """

    max_steps: int | None = required_hyperparameter(
        "Total number of updates. Instead of it, num_train_epochs can be stated.", (1, MOST_STEPS)
    )
    num_train_epochs: float | None = key(
        "length",
        None,
        "Number of times that the training text is read, instead of max_steps. It may be a "
        "fraction such as 0.5. Training starts when all data is prepared. Not for streams of "
        "unknown length.",
        (1e-6, 1e9),
    )
    max_hours: float = runtime_key(
        0.0,
        "Time limit in hours, from the first update. The number of updates is reduced to fit. "
        "0 means no limit.",
        (0.0, 1e6),
    )
    learning_rate: float = required_hyperparameter(
        "Peak learning rate. A larger model needs a smaller one; 6e-4 suits 124M parameters.",
        (0.0, 10.0),
    )
    min_lr_ratio: float = required_hyperparameter(
        "Final learning rate as a fraction of the peak learning rate. 0.1 is usual.",
        (0.0, 1.0),
        effect=(KeyIs("lr_scheduler_type", DECAYING_SCHEDULES),),
    )
    warmup_steps: int = required_hyperparameter(
        "Number of updates of linear warm-up. If it exceeds max_steps, a quarter of max_steps is "
        "used.",
        (0, 10**9),
    )
    lr_scheduler_type: str = required_hyperparameter(
        "Learning rate schedule after the warm-up. wsd stays at the peak and then decays linearly.",
        (*DECAYING_SCHEDULES, "constant"),
    )
    decay_ratio: float = hyperparameter(
        0.2,
        "Length of the decay phase of wsd as a fraction of max_steps.",
        (0.0, 1.0),
        effect=(KeyIs("lr_scheduler_type", ("wsd",)),),
    )

    @property
    def total_steps(self) -> int:
        """Total number of updates, which is known: ``max_steps`` is stated or was computed."""
        if self.max_steps is None:
            raise ValueError(
                f"max_steps has not been computed from num_train_epochs = {self.num_train_epochs}"
            )
        return self.max_steps

    @property
    def length_option(self) -> str:
        """The option that states the length of this run."""
        return "--max_steps" if self.num_train_epochs is None else "--num_train_epochs"


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Logging, validation, samples and benchmark tasks during training.

    For each number of steps between them, 0 means never.
    """

    logging_steps: int = runtime_key(
        10, "Number of updates between rows of metrics.jsonl.", (0, 10**9)
    )
    eval_steps: int = runtime_key(250, "Number of updates between validations.", (0, 10**9))
    eval_on_start: bool = runtime_key(
        True,
        "Also validate, evaluate the tasks and generate samples before the first update.",
        effect=EVALUATED,
    )
    eval_tokens: int = runtime_key(
        0,
        "Number of tokens per validation. 0 uses the whole validation split.",
        (0, 2**40),
        effect=VALIDATED_OR_EVAL_ONLY,
    )
    early_stopping_patience: int = runtime_key(
        0,
        "Stop after this number of validations without a lower loss. 0 disables early stopping.",
        (0, 10**6),
        effect=VALIDATED,
    )
    sample_steps: int = runtime_key(0, "Number of updates between samples.", (0, 10**9))
    sample_prompts: list[str] = runtime_key(
        (),
        "Prompts that the samples continue. Without prompts, they continue the beginnings of "
        "validation documents.",
        effect=SAMPLED,
    )
    sample_tokens: int = runtime_key(
        100, "Number of tokens to generate per sample.", (1, 10**6), effect=SAMPLED
    )
    sample_temperature: float = runtime_key(
        0.8, "Sampling temperature. 0 means greedy decoding.", (0.0, 100.0), effect=SAMPLED
    )
    sample_top_k: int = runtime_key(
        200,
        "Number of most likely tokens to sample from. 0 means all tokens.",
        (0, 10**6),
        effect=SAMPLED_AT_RANDOM,
    )
    sample_top_p: float = runtime_key(
        1.0,
        "Total probability of the most likely tokens to sample from. 1.0 means all tokens.",
        (1e-6, 1.0),
        effect=SAMPLED_AT_RANDOM,
    )
    tasks: list[str] = runtime_key(
        (),
        "Benchmark tasks to evaluate the model on, for example hellaswag. docs/evaluation.md lists "
        "them.",
        TASK_NAMES,
        effect=SCORED,
    )
    task_steps: int = runtime_key(
        0,
        "Number of updates between evaluations of the tasks. The scores of small models stay close "
        "to chance.",
        (0, 10**9),
    )
    task_limit: int = runtime_key(
        0,
        "Number of examples to use of each task, from the first one. 0 means all.",
        (0, 10**9),
        effect=SCORED,
    )
    task_files: list[str] | None = runtime_key(
        None,
        "Local files with the examples of tasks (JSON lines, Parquet or TSV), each as NAME=PATH. "
        "Other tasks are downloaded from the Hub.",
        effect=SCORED,
        path="assignment",
    )

    def files_of(self, task: str) -> list[str] | None:
        """Return the local files with the examples of a task, or None to use those of the Hub."""
        files = []
        for assignment in self.task_files or ():
            name, _, file = assignment.partition("=")
            if name == task:
                files.append(file)
        return files or None


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Run folder and checkpoints."""

    save_steps: int = runtime_key(
        1000,
        "Number of updates between checkpoints. A crash loses at most this much work. With 0, "
        "there are no regular ones, but a stop, max_hours, load_best_model_at_end, "
        "keep_checkpoints and the schedules wsd and constant still write some.",
        (0, 10**9),
    )
    load_best_model_at_end: bool = runtime_key(
        False,
        "Write the weights with the lowest validation loss to model/, instead of the last ones.",
        effect=VALIDATED,
    )
    save_total_limit: int = runtime_key(
        2, "Number of newest checkpoints to keep, at least 2. 0 keeps all of them.", (0, 10**6)
    )
    keep_checkpoints: list[str] | None = runtime_key(
        None,
        "Checkpoints to keep for a learning curve, in addition to save_total_limit: log2 (steps 0, "
        "1, 2, 4, ... and the last one), steps (100), and tokens with K, M or B (10M, 1.5B).",
    )
    keep_optimizer: bool = runtime_key(
        True,
        "Keep the checkpoints of keep_checkpoints complete. With false, they contain only the "
        "model, and a run cannot be resumed from them.",
        effect=(KeyIsSet("keep_checkpoints", "log2"),),
    )
    output_dir: str | None = runtime_key(
        None, "Run folder. Without it, the run folder is runs/<run_name>.", path="folder"
    )
    run_name: str | None = runtime_key(
        None,
        "Name of the run in trackers, and of its folder. Without it, the name of the recipe file "
        "is used.",
    )
    resume_from_checkpoint: str = runtime_key(
        "auto",
        "Checkpoint to resume from: auto (the newest one in the run folder), none, a path, or "
        "hub://ID[@REVISION].",
        path="name",
    )

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.output_dir or f"runs/{self.name}")

    @property
    def option_of_another_run(self) -> str:
        """The option that gives a new run another folder.

        It is ``--output_dir`` if the folder of this run is not runs/<run_name>.
        """
        default_folder = Path("runs", self.name)
        has_default_folder = self.run_dir.absolute() == default_folder.absolute()
        return "--run_name" if has_default_folder else "--output_dir"

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.run_dir / run_files.CHECKPOINTS

    @property
    def name(self) -> str:
        """The name of the run, which a loaded recipe always has."""
        return self.run_name or ""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Settings that an accelerate configuration file does not have.

    They do not change the result of a run.
    """

    tf32: bool | Auto = runtime_key(
        "auto",
        "Use TF32 for fp32 matrix products: faster, with a mantissa of 10 bits. auto enables it on "
        "GPUs that support it (Ampere and later).",
    )
    deterministic: bool = runtime_key(
        False,
        "Use only deterministic kernels, so that a run on a GPU resumes bitwise identically. This "
        "is slower.",
    )
    compile_mode: str = runtime_key(
        "default",
        "Mode of torch.compile, for runs that are compiled. default uses the mode of the "
        "accelerate configuration file.",
        ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    ddp_timeout: int = runtime_key(
        600,
        "Time in seconds to wait for another process before it is considered lost.",
        (1, 10**6),
    )


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Reports to experiment trackers, in addition to metrics.jsonl."""

    report_to: list[str] | None = runtime_key(
        None, "Trackers to report to, or none.", ("none", *TRACKERS)
    )
    project_name: str = runtime_key("ursa-minor", "Project name in trackers.", effect=TRACKED)
    reference_curve: str | None = runtime_key(
        None,
        "File with the losses of a published run, which curves.png shows next to those of this "
        "run. recipes/references/ contains such files.",
        path="repository file",
    )
    tags: list[str] = runtime_key(
        (), "Tags of the run in wandb, and of the model on the Hub.", effect=TAGGED
    )

    @property
    def names(self) -> list[str]:
        """The trackers that a run reports to."""
        return [name for name in dict.fromkeys(self.report_to or ()) if name != "none"]


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Uploads of the model, and metadata of its model card."""

    push_to_hub: bool = runtime_key(
        False, "Push the model to the Hugging Face Hub in the background."
    )
    hub_model_id: str | None = runtime_key(
        None,
        "Repository to push to: NAME or OWNER/NAME. Without it, the name of the run is used, in "
        "your own namespace.",
        effect=PUSHED,
    )
    hub_private_repo: bool = runtime_key(
        True, "Make the repository private, if it has to be created.", effect=PUSHED
    )
    hub_strategy: str = runtime_key(
        "every_save",
        "When to push the model: at the end, or at every save. To resume the run elsewhere, "
        "checkpoint also pushes the newest full checkpoint, and all_checkpoints pushes all.",
        ("end", "every_save", "checkpoint", "all_checkpoints"),
        effect=PUSHED,
    )
    license: str = runtime_key(
        "unknown", "License of the model for its model card, as an identifier of the Hub."
    )
    language: list[str] = runtime_key(
        (),
        "Languages of the text for the model card, as ISO 639 codes, or code for source code.",
    )

    @property
    def pushes_checkpoints(self) -> bool:
        """Whether checkpoints are pushed, from which a run can be resumed."""
        return self.push_to_hub and self.hub_strategy in ("checkpoint", "all_checkpoints")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All keys of one run, in sections."""

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


def _fields_of_all_sections() -> dict[str, dataclasses.Field]:
    fields = {}
    for section in SECTIONS.values():
        for field in dataclasses.fields(section):
            fields[field.name] = field
    return fields


def _annotations_of_all_sections() -> dict[str, Any]:
    annotations = {}
    for section in SECTIONS.values():
        annotations |= typing.get_type_hints(section)
    return annotations


def _types_without_alternatives() -> dict[str, Any]:
    types: dict[str, Any] = dict(_ANNOTATIONS)
    for name in OPTIONAL_KEYS | AUTO_KEYS:
        types[name] = typing.get_args(_ANNOTATIONS[name])[0]
    return types


SECTIONS = typing.get_type_hints(Recipe)
FIELDS = _fields_of_all_sections()
_ANNOTATIONS = _annotations_of_all_sections()
# Keys that may also be none, and keys that may also be auto.
OPTIONAL_KEYS = {name for name, hint in _ANNOTATIONS.items() if type(None) in typing.get_args(hint)}
AUTO_KEYS = {name for name, hint in _ANNOTATIONS.items() if Auto in typing.get_args(hint)}
# The type of each key, apart from none and auto.
KEY_TYPES = _types_without_alternatives()


def from_dict(values: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a flat mapping of keys."""
    sections = {}
    for section_name, section in SECTIONS.items():
        names = [field.name for field in dataclasses.fields(section)]
        section_values = {name: values[name] for name in names if name in values}
        sections[section_name] = section(**section_values)
    return Recipe(**sections)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Return every key and its value."""
    values: dict[str, Any] = {}
    for section in SECTIONS:
        values |= _field_values(getattr(recipe, section))
    return values


def _field_values(section: Any) -> dict[str, Any]:
    """Return the keys of a section and their values, without cached properties."""
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}


def replace(recipe: Recipe, **changes: Any) -> Recipe:
    """Return the recipe with other values of some keys."""
    return from_dict(to_dict(recipe) | changes)


def map_paths(values: Mapping[str, Any], change: Callable[[str, str], str]) -> dict[str, Any]:
    """Return the keys and values with ``change(key, path)`` in place of each path.

    The paths of a mixture's sources are included. ``change`` also receives URLs, Hub ids and words
    such as ``auto``; from NAME=PATH it receives the path. A value that does not have the type of
    its key is returned unchanged.
    """
    return {name: _map_paths_of_key(name, value, change) for name, value in values.items()}


def _map_paths_of_key(name: str, value: Any, change: Callable[[str, str], str]) -> Any:
    kind = _path_kind(name)
    if kind is None and name != "sources":
        return value
    if isinstance(value, (list, tuple)):
        return [_map_paths_of_key(name, item, change) for item in value]
    if name == "sources" and isinstance(value, dict):
        return map_paths(value, change)
    if kind is None or not isinstance(value, str):
        return value
    if kind != "assignment":
        return change(name, value)

    task, equals, file = value.partition("=")
    return f"{task}={change(name, file)}" if equals else value


def is_local(name: str, path: str) -> bool:
    """Return whether a value is a path on this machine, and not a URL, a Hub id or a word.

    Args:
        name: the key.
        path: its value.
    """
    if not path or paths.is_url(path):
        return False
    if _path_kind(name) in ("folder", "path", "assignment"):
        return True
    return path not in WORDS and (Path(path).is_absolute() or os.path.lexists(path))


def absolute(name: str, path: str) -> str:
    """Return the path of a key in a form that is valid in any folder. Globs remain globs.

    Args:
        name: the key.
        path: its value, which may be relative to the current folder.
    """
    if not is_local(name, path) or _is_in_repository(name, path):
        return path
    folder = os.getcwd()  # noqa: PTH109  (a string, to be escaped)
    is_glob = has_magic(path) and not os.path.lexists(path)
    if is_glob:
        folder = escape(folder)
    return str(Path(folder, path))


def shortened(name: str, path: str) -> str:
    """Return the path of a key in a form for publication: the last component of a local path.

    The folder model/ of a run is named by the folder of the run.

    Args:
        name: the key.
        path: its value.
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
    """Return whether a relative path names a file of the repository, which any folder can find."""
    if _path_kind(name) != "repository file" or Path(path).is_absolute():
        return False
    repository_file = paths.ROOT / path
    if not repository_file.is_file():
        return False
    # A file of that name in the current folder takes precedence.
    return not os.path.lexists(path) or repository_file.samefile(path)


def redacted(recipe: Recipe) -> dict[str, Any]:
    """Return every key and value in a form for publication.

    URLs have no user, password and query, and local paths are shortened to their last component.
    """
    return map_paths(_without_secrets(recipe), shortened)


def as_yaml(recipe: Recipe) -> str:
    """Return the recipe as the YAML file of a run folder: URLs without secrets, paths absolute.

    ``load_recipe`` reads the same run from it in any folder.
    """

    def absolute_literal(name: str, path: str) -> str:
        return paths.literal(absolute(name, path))

    return _to_yaml(map_paths(_without_secrets(recipe), absolute_literal))


def redacted_yaml(recipe: Recipe) -> str:
    """Return the recipe as a YAML file for publication.

    URLs and paths are those of ``redacted``. output_dir is left out, because it is a folder of this
    machine.
    """

    def escape_path(_name: str, path: str) -> str:
        # Otherwise "$" and "~" in a name would be expanded when the file is read.
        return paths.literal(path)

    values = map_paths(redacted(recipe), escape_path)
    values["output_dir"] = None  # _to_yaml leaves out keys without a value
    return _to_yaml(values)


def hyperparameters(recipe: Recipe) -> dict[str, Any]:
    """Return the keys that may not change within a run.

    Data keys are not included, because the contents of the data are compared instead, and neither
    is num_train_epochs, because max_steps is compared instead. Local paths are shortened, because
    checkpoints store these values and may be published or moved.
    """
    values = {}
    for name, value in to_dict(recipe).items():
        if FIELDS[name].metadata["kind"] == "hyperparameter":
            values[name] = value
    return map_paths(values, shortened)


def _without_secrets(recipe: Recipe) -> dict[str, Any]:
    """Return every key and value; URLs of data have no user, password and query."""
    values = to_dict(recipe)
    for name, value in values.items():
        if FIELDS[name].metadata["kind"] == "data":
            values[name] = _with_redacted_urls(value)
    return values


def _to_yaml(values: Mapping[str, Any]) -> str:
    # None and an empty tuple are defaults, which need not be stated.
    stated = {name: value for name, value in values.items() if value not in (None, ())}
    if "num_train_epochs" in stated:
        stated.pop("max_steps", None)  # it was computed
    return yaml.safe_dump(stated, sort_keys=False, allow_unicode=True)


def _with_redacted_urls(value: Any) -> Any:
    """Return the value of a key with each URL in it redacted.

    The value of ``sources`` is a list of dicts.
    """
    if isinstance(value, dict):
        return {name: _with_redacted_urls(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_redacted_urls(item) for item in value]
    if isinstance(value, str) and paths.is_url(value):
        return redact_url(value)
    return value
