"""A run or a model made into another: read back as a user will load it, and its loss measured before and after."""

import argparse
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from ursa_minor.base import files, run_files
from ursa_minor.base.errors import BadInput
from ursa_minor.checkpoint import format as checkpoint
from ursa_minor.data.loading import batches as window_batches
from ursa_minor.data.loading import order as window_order
from ursa_minor.data.loading import windows
from ursa_minor.data.sources import find as find_sources
from ursa_minor.data.sources.formats.text import rows as text_rows
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.data.tokens import shards, split_points
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.evaluation import likelihood, validation
from ursa_minor.export import compression
from ursa_minor.export import gguf as gguf_export
from ursa_minor.export import stock as stock_export
from ursa_minor.model import pretrained
from ursa_minor.model.adapters import check_no_hub_adapter
from ursa_minor.model.build import build
from ursa_minor.model.dtypes import DTYPES
from ursa_minor.model.resolve import resolve_model
from ursa_minor.model.vocabulary import check_embedding_rows
from ursa_minor.recipe import keys, loading

log = logging.getLogger(__name__)

# bitsandbytes quantizes the matrices of the blocks and multiplies in fp16, so the other weights are stored in fp16.
EXPORT_DTYPES = {**DTYPES, "int8": DTYPES["fp16"]}
RECORD = "export.json"  # what was done; it also marks a folder as one that --overwrite may replace
LONGEST = 2048  # tokens of a window, for models that read more
# Tokens per batch, and tokens that show whether a precision is too low.
BATCH_TOKENS, FEW = (
    2048,
    16,
)
Change = Callable[[PreTrainedModel, PreTrainedTokenizerFast], None]


class HeldOutText(NamedTuple):
    """The text that the loss is measured on, as windows of ids."""

    name: str
    opened: list[windows.Windows]
    draws: np.ndarray


def convert(
    args: argparse.Namespace, refusals: Sequence[Change] = (), adapt: Change | None = None
) -> str:
    """Export as export_model.py's flags ask, read back, measure; return the table.

    Args:
        refusals: each raises BadInput, before any work, where what is asked for cannot be.
        adapt: changes model and tokenizer in place, before the export and after the first measurement.

    Raises BadInput for a model that cannot be exported, or whose export would not compute finite numbers. Then nothing
    is written.
    """
    disable_progress_bar()  # Transformers' own bars, over loading and saving one file
    if args.dtype == "int8":
        compression.require_int8()
    out = Path(args.out).resolve()
    check_free(out, args)
    model, tokenizer = open_model(args.model)
    for refuse in refusals:
        refuse(model, tokenizer)
    check_storable(args, model, tokenizer)
    text = find_text(args, model, tokenizer)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    before = measure(model, text)

    if adapt:
        adapt(model, tokenizer)
    if args.prune:
        compression.prune(model, args.prune)
    stock = stock_export.to_transformers(
        model, tokenizer, dtype=EXPORT_DTYPES[args.dtype], trim_vocab=args.trim_vocab
    )
    if args.dtype == "int8":
        stock = compression.quantize(stock)
    with files.making(out, replace=True) as temporary:
        stock_export.save(stock, temporary, tokenizer)
        if args.gguf:
            gguf_export.write(stock, tokenizer, temporary, out.name, args.gguf)
        loaded = pretrained.load(str(temporary)).to(model.device)  # as a user will load it
        computed = computes(loaded)
        after = measure(loaded, text)
        if not computed or not math.isfinite(after.get("loss", 0.0)):
            raise BadInput(not_finite_message(args, before))
        report = {
            name: getattr(args, name) for name in ("model", "dtype", "trim_vocab", "prune", "chat")
        }
        report |= {"measured_on": text and text.name, "before": before, "after": after}
        report |= {"files": {path.name: files.sha256(path) for path in sorted(temporary.iterdir())}}
        files.write_json(temporary / RECORD, report)
    measured = "nothing was measured: give --text FILE to see the loss before and after"
    if text:
        measured = f"measured on {text.name}{', in fp32, for this is a CPU' if model.device.type == 'cpu' else ''}"
    return f"{args.model} -> {args.out}\n\n{table(before, after)}\n\n{measured}"


def check_storable(
    args: argparse.Namespace, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Raise BadInput for a weight that is not finite, or that one of the files cannot store.

    The files are checked again when they are written. This check comes before the measurement, which
    may take minutes.
    """
    stock = stock_export.to_transformers(
        model, tokenizer, dtype=EXPORT_DTYPES[args.dtype], trim_vocab=args.trim_vocab
    )
    if args.gguf:
        gguf_export.check_overflow(stock, args.gguf)


def not_finite_message(args: argparse.Namespace, before: dict[str, float]) -> str:
    """Return the error for an export that computes NaN or infinity; ``before``: measured on its source."""
    if args.dtype == "fp32" or not math.isfinite(before.get("loss", 0.0)):
        return f"{args.model}: the output of the model contains NaN or infinity, so it cannot be exported"
    fix = stock_export.WIDER[EXPORT_DTYPES[args.dtype]]
    return f"--dtype {args.dtype}: the output of the exported model contains NaN or infinity. {fix}"


def check_free(out: Path, args: argparse.Namespace) -> None:
    """Raise BadInput unless ``out`` is free, or holds an export that may be replaced."""
    if problem := files.find_folder_problem(out.parent):
        raise BadInput(f"--out {args.out}: {problem}; give another folder")
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not args.overwrite or not out.is_dir() or out == Path(args.model).resolve():
        raise BadInput(
            f"--out {args.out}: exists; give another folder (--overwrite replaces an earlier export, never the model that "
            f"is exported)"
        )
    try:
        written = files.read_json(out / RECORD)["files"]
    except (OSError, ValueError, KeyError, TypeError):  # it is not an export
        written = {}
    exported_files = {path.name: path for path in sorted(out.iterdir()) if path.name != RECORD}
    if changed := [
        name
        for name, path in exported_files.items()
        if not path.is_file() or files.sha256(path) != written.get(name)
    ]:
        raise BadInput(
            f"--out {args.out}: {', '.join(changed)} was changed or added since that export; give another folder"
        )


def open_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return a run's model (model/, else its newest checkpoint), a folder's, or the Hub's, and its tokenizer."""
    run_dir = run_of(name)
    if run_dir and not (run_dir / run_files.MODEL_FOLDER).is_dir():
        return open_checkpoint(run_dir)
    location = resolve_model(name, "")
    check_no_hub_adapter(location, name)
    tokenizer = tokenization.load(location, of_model=True)
    model = pretrained.load(location)
    check_embedding_rows(model, tokenizer, name)
    if getattr(model.config, "quantization_config", None):
        raise BadInput(f"{name}: is quantized already; export the model that it was made from")
    return model, tokenizer


def run_of(name: str) -> Path | None:
    """Return the run folder that ``name`` is, or whose model/ it is."""
    path = Path(name)
    if (path / run_files.RECIPE).is_file():
        return path
    run_dir = path.parent
    if path == run_dir / run_files.MODEL_FOLDER and (run_dir / run_files.RECIPE).is_file():
        return run_dir
    return None


def open_checkpoint(run_dir: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return the model of a run's newest checkpoint, and the tokenizer of its data."""
    path, damaged = checkpoint.find_newest(run_dir / run_files.CHECKPOINTS)
    if path is None:
        raise BadInput(f"{run_dir}: has neither model/ nor a checkpoint yet")
    recipe = loading.load_recipe(run_dir / run_files.RECIPE)
    name = recipe.data.tokenizer
    if name in keys.TRAINED_TOKENIZERS:
        name = str(data_folders(recipe)[0] / "tokenizer")
        if not Path(name).is_dir():
            raise BadInput(
                f"{name}: the tokenizer of {run_dir} is not here; let the run end, which writes model/"
            )
    tokenizer = tokenization.load(name)
    model = build(pretrained.complete(recipe).model, eos_token_id=tokenizer.eos_token_id)
    checkpoint.load_weights(path, model)
    for line in (*damaged, f"from {path}"):
        log.info(line)
    return model.eval(), tokenizer


def data_folders(recipe: keys.Recipe) -> list[Path]:
    """Return the folders of a recipe's shards. Raises BadInput where its text is not here to name them."""
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
    """Return the text to measure on, if any: --text, else the run's validation split."""
    window, run_dir = (
        min(likelihood.context_length(model.config) or LONGEST, LONGEST),
        run_of(args.model),
    )
    if args.text:
        ids = read_text(args.text, tokenizer, args.eval_tokens)
        window = min(window, len(ids) - 1)
        name, weights, splits = (
            " ".join(args.text),
            [1.0],
            [[(Path(args.text[0]), len(ids), ids, 0)]],
        )
    elif run_dir:
        try:
            recipe = loading.load_recipe(run_dir / run_files.RECIPE)
            folders = data_folders(recipe)
            weights = [source.weight for source in recipe.data.resolved_sources]
            splits = [validation_shards(folder, tokenizer) for folder in folders]
        except BadInput as error:
            log.warning(f"not measured on the run's validation split: {error}")
            return None
        name = ", ".join(f"{folder}, validation" for folder in folders)
    else:
        return None
    opened = [windows.Windows(window, model.config.vocab_size) for _ in splits]
    for split_windows, shards_of_split in zip(opened, splits, strict=True):
        for shard in shards_of_split:
            split_windows.append(*shard)
    most = max(1, args.eval_tokens // window) if args.eval_tokens else 0
    draws = window_order.eval_draws(
        [split_windows.num_windows for split_windows in opened], weights, max_windows=most
    )
    return (
        HeldOutText(f"{len(draws) * window:,} tokens of {name}", opened, draws)
        if len(draws)
        else None
    )


def read_text(names: list[str], tokenizer: PreTrainedTokenizerFast, most: int) -> np.ndarray:
    """Return the ids of text files, each a document, up to ``most`` of them (0 = all) and one more to predict."""
    encode, parts = tokenization.Encoder(tokenizer), []
    rows = text_rows(map(Path, find_sources.find_files("--text", names)))
    for _, piece, begins in split_points.pieces(
        ((0, *row) for row in rows), split_points.split_point_pattern(tokenizer.backend_tokenizer)
    ):
        parts += [np.array([tokenizer.eos_token_id], dtype=np.uint32)] if begins else []
        parts += encode([piece])
        if most and sum(map(len, parts)) > most:
            return np.concatenate(parts)[: most + 1]
    return np.concatenate(parts)


def validation_shards(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> list[tuple[Path, int, np.ndarray, int]]:
    """Return a folder's validation shards as ``Windows.append`` takes them.

    Raises BadInput where they are not whole, or not of the model's tokenizer.
    """
    manifest = manifests.describe_folder(folder)
    reference = manifest.tokenizer
    if reference and reference.fingerprint != tokenization.fingerprint(tokenizer):
        raise BadInput(f"{folder} was made with another tokenizer than the model's")
    validation = manifest.splits.get("validation", [])
    manifests.check_unchanged(folder, validation)
    opened = []
    for shard in validation:
        path = folder / shard.file
        ids, offset = shards.open_ids(path, shard.tokens)
        opened.append((path, shard.tokens, ids, offset))
    return opened


class LogitsLoss(nn.Module):
    """Any causal language model, and its mean loss in nats per token."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:
        """Return the mean loss, a fp32 scalar; inputs and targets are (B, T) int64."""
        logits_BTV = self.model(inputs_BT, use_cache=False).logits
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


@torch.inference_mode()
def computes(model: PreTrainedModel) -> bool:
    """Return whether a few ids give finite logits in the model's own precision."""
    ids = torch.arange(min(FEW, model.config.vocab_size), device=model.device)
    return bool(model(ids[None], use_cache=False).logits.isfinite().all())


def measure(model: PreTrainedModel, text: HeldOutText | None) -> dict[str, float]:
    """Return the bytes of a model's weights, their share of zeros and, where there is a text, its loss in nats per token.

    On a CPU the model then computes in fp32.
    """
    measurements = {
        "bytes": compression.weight_bytes(model),
        "zeros": compression.share_of_zeros(model),
    }
    if text is None:
        return measurements
    if model.device.type == "cpu":
        compression.widen(model)
    mapped, size = (
        window_batches.Mapped(text.opened, model.device),
        max(1, BATCH_TOKENS // text.opened[0].sequence_length),
    )
    batches = window_batches.eval_batches(
        mapped, text.draws, batch_size=size, rank=0, num_processes=1
    )
    return measurements | validation.validation_loss(
        LogitsLoss(model), batches, device=model.device
    )


def table(before: dict[str, float], after: dict[str, float]) -> str:
    """Return a table of the export beside its source."""
    both = before, after
    rows = [
        ("", "before", "after", ""),
        ("weights, MB", *(f"{x['bytes'] / 1e6:,.2f}" for x in both), ""),
        ("zeros in the blocks' matrices", *(f"{x['zeros']:.1%}" for x in both), ""),
    ]
    if "loss" in before:
        change = after["loss"] - before["loss"]
        rows += [
            ("loss, nats per token", *(f"{x['loss']:.4f}" for x in both), f"{change:+z.4f}"),
            (
                "perplexity",
                *(f"{math.exp(x['loss']):,.3f}" for x in both),
                f"{math.expm1(change):+z.2%}",
            ),
        ]
    return "\n".join(
        f"{name:30} {old:>12} {new:>16} {change:>9}".rstrip() for name, old, new, change in rows
    )
