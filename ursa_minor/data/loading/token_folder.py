"""Judge whether the token files of another program are read with the right tokenizer and width."""

import logging
from pathlib import Path, PurePath

import numpy as np
from transformers import PreTrainedTokenizerFast

from ursa_minor.base import shell
from ursa_minor.base.errors import BadInput
from ursa_minor.data.loading.windows import Windows
from ursa_minor.data.tokens import pretrained_tokenizer
from ursa_minor.data.tokens import tokenizer as tokenization
from ursa_minor.data.tokens.documents import find_following_separators
from ursa_minor.data.tokens.manifest import Manifest

log = logging.getLogger(__name__)

BIGRAM_IDS = 2**18  # number of ids in which bigrams are counted
# A bigram model has a loss of several nats per token on text, and of less than this if nearly every
# id follows from the one before, as with a constant id or every second id 0.
MIN_BIGRAM_LOSS = 0.05


def warn_of_wrong_ids(
    folder: Path, train: Windows, largest_id: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Log one warning about ids that do not look like text of this tokenizer.

    Args:
        folder: the folder of token files.
        train: the train split.
        largest_id: the largest id of the split.
        tokenizer: the tokenizer of the run.
    """
    signs = []
    if not train.contains(tokenizer.eos_token_id):
        signs.append(
            f"the end-of-text id {tokenizer.eos_token_id} ({tokenizer.eos_token}) never occurs in "
            f"{train.num_tokens:,} tokens"
        )
    if largest_id >= len(tokenizer):
        signs.append(f"the largest id is {largest_id}, but the tokenizer has {len(tokenizer)} ids")
    loss = bigram_loss(train.first_ids(BIGRAM_IDS))
    if loss < MIN_BIGRAM_LOSS:
        signs.append(f"nearly every id follows from the one before (bigram loss {loss:.3f} nats)")
    if signs:
        log.warning(
            f"{folder}: {'; '.join(signs)}. Usually this means that the files were encoded with "
            f"another tokenizer, have ids of another width, or do not separate their documents"
        )


def check_document_mask(folder: Path, manifest: Manifest, separator: int) -> None:
    """Check that document_mask can be used with a folder of token files.

    Args:
        folder: the folder.
        manifest: its manifest.
        separator: the end-of-text id.

    Raises:
        BadInput: another program wrote the files, and the separators follow the documents.
    """
    if manifest.tokenizer is not None:
        return
    paths = [folder / shard.file for shard in manifest.splits["train"]]
    # With stream_keep = consumed, files may have been deleted.
    existing_paths = [path for path in paths if path.exists()]
    path = find_following_separators(existing_paths, separator)
    if path is not None:
        raise BadInput(
            f"document_mask = true: in {path} the end-of-text token follows each document. The "
            f"mask starts a document at this token, so it would belong to the next document. Use "
            f"--document_mask false, or files in which the token precedes each document, such as "
            f"those that prepare_data.py writes"
        )


def check_stated_tokenizer(folder: Path, stated: str, name: str, fingerprint: str) -> None:
    """Check that the tokenizer that token files state is that of the run, as far as possible.

    A tokenizer of the Hub is not downloaded for this, so its name is compared without the owner.

    Args:
        folder: the folder of token files.
        stated: name of a tokenizer of the Hub, or path of a tokenizer.json or of its folder.
        name: name or folder of the run's tokenizer.
        fingerprint: fingerprint of the run's tokenizer.

    Raises:
        BadInput: the tokenizer exists on this machine, and differs.
    """
    path = Path(stated)
    location = path.parent if path.is_file() else path
    if not location.is_dir():
        if PurePath(stated).name != PurePath(name).name:
            log.warning(
                f"{folder}: the files state that their ids were encoded with the tokenizer "
                f"{stated}. If it differs from {name}, use --tokenizer with this tokenizer"
            )
        return
    if tokenization.fingerprint(pretrained_tokenizer.load(str(location))) != fingerprint:
        raise BadInput(
            f"tokenizer = {name}: the files in {folder} state that their ids were encoded with a "
            f"different tokenizer, {stated}. Use --tokenizer {shell.path_word(location)}"
        )


def bigram_loss(ids: np.ndarray) -> float:
    """Return the mean loss in nats of a bigram model on the ids that it was counted on.

    It is the conditional entropy of an id given the previous one.

    Args:
        ids: (tokens,) int64.

    Returns:
        Infinity for fewer than two ids.
    """
    if len(ids) < 2:
        return float("inf")
    num_ids = int(ids.max()) + 1
    _, pair_counts = np.unique(ids[:-1] * num_ids + ids[1:], return_counts=True)
    first_counts = np.unique(ids[:-1], return_counts=True)[1]
    pair_entropy = -(pair_counts * np.log(pair_counts)).sum()
    first_entropy = -(first_counts * np.log(first_counts)).sum()
    return float(pair_entropy - first_entropy) / (len(ids) - 1)
