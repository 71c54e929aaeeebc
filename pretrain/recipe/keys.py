"""Every key of a recipe: its type, range, default, and what it is for, in the slices that the rooms take.

The YAML file is one flat mapping; key names are unique, so ``deal`` knows each one's slice. The science has no
defaults: the file states it. Places, cadence and reports have the defaults below.
"""

import dataclasses
import functools
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from pretrain.base.foreign import redact

ABSENT = dataclasses.MISSING
Auto = Literal["auto"]
# Names of trackers: of Accelerate's classes (accelerate.tracking).
TRACKERS = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")
TRAINED_TOKENIZERS = ("bpe", "characters")  # trained on the text of the run
# What a model that is trained on brings along.
LLAMA_KEYS = ("num_key_value_heads", "intermediate_size", "tie_word_embeddings", "rope_theta")
MODEL_KEYS = ("architecture", "n_layer", "n_head", "n_embd", "vocab_size", *LLAMA_KEYS)
# Names of the architectures (records in model/architectures.py), each with the keys that it needs beside all models'.
ARCHITECTURES: dict[str, tuple[str, ...]] = {"gpt2": (), "llama": LLAMA_KEYS}
# GPT-2's sizes, as n_layer, n_head, n_embd, by llm.c's names and Transformers'; GPT-3's for estimates.
SIZES = {"d12": (12, 12, 768), "d24": (24, 16, 1024), "d36": (36, 20, 1280), "d48": (48, 25, 1600)}
SIZES |= dict(zip(("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"), SIZES.values(), strict=True))
GPT3_SIZES = {"gpt3-125m": (12, 12, 768), "gpt3-6.7b": (32, 32, 4096), "gpt3-175b": (96, 96, 12288)}
# Names of the optimizers (records in optim/optimizers.py), and whether moments (ZeRO-1) and weights (FSDP2) may be sharded.
OPTIMIZERS = {"adamw": True, "adamw_8bit": False, "muon": True}
# A data_dir that is fetched from the Hub: id, revision (%2F stands for /) and folder.
REPOSITORY = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([^/]+))?(?:/(.+?))?/?")
# MultiBLiMP's languages, ISO 639-3, and how many pairs each has (lm-evaluation-harness 0.4.13, multiblimp/README.md).
_ROWS = Path(__file__).with_name("multiblimp.csv").read_text(encoding="utf-8").split()[1:]
MULTIBLIMP = {language: int(pairs) for language, pairs in (row.split(",") for row in _ROWS)}
# Tasks that a model can be scored on (records in evaluation/tasks/).
TASKS: tuple[str, ...] = ("arc_challenge", "arc_easy", "blimp", "hellaswag")
TASKS += ("lambada_openai", "piqa", "winogrande", *(f"multiblimp_{code}" for code in MULTIBLIMP))
# What a source of a mixture may state: which one it is, and what else it has from the recipe.
SOURCE_NAMES = ("data_dir", "data_files", "dataset_name", "dataset_config_name", "dataset_revision", "validation_files")
SOURCE_RULES: tuple[str, ...] = ("text_column", "token_column", "validation_fraction", "validation_tokens")
SOURCE_RULES += ("limit_tokens", "shard_tokens")


def key(kind: str, default: Any, help: str, allowed: tuple = (), *, only: tuple[str, tuple] | None = None) -> Any:
    """Describe one key.

    Args:
        kind: science (fixed for a run), data (fixed by its contents), run (may change when a run is resumed).
        allowed: of a number the least and the largest, of a text all that it may be.
        only: another key and its values, without which this one has no effect.
    """
    return dataclasses.field(default=default, metadata={"help": help, "kind": kind, "allowed": allowed, "only": only})


science, data, run = (functools.partial(key, kind) for kind in ("science", "data", "run"))
required = functools.partial(key, "science", ABSENT)  # science that the file states
llama = functools.partial(
    science, None, only=("architecture", tuple(name for name, own in ARCHITECTURES.items() if own))
)
GPT2, ADAM = ("architecture", ("gpt2",)), ("optimizer", ("adamw", "muon"))  # what some keys have an effect with only
FALLING = ("cosine", "linear", "wsd")  # learning rates


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data and their order: `data_dir`, else `data_files`, else `sources` (a mixture), else `dataset_name`."""

    dataset_name: str | None = data(None, "data set of the Hub, or python_stdlib (the running Python's own source)")
    dataset_config_name: str | None = data(None, "subset of the data set, for example sample-10BT of fineweb-edu")
    dataset_revision: str | None = data(None, "branch, tag or commit of the data set; a run stays at one commit")
    text_column: str = data("text", "column (or JSON field) that holds the text, where it is not text")
    token_column: str | None = data(None, "column with lists of the tokenizer's ids, for data that is tokenized")
    data_files: list[str] | None = data(None, "files: paths, globs, URLs; a text file or a table's row is a document")
    validation_files: list[str] | None = data(None, "files to validate on; without them a part of data_files is")
    validation_fraction: float = data(
        0.1, "text, python_stdlib: share kept for validation; 0.01 of a gigabyte", (0.0, 0.9)
    )
    validation_tokens: int = data(
        10_485_760, "data sets, tables: validation is the first documents, to so many tokens", (1, 2**40)
    )
    data_dir: str | None = data(
        None,
        "folder of token shards: ours, llm.c's .bin, build-nanogpt's .npy, nanoGPT's train.bin and val.bin; "
        "or hf://datasets/OWNER/NAME[@REVISION][/FOLDER], from where they are fetched",
    )
    sources: list[dict] | None = data(None, "a mixture, in the recipe file: mappings of a weight and the keys above")
    tokenizer: str = data(ABSENT, "bpe or characters (made from your text), a Hub id or a folder; else init_from's")
    tokenizer_vocab_size: int = data(4096, "size of a bpe made from your text; small for a small model", (257, 10**6))
    tokenizer_split: str = data(
        "qwen35",
        "where a bpe splits words: qwen35: for every script; gpt2: also at vowel signs",
        ("qwen35", "gpt2"),
        only=("tokenizer", ("bpe",)),
    )
    limit_tokens: int = data(0, "prepare about this many train tokens and no more; 0 = all", (0, 2**50))
    shard_tokens: int = data(100_000_000, "tokens of a shard; training begins with the first ones", (2, 2**31 - 1))
    stream_keep: str = run(
        "all", "consumed: delete train shards that no kept checkpoint needs (one epoch)", ("all", "consumed")
    )
    prepared_data_dir: str = run("data", "where prepared shards are kept")
    data_device: str = run(
        "auto", "where the ids lie: cpu: mapped files; cuda: whole; auto: cuda if small", ("auto", "cpu", "cuda")
    )
    data_seed: int = required("order of the windows", (0, 2**31 - 1))
    shuffle_block_tokens: int = science(2**26, "windows are shuffled within blocks of so many tokens", (1, 2**40))


@dataclass(frozen=True, kw_only=True)
class Model:
    """GPT2Config's own names where it has one, else LlamaConfig's. What init_from's model brings along may be left out."""

    architecture: str | None = science(
        "gpt2", "gpt2; or llama: RMSNorm, rotary positions, SwiGLU, grouped queries", tuple(ARCHITECTURES)
    )
    n_layer: int | None = required("number of blocks; GPT-2 has 12, 24, 36 or 48", (1, 1000))
    n_head: int | None = required("attention heads; n_embd / 64 is usual", (1, 1000))
    num_key_value_heads: int | None = llama("llama: heads of keys and values; fewer: a smaller cache in use", (1, 1000))
    n_embd: int | None = required("width; GPT-2 has 768, 1024, 1280 or 1600", (1, 100_000))
    intermediate_size: int | None = science(
        None, "width within the MLP; gpt2: else 4 n_embd; llama: 8/3 n_embd", (1, 1_000_000)
    )
    vocab_size: int | None = required("rows of the embedding: the tokenizer's, padded for speed", (2, 10_000_000))
    tie_word_embeddings: bool | None = llama("llama: the head is the embedding, as gpt2's always is")
    rope_theta: float | None = llama("llama: base of the rotary positions; 10000 is good", (1.0, 1e9))
    sequence_length: int = required("context in tokens, as long as the documents need (n_positions)", (2, 1_000_000))
    resid_pdrop: float = required(
        "dropout after attention and MLP; 0 is good, for many epochs try 0.1", (0.0, 0.99), only=GPT2
    )
    embd_pdrop: float = required("dropout after the embeddings", (0.0, 0.99), only=GPT2)
    attn_pdrop: float = required("dropout of attention weights", (0.0, 0.99))
    init_from: str | None = science(None, "start from this GPT-2 or Llama-type model: a run, a folder or a Hub id")
    initializer_range: float = science(
        0.02,
        "standard deviation of the first weights; AdamW on a model 128 wide wants 0.08",
        (1e-6, 1.0),
        only=("init_from", (None,)),
    )
    seed: int = required("first weights and dropout", (0, 2**31 - 1))
    gradient_checkpointing: str = run(
        "none",
        "saves memory: mlp: its activations are computed again; full: blocks, a third more work",
        ("none", "mlp", "full"),
    )


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The training loss; evaluation is always the mean of -log p."""

    document_mask: bool = science(False, "attention stays within a document; for many short documents a window")
    label_smoothing: float = science(0.0, "share of a target's probability, spread over the vocabulary", (0.0, 0.99))
    z_loss: float = science(0.0, "weight of the mean squared log of softmax's denominator; try 1e-4", (0.0, 1.0))

    @property
    def has_objective(self) -> bool:
        """Whether training minimizes something other than the plain cross entropy."""
        return self.label_smoothing > 0 or self.z_loss > 0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How much text one update sees."""

    tokens_per_step: int = required("tokens in one update, over all processes; few for a small model", (1, 2**40))
    per_device_train_batch_size: int | Auto = run(
        "auto", "most sequences of a micro-batch; auto = what the memory holds", (1, 2**20)
    )


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer of an update."""

    optimizer: str = science(
        "adamw",
        "adamw_8bit: moments in 8 bits; muon: Muon for the blocks' matrices, else AdamW; fewer tokens",
        tuple(OPTIMIZERS),
    )
    weight_decay: float = required("decay of tensors of two or more dimensions; 0.1 is usual", (0.0, 10.0))
    muon_momentum: float = science(0.95, "Muon's momentum", (0.0, 0.9999999), only=("optimizer", ("muon",)))
    adam_beta1: float = required("AdamW's beta1; 0.9 is usual", (0.0, 0.9999999))
    adam_beta2: float = required("AdamW's beta2; 0.95 is usual, 0.99 where an update sees few tokens", (0.0, 0.9999999))
    adam_epsilon: float = required("AdamW's epsilon; 1e-8 is usual", (0.0, 1.0))
    adam_nesterov: bool = science(False, "AdamW with Nesterov's momentum (NAdam)", only=ADAM)
    cautious: bool = science(False, "a weight whose step goes against its gradient waits", only=ADAM)
    embedding_lr_ratio: float = science(1.0, "learning rate of embeddings and head / learning_rate", (0.0, 1000.0))
    position_lr_ratio: float = science(1.0, "learning rate of the positions / learning_rate", (0.0, 1000.0), only=GPT2)
    vector_lr_ratio: float = science(1.0, "learning rate of norms and biases / learning_rate", (0.0, 1000.0))
    max_grad_norm: float = required("clip the gradient's norm here; 1.0 is usual, 0 = no clipping", (0.0, 1e9))
    shard_optimizer: bool = run(False, "each process keeps its share of the moments (ZeRO-1), to save memory")

    @property
    def lr_ratios(self) -> dict[str, float]:
        """What each kind of weights learns at, as a part of the learning rate; the blocks' matrices learn at the whole."""
        kinds = {"embeddings": self.embedding_lr_ratio, "positions": self.position_lr_ratio}
        return kinds | {"vectors": self.vector_lr_ratio}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How many updates, and the learning rate of each."""

    max_steps: int = required("number of updates", (1, 10**9))
    max_hours: float = science(0.0, "plan fewer updates, to train at most this long; 0 = no", (0.0, 1e6))
    learning_rate: float = required("peak learning rate; smaller for a larger model (6e-4 for 124M)", (0.0, 10.0))
    min_lr_ratio: float = required(
        "last learning rate / peak; 0.1 is usual", (0.0, 1.0), only=("lr_scheduler_type", FALLING)
    )
    warmup_steps: int = required("updates of linear warm-up; more than max_steps: a quarter of it", (0, 10**9))
    lr_scheduler_type: str = required(
        "shape after the warm-up; wsd: the peak, then a linear decay", (*FALLING, "constant")
    )
    decay_ratio: float = science(
        0.2, "wsd: the decay phase's share of max_steps", (0.0, 1.0), only=("lr_scheduler_type", ("wsd",))
    )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluations during training, every so many steps; 0 = never."""

    logging_steps: int = run(10, "steps between rows of metrics.jsonl", (0, 10**9))
    eval_steps: int = run(250, "steps between validations", (0, 10**9))
    eval_on_start: bool = run(True, "also validate, score and sample before the first update")
    eval_tokens: int = run(0, "tokens of a validation; 0 = the whole split", (0, 2**40))
    early_stopping_patience: int = run(0, "end after so many validations without a lower loss; 0 = no", (0, 10**6))
    sample_steps: int = run(0, "steps between samples", (0, 10**9))
    sample_prompts: list[str] = run((), "texts that the samples continue; none: beginnings of validation documents")
    sample_tokens: int = run(100, "new tokens of a sample", (1, 10**6))
    sample_temperature: float = run(0.8, "sampling temperature; 0 = greedy", (0.0, 100.0))
    sample_top_k: int = run(200, "sample among this many likeliest tokens; 0 = all", (0, 10**6))
    sample_top_p: float = run(1.0, "sample among the likeliest that hold this probability; 1.0 = all", (1e-6, 1.0))
    tasks: list[str] = run((), "tasks that the run is scored on (docs/evaluation.md)", TASKS)
    task_steps: int = run(0, "steps between scores of the tasks; small models stay near chance", (0, 10**9))
    task_limit: int = run(0, "the first so many items of each task; 0 = all", (0, 10**9))
    task_files: list[str] | None = run(None, "NAME=FILE: a task's items, JSON lines, Parquet or TSV; else the Hub's")

    def files_of(self, task: str) -> list[str] | None:
        """Return the files of a task's items; None: the Hub's."""
        return [file.partition("=")[2] for file in self.task_files or () if file.startswith(f"{task}=")] or None


@dataclass(frozen=True, kw_only=True)
class Saving:
    """The run folder and its checkpoints."""

    save_steps: int = run(1000, "steps between checkpoints: what a crash can cost", (0, 10**9))
    load_best_model_at_end: bool = run(False, "model/ has the weights of the lowest validation loss, not the last")
    save_total_limit: int = run(2, "newest checkpoints that are kept: 2 or more; 0 = all", (0, 10**6))
    output_dir: str | None = run(None, "run folder; without it runs/<run_name>")
    run_name: str | None = run(None, "name of the run, its folder and in trackers; else the recipe's")
    resume_from_checkpoint: str = run("auto", "auto, none, a checkpoint's path, or hub://ID (hub://ID@REVISION)")

    @property
    def run_dir(self) -> Path:
        """The run folder."""
        return Path(self.output_dir or f"runs/{self.name}")

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints lie."""
        return self.run_dir / "checkpoints"

    @property
    def name(self) -> str:
        """The run's name, which a loaded recipe always has."""
        return self.run_name or ""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Settings of the machine that the accelerate YAML has no key for. Nothing here changes the result."""

    tf32: bool | Auto = run("auto", "fp32 matrix products with 10 bits of mantissa, faster; auto = from Ampere on")
    deterministic: bool = run(False, "only kernels that repeat their bits: a card, too, resumes to the bit; slower")
    compile_mode: str = run(
        "default",
        "torch.compile's mode where the run is compiled; default: the accelerate YAML's",
        ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"),
    )
    ddp_timeout: int = run(600, "seconds after which a process that others wait for counts as lost", (1, 10**6))


@dataclass(frozen=True, kw_only=True)
class Tracking:
    """Trackers, beside metrics.jsonl, which is always written."""

    report_to: list[str] | None = run(None, "none, or trackers beside metrics.jsonl", ("none", *TRACKERS))
    project_name: str = run("ursa-minor", "project name in trackers")
    reference_curve: str | None = run(None, "a published run's losses, drawn beside this one's: a file of references/")
    tags: list[str] = run((), "tags of the run in wandb, and of the model on the Hub")

    @property
    def names(self) -> list[str]:
        """Which trackers a run reports to."""
        return [name for name in dict.fromkeys(self.report_to or ()) if name != "none"]


@dataclass(frozen=True, kw_only=True)
class Hub:
    """Pushes to the Hugging Face Hub."""

    push_to_hub: bool = run(False, "push the model to the Hugging Face Hub, in the background")
    hub_model_id: str | None = run(None, "repository: NAME, or OWNER/NAME; without it the run's name, yours")
    hub_private_repo: bool = run(True, "whether a repository that is made is private")
    hub_strategy: str = run(
        "every_save",
        "when the model is pushed; or with the newest full checkpoint, to resume from, or with all of them",
        ("end", "every_save", "checkpoint", "all_checkpoints"),
    )
    license: str = run("unknown", "license of the model, for its card: an identifier of the Hub")
    language: list[str] = run((), "language of the text, for the card: ISO 639 codes, or code")

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


SLICES = typing.get_type_hints(Recipe)
FIELDS = {field.name: field for part in SLICES.values() for field in dataclasses.fields(part)}
# The type of each key, and whether it may also be none or auto.
_HINTS = {name: hint for part in SLICES.values() for name, hint in typing.get_type_hints(part).items()}
OPTIONAL = {name for name, hint in _HINTS.items() if type(None) in typing.get_args(hint)}
AUTO = {name for name, hint in _HINTS.items() if Auto in typing.get_args(hint)}
TYPES: dict[str, Any] = {
    name: typing.get_args(hint)[0] if name in OPTIONAL | AUTO else hint for name, hint in _HINTS.items()
}


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


def fixed(recipe: Recipe) -> dict[str, Any]:
    """Return the keys that may not change within a run (data is compared by its contents instead)."""
    return {name: value for name, value in flat(recipe).items() if FIELDS[name].metadata["kind"] == "science"}


def sources(data: Data) -> list[Data]:
    """Return the run's sources: one, or those of a mixture, with the recipe's rules where they state none."""
    names = dict.fromkeys(SOURCE_NAMES)
    stated = [{name: value for name, value in given.items() if name != "weight"} for given in _mixture(data)]
    return [dataclasses.replace(data, **names | given) for given in stated] or [data]


def is_here(source: Data) -> bool:
    """Return whether a source is a folder of shards, which nothing needs to be prepared for."""
    return source.data_dir is not None and not source.data_dir.startswith("hf://")


def hub_id(source: Data) -> str | None:
    """Return the id of the Hub's data set that a source comes from; None: it comes from elsewhere."""
    if source.data_dir:
        found = REPOSITORY.fullmatch(source.data_dir)
        return found[1] if found else None
    return None if source.data_files or source.dataset_name == "python_stdlib" else source.dataset_name


def weights(data: Data) -> tuple[float, ...]:
    """Return the share of the windows of each of the ``sources``, relative to the others'."""
    return tuple(float(given["weight"]) for given in _mixture(data)) or (1.0,)


def _mixture(data: Data) -> list[dict]:
    return [] if data.data_dir or data.data_files else data.sources or []


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _public(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_public(one) for one in value]
    return redact(value) if isinstance(value, str) else value
