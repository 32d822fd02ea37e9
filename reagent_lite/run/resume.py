"""What a run takes over from an earlier start of itself: nothing, or its state between two steps.

checkpoints/ ─► unfinished, same config? ─► same data? ─► position in this run's plan ─► state of every rank
"""

import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reagent_lite.config import WorkflowConfig, fingerprint, resolved
from reagent_lite.console import logger
from reagent_lite.distributed.agreement import patient
from reagent_lite.distributed.faults import fault_here
from reagent_lite.distributed.group import Group, attempt_here
from reagent_lite.errors import ConfigError, Problem, counted
from reagent_lite.run.experience import Experience, Stream
from reagent_lite.training.checkpoint import CheckpointFolder, Checkpoints, Tree
from reagent_lite.training.loop import Position, Running
from reagent_lite.training.resume import look_for, position_in, regrouped_own, require_same_learning, restore


def look_back(config: WorkflowConfig, group: Group, folder: Path) -> "History":
    """Returns what there is to continue; called on every rank.

    Raises:
        ConfigError: an unfinished run of another learning config stands there.
    """
    checkpoints = CheckpointFolder(folder)
    wanted = config.checkpoint.resume or attempt_here() > 0  # the first attempt has begun anew, the others continue it
    state = look_for(checkpoints, group, wanted=wanted)
    if state is not None:
        logs_only = bool(config.training_data_path) and not config.simulated_share
        growing = ("epochs",) if logs_only else ()  # what is simulated, and how, depends on the length of the run
        require_same_learning(state["config"], resolved(config), state["name"], growing=growing)
    return History(config=config, group=group, folder=checkpoints, state=state)


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """An earlier start of this run, or that there was none.

    Attributes:
        config: the run's config.
        group: the ranks.
        folder: the run's checkpoints, on rank 0's disk.
        state: state.json of the checkpoint to continue from, on every rank; None begins anew.
    """

    config: WorkflowConfig
    group: Group
    folder: CheckpointFolder
    state: dict[str, Any] | None

    @property
    def lines(self) -> int:
        """Lines of metrics.jsonl that stay."""
        return 0 if self.state is None else int(self.state["told"]["lines"])

    @property
    def figures(self) -> dict[str, float]:
        """Figures of the last epoch."""
        return {} if self.state is None else dict(self.state["told"]["figures"])

    def require_same(self, experience: Experience) -> None:
        """Refuses to go on with other data.

        Raises:
            ConfigError: the data, or the environment, is not what the checkpoint has learned from.
        """
        if self.state is None or self.state["identity"] == _identity(experience):
            return
        now = _identity(experience)
        raise ConfigError(
            [
                Problem(key, f"what the unfinished run of checkpoint {self.state['name']} has learned from "
                        f"(sha256 {value[:12]})", f"sha256 {now[name][:12]}",
                        "Restore it, give another model_output_path, or begin anew with --set checkpoint.resume=false")
                for (name, value), key in zip(sorted(self.state["identity"].items()), _KEYS, strict=True)
                if value != now[name]
            ]
        )  # fmt: skip

    def position(self, stream: Stream) -> Position:
        """Returns where the run goes on, and says so.

        Raises:
            ConfigError: the run is to be shorter than it is already.
        """
        if self.state is None:
            return Position()
        step, rows, again = position_in(self.state, stream.order)
        if step > stream.plan.num_steps:
            raise ConfigError(
                Problem("epochs", f"at least {-(-step // stream.order.steps)}: so far is the unfinished run of "
                        f"checkpoint {self.state['name']}", str(self.config.epochs))
            )  # fmt: skip
        said = counted(again, "row of an epoch is", "rows of an epoch are")
        note = f"; {said} read again, for the minibatches are others than before" if again else ""
        epoch = step // stream.order.steps
        logger.info(f"resuming from {self.folder.folder.name}/{self.state['name']} (epoch {epoch}, "
                        f"{counted(rows, 'row')})"
                        f"{note}")  # fmt: skip
        return Position(step=step, rows=rows)

    def continue_in(
        self, running: Running, stream: Stream, experience: Experience, versions: dict[str, str]
    ) -> Checkpoints:
        """Loads what was saved into the run, and returns where it is saved from here on."""
        group, state = self.group, self.state
        nodes = Counter(group.each(group.node))
        document = {
            "run": uuid.uuid4().hex if state is None else state["run"],
            "serial": 0 if state is None else state["serial"],
            "config": resolved(self.config),
            "config_hash": fingerprint(self.config),
            "identity": _identity(experience),
            **stream.order.as_json(),
            "world": {"processes": group.world_size, "per_node": [nodes[node] for node in sorted(nodes)]},
            "versions": versions,
        }
        if state is not None:
            self._load(state, running, stream, versions)
        since = None if state is None else state["name"]
        return Checkpoints(self.folder, group, running, document, keep=self.config.checkpoint.keep, since=since)

    def _load(self, state: dict[str, Any], running: Running, stream: Stream, versions: dict[str, str]) -> None:
        group, step = self.group, running.position.step
        others = [
            f"{name} {old} -> {versions[name]}" for name, old in state["versions"].items() if versions[name] != old
        ]
        if others and group.is_first:
            logger.warning(f"versions are not those of the checkpoint: {', '.join(others)}")
        same = state["order"] == stream.order.order

        def deal(states: list[Tree], rank: int) -> Tree:
            source = stream.regrouped([each["source"] for each in states], rank, step)
            return regrouped_own(states, rank, source, between=same)

        alike = same and state["world"]["processes"] == group.world_size
        restore(state, self.folder, running, group, None if alike else deal)


_KEYS = ("training_data_path", "simulation.env")


def _identity(experience: Experience) -> dict[str, str]:
    """Returns a sha256 of what is learned from, in the order of _KEYS; "" for what is not."""
    data, simulation = experience.data, experience.simulation
    return {
        "data": "" if data is None else data.found.content,
        "env": "" if simulation is None else simulation.identity(),
    }


def short_waits(config: WorkflowConfig, group: Group) -> AbstractContextManager[None]:
    """Lets ranks wait for each other only as long as a step may take, inside the block."""
    waits = config.rendezvous
    return patient(group, waits.step_timeout_seconds, then=waits.startup_timeout_seconds)


def long_waits(config: WorkflowConfig, group: Group) -> AbstractContextManager[None]:
    """Lets them wait longer again, for work that one of them does alone between two steps."""
    waits = config.rendezvous
    return patient(group, waits.startup_timeout_seconds, then=waits.step_timeout_seconds)


def with_fault(before_step: Callable[[int], None], group: Group) -> Callable[[int], None]:
    """Returns what happens before a step, after the fault that the environment asks of this process, if any."""
    fault = fault_here(group.place)
    if fault is None:
        return before_step

    def struck(step: int) -> None:
        fault.before_step(step)
        before_step(step)

    return struck
