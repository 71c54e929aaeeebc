"""prepare_data.py under control: after its N-th train shard it is killed once (KILL_READER=N) or held (HOLD_READER=N).

A held reader continues when the file ``go`` is there.
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

real, finished = shards.ShardWriter.finish, []


def finish(self):
    shard = real(self)
    if shard and shard.file.startswith("train"):
        finished.append(shard)
        if (
            len(finished) == int(os.environ.get("KILL_READER", 0))
            and not (mark := self.folder / "killed-once").exists()
        ):
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return shard


def held(self, existing):
    wait(self, existing)
    if len(existing) == int(os.environ.get("HOLD_READER", -1)):
        while not Path("go").exists():
            time.sleep(0.02)


shards.ShardWriter.finish = finish
wait, progress.PrefetchTarget.wait = progress.PrefetchTarget.wait, held

if __name__ == "__main__":
    sys.exit(prepare_data.main())
