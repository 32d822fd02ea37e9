"""Learning from the episodes that collectors write, instead of from environments in the learner's processes.

 files in order ─► rank 0 chooses as many as the schedule needs ─► names to all ranks ─► each reads its share
                                                                                          └► its replay ring

Before each optimizer step a run reads as many environment steps as it would play itself, so that the amount of data is
the same. If there are too few, it publishes its policy for waiting collectors, and waits. Each type of agents that
learns has its own replay ring.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reagent_lite.algorithms.learners import Learner
from reagent_lite.console import Waiting, logger
from reagent_lite.data.dataset import EpisodeFile, EpisodeFolder, game_and_agent, misfits
from reagent_lite.data.rows.matrices import Lists
from reagent_lite.distributed.group import Group
from reagent_lite.errors import ConfigError, DataError, Problem, counted
from reagent_lite.files import sentence_of, wait_for
from reagent_lite.run.environments import ObservationEncoder
from reagent_lite.run.roles.policies import (
    DATASET_KEY,
    LearnerProgress,
    PolicyPublisher,
    facts_of,
    keep_size,
    most_env_steps_ahead,
    origin_of,
    policies_folder,
)
from reagent_lite.run.simulated import open_ring, ring_settings
from reagent_lite.sim.rollout import RolloutSource, partitioned_count, require_rewards_in_range
from reagent_lite.sim.spec import EnvSpec
from reagent_lite.training.stop import StopSignal
from reagent_lite.types import EnvStep

if TYPE_CHECKING:
    from reagent_lite.data.rows.reading import Rows

T = TypeVar("T")


class CollectedReplay:
    """Reads the rows of collectors into replay rings, for a RolloutSource; every rank calls each method.

    Args:
        encoder: converts observations of the collectors' environment to the network's input.
        learner: learner whose policies rank 0 publishes.
        group: ranks that divide the files.
        signal: ends the wait for rows.

    Attributes:
        actors, rings, device: see sim.rollout.Experience.
        env_steps: environment steps read so far, over all ranks.
    """

    def __init__(self, encoder: ObservationEncoder, learner: Learner, group: Group, signal: StopSignal) -> None:
        config, self._spec = encoder.config, encoder.simulation.backend.spec
        self._settings, self._origin = config.environments.shared, origin_of(config, encoder.simulation)
        self._actions, self._group, self._signal = config.actions, group, signal
        self._folder = EpisodeFolder(Path(self._settings.path).expanduser())
        settings = replace(
            ring_settings(config, self._spec, 1),
            slots=config.environments.replay.capacity // group.world_size,
            candidates=config.parametric,  # files have lists of candidates, fixed or not
            action_features=None,
        )
        self._types, self._step = encoder.simulation.types, 0
        self.actors, self.device = {kind.name: None for kind in self._types}, group.device
        self.rings = {name: open_ring(settings, config, group) for name in encoder.simulation.learning}
        fewest = min(len(kind.agents) for kind in self._types if kind.learns)
        self._most_env_steps = settings.slots * group.world_size // fewest
        self._lag = settings.lag
        self._policies = policies_folder(config.environments.shared)
        self._publisher = PolicyPublisher(self._policies, learner, facts_of(encoder, learner))
        self._env_steps_per_step, self._ahead = config.environments.num_envs, most_env_steps_ahead(config.environments)
        self._unit_reward, self._out_of_range_rewards = config.rl.q_network_loss == "bce_with_logits", 0
        self._pending, self._seen, self._through = deque[EpisodeFile](), set[str](), 0
        self._unread = deque[str]()  # files that this rank has to read
        self._parts = 0  # of the first of them that are in the rings
        self._away = ""  # why the folder could not be read at the last attempt
        self._left_out: list[DataError] = []
        self._given = [0] * group.world_size
        self.env_steps = self._wanted = 0
        self._finished = torch.zeros(2 + len(self._types), dtype=torch.float64)

    def publish(self, step: int) -> None:
        """Publishes the policy every `publish_every_steps` optimizer steps, and at the first call."""
        self._step = step
        if step % self._settings.publish_every_steps == 0 or self._publisher.first:
            self._publish()

    def publish_last(self, step: int) -> None:
        """Publishes the policy as the final one, after which collectors stop; waits while it cannot be written.

        Raises:
            Preempted: on all ranks, if a signal came to one of them while it waited.
        """
        self._step = step
        waiting = Waiting()
        while self._on_any_rank(bool(reason := self._publish(finished=True))):
            self._wait(
                waiting, f"the last policy, for which collectors wait, cannot be written to {self._policies}: {reason}"
            )

    def _publish(self, *, finished: bool = False) -> str:
        """Publishes the policy on rank 0; returns "", or why it was not written."""
        if not self._group.is_first:
            return ""
        progress = LearnerProgress(
            step=self._step, env_steps=self.env_steps, through=self._through, ahead=self._ahead, finished=finished
        )
        reason = self._publisher.publish(progress)
        keep_size(self._folder, self._settings)
        return reason

    def _wait(self, waiting: Waiting, what: str, key: str = "") -> None:
        if self._on_any_rank(self._signal.wanted):
            raise self._signal.preempted()
        waiting.sleep(what, key)

    def _on_any_rank(self, wanted: bool) -> bool:
        return bool(self._group.all_reduce(torch.tensor([wanted], dtype=torch.int64)))

    def explore(self, epsilon: float) -> None:
        """Does nothing, as the collectors explore."""

    def run(self, steps: int, *, informed: bool = True) -> None:
        """Reads `steps` steps of every environment, and waits for collectors if there are too few.

        Raises:
            Preempted: on all ranks, if a signal came to one of them while it waited.
            UnavailableError: the folder was away for ten minutes.
        """
        wanted = self._wanted + steps * self._env_steps_per_step
        waiting = Waiting()
        while not self._suffices(wanted):
            if self._take(wanted):
                waiting = Waiting()
                continue
            self._publish()
            scarce = (
                f"{self._folder.path} has {self.env_steps:,} of the {wanted:,} environment steps that step "
                f"{self._step:,} needs; collectors write them (simulation.mode collect)"
            )
            self._wait(waiting, self._away or scarce, DATASET_KEY if self._away else "")
        self._wanted = wanted

    def _suffices(self, wanted: int) -> bool:
        return self.env_steps >= wanted and min(self._given) > self._lag

    def _take(self, wanted: int) -> bool:
        """Reads files until there are enough rows, and returns whether there were any."""
        chosen: list[tuple[str, int]] = []
        if self._group.is_first:
            self._away = ""
            try:
                if not self._pending:
                    files = self._folder.files()
                    self._seen.intersection_update(file.name for file in files)
                    self._pending.extend(file for file in files if file.name not in self._seen)
                while self._pending and (not chosen or self.env_steps + sum(steps for _, steps in chosen) < wanted):
                    chosen += self._checked(self._pending[0])
                    self._pending.popleft()
            except OSError as error:
                self._away = sentence_of(error, self._folder.path)
            self._warn()
        return self._read_shares(chosen, count=True)

    def _checked(self, file: EpisodeFile) -> list[tuple[str, int]]:
        """Returns name and environment steps of a file, or nothing if it does not fit and is left out.

        Raises:
            OSError: the folder is away.
        """
        chosen: list[tuple[str, int]] = []
        try:
            origin, steps = self._of_folder(lambda: self._folder.origin(file.name))
            if problems := misfits(str(self._folder.path / file.name), self._origin, origin):
                raise DataError(problems)
            chosen = [(file.name, steps)]
        except DataError as error:
            self._left_out.append(error)
        self._seen.add(file.name)
        self._through = max(self._through, file.number)
        return chosen

    def _of_folder(self, read: Callable[[], T]) -> T:
        """Returns what `read` returns; an error is a file's fault only where the folder is there before and after.

        Raises:
            OSError: the folder is away.
            DataError: the error of a file.
        """
        self._folder.require()
        try:
            return read()
        except DataError:
            self._folder.require()
            return read()

    def _warn(self) -> None:
        """Warns of the files that were left out since the last call, with the reason of the first."""
        if self._left_out:
            files = counted(len(self._left_out), "file of the dataset is", "files of the dataset are")
            logger.warning(f"{files} left out, for this reason or a similar one: {self._left_out[0]}")
            self._left_out.clear()

    def _read_shares(self, chosen: list[tuple[str, int]], *, count: bool) -> bool:
        """Reads this rank's share of the files that rank 0 has chosen, and returns whether there are any."""
        files = json.loads(self._group.broadcast_text(json.dumps(chosen)))
        waiting = Waiting()
        for name, steps in files:
            rank = self._given.index(min(self._given))
            self._given[rank] += steps
            self.env_steps += steps if count else 0
            if rank == self._group.rank:
                self._finished[1] += steps
                self._unread.append(name)
        while self._on_any_rank(bool(reason := self._read_own())):
            self._wait(waiting, reason or f"{self._folder.path} cannot be used by another rank", DATASET_KEY)
        return bool(files)

    def _read_own(self) -> str:
        """Reads this rank's files; returns "", or why the folder cannot be read, after which it may be called again."""
        while self._unread:
            try:
                self._of_folder(self._read)
            except OSError as error:
                return sentence_of(error, self._folder.path)
            except DataError as error:
                logger.warning(f"a file of the dataset is left out: {error}")
            self._unread.popleft()
            self._parts = 0
            for ring in self.rings.values():
                ring.end_episodes()
        return ""

    def _read(self) -> None:
        name = self._unread[0]
        for rows in itertools.islice(self._folder.rows(name, self._actions), self._parts, None):
            self._write(env_steps(rows, self._spec), agents_of(rows, self._spec, name))
            self._parts += 1

    def _write(self, steps: EnvStep, agent: Tensor) -> None:
        if self._unit_reward:
            self._out_of_range_rewards += int((~((steps.reward >= 0) & (steps.reward <= 1))).sum())
        # an episode of the environment has one of its first agent
        self._finished[0] += ((steps.terminated | steps.truncated) & (agent == 0)).sum()
        for index, kind in enumerate(self._types):
            of_type = steps.rows(torch.isin(agent, torch.tensor(kind.agents)))
            self._finished[2 + index] += of_type.reward.sum(dtype=torch.float64) / len(kind.agents)
            if (ring := self.rings.get(kind.name)) is None:
                continue
            for begin in range(0, len(of_type.reward), ring.most_rounds):
                part = of_type.rows(slice(begin, begin + ring.most_rounds))
                ring.write(part.to(self._group.device), len(part.reward))

    def check(self) -> None:
        """Raises the errors of the rows.

        Raises:
            SimulationError: a reward that the loss cannot take.
        """
        require_rewards_in_range(self._out_of_range_rewards, self._spec.name)

    def finished(self) -> Tensor:
        """Returns and resets [2 + actors] float64: episodes read, their steps, returns of an agent by type."""
        self.check()
        totals, self._finished = self._finished, torch.zeros_like(self._finished)
        return totals

    def state_dict(self) -> dict[str, Any]:
        """Returns which files are read; the rows are still in them."""
        names = json.dumps(sorted(self._seen)).encode()
        return {
            "env_steps": self.env_steps,
            "wanted": self._wanted,
            "through": self._through,
            "seen": torch.frombuffer(bytearray(names), dtype=torch.uint8),
            "finished": self._finished,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Fills the rings from the newest files that had been read; the others are read next.

        Raises:
            ConfigError: the checkpoint was written by an earlier version.
        """
        if not {"env_steps", "seen"} <= state.keys():
            expected = "a checkpoint that names the files and counts the environment steps it has read"
            todo = "Set it to false, and the run begins anew"
            raise ConfigError(Problem("checkpoint.resume", expected, "one of an earlier version", todo))
        self.env_steps, self._wanted, self._through = (int(state[name]) for name in ("env_steps", "wanted", "through"))
        again: list[tuple[str, int]] = []
        if self._group.is_first:
            names = set(json.loads(state["seen"].numpy().tobytes()))
            again = wait_for(lambda: self._newest_of(names), self._folder.path, DATASET_KEY)
            self._warn()
        self._read_shares(again[::-1], count=False)
        self._finished = state["finished"].clone()

    def _newest_of(self, names: set[str]) -> list[tuple[str, int]]:
        """Returns names and environment steps of the newest files that had been read, as many as the rings take."""
        newest: list[tuple[str, int]] = []
        read = [file for file in self._folder.files() if file.name in names]
        self._seen.update(file.name for file in read)
        while read and sum(steps for _, steps in newest) < self._most_env_steps:
            newest += self._checked(read.pop())
        return newest


class CollectedSource(RolloutSource):
    """Batches of collectors' transitions; a checkpoint holds no rows, as they are in the dataset."""

    rollout: CollectedReplay

    def collect(self, step: int) -> None:
        """Publishes the policy if it is time to, and reads rows where the schedule says so."""
        self.rollout.publish(step)
        super().collect(step)

    def at_end(self, step: int) -> None:
        """Publishes the last policy."""
        self.rollout.publish_last(step)

    def partition(self, states: Sequence[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
        """Returns how far the files are read; each rank fills its replay from its share of them."""
        rollout = states[0]["rollout"] | {"finished": partitioned_count(states, rank, "finished")}
        return {**states[0], "rollout": rollout}

    @property
    def env_steps(self) -> int:
        """Environment steps in the rows read from all collectors so far."""
        return self.rollout.env_steps

    def state_dict(self) -> dict[str, Any]:
        """Returns how far the files are read and the number of the next optimizer step."""
        return {"step": self._step, "warm": self._warm, "rollout": self.rollout.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict`."""
        self._step, self._warm = int(state["step"]), bool(state["warm"])
        self.rollout.load_state_dict(state["rollout"])


def agents_of(rows: Rows, spec: EnvSpec, where: str) -> Tensor:
    """Returns [n] the number of each row's agent, which its episode's name ends with.

    Raises:
        DataError: an agent that the environment does not have.
    """
    agents = np.array([game_and_agent(name)[1] for name in rows.mdp_ids.to_pylist()])
    if len(agents) and agents.max() >= spec.agents:
        expected = f"names of episodes that end with agents 0 to {spec.agents - 1} of {spec.name}"
        raise DataError(Problem(where, expected, str(agents.max())))
    return torch.from_numpy(np.append(agents, 0)[rows.episode])


def env_steps(rows: Rows, spec: EnvSpec) -> EnvStep:
    """Returns rows, one after the other, as steps of one environment.

    The candidates of a row take the first of K places, in the order of their list.
    """
    mask, next_mask, features = rows.mask.astype(bool), rows.next_mask.astype(bool), dict[str, NDArray[np.float32]]()
    if rows.lists is not None and rows.next_lists is not None:
        features["features"], mask = _places(rows.lists, spec)
        features["next_features"], next_mask = _places(rows.next_lists, spec)
    ids = tuple(range(spec.observation_size))
    columns = {
        "observation": rows.state.aligned(ids),
        "action": rows.action,
        "reward": rows.reward,
        "terminated": rows.bootstrap == 0,
        "truncated": rows.truncated.astype(bool),
        "next_observation": rows.next_state.aligned(ids),
        "propensity": rows.propensity,
        "mask": mask,
        "next_mask": next_mask,
        **features,
    }
    return EnvStep(**{name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in columns.items()})


def _places(lists: Lists, spec: EnvSpec) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Returns features [n, K, F] and mask [n, K] of candidate lists."""
    mask = np.arange(spec.num_actions) < lists.lengths[:, None]
    features = np.zeros((*mask.shape, spec.action_feature_size), np.float32)
    features[mask] = lists.features.aligned(tuple(range(spec.action_feature_size)))
    return features, mask
