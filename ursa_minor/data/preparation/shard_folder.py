"""Bring the folder of a source up to date while no other process writes to it."""

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from ursa_minor.base import files
from ursa_minor.base.errors import BadInput
from ursa_minor.data.preparation import prepare, repair
from ursa_minor.data.preparation.progress import PrefetchTarget, log_missing_text
from ursa_minor.data.sources.find import FoundSource
from ursa_minor.data.tokens import manifest as manifests

log = logging.getLogger(__name__)

BUSY = 75  # exit status while another process has the lock (EX_TEMPFAIL)
BUSY_SECONDS = 10.0  # time between two attempts to get the lock


def complete_folder(source: FoundSource, target: PrefetchTarget | None) -> None:
    """Write or download the shards of a source that are missing or corrupted.

    Args:
        target: limit up to which shards are written while train.py reads them, or None to write
            all shards. With a limit, this function waits for another process that prepares the
            same folder.

    Raises:
        BadInput: another process prepares the folder, or the source cannot be read.
        TrainingStopped: the retries of a download are used up.
    """
    folder = source.folder
    folder.mkdir(parents=True, exist_ok=True)
    with lock_folder(folder, waits=target is not None):
        if source.repository:
            # This import is slow, and text does not need it.
            from ursa_minor.data.preparation import download

            download.fetch(source, target)
            return
        repair.repair(source, every=target is None)
        if manifests.is_complete(folder):
            manifest = manifests.describe_folder(folder)
            log_missing_text(manifest)
            overlap = manifests.overlap_note(manifest)
            if overlap:
                log.warning(overlap)
        else:
            prepare.prepare(source, target)


@contextlib.contextmanager
def lock_folder(folder: Path, *, waits: bool) -> Iterator[None]:
    """Lock a folder inside the ``with`` block.

    Args:
        waits: whether to wait if another process has the lock.

    Raises:
        BadInput: another process has the lock, and ``waits`` is false.
    """
    busy = f"{folder} is being prepared by process {{pid}}. Wait until this process has finished"
    with contextlib.ExitStack() as stack:
        is_locked = False
        while not is_locked:
            try:
                stack.enter_context(files.locked(folder / files.LOCK_FILE, busy, BUSY))
                is_locked = True
            except BadInput as error:
                if not waits or error.status != BUSY:
                    raise
                # It may be the process of another machine, or an earlier one that is still ending.
                log.info(str(error))
                time.sleep(BUSY_SECONDS)
        yield
