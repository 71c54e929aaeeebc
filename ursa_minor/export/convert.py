"""Export a run or a model, load it again as a user will, and measure the loss before and after."""

import argparse
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from ursa_minor.base import files, run_files
from ursa_minor.base.checkpoint_files import run_folder_of
from ursa_minor.base.errors import BadInput
from ursa_minor.data.loading import batches as window_batches
from ursa_minor.data.loading import order as window_order
from ursa_minor.data.loading import windows
from ursa_minor.data.sources import find as find_sources
from ursa_minor.data.sources.formats.text import rows as text_rows
from ursa_minor.data.tokens import documents, pretrained_tokenizer, shards, split_points
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation import likelihood, validation
from ursa_minor.export import compression
from ursa_minor.export import gguf as gguf_export
from ursa_minor.export import stock as stock_export
from ursa_minor.model import pretrained
from ursa_minor.model.adapters import check_no_hub_adapter
from ursa_minor.model.dtypes import DTYPES
from ursa_minor.model.resolve import resolve_model
from ursa_minor.model.vocabulary import check_embedding_rows
from ursa_minor.recipe import keys, loading

log = logging.getLogger(__name__)

# With int8, the weights that are not quantized are stored in fp16, because bitsandbytes multiplies
# in fp16.
EXPORT_DTYPES = {**DTYPES, "int8": DTYPES["fp16"]}
# Describes the export. A folder with this file may be replaced with --overwrite.
EXPORT_RECORD = "export.json"
# The loss is measured on windows of at most this many tokens, even if the model can read more.
MAX_WINDOW = 2048
BATCH_TOKENS = 2048
# Number of ids that the exported model reads to show whether it computes finite numbers.
CHECKED_IDS = 16
MODEL_CARD = "README.md"
ModelFunction = Callable[[PreTrainedModel, PreTrainedTokenizerFast], None]


class Shard(NamedTuple):
    """Token ids of a file, as ``Windows.append`` takes them."""

    path: Path
    tokens: int
    ids: np.ndarray | documents.SeparatedIds
    offset: int  # bytes from the start of the file to the first id


class TextSources(NamedTuple):
    """Token ids that the loss can be measured on.

    Attributes:
        name: name of the text in the report.
        shards: the shards of each source.
        weights: the share of each source, relative to the others.
    """

    name: str
    shards: list[list[Shard]]
    weights: list[float]


class HeldOutText(NamedTuple):
    """The windows of ids that the loss is measured on.

    Attributes:
        name: number of tokens and their source, for the report.
        windows: all windows of each source.
        draws: the windows to measure on, (n, 2) int64: source, window.
    """

    name: str
    windows: list[windows.Windows]
    draws: np.ndarray


@dataclass(frozen=True)
class Measurement:
    """Measurements of a model before or after the export.

    Attributes:
        bytes: size of the weights.
        zeros: share of the weights in the blocks' matrices that is zero, from 0 to 1.
        loss: mean nats per token, or None if there is no text to measure on.
    """

    bytes: int
    zeros: float
    loss: float | None = None

    def has_finite_loss(self) -> bool:
        """Return False if the loss is NaN or infinite, and True if it was not measured."""
        return self.loss is None or math.isfinite(self.loss)

    def to_dict(self) -> dict[str, float]:
        """Return the measured values by name."""
        values: dict[str, float] = {"bytes": self.bytes, "zeros": self.zeros}
        if self.loss is not None:
            values["loss"] = self.loss
        return values


@dataclass(frozen=True)
class Exported:
    """An export that is complete except for its model card.

    Attributes:
        model: the model, loaded from the exported files.
        tokenizer: the exported tokenizer.
        before: measurement of the source.
        after: measurement of ``model``.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    before: Measurement
    after: Measurement


def convert(
    args: argparse.Namespace,
    checks: Sequence[ModelFunction] = (),
    adapt: ModelFunction | None = None,
    make_card: Callable[[Exported], str] | None = None,
) -> str:
    """Export a model as the flags of export_model.py state, and return a table of the measurements.

    Args:
        args: the flags.
        checks: functions that are called with model and tokenizer before any work. Each raises
            BadInput if the export is not possible.
        adapt: function that changes model and tokenizer in place, after the first measurement.
        make_card: function that returns the text of the export's README.md.

    Raises:
        BadInput: the model cannot be exported, or the exported model would not compute finite
            numbers. No export is written then.
    """
    # Check everything that needs no computation.
    disable_progress_bar()  # Transformers shows one while it loads or saves a single file
    if args.dtype == "int8":
        compression.require_int8()
    out = Path(args.out).resolve()
    check_out_folder(out, args)
    model, tokenizer = load_model(args.model)
    for check in checks:
        check(model, tokenizer)
    check_storable(args, model, tokenizer)

    # Measure the source.
    text = find_text(args, model, tokenizer)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    before = measure(model, text)

    # Change the model.
    if adapt:
        adapt(model, tokenizer)
    notes = []
    if args.prune:
        compression.prune(model, args.prune)
        notes.append(f"Not pruned: {', '.join(compression.unpruned(model))}")
    stock = to_export_dtype(args, model, tokenizer)
    if args.dtype == "int8":
        stock = compression.quantize(stock)
        notes.append(f"Not quantized: {', '.join(compression.unquantized(stock))}")

    # Write the export into a temporary folder, load it as a user will, and measure it.
    with files.create_folder(out, replace=True) as temporary:
        stock_export.save(stock, temporary, tokenizer)
        if args.gguf:
            gguf_export.write(stock, tokenizer, temporary, out.name, args.gguf)
            notes.append(describe_gguf(temporary, args.gguf))
        exported = pretrained.load(str(temporary)).to(model.device)
        is_finite = has_finite_logits(exported)
        after = measure(exported, text)
        if not is_finite or not after.has_finite_loss():
            raise BadInput(not_finite_message(args, before))
        if make_card:
            if exported.device.type == "cpu":
                compression.upcast(exported)
            card = make_card(Exported(exported, tokenizer, before, after))
            files.write_text(temporary / MODEL_CARD, card)
        record = export_record(args, temporary, text, before, after)
        files.write_json(temporary / EXPORT_RECORD, record)

    notes.append(describe_text(text, model.device))
    summary = "\n".join(notes)
    return f"{args.model} -> {args.out}\n\n{comparison_table(before, after)}\n\n{summary}"


def describe_gguf(folder: Path, precision: str) -> str:
    """Return the name, the precision and the size of the GGUF file in a folder."""
    (file,) = folder.glob("*.gguf")
    return f"{file.name} ({precision}): {file.stat().st_size / 1e6:,.2f} MB"


def to_export_dtype(
    args: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> PreTrainedModel:
    """Return the stock model in the dtype of --dtype, before a quantization."""
    dtype = EXPORT_DTYPES[args.dtype]
    return stock_export.to_transformers(model, tokenizer, dtype=dtype, trim_vocab=args.trim_vocab)


def check_storable(
    args: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Raise BadInput for a weight that is not finite, or that one of the files cannot store.

    The files are checked again when they are written. This check comes before the measurement,
    which may take minutes.
    """
    stock = to_export_dtype(args, model, tokenizer)
    if args.gguf:
        gguf_export.check_overflow(stock, args.gguf)


def not_finite_message(args: argparse.Namespace, before: Measurement) -> str:
    """Return the error for an export that computes NaN or infinity.

    Args:
        before: the measurement of the source, which may compute NaN itself.
    """
    if args.dtype == "fp32" or not before.has_finite_loss():
        return (
            f"{args.model} cannot be exported, because the output of the model contains NaN or "
            f"infinity. Export a checkpoint from before the training diverged"
        )
    fix = stock_export.WIDER[EXPORT_DTYPES[args.dtype]]
    return f"--dtype {args.dtype}: the output of the exported model contains NaN or infinity. {fix}"


def export_record(
    args: argparse.Namespace,
    folder: Path,
    text: HeldOutText | None,
    before: Measurement,
    after: Measurement,
) -> dict:
    """Return the contents of export.json: flags, measurements, and the SHA-256 of each file.

    Args:
        folder: folder of the exported files.
    """
    return {
        "model": args.model,
        "dtype": args.dtype,
        "trim_vocab": args.trim_vocab,
        "prune": args.prune,
        "chat": args.chat,
        "measured_on": text.name if text else None,
        "before": before.to_dict(),
        "after": after.to_dict(),
        "files": {path.name: files.sha256(path) for path in sorted(folder.iterdir())},
    }


def describe_text(text: HeldOutText | None, device: torch.device) -> str:
    """Return a sentence about the text that the loss was measured on."""
    if text is None:
        return "The loss was not measured. Use --text PATH to see the loss before and after."
    if device.type == "cpu":
        return f"The loss was measured on {text.name}, in fp32 because no GPU was used."
    return f"The loss was measured on {text.name}."


def check_out_folder(out: Path, args: argparse.Namespace) -> None:
    """Raise BadInput unless ``out`` is free or may be replaced.

    With --overwrite, it may be replaced if it contains an unchanged export of another model.
    """
    problem = files.find_folder_problem(out.parent)
    if problem:
        raise BadInput(f"--out {args.out}: {problem}. Use another folder")
    is_empty_folder = out.is_dir() and not any(out.iterdir())
    if not out.exists() or is_empty_folder:
        return
    if out == Path(args.model).resolve():
        raise BadInput(
            f"--out {args.out} is the model that is exported, which is never replaced. Use another "
            f"folder"
        )
    if not out.is_dir():
        raise BadInput(f"--out {args.out} is a file, not a folder. Use another path")
    if not args.overwrite:
        raise BadInput(
            f"--out {args.out} already exists. Use another folder, or --overwrite to replace an "
            f"earlier export"
        )
    changed = changed_files(out)
    if changed:
        raise BadInput(
            f"--out {args.out} is not replaced, because it contains files that are not part of an "
            f"unchanged export: {', '.join(changed)}. Use another folder"
        )


def changed_files(export: Path) -> list[str]:
    """Return the names of the files that the export has not written as they are now.

    These are all files if the folder is not an export.
    """
    try:
        written = files.read_json(export / EXPORT_RECORD)["files"]
    except (OSError, ValueError, KeyError, TypeError):  # the folder is not an export
        written = {}
    changed = []
    for path in sorted(export.iterdir()):
        if path.name == EXPORT_RECORD:
            continue
        if not path.is_file() or files.sha256(path) != written.get(path.name):
            changed.append(path.name)
    return changed


def load_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return a model and its tokenizer.

    Args:
        name: a run folder, a model folder or checkpoint, or a Hub id.
    """
    location = resolve_model(name, "")
    check_no_hub_adapter(location, name)
    tokenizer = pretrained_tokenizer.load(location, of_model=True)
    model = pretrained.load(location)
    check_embedding_rows(model, tokenizer, name)
    if getattr(model.config, "quantization_config", None):
        raise BadInput(
            f"{name} is already quantized, so it cannot be exported. Export the original model "
            f"that was quantized"
        )
    return model, tokenizer


def data_folders(recipe: keys.Recipe) -> list[Path]:
    """Return the folder of shards of each of a recipe's sources.

    Raises BadInput if the text is missing from which the name of a folder is computed.
    """
    folders = []
    for source in recipe.data.resolved_sources:
        if source.is_token_folder:
            folders.append(Path(str(source.data_dir)))
        else:
            folders.append(find_sources.find_source(source).folder)
    return folders


def find_text(
    args: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> HeldOutText | None:
    """Return the text to measure on: --text, or else the validation split of the run.

    Returns None if neither exists, or if the split has no window. A split that cannot be read is
    logged.
    """
    window = min(likelihood.context_length(model.config) or MAX_WINDOW, MAX_WINDOW)
    run_dir = run_folder_of(Path(args.model))
    if args.text:
        ids = read_text(args.text, tokenizer, args.eval_tokens)
        window = min(window, len(ids) - 1)
        shard = Shard(Path(args.text[0]), len(ids), ids, offset=0)
        sources = TextSources(" ".join(args.text), [[shard]], [1.0])
    elif run_dir:
        try:
            sources = validation_split(run_dir, tokenizer)
        except BadInput as error:
            log.warning(
                f"The loss is not measured, because the run's validation split cannot be read: "
                f"{error}"
            )
            return None
    else:
        return None

    windows_of_sources = []
    for shards_of_source in sources.shards:
        source_windows = windows.Windows(window, model.config.vocab_size)
        for shard in shards_of_source:
            source_windows.append(*shard)
        windows_of_sources.append(source_windows)
    max_windows = 0  # no limit
    if args.eval_tokens:
        max_windows = max(1, args.eval_tokens // window)
    num_windows = [source_windows.num_windows for source_windows in windows_of_sources]
    draws = window_order.eval_draws(num_windows, sources.weights, max_windows=max_windows)
    if len(draws) == 0:
        return None
    name = f"{len(draws) * window:,} tokens of {sources.name}"
    return HeldOutText(name, windows_of_sources, draws)


def validation_split(run_dir: Path, tokenizer: PreTrainedTokenizerFast) -> TextSources:
    """Return the validation shards of a run. Raises BadInput if they cannot be used."""
    recipe = loading.load_recipe(run_dir / run_files.RECIPE)
    folders = data_folders(recipe)
    return TextSources(
        name=", ".join(f"{folder}, validation" for folder in folders),
        shards=[validation_shards(folder, tokenizer) for folder in folders],
        weights=[source.weight for source in recipe.data.resolved_sources],
    )


def read_text(names: list[str], tokenizer: PreTrainedTokenizerFast, max_targets: int) -> np.ndarray:
    """Return the ids of text files. Each file is one document and starts with the end-of-text id.

    Args:
        names: names of the files.
        tokenizer: tokenizer of the model.
        max_targets: number of ids to predict, or 0 for all. One more id is returned, because the
            first id is not predicted.
    """
    encode = tokenization.Encoder(tokenizer)
    paths = map(Path, find_sources.find_files("--text", names))
    numbered_rows = ((0, text, begins) for text, begins in text_rows(paths))
    split_point = split_points.split_point_pattern(tokenizer.backend_tokenizer)
    parts = []
    num_ids = 0
    for _, piece, begins in split_points.pieces(numbered_rows, split_point):
        if begins:
            parts.append(np.array([tokenizer.eos_token_id], dtype=np.uint32))
            num_ids += 1
        (ids,) = encode([piece])
        parts.append(ids)
        num_ids += len(ids)
        if max_targets and num_ids > max_targets:
            return np.concatenate(parts)[: max_targets + 1]
    return np.concatenate(parts)


def validation_shards(folder: Path, tokenizer: PreTrainedTokenizerFast) -> list[Shard]:
    """Return the validation shards of a folder.

    Raises BadInput if they are incomplete, or if they were encoded with a different tokenizer than
    the model's.
    """
    manifest = manifests.describe_folder(folder)
    reference = manifest.tokenizer
    if reference and reference.fingerprint != tokenization.fingerprint(tokenizer):
        raise BadInput(
            f"{folder} was encoded with a different tokenizer than the model's. Use --text FILE to "
            f"measure the loss"
        )
    validation = manifest.splits.get("validation", [])
    manifests.check_unchanged(folder, validation)
    opened = []
    for shard in validation:
        path = folder / shard.file
        ids: np.ndarray | documents.SeparatedIds
        ids, offset = shards.open_ids(path, shard.tokens)
        if reference is None:
            ids = documents.with_separators(path, ids, tokenizer.eos_token_id)
        opened.append(Shard(path, len(ids), ids, offset))
    return opened


class LogitsLoss(nn.Module):
    """The mean loss of any causal language model, in nats per token."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, a fp32 scalar.

        Args:
            inputs_BT: (batch, sequence) int64 token ids.
            targets_BT: (batch, sequence) int64, the id that follows each input.
        """
        logits_BTV = self.model(inputs_BT, use_cache=False).logits
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


@torch.inference_mode()
def has_finite_logits(model: PreTrainedModel) -> bool:
    """Return whether the logits of a few ids are finite in the precision of the model."""
    ids = torch.arange(min(CHECKED_IDS, model.config.vocab_size), device=model.device)
    return bool(model(ids[None], use_cache=False).logits.isfinite().all())


def measure(model: PreTrainedModel, text: HeldOutText | None) -> Measurement:
    """Measure the size of a model's weights, their share of zeros, and the loss if there is a text.

    On a CPU, the measurement of the loss converts the model to fp32 in place.
    """
    size = compression.weight_bytes(model)
    zeros = compression.share_of_zeros(model)
    if text is None:
        return Measurement(size, zeros)
    if model.device.type == "cpu":
        compression.upcast(model)
    mapped = window_batches.Mapped(text.windows, model.device)
    batch_size = max(1, BATCH_TOKENS // text.windows[0].sequence_length)
    batches = window_batches.eval_batches(
        mapped, text.draws, batch_size=batch_size, rank=0, num_processes=1
    )
    losses = validation.validation_loss(LogitsLoss(model), batches, device=model.device)
    assert losses is not None  # None is returned only on a request to stop
    return Measurement(size, zeros, losses["loss"])


def comparison_table(before: Measurement, after: Measurement) -> str:
    """Return a table of the measurements before and after the export."""
    rows = [
        ("", "before", "after", ""),
        ("weights, MB", f"{before.bytes / 1e6:,.2f}", f"{after.bytes / 1e6:,.2f}", ""),
        ("zeros in the blocks' matrices", f"{before.zeros:.1%}", f"{after.zeros:.1%}", ""),
    ]
    if before.loss is not None and after.loss is not None:
        change = after.loss - before.loss
        rows.append(
            (
                "loss, nats per token",
                f"{before.loss:.4f}",
                f"{after.loss:.4f}",
                f"{change:+z.4f}",
            )
        )
        rows.append(
            (
                "perplexity",
                f"{math.exp(before.loss):,.3f}",
                f"{math.exp(after.loss):,.3f}",
                f"{math.expm1(change):+z.2%}",
            )
        )
    lines = [
        f"{name:30} {old:>12} {new:>16} {change:>9}".rstrip() for name, old, new, change in rows
    ]
    return "\n".join(lines)
