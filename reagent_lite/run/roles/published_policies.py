"""Versioned policies in a shared folder, which a learner publishes and any number of collectors play.

A version has the policies of all types of agents that learn.

learner ─► policies/0000000012/ weights.safetensors, manifest.json ─► collectors of the same environment and network
"""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from safetensors.torch import load, save
from torch import Tensor

from reagent_lite.algorithms.learners import Learner
from reagent_lite.config import WorkflowConfig, expand_config
from reagent_lite.config.dataset import DatasetConfig
from reagent_lite.config.simulation import SimulationConfig
from reagent_lite.console import logger
from reagent_lite.data.episode_folder import FIFO, EpisodeFolder, compare_facts
from reagent_lite.disk_room import require_writable
from reagent_lite.distributed.group import attempt_here
from reagent_lite.errors import BundleError, ConfigError, Problem, raise_any
from reagent_lite.folder_identity import FolderIdentity, names_in, wait_for
from reagent_lite.folder_lock import alone_in
from reagent_lite.manifest import POLICY, seal_folder, verify_folder
from reagent_lite.run.environments import ObservationEncoder, Simulation
from reagent_lite.sim.kernel_sources import origin
from reagent_lite.training.checkpoint_folder import copy_tensors
from reagent_lite.whole_files import appearing_folder

WEIGHTS: Final = "weights.safetensors"
DATASET_KEY: Final = "simulation.dataset.path"
"""Config key of the folder between collectors and learners."""
_TARGET: Final = ".target_network."  # part of the names of tensors that are not published
_KEPT: Final = 3  # number of versions


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerProgress:
    """Progress of a learner when it published a policy.

    Attributes:
        step: optimizer steps done.
        env_steps: environment steps taken from the dataset, over all ranks and collectors.
        through: largest number of the files that were read.
        ahead: largest number of environment steps in later files; with more, collectors wait.
        finished: whether the run has ended.
    """

    step: int
    env_steps: int
    through: int
    ahead: int
    finished: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPolicy:
    """A published policy: its version, the learner's progress, and its tensors without target networks."""

    version: int
    progress: LearnerProgress
    tensors: dict[str, Tensor]


def policies_folder(settings: DatasetConfig) -> Path:
    """Returns the folder in which policies are published."""
    return Path(settings.policies or f"{settings.path}/policies").expanduser()


def origin_of(config: WorkflowConfig, simulation: Simulation) -> dict[str, Any]:
    """Returns the origin in files of this config's episodes: environment, parameters, constants, release."""
    return origin(simulation.config, simulation.backend.spec, config.actions)


def env_steps_per_policy(settings: SimulationConfig) -> int:
    """Returns the number of environment steps that a learner reads between two published policies."""
    rollouts = max(settings.shared.publish_every_steps // settings.updates_per_rollout, 1)
    return rollouts * settings.steps_per_rollout * settings.num_envs


def most_env_steps_ahead(settings: SimulationConfig) -> int:
    """Returns the number of unread environment steps above which collectors wait for the learner."""
    return 2 * env_steps_per_policy(settings)


def keep_size(folder: EpisodeFolder, settings: DatasetConfig) -> None:
    """Removes the oldest files of a dataset that is larger than max_bytes, if this process may edit it."""
    if settings.edits and settings.max_bytes is not None:
        folder.keep_below(settings.max_bytes)


def facts_of(encoder: ObservationEncoder, learner: Learner) -> dict[str, Any]:
    """Returns the facts that a learner and its collectors must share: environment, other actors, network settings.

    Two processes with the same facts compute the same values from the same tensors.
    """
    config = encoder.config
    facts = {
        **origin_of(config, encoder.simulation),
        "simulation.policies": {
            agent_type.name: agent_type.digest or agent_type.plays for agent_type in encoder.simulation.types
        },
        "training.activations": config.training.activations,
        "training.network": config.training.network,
        **{f"rainbow.{key}": value for key, value in expand_config(config)["rainbow"].items()},
        "rl.q_network_loss": config.rl.q_network_loss,
        "normalization": encoder.normalization.json(),
        "tensors": {name: list(value.shape) for name, value in _tensors(learner).items()},
    }
    read_back: dict[str, Any] = json.loads(json.dumps(facts))  # with lists for tuples, as in a manifest
    return read_back


@contextmanager
def shared_folders(config: WorkflowConfig, *, resumed: bool = False) -> Iterator[None]:
    """Creates the folders of a collector, or of rank 0 of a learner, and locks those that only it may change.

    Args:
        config: the config.
        resumed: whether the run continues from a checkpoint; its dataset must then exist and is not created.

    Raises:
        ConfigError: a folder cannot be written.
        UnavailableError: a folder could not be written for ten minutes, in a later attempt or a resumed run.
        FolderInUseError: another process publishes policies there, or edits the dataset.
    """
    settings = config.environments.shared
    key = "simulation.dataset"
    again = attempt_here() > 0
    fifo = Path(settings.path).expanduser() / FIFO
    policies = policies_folder(settings)
    if resumed:
        wait_for(lambda: FolderIdentity.read_mark(fifo), fifo, f"{key}.path")
    elif not fifo.exists():
        logger.info(
            f"{key}.path: {fifo} did not exist and is created; if it is on a share, check that the share is mounted"
        )
    require_writable(fifo, f"{key}.path", keep=True, again=again)
    with alone_in(fifo, f"{key}.edits", again=again) if settings.edits else nullcontext():
        if config.collects:
            yield
            return
        require_writable(policies, f"{key}.policies", keep=True, again=again)
        with alone_in(policies, f"{key}.policies", again=again):
            yield


class PolicyPublisher:
    """Publishes a learner's policy.

    Args:
        folder: folder of policies that no other learner uses; `shared_folders` creates it.
        learner: learner whose policy is published.
        facts: facts that collectors must share, from `facts_of`.
    """

    def __init__(self, folder: Path, learner: Learner, facts: dict[str, Any]) -> None:
        self._folder = folder
        self._learner = learner
        self._facts = facts
        self._identity: FolderIdentity | None = None  # since the first policy
        self._published: LearnerProgress | None = None
        self._warned = ""

    @property
    def first(self) -> bool:
        """Whether no policy has been published yet."""
        return self._published is None

    def publish(self, progress: LearnerProgress) -> str:
        """Publishes the policy unless it was published at the same progress; returns "" or the reason of a failure.

        Warns once about each reason until a policy is published again.
        """
        if progress == self._published:
            return ""
        try:
            if self._identity is None:
                self._identity = FolderIdentity.mark(self._folder)
            older = sorted(_versions(self._identity.names()))
            version = max(older, default=0) + 1
            with appearing_folder(self._folder / f"{version:010d}", within=self._identity) as folder:
                (folder / WEIGHTS).write_bytes(save(_tensors(self._learner)))
                seal_folder(folder, {"kind": "policy", "progress": asdict(progress), **self._facts})
        except OSError as error:
            reason = error.strerror or str(error)
            if reason != self._warned:
                logger.warning(
                    f"the policy of step {progress.step:,} was not published: {reason}; collectors play an older one"
                )
            self._warned = reason
            return reason
        self._published = progress
        self._warned = ""
        for old in [*older, version][:-_KEPT]:
            shutil.rmtree(self._folder / f"{old:010d}", ignore_errors=True)
        return ""


class PolicyReader:
    """Finds policies that are newer than the last one it returned.

    Args:
        folder: folder of policies, which need not exist.
        facts: facts that a policy must share, from `facts_of`.
    """

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self._folder = folder
        self._facts = facts
        self._version = 0
        self._damaged = set[int]()

    def newer(self) -> PublishedPolicy | None:
        """Returns the newest complete policy, or None if it was returned before; damaged ones are skipped.

        Raises:
            ConfigError: the policy is from another environment, network or release.
            OSError: the folder cannot be listed.
        """
        for version in sorted(_versions(names_in(self._folder)), reverse=True):
            if version == self._version:
                return None
            folder = self._folder / f"{version:010d}"
            try:
                document, kept = verify_folder(folder, POLICY, keep={WEIGHTS})
            except BundleError as error:
                if folder.exists() and version not in self._damaged:  # else the learner has just removed it
                    self._damaged.add(version)
                    logger.warning(f"policy {version} is skipped, an older one is played: {error.problems[0]}")
                continue
            raise_any(compare_facts(str(folder), self._facts, document), ConfigError)
            progress = document["progress"]
            if progress.keys() != LearnerProgress.__dataclass_fields__.keys():
                expected = f"the progress of a learner: {', '.join(LearnerProgress.__dataclass_fields__)}"
                raise ConfigError(Problem(str(folder), expected, ", ".join(progress), POLICY.outdated))
            self._version = version
            return PublishedPolicy(version=version, progress=LearnerProgress(**progress), tensors=load(kept[WEIGHTS]))
        return None


def load_policy(learner: Learner, policy: PublishedPolicy) -> None:
    """Loads the tensors of a policy into a learner of the same network."""
    learner.load_state_dict({**learner.state_dict(), **policy.tensors})


def _tensors(learner: Learner) -> dict[str, Tensor]:
    return {name: value for name, value in copy_tensors(learner).items() if _TARGET not in f".{name}"}


def _versions(names: list[str]) -> list[int]:
    return [int(name) for name in names if re.fullmatch(r"\d{10}", name)]
