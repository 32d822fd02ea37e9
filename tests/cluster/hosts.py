"""A cluster on one machine: hosts with a network between them, a private disk each, and one shared folder.

    test ── Hosts ─┬─ hub      machine that carries the bridge 10.83.0.254 and serves the shared folder
                   ├─ node0    10.83.0.1, own <lab>/data (tmpfs), <lab>/share (mounted), no default route
                   └─ node1    10.83.0.2, the same paths

Every laboratory is a network of its own, so that any number can stand at once with the same addresses. Needs root.
The share is GlusterFS as a user would mount it: a real glusterd on the hub, one volume of one brick on a tmpfs of
64 MB, mounted without options, so that the client's caches behave as on a user's cluster.
"""

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from cluster.machine import COMMAND_SECONDS, Machine
from helpers.interpreters import Interpreter

Names = Literal["loopback", "unknown", "silent"]
Fault = Literal["readonly", "full", "hangs"]
HUB_ADDRESS = "10.83.0.254"
NAME_SERVER = "10.83.0.253"  # where names are "silent"; nobody has it
NOWHERE = ["lladdr", "02:00:00:00:00:fe", "dev", "eth0", "nud", "permanent"]  # a hardware address that nobody has
BRICK = Path("/run/brick")  # below a tmpfs of the hub's own


class Host(Machine):
    """One machine of the cluster.

    Attributes:
        index: 0, 1, ...; the host name is "node" and the index.
        address: IPv4 address of eth0, reachable by the other hosts alone.
        data: its private disk; the same path on every host.
    """

    def __init__(self, index: int, hub: Machine, lab: Path) -> None:
        super().__init__(f"node{index}", mounts_of=hub)
        self.index, self.address, self.data = index, _address(index), lab / "data"
        self._hub, self._lab, self._port = hub, lab, f"port{index}"
        self._started: list[Interpreter] = []
        self._needs_share = False
        for folder in (self.data, "/dev/shm"):
            self.run("mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", folder)
        ends = f"name eth0 netns {self.pid} type veth peer name {self._port} netns {hub.pid}"
        hub.run("ip", "link", "add", *ends.split())
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.heal()

    def learn_names(self, count: int, names: Names) -> None:
        """Gives the host an /etc/hosts of its own: for `count` hosts, or for none."""
        local = ["127.0.0.1 localhost"]
        hosts = [f"{'127.0.1.1' if i == self.index else _address(i)} node{i}" for i in range(count)]
        files = {"hosts": {"silent": [], "unknown": local, "loopback": local + hosts}[names]}
        if names == "silent":
            files["resolv.conf"] = [f"nameserver {NAME_SERVER}"]
            self.run("ip", "neighbour", "replace", NAME_SERVER, *NOWHERE)
        for name, content in files.items():
            file = self._lab / "output" / f"{self.name}.{name}"
            file.write_text("\n".join(content) + "\n")
            self.run("mount", "--bind", file, f"/etc/{name}")

    def mount_share(self) -> None:
        """Mounts the shared folder with the options that a user gets without asking, now and after a loss of power."""
        with contextlib.suppress(RuntimeError):  # not mounted
            self.run("umount", "--lazy", self._lab / "share")
        self.run("mount", "-t", "glusterfs", f"{HUB_ADDRESS}:/share", self._lab / "share")
        self._needs_share = False

    def start(
        self, argv: Sequence[str | Path], env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Interpreter:
        """Starts a command on the private disk, or in `cwd`; a host that lost power starts up first."""
        if self._needs_share:
            self.heal()
            self.mount_share()
        environment = {**os.environ, "TMPDIR": str(self.data), **(env or {})}
        self._started.append(self.spawn([*map(str, argv)], environment, cwd or self.data))
        return self._started[-1]

    def close(self) -> None:
        super().close()
        for started in self._started:
            started.wait(COMMAND_SECONDS)

    def write(self, path: str, content: bytes) -> None:
        """Writes a file below `data`, with the folders that it needs."""
        file = self.seen_from_here(self.data / path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)

    def read(self, path: str) -> bytes:
        """Returns a file below `data`."""
        return self.seen_from_here(self.data / path).read_bytes()

    def cut(self, how: Literal["link", "silent"]) -> None:
        """Takes the host off the network and the share: its interface goes down, or the switch loses every packet."""
        if how == "link":
            self.run("ip", "link", "set", "eth0", "down")
        else:
            self._hub.run("ip", "link", "set", self._port, "nomaster")

    def lose_packets_to(self, other: "Host") -> None:
        """Loses silently what this host sends to another; what the other sends arrives."""
        self.run("ip", "neighbour", "replace", other.address, *NOWHERE)

    def heal(self) -> None:
        """Ends `cut`."""
        self.run("ip", "link", "set", "eth0", "up")
        self._hub.run("ip", "link", "set", self._port, "up", "master", "bridge0")

    def kill_all(self, *, silent: bool) -> None:
        """Ends every process at once with SIGKILL, the share's client included, as a loss of power does.

        The private disk keeps its files. The next `start` mounts the shared folder again.

        Args:
            silent: the peers hear nothing of it; else the kernel closes their connections, as after a crash of the run.
        """
        if silent:
            self.cut("silent")
        self.end_all()
        self._needs_share = True


def _address(index: int) -> str:
    return f"10.83.0.{index + 1}"


class Hosts(list[Host]):
    """The hosts of a cluster, made by `cluster_of`.

    Attributes:
        share: the shared folder; the same path on every host, and only there.
    """

    def __init__(self, hub: Machine, share: Path) -> None:
        super().__init__()
        self._hub, self.share = hub, share

    def serve(self) -> None:
        """Starts the server of the share."""
        for folder in ("/run", "/var/lib/glusterd", "/var/log/glusterfs"):
            self._hub.run("mount", "-t", "tmpfs", "tmpfs", folder)
        self._hub.run("mkdir", "-p", "/run/gluster", BRICK)
        self._hub.run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", BRICK)
        self._hub.run("glusterd")
        self._gluster("create", f"{HUB_ADDRESS}:{BRICK}/volume", "force")
        self._gluster("start")

    def _gluster(self, verb: str, *words: str) -> str:
        """Glusterd answers a moment after it has started."""
        return _again(lambda: self._hub.run("gluster", "--mode=script", "volume", verb, "share", *words))

    def _signal_brick(self, number: signal.Signals) -> None:
        self._hub.run("pkill", f"-{int(number)}", "--nslist", "net", "--ns", str(self._hub.pid), "glusterfsd")

    def share_fault(self, fault: Fault) -> None:
        """readonly: EROFS; full: ENOSPC; hangs: the brick stops answering, so that calls wait (ping timeout 42 s)."""
        if fault == "readonly":
            self._gluster("set", "features.read-only", "on")
        elif fault == "full":
            free, block = self._hub.run("stat", "--file-system", "--format=%a %S", BRICK).split()
            self._hub.run("fallocate", "--length", str(int(free) * int(block)), BRICK / "ballast")
        else:
            self._signal_brick(signal.SIGSTOP)

    def share_heal(self) -> None:
        """Ends all faults of the share; returns when the first host can write again.

        GlusterFS looks at its disk's free space every 5 s and refuses writes until it has seen that there is some.
        """
        self._signal_brick(signal.SIGCONT)
        self._hub.run("rm", "--force", BRICK / "ballast")
        if "read-only: on" in self._gluster("info"):
            self._gluster("set", "features.read-only", "off")
        probe = self.share / "healed"
        _again(lambda: self[0].run("sh", "-c", f"echo healed > {probe} && rm {probe}"))


@contextlib.contextmanager
def cluster_of(count: int, kind: Literal["gluster", "bind"] = "gluster", names: Names = "unknown") -> Iterator[Hosts]:
    """A cluster that ends with the block.

    Args:
        count: of hosts, up to 250.
        kind: of the share: "gluster" caches as a network's file system does, "bind" is one memory.
        names: whether hosts find each other by name: "loopback": yes, but each finds itself at 127.0.1.1, as Debian's
            installer leaves it. "silent": no name is known, and packets to the name server are lost.
    """
    with (
        tempfile.TemporaryDirectory(prefix="cluster_", ignore_cleanup_errors=True) as folder,
        contextlib.ExitStack() as stack,
    ):
        lab = Path(folder)
        for name in ("data", "share", "output"):
            (lab / name).mkdir()
        hub = stack.enter_context(contextlib.closing(Machine("hub")))
        hosts = Hosts(hub, lab / "share")
        for words in (
            "link add bridge0 type bridge",
            f"address add {HUB_ADDRESS}/24 dev bridge0",
            "link set bridge0 up",
        ):
            hub.run("ip", *words.split())
        if kind == "gluster":
            hosts.serve()
        else:  # the hosts, whose mounts are copies of the hub's, have it as well
            hub.run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", hosts.share)
        for index in range(count):
            host = stack.enter_context(contextlib.closing(Host(index, hub, lab)))
            hosts.append(host)
            host.learn_names(count, names)
            if kind == "gluster":
                host.mount_share()
        yield hosts


def _again(call: Callable[[], str]) -> str:
    """Returns the result of a call that fails at first, for 20 s or so."""
    for _ in range(200):
        with contextlib.suppress(RuntimeError):
            return call()
        time.sleep(0.1)
    return call()
