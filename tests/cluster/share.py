"""The folder that all machines of a laboratory share: GlusterFS as a user would mount it.

A real glusterd serves one volume from the machine that carries the network; each host mounts it with
`mount -t glusterfs` and no options, so that the client's caches behave as on a user's cluster.
"""

import contextlib
import signal
import time
from pathlib import Path
from typing import Literal

from cluster.machine import Machine

Fault = Literal["readonly", "full", "hangs"]
BRICK = Path("/run/brick")  # below a tmpfs of the server's own
READY_SECONDS = 20.0


class Gluster:
    """One volume of one brick on a tmpfs of 64 MB, by a glusterd with state, sockets and logs of its own."""

    def __init__(self, server: Machine, address: str, folder: Path) -> None:
        self._server, self._address, self._folder = server, address, folder
        self._ballast = BRICK / "ballast"
        for folder in ("/run", "/var/lib/glusterd", "/var/log/glusterfs"):
            self._server.run("mount", "-t", "tmpfs", "tmpfs", folder)
        self._server.run("mkdir", "-p", "/run/gluster", BRICK)
        self._server.run("mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", BRICK)
        self._server.run("mkdir", BRICK / "volume")
        self._server.run("glusterd")
        self._gluster("volume", "create", "share", f"{self._address}:{BRICK}/volume", "force")
        self._gluster("volume", "start", "share")

    def mount(self, host: Machine) -> None:
        """Mounts the volume with the options that a user gets without asking."""
        with contextlib.suppress(RuntimeError):  # not mounted
            host.run("umount", "--lazy", self._folder)
        host.run("mount", "-t", "glusterfs", f"{self._address}:/share", self._folder)

    def fail(self, fault: Fault) -> None:
        """readonly: EROFS; full: ENOSPC; hangs: the brick stops answering, so that calls wait (ping timeout 42 s)."""
        if fault == "readonly":
            self._gluster("volume", "set", "share", "features.read-only", "on")
        elif fault == "full":
            free = int(self._server.run("stat", "--file-system", "--format=%a", BRICK))
            block = int(self._server.run("stat", "--file-system", "--format=%S", BRICK))
            self._server.run("fallocate", "--length", str(free * block), self._ballast)
        else:
            self._signal_brick(signal.SIGSTOP)

    def heal(self) -> None:
        """Ends all faults."""
        self._signal_brick(signal.SIGCONT)
        self._server.run("rm", "--force", self._ballast)
        if "read-only: on" in self._gluster("volume", "info", "share"):
            self._gluster("volume", "set", "share", "features.read-only", "off")

    def _signal_brick(self, number: signal.Signals) -> None:
        self._server.run("pkill", f"-{int(number)}", "--nslist", "net", "--ns", str(self._server.pid), "glusterfsd")

    def _gluster(self, *words: str) -> str:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                return self._server.run("gluster", "--mode=script", *words)
            except RuntimeError:
                if time.monotonic() > deadline:  # glusterd answers a moment after it has started
                    raise
                time.sleep(0.05)
