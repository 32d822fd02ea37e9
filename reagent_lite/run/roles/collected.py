"""Learning from the episodes that collectors write, instead of from environments in the learner's processes.

 _FileOrder                                                    CollectedReplay            _RankFiles
 files in order ─► rank 0 takes as many as the schedule needs ─► divided among the ranks ─► each reads its own ─► rings

Before each optimizer step a run reads as many environment steps as it would play itself, so that the amount of data is
the same. If there are too few, it publishes its policy for waiting collectors, and waits. Each type of agents that
learns has its own replay ring.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reagent_lite.algorithms.learners import Learner
from reagent_lite.console import Waiting, logger
from reagent_lite.data.episode_folder import EpisodeFile, EpisodeFolder, compare_facts, game_and_agent
from reagent_lite.data.rows.matrices import Lists
from reagent_lite.distributed.group import Group
from reagent_lite.errors import ConfigError, DataError, Problem, pluralize, raise_any
from reagent_lite.folder_identity import sentence_of, wait_for
from reagent_lite.run.environments import ObservationEncoder
from reagent_lite.run.roles.published_policies import (
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
from reagent_lite.sim.experience import RolloutSource, partitioned_count, require_rewards_in_range
from reagent_lite.sim.replay.ring import ReplayRing
from reagent_lite.sim.spec import EnvSpec
from reagent_lite.training.stop import StopSignal
from reagent_lite.types import EnvStep

if TYPE_CHECKING:
    from reagent_lite.data.rows.reading import Rows

T = TypeVar("T")


Chosen = list[tuple[str, int]]
"""Names of files and the environment steps in each."""


class _FileOrder:
    """Files of the shared folder in the order of their numbers, with a record of those already read.

    Only rank 0 accesses the folder; on other ranks the state is that of rank 0's checkpoint.

    Args:
        folder: the shared folder.
        origin: environment, parameters and release that a file must have.

    Attributes:
        seen: names of the files that have been read or left out.
        through: largest number of these files.
        unavailable: reason why the last attempt could not read the folder, or "".
    """

    def __init__(self, folder: EpisodeFolder, origin: Mapping[str, Any]) -> None:
        self._folder = folder
        self._origin = origin
        self._pending = deque[EpisodeFile]()
        self._left_out: list[DataError] = []
        self.seen = set[str]()
        self.through = 0
        self.unavailable = ""

    def take(self, env_steps: int) -> Chosen:
        """Returns the next files with `env_steps` environment steps, at least one file; fewer if there are no more."""
        chosen: Chosen = []
        self.unavailable = ""
        try:
            if not self._pending:
                files = self._folder.files()
                self.seen.intersection_update(file.name for file in files)
                self._pending.extend(file for file in files if file.name not in self.seen)
            while self._pending and (not chosen or _env_steps_in(chosen) < env_steps):
                chosen += self._check(self._pending[0])
                self._pending.popleft()
        except OSError as error:
            self.unavailable = sentence_of(error, self._folder.path)
        self._warn()
        return chosen

    def take_again(self, names: set[str], env_steps: int) -> Chosen:
        """Returns the newest of these files with `env_steps` environment steps, oldest first; waits for the folder.

        Raises:
            UnavailableError: the folder was unavailable for ten minutes.
        """

        def newest() -> Chosen:
            chosen: Chosen = []
            read = [file for file in self._folder.files() if file.name in names]
            self.seen.update(file.name for file in read)
            while read and _env_steps_in(chosen) < env_steps:
                chosen += self._check(read.pop())
            return chosen

        chosen = wait_for(newest, self._folder.path, DATASET_KEY)
        self._warn()
        return chosen[::-1]

    def _check(self, file: EpisodeFile) -> Chosen:
        """Returns the file if it fits the run; otherwise leaves it out and returns nothing.

        Raises:
            OSError: the folder is unavailable.
        """
        chosen: Chosen = []
        try:
            origin, env_steps = _read_from(self._folder, lambda: self._folder.origin(file.name))
            raise_any(compare_facts(str(self._folder.path / file.name), self._origin, origin))
            chosen = [(file.name, env_steps)]
        except DataError as error:
            self._left_out.append(error)
        self.seen.add(file.name)
        self.through = max(self.through, file.number)
        return chosen

    def _warn(self) -> None:
        """Warns about the files left out since the last call, with the reason for the first."""
        if self._left_out:
            files = pluralize(len(self._left_out), "file of the dataset is", "files of the dataset are")
            logger.warning(f"{files} left out for this or a similar reason: {self._left_out[0]}")
            self._left_out.clear()


class _RankFiles:
    """This rank's share of the files, which it reads into its rings.

    Args:
        folder: the shared folder.
        encoder: encoder of the run's observations, with environment and config.
        rings: rings by the name of each type of agents that learns.
        device: the device of the rings.

    Attributes:
        totals: [2 + types] float64: episodes read, their environment steps, returns of an agent by type.
        out_of_range_rewards: number of rewards outside the range of the loss.
    """

    def __init__(
        self,
        folder: EpisodeFolder,
        encoder: ObservationEncoder,
        rings: Mapping[str, ReplayRing],
        device: torch.device,
    ) -> None:
        self._folder = folder
        self._device = device
        self._spec = encoder.simulation.backend.spec
        self._time_limit = encoder.simulation.config.time_limit or self._spec.time_limit
        self._types = encoder.simulation.types
        self._actions = encoder.config.actions
        self._unit_reward = encoder.config.rl.q_network_loss == "bce_with_logits"
        self._rings = rings
        self._unread = deque[str]()
        self._blocks_read = 0  # of the first unread file
        self.totals = torch.zeros(2 + len(self._types), dtype=torch.float64)
        self.out_of_range_rewards = 0

    def add(self, name: str, env_steps: int) -> None:
        """Adds a file to be read by `read`."""
        self._unread.append(name)
        self.totals[1] += env_steps

    def read(self) -> str:
        """Reads the added files; returns "", or the reason why the folder cannot be read; a later call continues."""
        while self._unread:
            try:
                _read_from(self._folder, self._read_blocks)
            except OSError as error:
                return sentence_of(error, self._folder.path)
            except DataError as error:
                logger.warning(f"a file of the dataset is left out: {error}")
            self._unread.popleft()
            self._blocks_read = 0
            for ring in self._rings.values():
                ring.end_episodes()
        return ""

    def _read_blocks(self) -> None:
        name = self._unread[0]
        of_file = self._folder.rows(name, self._actions, self._spec.image)
        for rows in itertools.islice(of_file, self._blocks_read, None):
            self._write(env_steps(rows, self._spec, self._time_limit), agents_of(rows, self._spec, name))
            self._blocks_read += 1

    def _write(self, steps: EnvStep, agent: Tensor) -> None:
        if self._unit_reward:
            self.out_of_range_rewards += int((~((steps.reward >= 0) & (steps.reward <= 1))).sum())
        # each episode of the environment has exactly one episode of its first agent
        self.totals[0] += ((steps.terminated | steps.truncated) & (agent == 0)).sum()
        for index, agent_type in enumerate(self._types):
            of_type = steps.rows(torch.isin(agent, torch.tensor(agent_type.agents)))
            self.totals[2 + index] += of_type.reward.sum(dtype=torch.float64) / len(agent_type.agents)
            if (ring := self._rings.get(agent_type.name)) is None:
                continue
            for begin in range(0, len(of_type.reward), ring.most_rounds):
                part = of_type.rows(slice(begin, begin + ring.most_rounds))
                ring.write(part.to(self._device), len(part.reward))


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
        config = encoder.config
        spec = encoder.simulation.backend.spec
        types = encoder.simulation.types
        settings = replace(
            ring_settings(config, spec, 1),
            slots=config.environments.replay.capacity // group.world_size,
            candidates=config.parametric,  # files have lists of candidates, fixed or not
            action_features=None,
        )
        self.actors = dict.fromkeys(agent_type.name for agent_type in types)
        self.device = group.device
        self.rings = {name: open_ring(settings, config, group) for name in encoder.simulation.learning}
        self.env_steps = 0
        self._group = group
        self._signal = signal
        self._dataset = config.environments.shared
        self._folder = EpisodeFolder(Path(self._dataset.path).expanduser())
        self._order = _FileOrder(self._folder, origin_of(config, encoder.simulation))
        self._files = _RankFiles(self._folder, encoder, self.rings, group.device)
        self._spec = spec
        self._num_envs = config.environments.num_envs
        self._lag = settings.lag
        fewest_agents = min(len(agent_type.agents) for agent_type in types if agent_type.learns)
        self._most_env_steps = settings.slots * group.world_size // fewest_agents  # that the rings hold
        self._policies = policies_folder(self._dataset)
        self._publisher = PolicyPublisher(self._policies, learner, facts_of(encoder, learner))
        self._ahead = most_env_steps_ahead(config.environments)
        self._step = 0
        self._wanted = 0
        self._env_steps_of_ranks = [0] * group.world_size

    def publish(self, step: int) -> None:
        """Publishes the policy every `publish_every_steps` optimizer steps, and at the first call."""
        self._step = step
        if step % self._dataset.publish_every_steps == 0 or self._publisher.first:
            self._publish()

    def publish_last(self, step: int) -> None:
        """Publishes the policy as the final one, after which collectors stop; waits while it cannot be written.

        Raises:
            Preempted: on all ranks, if one of them received a signal while it waited.
        """
        self._step = step
        waiting = Waiting()
        while self._on_any_rank(bool(reason := self._publish(finished=True))):
            self._wait(
                waiting, f"the last policy, for which collectors wait, cannot be written to {self._policies}: {reason}"
            )

    def _publish(self, *, finished: bool = False) -> str:
        """Publishes the policy on rank 0; returns "", or the reason why it was not written."""
        if not self._group.is_first:
            return ""
        progress = LearnerProgress(
            step=self._step,
            env_steps=self.env_steps,
            through=self._order.through,
            ahead=self._ahead,
            finished=finished,
        )
        reason = self._publisher.publish(progress)
        keep_size(self._folder, self._dataset)
        return reason

    def _wait(self, waiting: Waiting, what: str, key: str = "") -> None:
        if self._on_any_rank(self._signal.wanted):
            raise self._signal.preemption()
        waiting.sleep(what, key)

    def _on_any_rank(self, wanted: bool) -> bool:
        return bool(self._group.all_reduce(torch.tensor([wanted], dtype=torch.int64)))

    def explore(self, epsilon: float) -> None:
        """Does nothing, as the collectors explore."""

    def run(self, steps: int, *, follow_policy: bool = True) -> None:
        """Reads `steps` steps of every environment, and waits for collectors if there are too few.

        Raises:
            Preempted: on all ranks, if one of them received a signal while it waited.
            UnavailableError: the folder was unavailable for ten minutes.
        """
        wanted = self._wanted + steps * self._num_envs
        waiting = Waiting()
        while not self._suffices(wanted):
            chosen = self._order.take(wanted - self.env_steps) if self._group.is_first else []
            assigned = self._assign(chosen)
            self.env_steps += assigned  # a signal may end the run while it reads: these files count as read
            self._read()
            if assigned:
                waiting = Waiting()
                continue
            self._publish()
            unavailable = self._order.unavailable
            too_few = (
                f"{self._folder.path} has {self.env_steps:,} of the {wanted:,} environment steps that step "
                f"{self._step:,} needs; collectors write them (simulation.mode collect)"
            )
            self._wait(waiting, unavailable or too_few, DATASET_KEY if unavailable else "")
        self._wanted = wanted

    def _suffices(self, wanted: int) -> bool:
        return self.env_steps >= wanted and min(self._env_steps_of_ranks) > self._lag

    def _assign(self, chosen: Chosen) -> int:
        """Divides the files that rank 0 has chosen among the ranks, and returns their environment steps."""
        files = json.loads(self._group.broadcast_text(json.dumps(chosen)))
        for name, env_steps in files:
            rank = self._env_steps_of_ranks.index(min(self._env_steps_of_ranks))
            self._env_steps_of_ranks[rank] += env_steps
            if rank == self._group.rank:
                self._files.add(name, env_steps)
        return _env_steps_in(files)

    def _read(self) -> None:
        """Reads this rank's share, and waits until all ranks have read theirs."""
        waiting = Waiting()
        while self._on_any_rank(bool(reason := self._files.read())):
            self._wait(waiting, reason or f"{self._folder.path} cannot be used by another rank", DATASET_KEY)

    def check(self) -> None:
        """Raises the errors of the rows.

        Raises:
            SimulationError: a reward is outside the range of the loss.
        """
        require_rewards_in_range(self._files.out_of_range_rewards, self._spec.name)

    def take_finished(self) -> Tensor:
        """Returns and resets [2 + actors] float64: episodes read, their steps, returns of an agent by type."""
        self.check()
        totals = self._files.totals.clone()
        self._files.totals.zero_()
        return totals

    def state_dict(self) -> dict[str, Any]:
        """Returns the names of the files that have been read; the rows stay in the files."""
        names = json.dumps(sorted(self._order.seen)).encode()
        return {
            "env_steps": self.env_steps,
            "wanted": self._wanted,
            "through": self._order.through,
            "seen": torch.frombuffer(bytearray(names), dtype=torch.uint8),
            "finished": self._files.totals.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Fills the rings from the newest files that had been read; the others are read next.

        Raises:
            ConfigError: the checkpoint was written by an earlier version.
        """
        if not {"env_steps", "seen"} <= state.keys():
            expected = "a checkpoint that names the files and counts the environment steps it has read"
            todo = "Set it to false to start the run over"
            raise ConfigError(Problem("checkpoint.resume", expected, "one of an earlier version", todo))
        self.env_steps = int(state["env_steps"])
        self._wanted = int(state["wanted"])
        self._order.through = int(state["through"])
        names = set(json.loads(state["seen"].numpy().tobytes()))
        self._assign(self._order.take_again(names, self._most_env_steps) if self._group.is_first else [])
        self._read()
        self._files.totals.copy_(state["finished"])


def _env_steps_in(files: Chosen) -> int:
    return sum(env_steps for _, env_steps in files)


def _read_from(folder: EpisodeFolder, read: Callable[[], T]) -> T:
    """Returns the result of `read`; calls it again after an error, as the folder may have been unavailable meanwhile.

    Raises:
        OSError: the folder is unavailable.
        DataError: the file is faulty.
    """
    folder.require()
    try:
        return read()
    except DataError:
        folder.require()
        return read()


class CollectedSource(RolloutSource):
    """Batches of collectors' transitions; a checkpoint holds no rows, as they are in the dataset."""

    rollout: CollectedReplay

    def collect(self, step: int) -> None:
        """Publishes the policy and reads rows if they are due before optimizer step `step`."""
        self.rollout.publish(step)
        super().collect(step)

    def at_end(self, step: int) -> None:
        """Publishes the last policy."""
        self.rollout.publish_last(step)

    def partition(self, states: Sequence[dict[str, Any]], rank: int, world: int) -> dict[str, Any]:
        """Returns the progress of reading; each rank fills its replay from its share of the files."""
        rollout = states[0]["rollout"] | {"finished": partitioned_count(states, rank, "finished")}
        return {**states[0], "rollout": rollout}

    @property
    def env_steps(self) -> int:
        """Environment steps in the rows read from all collectors so far."""
        return self.rollout.env_steps

    def state_dict(self) -> dict[str, Any]:
        """Returns the progress of reading and the number of the next optimizer step."""
        return {"step": self._step, "warm": self._warm, "rollout": self.rollout.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a `state_dict`."""
        self._step = int(state["step"])
        self._warm = bool(state["warm"])
        self.rollout.load_state_dict(state["rollout"])


def agents_of(rows: Rows, spec: EnvSpec, where: str) -> Tensor:
    """Returns the number of each row's agent, [n], from the end of its episode's name.

    Raises:
        DataError: the environment does not have this agent.
    """
    agents = np.array([game_and_agent(name)[1] for name in rows.mdp_ids.to_pylist()])
    if len(agents) and agents.max() >= spec.agents:
        expected = f"names of episodes that end with agents 0 to {spec.agents - 1} of {spec.name}"
        raise DataError(Problem(where, expected, str(agents.max())))
    return torch.from_numpy(np.append(agents, 0)[rows.episode])


def env_steps(rows: Rows, spec: EnvSpec, time_limit: int) -> EnvStep:
    """Returns rows, one after the other, as steps of one environment.

    Candidates are the first of K choices, in the order of their list.
    """
    mask = rows.mask.astype(bool)
    next_mask = rows.next_mask.astype(bool)
    features: dict[str, NDArray[np.float32]] = {}
    if rows.lists is not None and rows.next_lists is not None:
        features["features"], mask = _pad_lists(rows.lists, spec)
        features["next_features"], next_mask = _pad_lists(rows.next_lists, spec)
    ids = tuple(range(spec.observation_size))
    terminated = rows.bootstrap == 0
    columns = {
        "observation": rows.state.align(ids),
        "action": rows.action,
        "reward": rows.reward,
        "terminated": terminated,
        "truncated": (rows.truncated > 0) | terminated & (rows.sequence == time_limit - 1),
        "next_observation": rows.next_state.align(ids),
        "propensity": rows.propensity,
        "mask": mask,
        "next_mask": next_mask,
        **features,
    }
    return EnvStep(**{name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in columns.items()})


def _pad_lists(lists: Lists, spec: EnvSpec) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Returns features [n, K, F] and mask [n, K] of candidate lists."""
    mask = np.arange(spec.num_actions) < lists.lengths[:, None]
    features = np.zeros((*mask.shape, spec.action_feature_size), np.float32)
    features[mask] = lists.features.align(tuple(range(spec.action_feature_size)))
    return features, mask
