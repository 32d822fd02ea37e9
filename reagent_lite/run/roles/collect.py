"""A collector: plays the newest policy and writes whole episodes to the shared folder until the learner has ended.

newest policy ─► some rounds ─► finished episodes ─► a file in fifo/ ─► wait while the learner is far behind ─► …
"""

import json
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from reagent_lite.config import WorkflowConfig
from reagent_lite.console import Waiting, logger
from reagent_lite.data.episode_folder import EpisodeFolder, name_episode
from reagent_lite.data.writing.episode_rows import EpisodeBlock, LogSchema, episode_rows
from reagent_lite.disk_room import NO_ROOM
from reagent_lite.distributed.group import Group
from reagent_lite.errors import DataError, pluralize
from reagent_lite.folder_identity import sentence_of
from reagent_lite.run.environments import (
    TRAINING,
    ObservationEncoder,
    given_or_unchanged,
    open_simulation,
    with_actions,
    with_image,
)
from reagent_lite.run.learner import build_learners, choose_threads
from reagent_lite.run.roles.published_policies import (
    DATASET_KEY,
    PolicyReader,
    PublishedPolicy,
    env_steps_per_policy,
    facts_of,
    keep_size,
    load_policy,
    most_env_steps_ahead,
    origin_of,
    policies_folder,
    shared_folders,
)
from reagent_lite.run.simulated import exploration_of, simulated_plan
from reagent_lite.sim.cuda import on_stream
from reagent_lite.sim.played_episodes import BLOCK_ROWS, EpisodeRecorder, PlayedEpisodes
from reagent_lite.training.stop import StopSignal

_FILES_PER_POLICY = 4
_LOG_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The result of a collector, printed as the last line of standard output.

    Attributes:
        dataset: the shared folder.
        files, episodes, rows: numbers written by this process; each agent's part counts as an episode.
        mean_return: mean return of its episodes; None without episodes.
        policy: version of the last policy; 0 without a policy.
        seconds: total wall-clock time.
    """

    dataset: str
    files: int
    episodes: int
    rows: int
    mean_return: float | None
    policy: int
    seconds: float

    def line(self) -> str:
        """Returns the result as one line of JSON."""
        return json.dumps(asdict(self))


def collect(config: WorkflowConfig, group: Group) -> Collected:
    """Collects until the learner's run has ended.

    Raises:
        Preempted: a signal arrived; finished episodes have been written.
        UnavailableError: the shared folder was unavailable for ten minutes.
        ConfigError: policies of another environment, network or release.
    """
    start = time.monotonic()
    with StopSignal() as signal, on_stream(group.device):
        collector = Collector(config, group, signal)
        with shared_folders(config), signal.defer():
            collector.run()
    return collector.outcome(time.monotonic() - start)


class Collector:
    """Plays the newest policy and writes its episodes.

    Args:
        config: the config of the learner, with simulation.mode collect.
        group: the group of this single process.
        signal: asks the collector to end.
    """

    def __init__(self, config: WorkflowConfig, group: Group, signal: StopSignal) -> None:
        simulation = open_simulation(config, group)
        config = with_image(with_actions(config, simulation), simulation)
        settings = simulation.config
        spec = simulation.backend.spec
        normalization = given_or_unchanged(config, simulation)
        encoder = ObservationEncoder(config, simulation, normalization, group.device)
        self._id = uuid.uuid4().hex[:12]
        env = replace(simulation, seed=int(self._id[:8], 16)).envs(0, settings.num_envs, stream=TRAINING)
        network_spec = normalization.spec(config.actions)
        self._learner = build_learners(config, network_spec, simulation.learning, group.device)
        choose_threads(config, network_spec, group)
        self._origin = origin_of(config, simulation)
        self._policies = PolicyReader(policies_folder(settings.shared), facts_of(encoder, self._learner))
        self._policy: PublishedPolicy | None = None
        self._exploration = exploration_of(config, simulated_plan(config, 1).num_steps)
        self._warmup = settings.warmup_steps
        self._epsilon = torch.ones(1, device=env.device)
        actors = encoder.actors(env, self._learner, epsilon=self._epsilon, temperature=self._exploration.temperature)
        self._informed = tuple(actors.values())
        self._uniform = tuple(
            replace(actor, policy=None) if agent_type.learns else actor
            for agent_type, actor in zip(simulation.types, self._informed, strict=True)
        )
        self._ahead = most_env_steps_ahead(settings)
        self._env_steps_per_file = max(
            min(env_steps_per_policy(settings) // _FILES_PER_POLICY, BLOCK_ROWS // spec.agents), 1
        )
        self._recorder = EpisodeRecorder(env, rounds=max(self._env_steps_per_file // env.num_envs, 1))
        fixed = simulation.parametric and not spec.candidates
        features = spec.action_features.numpy() if fixed else None
        self._schema = LogSchema(transitions=True, action_names=config.actions, action_features=features)
        self._signal = signal
        self._dataset = settings.shared
        self._folder = EpisodeFolder(Path(self._dataset.path).expanduser())
        self._saw_running = False  # whether a policy of a run that had not ended was loaded
        self._total_return = 0.0
        self._episodes = 0
        self._rows = 0
        self._files = 0
        signal.standing = f"finished episodes are in {self._folder.path}; the same command collects more"

    def run(self) -> None:
        """Plays until the learner's run ends or a signal arrives, then writes the episodes that have ended."""
        logger.info(f"collecting in {self._folder.path}, as writer {self._id}")
        waiting = Waiting()
        logged = time.monotonic()
        while not self._should_stop():
            try:
                reason = self._reason_to_wait()
            except OSError as error:
                waiting.sleep(sentence_of(error, self._folder.path), DATASET_KEY)
                continue
            if reason:
                waiting.sleep(reason)
                continue
            waiting = Waiting()
            while self._recorder.steps_over < self._env_steps_per_file and not self._should_stop():
                self._play_some()
            self._write()
            if time.monotonic() - logged >= _LOG_SECONDS:
                logged = time.monotonic()
                mean = self._total_return / max(self._episodes, 1)
                logger.info(f"collected {pluralize(self._rows, 'row')}, mean return {mean:.4g}, policy {self._version}")
        self._write()

    def outcome(self, seconds: float) -> Collected:
        """Returns the result after `seconds` seconds."""
        return Collected(
            dataset=str(self._folder.path),
            files=self._files,
            episodes=self._episodes,
            rows=self._rows,
            mean_return=self._total_return / self._episodes if self._episodes else None,
            policy=self._version,
            seconds=round(seconds, 3),
        )

    @property
    def _version(self) -> int:
        return 0 if self._policy is None else self._policy.version

    def _should_stop(self) -> bool:
        """Returns whether a signal has arrived or the learner's run has ended; loads a newer policy if there is one."""
        if self._signal.wanted:
            return True
        newer = None
        with suppress(OSError):  # the collector plays the older policy, and waits once it is far ahead of the learner
            newer = self._policies.newer()
        if newer is not None:
            load_policy(self._learner, newer)
            self._policy = newer
            self._saw_running |= not newer.progress.finished
            learned_from = newer.progress.env_steps - self._warmup
            self._epsilon.fill_(self._exploration.epsilon(max(learned_from, 0)))
        return self._saw_running and self._policy is not None and self._policy.progress.finished

    def _reason_to_wait(self) -> str:
        progress = None if self._policy is None else self._policy.progress
        if progress is not None and progress.finished:
            return f"the run that learned from {self._folder.path} has ended: start another (simulation.mode learn)"
        ahead = self._ahead if progress is None else progress.ahead
        unread = self._folder.unread(0 if progress is None else progress.through)
        if unread < ahead:
            return ""
        learner = (
            "no learner has published a policy" if progress is None else f"the learner is at step {progress.step:,}"
        )
        return f"{unread:,} environment steps in {self._folder.path} are not learned from yet; {learner}"

    def _play_some(self) -> None:
        """Plays a chunk with the newest policy; uniformly random until the learner has read its warm-up."""
        follow_policy = self._policy is not None and self._policy.progress.env_steps >= self._warmup
        self._recorder.play(self._informed if follow_policy else self._uniform)

    def _write(self) -> None:
        """Writes the episodes that have ended as one file.

        Unless a signal has arrived, waits while the share is full, and up to ten minutes if it is unavailable.
        """
        over = self._recorder.over
        waiting = Waiting()
        if not len(over):
            return
        episodes = self._recorder.episodes(over)
        count = len(episodes.lengths)
        table = episode_rows(named_block(episodes, self._id), self._schema)
        while True:
            try:
                self._folder.add(table, {**self._origin, "policy": self._version}, self._id)
                break
            except DataError as error:
                cause = error.__cause__
                rows = pluralize(table.num_rows, "row")
                if not isinstance(cause, OSError):
                    raise
                if self._signal.wanted:
                    logger.warning(f"{pluralize(count, 'episode is', 'episodes are')} lost: {error}")
                    return
                if cause.errno in NO_ROOM:
                    waiting.sleep(f"no room for {rows} in {self._folder.path}: free some space there")
                else:
                    waiting.sleep(f"{rows} cannot be written: {sentence_of(cause, self._folder.path)}", DATASET_KEY)
        self._recorder.drop(over)
        keep_size(self._folder, self._dataset)
        self._total_return += float(episodes.returns.sum())
        self._episodes += count
        self._rows += table.num_rows
        self._files += 1


def named_block(episodes: PlayedEpisodes, prefix: str) -> EpisodeBlock:
    """Returns a block of episodes for the writer, with names that begin with a prefix."""
    agents = episodes.agent.tolist() if episodes.agent.any() else [None] * len(episodes.agent)
    names = [name_episode(prefix, *each) for each in zip(episodes.env, episodes.number, agents, strict=True)]
    columns = {name: getattr(episodes, name) for name in EpisodeBlock.__dataclass_fields__ if name != "mdp_ids"}
    return EpisodeBlock(mdp_ids=names, **columns)
