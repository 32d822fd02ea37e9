"""A Slurm over the hosts of a laboratory: munge and slurmd on each, slurmctld on node0, everything on private disks."""

from collections.abc import Mapping
from pathlib import Path

from cluster.hosts import Host, Hosts
from helpers.interpreters import Interpreter
from helpers.waiting import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")
READY_SECONDS = 30.0
CONFIG = """\
ClusterName=lab
SlurmctldHost=node0({controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Daemons of one cluster; they end with the hosts."""

    def __init__(self, hosts: Hosts) -> None:
        """Starts the daemons and returns when every host takes tasks.

        Raises:
            AssertionError: they do not within READY_SECONDS; with their output.
        """
        self._hosts, self._folder = hosts, hosts[0].data / "slurm"
        self._environment = {"SLURM_CONF": str(self._folder / "slurm.conf")}
        # more processors than there may be: a test counts tasks, not cores
        nodes = [f"NodeName={host.name} NodeAddr={host.address} CPUs=4 RealMemory=100" for host in hosts]
        config = CONFIG.format(folder=self._folder, controller=hosts[0].address, nodes="\n".join(nodes))
        for host in hosts:
            host.write("slurm/slurm.conf", config.encode())
            host.run("mkdir", self._folder / "state", self._folder / "spool")
        self._daemons = [self._munge(host) for host in hosts] + [self.start("slurmctld", "-D", "-c")]
        self._daemons += [host.start(["slurmd", "-D", "-N", host.name], env=self._environment) for host in hosts]
        wait_until(
            lambda: self.output("sinfo", "--noheader", "--format=%D %t") == f"{len(hosts)} idle\n",
            lambda: "\n".join(daemon.said for daemon in self._daemons), READY_SECONDS,
        )  # fmt: skip

    def start(self, *argv: str | Path, env: Mapping[str, str] | None = None) -> Interpreter:
        """Starts a command of Slurm on node0, with variables that its tasks see as well."""
        return self._hosts[0].start(argv, env={**self._environment, **(env or {})})

    def output(self, *argv: str | Path, env: Mapping[str, str] | None = None) -> str:
        """Returns the output of a short command of Slurm on node0, whatever its exit status."""
        return "".join(self.start(*argv, env=env).communicate(READY_SECONDS))

    def _munge(self, host: Host) -> Interpreter:
        """Starts the service that vouches for who asks, with one key for all hosts."""
        host.write("slurm/munge.key", b"a laboratory's key; it opens nothing else")
        host.run("chmod", "0600", self._folder / "munge.key")
        files = [f"--{name}-file={self._folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        # --force: the laboratory's folder is open to root alone
        return host.start(["munged", "--foreground", "--force", f"--socket={self._folder}/munge.socket", *files])
