"""Estimate how much text a recipe has and how fast it is tokenized."""

import math
import re
from pathlib import Path
from typing import NamedTuple

from ursa_minor.base.errors import BadInput
from ursa_minor.base.wording import pluralize
from ursa_minor.data.sources import find as find_sources
from ursa_minor.data.tokens import manifest as manifests
from ursa_minor.data.tokens.shards import count_tokens
from ursa_minor.recipe import keys

TOKEN_BYTES = 4.5  # bytes of English text per token of GPT-2's tokenizer
PARQUET_BYTES = 2.9  # bytes of Parquet per such token: FineWeb-Edu's sample-10BT is 28.5 GB
ID_BYTES = 2.0  # bytes per id in a token file
# Names of FineWeb's samples, in billions of GPT-2 tokens.
SAMPLE = re.compile(r"sample-(\d+)BT")


class DataThroughput(NamedTuple):
    """How much text there is and how fast it is tokenized.

    Attributes:
        train_tokens: tokens of the train split. inf if not known.
        speed: tokens per second. inf if the shards are prepared already.
        description: what determines the speed, for the estimate that a user reads.
    """

    train_tokens: float
    speed: float
    description: str = ""

    def waiting_seconds(self, tokens: float, training_seconds: float) -> float:
        """Return how long training waits for data. Each token is prepared once, during training."""
        preparation_seconds = min(tokens, self.train_tokens) / self.speed
        return max(0.0, preparation_seconds - training_seconds)


PREPARED = DataThroughput(math.inf, math.inf, "prepared")


def estimate_throughput(
    data: keys.Data, *, trainers: int, cores: int, link: float, speed: float
) -> DataThroughput:
    """Return how much text a recipe has and how fast it is tokenized.

    Args:
        data: the data keys of the recipe.
        trainers: number of training processes, each of which needs a core.
        cores: number of cores of the machine.
        link: bytes per second of the connection to the source of the text. 0 for no limit.
        speed: tokens per second, if known. 0 to measure one core of this machine for a second.
    """
    amounts = [_train_tokens_of_source(source) for source in data.resolved_sources]
    train_tokens = sum(tokens for tokens, _ in amounts)
    if all(is_prepared for _, is_prepared in amounts):
        return PREPARED._replace(train_tokens=train_tokens)
    if speed:
        return DataThroughput(train_tokens, speed, "as given")

    limits = {}
    # Downloaded token files need no CPU core.
    is_downloaded = all(source.hub_id and source.data_dir for source in data.resolved_sources)
    if link:
        bytes_per_token = ID_BYTES if is_downloaded else PARQUET_BYTES
        limits[f"{link / 1e6:g} MB/s"] = link / bytes_per_token
    if not is_downloaded:
        from ursa_minor.data.preparation import measure  # imports Transformers

        tokens_per_core = measure.text_bytes_per_core() / TOKEN_BYTES
        free_cores = max(1, cores - trainers)
        label = (
            f"{pluralize(free_cores, 'core', 'cores')} of {cores} at {tokens_per_core / 1e6:.1f} M "
            f"each, as measured on this machine"
        )
        limits[label] = free_cores * tokens_per_core
    label = ", ".join(limits) or "as fast as the link"
    return DataThroughput(train_tokens, min(limits.values(), default=math.inf), label)


def _train_tokens_of_source(source: keys.DataSource) -> tuple[float, bool]:
    """Return about how many train tokens a source has, and whether they are prepared.

    The number is inf if it is not known. Nothing is downloaded.
    """
    if find_sources.has_urls(source):
        return math.inf, False
    if source.is_token_folder:
        try:
            return _train_tokens(Path(str(source.data_dir))), True
        except BadInput:  # the folder is on another machine
            return math.inf, True
    try:
        found_source = find_sources.find_source(source)
        if manifests.is_complete(found_source.folder):
            return _train_tokens(found_source.folder), True
    except BadInput:  # the text is on another machine, or does not exist yet
        return math.inf, False

    tokens = math.inf
    sample = SAMPLE.fullmatch(source.dataset_config_name or "")
    if sample:
        tokens = 1e9 * int(sample[1])
    elif found_source.most_tokens:
        tokens = found_source.most_tokens / TOKEN_BYTES
    elif found_source.files:
        sizes = [Path(name).stat().st_size for name in found_source.files["train"]]
        tokens = sum(sizes) / PARQUET_BYTES
    return min(tokens, source.limit_tokens or tokens), False


def _train_tokens(folder: Path) -> int:
    """Return the number of train tokens of a prepared folder."""
    return count_tokens(manifests.describe_folder(folder).splits["train"])
