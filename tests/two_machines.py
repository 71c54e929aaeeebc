"""Two machines on one host: network namespaces, each with a host name of its own, and a cable between them that can be cut.

Unlike two machines they share a disk, cores and a clock. There is neither a switch nor InfiniBand between them, nor a card.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

HOSTS = ("node1", "node2")  # as Slurm names them; the first is where the launchers meet
DEVICE = "eth0"
PORT = 29500
# A machine's own names, in mount and host name spaces of its own: nothing of this host's /etc is touched.
ENTER = """
mount --bind "$1" /etc/hosts
echo "$2" > /proc/sys/kernel/hostname
shift 2
exec "$@"
"""


class TwoMachines:
    """The two, until the block ends; then no process of theirs is left.

    Args:
        folder: for the names and what processes print.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.names = [f"ursa-{os.getpid()}-{host}" for host in HOSTS]

    def __enter__(self) -> "TwoMachines":
        self.hosts = self.folder / "hosts"
        rows = [f"{self.address(number)} {host}" for number, host in enumerate(HOSTS)]
        self.hosts.write_text("\n".join(["127.0.0.1 localhost", *rows]) + "\n")
        try:
            for name in self.names:
                _ip("netns", "add", name)
            first, second = self.names
            _ip(
                "link",
                "add",
                DEVICE,
                "netns",
                first,
                "type",
                "veth",
                "peer",
                "name",
                DEVICE,
                "netns",
                second,
            )
            for number, name in enumerate(self.names):
                _ip("-n", name, "address", "add", f"{self.address(number)}/24", "dev", DEVICE)
                for device in ("lo", DEVICE):
                    _ip("-n", name, "link", "set", device, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for machine, name in enumerate(self.names):
            if Path("/run/netns", name).exists():
                self.kill(machine)
                _ip("netns", "delete", name)

    def address(self, machine: int) -> str:
        """Return a machine's address."""
        return f"10.22.0.{machine + 1}"

    def start(self, machine: int, command: Sequence[str], **environment: str) -> "Started":
        """Start a command there."""
        environment = os.environ | {"GLOO_SOCKET_IFNAME": DEVICE} | environment
        return Started([*self.enter(machine), *command], environment, self.folder)

    def enter(self, machine: int) -> list[str]:
        """Return the words before a command that is to run there."""
        names = [
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-ec",
            ENTER,
            "sh",
            str(self.hosts),
            HOSTS[machine],
        ]
        return ["ip", "netns", "exec", self.names[machine], *names]

    def processes(self, machine: int) -> dict[int, str]:
        """Return the command lines of what runs there, by process id."""
        found = {}
        for word in _ip("netns", "pids", self.names[machine]).split():
            with contextlib.suppress(OSError):
                found[int(word)] = Path(f"/proc/{word}/cmdline").read_text().replace("\0", " ")
        return found

    def kill(self, machine: int) -> None:
        """Kill all that runs there."""
        while pids := self.processes(machine):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)  # one that has ended stays for a moment

    def cut(self) -> None:
        """Cut the cable: what is sent is lost, and nobody is told."""
        _ip("-n", self.names[1], "link", "set", DEVICE, "down")

    def mend(self) -> None:
        """Mend the cable."""
        _ip("-n", self.names[1], "link", "set", DEVICE, "up")


class Started:
    """A process, and the file that holds what it printed."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], folder: Path):
        handle, path = tempfile.mkstemp(dir=folder, prefix=".out-")
        self.path = Path(path)
        with open(handle, "wb") as out:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        """What it has printed."""
        return self.path.read_text(errors="replace")


def _ip(*words: str) -> str:
    return subprocess.run(
        ["ip", *words], check=True, capture_output=True, text=True, timeout=20
    ).stdout


def why_not() -> str:
    """Return why there can be no two machines here, or nothing."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        return "needs Linux with iproute2 and util-linux"
    name = f"ursa-{os.getpid()}-try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=20)
    if tried.returncode:
        return f"needs the right to make network namespaces (root): {tried.stderr.strip()}"
    _ip("netns", "delete", name)
    return ""


@pytest.fixture
def machines(tmp_path) -> Iterator[TwoMachines]:
    """Two machines that are gone when the test is."""
    if reason := why_not():
        pytest.skip(reason)
    with TwoMachines(tmp_path) as both:
        yield both
