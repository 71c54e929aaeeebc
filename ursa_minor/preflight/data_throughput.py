"""How much text a recipe has, and how fast it becomes ids: what of it a card would wait for. Estimated."""

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

TOKEN_BYTES = 4.5  # of English text, by GPT-2's tokenizer
SENT_BYTES = 2.9  # of Parquet, for such a token: FineWeb-Edu's sample-10BT is 28.5 GB
READY_BYTES = 2.0  # of an id in a token file
# Names of FineWeb's samples, in billions of GPT-2 tokens.
SAMPLE = re.compile(r"sample-(\d+)BT")


class DataThroughput(NamedTuple):
    """What the data give: ``text`` tokens (inf where not known), at ``speed`` tokens per second (inf where prepared)."""

    text: float
    speed: float
    words: str = ""

    def waiting_seconds(self, tokens: float, training_seconds: float) -> float:
        """Return how long training waits: each token of the text is read once, beside the training of all."""
        return max(0.0, min(tokens, self.text) / self.speed - training_seconds)


PREPARED = DataThroughput(math.inf, math.inf, "prepared")


def supply(
    data: keys.Data, *, trainers: int, cores: int, link: float, speed: float
) -> DataThroughput:
    """Return how much text a recipe has and how fast it is read.

    Args:
        trainers: processes beside the reader, which leaves them a core each.
        link: bytes per second from where the text is; 0: not a limit.
        speed: tokens per second, where that is known; 0: one core is measured here for a second.
    """
    amounts = [_amount(source) for source in data.resolved_sources]
    text = sum(tokens for tokens, _ in amounts)
    if all(ready for _, ready in amounts):
        return PREPARED._replace(text=text)
    if speed:
        return DataThroughput(text, speed, "as you say")
    # Token ids need no CPU core.
    fetched = all(source.hub_id and source.data_dir for source in data.resolved_sources)
    limits = (
        {f"{link / 1e6:g} MB/s": link / (READY_BYTES if fetched else SENT_BYTES)} if link else {}
    )
    if not fetched:
        from ursa_minor.data.preparation import measure  # imports Transformers

        core, free = measure.text_bytes_per_core() / TOKEN_BYTES, max(1, cores - trainers)
        words = f"{pluralize(free, 'core', 'cores')} of {cores} at {core / 1e6:.1f} M, the speed of one here"
        limits[words] = free * core
    return DataThroughput(
        text, min(limits.values(), default=math.inf), ", ".join(limits) or "as fast as the link"
    )


def _amount(source: keys.DataSource) -> tuple[float, bool]:
    """Return about how many train tokens a source has, inf where that is not known, and whether they are prepared."""
    here, text = source.is_token_folder, math.inf
    if find_sources.has_urls(source):  # nothing is fetched for an estimate
        return text, False
    try:
        found = None if here else find_sources.find_source(source)
        if found is None or manifests.is_complete(found.folder):
            folder = found.folder if found else Path(str(source.data_dir))
            manifest = manifests.describe_folder(folder)
            return count_tokens(manifest.splits["train"]), True
    except BadInput:  # it is on another machine, or its text is not there yet
        return text, here
    if sample := SAMPLE.fullmatch(source.dataset_config_name or ""):
        text = 1e9 * int(sample[1])
    elif found.most_tokens:
        text = found.most_tokens / TOKEN_BYTES
    elif found.files:
        text = sum(Path(name).stat().st_size for name in found.files["train"]) / SENT_BYTES
    return min(text, source.limit_tokens or text), False
