"""A cluster on one machine: hosts with a network between them, a private disk each, and one shared folder.

    test ── Hosts ─┬─ hub      machine that carries the bridge 10.83.0.254 and serves the shared folder
                   ├─ node0    10.83.0.1, own <lab>/data (tmpfs), <lab>/share (mounted), no default route
                   └─ node1    10.83.0.2, the same paths

Every laboratory is a network of its own, so that any number can stand at once with the same addresses. Needs root.
"""

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from cluster.machine import COMMAND_SECONDS, Machine, Started
from cluster.share import READY_SECONDS, Fault, Gluster

HUB_ADDRESS = "10.83.0.254"
Names = Literal["loopback", "unknown", "silent"]
NAME_SERVER = "10.83.0.253"  # where names are "silent"; nobody has it
INTERFACE = "eth0"  # the same on every host
NOWHERE = "02:00:00:00:00:fe"  # a hardware address that nobody has


class Host(Machine):
    """One machine of the cluster.

    Attributes:
        index: 0, 1, ...; the host name is "node" and the index.
        address: IPv4 address, reachable by the other hosts alone.
        data: its private disk; the same path on every host.
    """

    def __init__(self, index: int, hub: Machine, lab: Path) -> None:
        super().__init__(f"node{index}", mounts_of=hub)
        self.index, self.address, self.data = index, _address(index), lab / "data"
        self._hub, self._output = hub, lab / "output"
        self._started: list[Started] = []
        self._port = f"port{index}"
        self.run("mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", self.data)
        self.run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
        peer = ["type", "veth", "peer", "name", self._port, "netns", str(hub.pid)]
        hub.run("ip", "link", "add", "name", INTERFACE, "netns", str(self.pid), *peer)
        self.run("ip", "address", "add", f"{self.address}/24", "dev", INTERFACE)
        self.run("ip", "link", "set", INTERFACE, "up")
        hub.run("ip", "link", "set", self._port, "up", "master", "bridge0")
        self._lost: set[str] = set()
        self._share: Gluster | None = None
        self._needs_share = True

    def learn_names(self, count: int, names: Names) -> None:
        """Gives the host an /etc/hosts of its own: for `count` hosts, or for none."""
        addresses = {}
        if names == "loopback":
            addresses = {f"node{index}": _address(index) for index in range(count)} | {self.name: "127.0.1.1"}
        if names == "silent":
            server = self._output / "resolv.conf"
            server.write_text(f"nameserver {NAME_SERVER}\n")
            self.run("mount", "--bind", server, "/etc/resolv.conf")
            self.run("ip", "neighbour", "replace", NAME_SERVER, "lladdr", NOWHERE, "dev", INTERFACE, "nud", "permanent")
        file = self._output / f"{self.name}.hosts"
        lines = [
            "127.0.0.1 localhost" if names != "silent" else "",
            *(f"{address} {name}" for name, address in addresses.items()),
        ]
        file.write_text("\n".join(lines) + "\n")
        self.run("mount", "--bind", file, "/etc/hosts")

    def connect_share(self, share: Gluster) -> None:
        """Mounts the shared folder, now and after each loss of power."""
        share.mount(self)
        self._share, self._needs_share = share, False

    def start(
        self, argv: Sequence[str | Path], env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Started:
        """Starts a command on the private disk, or in `cwd`; a host that lost power starts up first."""
        if self._needs_share and self._share is not None:
            self.heal()
            self.connect_share(self._share)
        output = self._output / f"{self.name}_{len(self._started)}"
        environment = {**os.environ, "TMPDIR": str(self.data), **(env or {})}
        self._started.append(super().spawn([str(word) for word in argv], environment, output, cwd or self.data))
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

    def cut(self, how: Literal["link", "silent"] = "link") -> None:
        """Takes the host off the network, shared folder included.

        Args:
            how: "link" takes the interface down, which the host notices; "silent" loses every packet in the switch.
        """
        if how == "link":
            self.run("ip", "link", "set", INTERFACE, "down")
        else:
            self._hub.run("ip", "link", "set", self._port, "nomaster")

    def lose_packets_to(self, other: "Host") -> None:
        """Loses silently what this host sends to another; what the other sends arrives."""
        entry = ["lladdr", NOWHERE, "dev", INTERFACE, "nud", "permanent"]
        self.run("ip", "neighbour", "replace", other.address, *entry)
        self._lost.add(other.address)

    def heal(self) -> None:
        """Ends `cut` and `lose_packets_to`."""
        self.run("ip", "link", "set", INTERFACE, "up")
        self._hub.run("ip", "link", "set", self._port, "up", "master", "bridge0")
        while self._lost:
            self.run("ip", "neighbour", "delete", self._lost.pop(), "dev", INTERFACE)

    def kill_all(self, *, silent: bool = False) -> None:
        """Ends every process at once with SIGKILL, the shared folder's client included, as a loss of power does.

        The private disk keeps its files. The next `start` mounts the shared folder again.

        Args:
            silent: the peers hear nothing of it; else the kernel closes their connections, as after a crash of the run.
        """
        if silent:
            self.cut("silent")
        self.end_all()
        self._needs_share = True

    def freeze(self) -> None:
        """Stops every process with SIGSTOP: the host answers pings and nothing else. Look at no shared file here."""
        self.signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets every process go on."""
        self.signal_all(signal.SIGCONT)


def _address(index: int) -> str:
    return f"10.83.0.{index + 1}"


class Hosts:
    """The cluster, from `with Hosts(2) as hosts` to the end of the block.

    Attributes:
        share: the shared folder; the same path on every host, and only there.
    """

    def __init__(self, count: int, share: Literal["gluster", "bind"] = "gluster", names: Names = "unknown") -> None:
        """Describes a cluster.

        Args:
            count: of hosts, up to 250.
            share: "gluster" caches as a network's file system does, "bind" is one memory.
            names: whether hosts find each other by name: "loopback": yes, but each finds itself at 127.0.1.1, as
                Debian's installer leaves it. "silent": no name is known, and packets to the name server are lost.
        """
        self._count, self._kind, self._names = count, share, names
        self._hosts: list[Host] = []
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> "Hosts":
        """Builds the cluster, or leaves nothing of it behind."""
        with contextlib.ExitStack() as stack:
            lab = Path(tempfile.mkdtemp(prefix="cluster_"))
            stack.callback(shutil.rmtree, lab, ignore_errors=True)
            self.share = lab / "share"
            for name in ("data", "share", "output"):
                (lab / name).mkdir()
            hub = Machine("hub")
            stack.callback(hub.close)
            hub.run("ip", "link", "add", "name", "bridge0", "type", "bridge")
            hub.run("ip", "address", "add", f"{HUB_ADDRESS}/24", "dev", "bridge0")
            hub.run("ip", "link", "set", "bridge0", "up")
            self._service: Gluster | None = None
            if self._kind == "gluster":
                self._service = Gluster(hub, HUB_ADDRESS, self.share)
            else:  # the hosts, whose mounts are copies of the hub's, have it as well
                hub.run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", self.share)
            for index in range(self._count):
                host = Host(index, hub, lab)
                stack.callback(host.close)
                self._hosts.append(host)
                host.learn_names(self._count, self._names)
                if self._service is not None:
                    host.connect_share(self._service)
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends every process of every host and removes all files."""
        self._hosts.clear()
        self._closing.close()

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def share_fault(self, fault: Fault) -> None:
        """Makes a folder shared by GlusterFS "readonly" or "full" for all hosts, or makes it hang."""
        assert self._service is not None
        self._service.fail(fault)

    def share_heal(self) -> None:
        """Ends all faults of the shared folder; returns when the first host can write again.

        GlusterFS looks at its disk's free space every 5 s and refuses writes until it has seen that there is some.
        """
        assert self._service is not None
        self._service.heal()
        probe, deadline = self.share / "healed", time.monotonic() + READY_SECONDS
        while True:
            try:
                self[0].run("sh", "-c", f"echo healed > {probe} && rm {probe}")
                return
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
