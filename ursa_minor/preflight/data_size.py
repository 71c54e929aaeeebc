"""Estimate the size of the data of a recipe before a run, without reading or downloading any text.

The size of a prepared folder is exact. Otherwise it is estimated from the tokens of the data report
of check_setup.py, or without a report from the size of the files.
"""

import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import pluralize
from ursa_minor.data.preparation.data_report import DataReport
from ursa_minor.data.sources import find as find_sources
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.data.tokens.shards import count_tokens
from ursa_minor.recipe import keys, loading
from ursa_minor.recipe.batching import steps_of_epochs

TOKEN_BYTES = 4.5  # bytes of English text per token of GPT-2's tokenizer
PARQUET_BYTES = 2.9  # bytes of Parquet per such token: FineWeb-Edu's sample-10BT is 28.5 GB
UNKNOWN_STEPS = "the number of steps is not known, because the size of the data is not known"
# How the size of a source is known, from the least to the most exact.
FROM_FILES = "estimated from the size of the files"
FROM_REPORT = "estimated from the tokens of the data report"
COUNTED = "counted in the prepared data"
# Names of FineWeb's samples, in billions of GPT-2 tokens.
SAMPLE = re.compile(r"sample-(\d+)BT")


class TrainSize(NamedTuple):
    """Size of the train split of a source.

    Attributes:
        tokens: number of tokens, or inf if it is not known.
        windows: number of windows, or inf if it is not known.
        basis: how they are known: ``FROM_FILES``, ``FROM_REPORT`` or ``COUNTED``.
    """

    tokens: float
    windows: float
    basis: str


class StepsEstimate(NamedTuple):
    """Number of steps of a recipe that states ``num_train_epochs``.

    Attributes:
        steps: the number.
        basis: how the size of the least exact source is known, as the end of a sentence.
    """

    steps: int
    basis: str


def complete_recipe(
    recipe: keys.Recipe, reports: Iterable[DataReport] = ()
) -> tuple[keys.Recipe, str]:
    """Return the recipe with the estimated ``max_steps``, and a line about them for the user.

    A recipe that states ``max_steps`` is returned unchanged, with an empty line.

    Args:
        recipe: the loaded recipe.
        reports: the data reports of its sources, as far as there are any.

    Raises:
        BadInput: the size of the data is not known, or the schedule does not fit the length.
    """
    schedule = recipe.schedule
    if schedule.max_steps is not None:
        return recipe, ""
    setting = f"num_train_epochs = {schedule.num_train_epochs:g}"
    estimate = estimate_steps(recipe, reports)
    if estimate is None:
        advice = "For an estimate for N updates use --max_steps N"
        if not find_sources.has_data(recipe.data):
            advice = f"State the data with --data_files FILE. {advice}"
        raise BadInput(f"{setting}: {UNKNOWN_STEPS}. {advice}")
    completed = loading.with_max_steps(recipe, estimate.steps, logs_advice=False)
    steps = pluralize(estimate.steps, "step", "steps")
    return completed, f"{setting} is {steps}, {estimate.basis}"


def estimate_steps(recipe: keys.Recipe, reports: Iterable[DataReport] = ()) -> StepsEstimate | None:
    """Return the number of steps of ``num_train_epochs``, or None if the size is not known."""
    epochs = recipe.schedule.num_train_epochs
    assert epochs is not None  # the caller has checked it
    if not find_sources.has_data(recipe.data):
        return None
    sequence_length = recipe.model.sequence_length
    reports = tuple(reports)
    sizes = [
        train_size(source, sequence_length, reports) for source in recipe.data.resolved_sources
    ]
    num_windows = sum(size.windows for size in sizes)
    if not math.isfinite(num_windows):
        return None
    steps = max(1, steps_of_epochs(epochs, int(num_windows), recipe))
    basis = min((size.basis for size in sizes), key=(FROM_FILES, FROM_REPORT, COUNTED).index)
    return StepsEstimate(steps, basis)


def train_size(
    source: keys.DataSource, sequence_length: int, reports: Iterable[DataReport] = ()
) -> TrainSize:
    """Return the size of the train split of a source, with windows of ``sequence_length``."""
    unknown = TrainSize(math.inf, math.inf, FROM_FILES)
    if find_sources.has_urls(source):
        return unknown
    try:
        return _size_of_local_source(source, sequence_length, reports)
    except BadInput:  # the data is on another machine, or does not exist yet
        return unknown


def _size_of_local_source(
    source: keys.DataSource, sequence_length: int, reports: Iterable[DataReport]
) -> TrainSize:
    if source.is_token_folder:
        return _counted_size(Path(str(source.data_dir)), sequence_length)
    found_source = find_sources.find_source(source)
    if manifests.is_complete(found_source.folder):
        return _counted_size(found_source.folder, sequence_length)

    tokens = _estimate_tokens(source, found_source)
    basis = FROM_FILES
    for report in reports:
        if report.folder == str(found_source.folder) and report.bytes_per_token:
            tokens = _measured_tokens(found_source, report)
            basis = FROM_REPORT
    if math.isinf(tokens):
        return TrainSize(tokens, tokens, basis)
    return TrainSize(tokens, tokens // sequence_length, basis)


def _counted_size(folder: Path, sequence_length: int) -> TrainSize:
    """Return the size of a prepared folder."""
    shards = manifests.describe_folder(folder).splits["train"]
    num_windows = sum(max(0, shard.tokens - 1) // sequence_length for shard in shards)
    return TrainSize(count_tokens(shards), num_windows, COUNTED)


def estimate_train_tokens(data: keys.Data) -> float:
    """Return about how many tokens the train split of a recipe has, or inf if that is not known.

    Nothing is downloaded.
    """
    return sum(train_size(source, 1).tokens for source in data.resolved_sources)


def _estimate_tokens(source: keys.DataSource, found_source: find_sources.FoundSource) -> float:
    """Return about how many train tokens a source has that is not prepared."""
    tokens = math.inf
    sample = SAMPLE.fullmatch(source.dataset_config_name or "")
    if sample:
        tokens = 1e9 * int(sample[1])
    elif found_source.most_tokens:
        tokens = found_source.most_tokens / _bytes_per_token(source)
        # The files of another source are those of the train split only.
        if found_source.text_files and not source.validation_files:
            tokens *= 1 - source.validation_fraction
    elif found_source.files:
        sizes = [Path(name).stat().st_size for name in found_source.files["train"]]
        tokens = sum(sizes) / PARQUET_BYTES
    return min(tokens, source.limit_tokens or tokens)


def _measured_tokens(found_source: find_sources.FoundSource, report: DataReport) -> float:
    """Return the number of train tokens according to a report that has measured the tokenizer."""
    assert report.cost and report.bytes_per_token  # the caller has checked it
    source = found_source.config
    tokens = report.cost.text_megabytes * 1e6 / report.bytes_per_token
    if found_source.text_files and not source.validation_files:
        tokens *= 1 - source.validation_fraction
    elif found_source.parts is None and not report.validation_files:
        tokens = max(0, tokens - source.validation_tokens)
    return min(tokens, source.limit_tokens or tokens)


def _bytes_per_token(source: keys.DataSource) -> float:
    """Return about how many bytes of text a token of a source's tokenizer represents.

    A BPE that is trained on the text was measured on TinyShakespeare: 2.62 bytes with 1,024 ids
    and 3.61 with 4,090, which is half a byte more for each doubling.
    """
    if source.tokenizer == "characters":
        return 1.0
    if source.tokenizer == "bpe" and source.tokenizer_vocab_size:
        bytes_per_token = 0.5 * math.log2(source.tokenizer_vocab_size) - 2.4
        return min(TOKEN_BYTES, max(1.0, bytes_per_token))
    return TOKEN_BYTES
