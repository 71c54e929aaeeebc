"""Simulate two machines on one host: two network namespaces, joined by a link that can be cut.

Each has its own host name. Unlike real machines they share a disk, the cores and a clock, and
there is no switch, no InfiniBand and no GPU.
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

HOSTS = ("node1", "node2")  # named as in Slurm; the launchers meet on the first one
DEVICE = "eth0"
PORT = 29500
# Run a command with its own /etc/hosts and host name. The files of the host do not change.
ENTER = """
mount --bind "$1" /etc/hosts
echo "$2" > /proc/sys/kernel/hostname
shift 2
exec "$@"
"""


class TwoMachines:
    """Two simulated machines. At the end of the `with` block all of their processes are killed.

    Args:
        folder: for the hosts file and the output of the processes.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.names = [f"ursa-{os.getpid()}-{host}" for host in HOSTS]
        self.hosts = folder / "hosts"

    def __enter__(self) -> "TwoMachines":
        self._write_hosts_file()
        try:
            self._create_network()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_) -> None:
        for machine, name in enumerate(self.names):
            if Path("/run/netns", name).exists():
                self.kill(machine)
                _ip(f"netns delete {name}")

    def _write_hosts_file(self) -> None:
        lines = ["127.0.0.1 localhost"]
        for machine, host in enumerate(HOSTS):
            lines.append(f"{self.address(machine)} {host}")
        self.hosts.write_text("\n".join(lines) + "\n")

    def _create_network(self) -> None:
        first, second = self.names
        for name in self.names:
            _ip(f"netns add {name}")
        _ip(f"link add {DEVICE} netns {first} type veth peer name {DEVICE} netns {second}")
        for machine, name in enumerate(self.names):
            _ip(f"-n {name} address add {self.address(machine)}/24 dev {DEVICE}")
            _ip(f"-n {name} link set lo up")
            _ip(f"-n {name} link set {DEVICE} up")

    def address(self, machine: int) -> str:
        """Return the IP address of a machine."""
        return f"10.22.0.{machine + 1}"

    def start(self, machine: int, command: Sequence[str], **environment: str) -> "Started":
        """Start a command on a machine."""
        environment = os.environ | {"GLOO_SOCKET_IFNAME": DEVICE} | environment
        return Started([*self.enter(machine), *command], environment, self.folder)

    def enter(self, machine: int) -> list[str]:
        """Return the prefix that makes a command run on a machine."""
        in_network = ["ip", "netns", "exec", self.names[machine]]
        in_namespaces = ["unshare", "--uts", "--mount", "sh", "-ec", ENTER, "sh"]
        return [*in_network, *in_namespaces, str(self.hosts), HOSTS[machine]]

    def processes(self, machine: int) -> dict[int, str]:
        """Return the command lines of a machine's processes, by process id."""
        commands = {}
        for pid in _ip(f"netns pids {self.names[machine]}").split():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_text()
                commands[int(pid)] = command.replace("\0", " ")
        return commands

    def kill(self, machine: int) -> None:
        """Kill all processes of a machine."""
        pids = self.processes(machine)
        while pids:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)  # a killed process is listed for a moment
            pids = self.processes(machine)

    def disconnect(self) -> None:
        """Cut the link: packets are lost, and neither machine is notified."""
        _ip(f"-n {self.names[1]} link set {DEVICE} down")

    def reconnect(self) -> None:
        """Restore the link."""
        _ip(f"-n {self.names[1]} link set {DEVICE} up")


class Started:
    """A running process, with the file that receives its output."""

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
    def output(self) -> str:
        """The output so far."""
        return self.path.read_text(errors="replace")


def _ip(arguments: str) -> str:
    """Run the command `ip` and return its output."""
    command = ["ip", *arguments.split()]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20)
    return result.stdout


def skip_reason() -> str:
    """Return why this host cannot simulate two machines, or an empty string."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        return "needs Linux with iproute2 and util-linux"
    name = f"ursa-{os.getpid()}-try"
    command = ["ip", "netns", "add", name]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if result.returncode:
        return f"needs the permission to create network namespaces (root): {result.stderr.strip()}"
    _ip(f"netns delete {name}")
    return ""


@pytest.fixture
def machines(tmp_path) -> Iterator[TwoMachines]:
    """Two simulated machines for the duration of a test."""
    reason = skip_reason()
    if reason:
        pytest.skip(reason)
    with TwoMachines(tmp_path) as two_machines:
        yield two_machines
