"""Run prepare_data.py and kill it once, or make it wait, after a number of train shards.

Environment variables:

- KILL_READER: kill this process, once, after that many train shards.
- HOLD_READER: wait after that many train shards until the file ``go`` exists.
"""

import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import prepare_data  # noqa: E402
from ursa_minor.data.preparation import progress  # noqa: E402
from ursa_minor.data.tokens import shards  # noqa: E402

original_finish = shards.ShardWriter.finish
original_wait = progress.PrefetchTarget.wait
train_shards = []


def finish(self):
    """Finish a shard, then kill this process if this was the shard to be killed after."""
    shard = original_finish(self)
    if shard and shard.file.startswith("train"):
        train_shards.append(shard)
        mark = self.folder / "killed-once"
        if len(train_shards) == int(os.environ.get("KILL_READER", 0)) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return shard


def wait(self, existing):
    """Wait as prepare_data.py does, and then for the file ``go`` if HOLD_READER says so."""
    original_wait(self, existing)
    if len(existing) == int(os.environ.get("HOLD_READER", -1)):
        while not Path("go").exists():
            time.sleep(0.02)


shards.ShardWriter.finish = finish
progress.PrefetchTarget.wait = wait

if __name__ == "__main__":
    sys.exit(prepare_data.main())
