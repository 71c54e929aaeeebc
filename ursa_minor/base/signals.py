"""Define the signals that stop a run, and ignore them in its background processes.

This module does not import torch.
"""

import signal

# Schedulers send these before they end or suspend a job. Slurm's --signal and Grid Engine's -notify
# send SIGUSR1 or SIGUSR2, and the system sends SIGXCPU at the soft limit on CPU time.
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, *WARNINGS)


def ignore_stop_signals() -> None:
    """Ignore the signals that a scheduler may send to every process of a job.

    Background processes of a run call this. The trainer stops at such a signal and then ends them.
    """
    for number in (signal.SIGHUP, *WARNINGS):
        signal.signal(number, signal.SIG_IGN)
