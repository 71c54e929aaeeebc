"""How a run in wandb begins: offline where there is no login or no answer, and without what wandb gathers by itself."""

import logging
import shlex
from pathlib import Path

from accelerate.tracking import GeneralTracker

from pretrain.base.foreign import one_line

log = logging.getLogger(__name__)

INIT_SECONDS, FINISH_SECONDS = 20, 50
HEADER_BYTES = 7  # of a .wandb file


def start(tracker: GeneralTracker, run_dir: Path, held: dict[str, int]) -> dict[str, int]:
    """Begin or continue the run of a tracker of Accelerate's; return the last step that it has by kind of row.

    Args:
        held: what earlier processes have sent; a server is asked instead.
    """
    import wandb

    hidden = {"disable_code": True, "disable_git": True, "x_disable_meta": True}  # the last: command line and host
    quiet = {"silent": True, "console": "off", "symlink": False, "x_save_requirements": False}
    times = {"init_timeout": INIT_SECONDS, "finish_timeout": FINISH_SECONDS}
    mode = wandb.setup(wandb.Settings(silent=True)).settings.mode
    about, why = tracker.init_kwargs, f"as its settings ask (WANDB_MODE = {mode})"
    about["settings"] = wandb.Settings(**hidden, **quiet, **times)
    earlier = [*run_dir.glob(f"wandb/offline-*/run-{about['id']}.wandb")]
    try:
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            mode, why = "offline", "for no login was found (wandb login)"
        about["mode"] = mode
        tracker.start()
    except wandb.Error as error:
        why, about["mode"] = f"for the server cannot be used ({one_line(error)})", "offline"
        wandb.teardown()  # its process, which would report that the run's id is in use
        tracker.start()
    run = tracker.tracker
    run.define_metric("*", step_metric="step")
    for path in earlier:  # online, what they have is sent from metrics.jsonl; an empty one would fail the sync of all
        if run.url or path.stat().st_size <= HEADER_BYTES:
            path.with_suffix(".wandb.synced").touch()
    if run.offline:
        parts = f"{shlex.quote(str(run_dir / 'wandb'))}/offline-*"  # one by one: a sync of all ends at a torn one
        each = f'for part in {parts}; do wandb sync "$part"; done'
        log.info(f"wandb: offline, {why}. To send the curves later: {each}")
    elif run.url:
        log.info(f"wandb: {run.url}")
        return dict(run.summary.get("held") or {})
    return held
