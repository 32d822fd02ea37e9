"""`rendezvous`: how machines find each other, detect a lost one, and restart a run."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from reagent_lite.config.section import Count, Number, Positive, Section
from reagent_lite.errors import Problem


class RendezvousConfig(Section):
    """How several machines or processes find each other and detect a failure."""

    join_timeout_seconds: Positive = 600.0
    """Time that a machine waits for all others, also after a restart."""
    job: str | None = None
    """Name of the job, the same on all its machines; machines of another job are refused. Absent: the scheduler's job
    number, and model_output_path."""
    interface: str | None = None
    """Network interface (eth0) or numeric address of this machine; absent: that of the default route."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """Port that node 0 listens on; 0: a free port."""
    max_restarts: Number | None = None
    """Largest number of restarts of a failed run from its last checkpoint; absent: 3 with checkpoints, else 0."""
    heartbeat_seconds: Positive = 1.0
    """Time between two heartbeats of a machine."""
    lost_after_seconds: Positive = 10.0
    """Silence after which a machine or a stopped process counts as lost."""
    startup_timeout_seconds: Positive = 7200.0
    """Time that processes wait for each other while one of them reads data, evaluates or exports. A quarter of it
    bounds the search of simulation.auto_scale, also in a single process."""
    step_timeout_seconds: Positive = 300.0
    """Time that a process waits for its peers within a training step; the error names the peer that is late."""
    checksum_every_steps: Count = 1000
    """Steps between two comparisons of the parameters of all processes."""

    def rules(self) -> Iterator[Problem]:
        """Yields a Problem for each pair of times that contradict each other."""
        least = 3 * self.heartbeat_seconds
        if self.lost_after_seconds < least:
            expected = f"at least three heartbeats ({least:g})"
            yield self.wrong("lost_after_seconds", expected, "A single late heartbeat must not count as a loss")
