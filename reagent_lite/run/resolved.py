"""The config of a run in which every key has its value: nothing changes it afterwards.

config ─► auto-scaling ─► actions of the environment ─► numbers of an unfinished run ─► numbers of the rows ─► Resolved
"""

from dataclasses import dataclass, replace

from reagent_lite.config import WorkflowConfig
from reagent_lite.console import logger
from reagent_lite.distributed.group import Group
from reagent_lite.run.environments import Simulation, open_simulation, with_actions, with_image
from reagent_lite.run.logged import Data, prepare
from reagent_lite.run.scaling.auto_scale import auto_scaled
from reagent_lite.run.sources.collected_experience import CollectedExperience
from reagent_lite.run.sources.experience_source import Source
from reagent_lite.run.sources.logged_experience import LoggedExperience
from reagent_lite.run.sources.mixed_experience import MixedExperience
from reagent_lite.run.sources.simulated_experience import SimulatedExperience
from reagent_lite.run.value_scale import value_scale
from reagent_lite.training.resume import History
from reagent_lite.training.stop import StopSignal
from reagent_lite.training.warm_start import value_scale_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The parts of a run.

    Attributes:
        history: an earlier start of the run, if there is one, with the resolved config and the ranks.
        simulation: the opened environment, or None without a simulation section.
        data: the logged data, or None without training_data_path.
    """

    history: History
    simulation: Simulation | None
    data: Data | None

    @property
    def config(self) -> WorkflowConfig:
        """The config; all its numbers are those of the run."""
        return self.history.config

    @property
    def group(self) -> Group:
        """The ranks."""
        return self.history.group

    def open_source(self, signal: StopSignal | None = None) -> Source:
        """Returns the source that the config describes.

        Args:
            signal: ends the wait for collectors; with None the wait has no end.

        Raises:
            DataError, ConfigError: the normalization does not fit the environment, see ObservationEncoder.
        """
        config = self.config
        group = self.group
        simulation = self.simulation
        if simulation is None:
            assert self.data is not None, "a config has logged data or a simulation"
            return LoggedExperience(config, group, self.data)
        if self.data is not None:
            return MixedExperience(config, group, self.data, simulation)
        if simulation.config.mode == "learn":
            return CollectedExperience(config, group, simulation, signal or StopSignal())
        return SimulatedExperience(config, group, simulation)


def resolve(config: WorkflowConfig, group: Group) -> Resolved:
    """Reads the data, opens the environment, and returns them with the config in which every key has its value.

    It is the last place that changes the config of a run. Every rank calls it.

    Raises:
        DataError, ConfigError: see auto_scaled, open_simulation, with_actions, History.find and prepare.
    """
    checkpoints = config.folder / "checkpoints"
    if config.simulation is not None and config.simulation.auto_scale:
        config = auto_scaled(config, group, checkpoints)
    simulation = None
    if config.simulation is not None:
        simulation = open_simulation(config, group)
        config = with_image(with_actions(config, simulation), simulation)
    _warn_of_unused_minibatch(config, group)
    history = History.find(config, group, checkpoints)
    data = None
    if config.training_data_path:
        data = prepare(history.config, group)
        history = replace(history, config=_for_rows(history.config, data, group))
    return Resolved(history=history, simulation=simulation, data=data)


def _warn_of_unused_minibatch(config: WorkflowConfig, group: Group) -> None:
    """Warns of a key that is not refused, as resolved configs of earlier runs have it."""
    if not config.takes_steps and config.has_minibatch and group.is_first:
        logger.warning(f"training.minibatch_size has no effect: algorithm {config.algorithm} takes no steps")


def _for_rows(config: WorkflowConfig, data: Data, group: Group) -> WorkflowConfig:
    """Returns the config with numbers for the keys that depend on the data; every rank calls it."""
    rows = sum(data.train.agreement.rows)
    config = config.with_length_for(rows, sum(data.counts), group.world_size, continues=data.continues)
    if config.rl.value_scale == "returns":
        earlier = config.training.warm_start_model_path
        scale = (
            value_scale(data.train.copy, config.rl.gamma, data.shards)
            if earlier is None
            else value_scale_of(earlier, group)
        )
        config = config.with_rl(value_scale=scale)
    if config.defaults == "2026" and group.is_first:
        logger.info(f"defaults of 2026: {config.defaults_in_words}")
    return config
