"""The whole JSON of `workflows.evaluate`: an exported model, perhaps a second one, and what they are judged on.

That is a log, an environment in which they play, or both.
"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from reagent_lite.config.columns import Columns, column_problems
from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.config.section import Section, local_problems
from reagent_lite.config.timeline import QuerySection, TimelineSection
from reagent_lite.errors import Problem

_OF_TRAINING = ("calc_cpe_in_training", "figures_share", "fit_passes")
_OF_INTERVALS = ("confidence_level", "bootstrap_resamples")
"""What of `evaluation` is read without a log as well."""


class LogEvaluationConfig(EvaluationConfig):
    """How a policy's value is estimated from a log that it need not have learned from."""

    held_out_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the log's episodes that are scored; reward and value models are fitted to the others."""

    def problems(self, path: str) -> Iterator[Problem]:
        """Yields keys that only mean something while a model learns."""
        for key in _OF_TRAINING:
            if key in self.changed:
                yield Problem(f"{path}.{key}", "its default", str(getattr(self, key)), "It is about epochs of training")


class PlayedEnvironmentConfig(EnvironmentConfig):
    """An environment in which the exported models play; its constants are named as in training."""

    backend: Literal["auto", "cuda", "cpu"] = "auto"
    """Where the environment runs; auto: on the CPU, where exported models decide."""
    evaluation_episodes: Annotated[int, Field(ge=2, le=10_000)] = 1000
    """Episodes of each policy, side by side; every policy meets the same starts and the same luck."""


class EvaluateConfig(Section):
    """`python -m workflows.evaluate`: what an exported model's policy is worth, by a log, by playing, or by both."""

    model: str = ""
    """Folder of an exported model."""
    against: str | None = None
    """Folder of another one; the difference of the two is estimated as well."""
    data_path: str = ""
    """The log: events, of which transitions are made first, or transitions, in any format that training reads; absent:
    only `simulation` tells."""
    columns: Columns = {}
    """The log's own names for columns of the contract, as data.columns of training."""
    simulation: PlayedEnvironmentConfig | None = None
    """An environment to play in; absent: only the log tells."""
    output_path: str | None = None
    """JSON file of all estimates, and beside it the same as a page, `.html`; replaced if they are there. Absent: beside
    the model's folder, under a name of its own for every model, log and config."""
    policy: Literal["acting", "greedy", "softmax"] = "acting"
    """acting: the policy that each model was exported with, which its `act` draws from; greedy: the largest value;
    softmax: of the values."""
    temperature: Annotated[float, Field(gt=0)] | None = None
    """Of policy softmax; absent: rl.temperature that each model was trained with."""
    gamma: Annotated[float, Field(ge=0, le=1)] | None = None
    """Discount per step of a return; absent: rl.gamma that `model` was trained with."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of resamples, of the models that are fitted, and of simulated episodes, which no training run has seen."""
    training_copy_dir: str | None = None
    """Folder for the memory-mapped copy of the log, as data.training_copy_dir in training."""
    timeline: TimelineSection | None = None
    """How transitions are made of events; absent: by its defaults."""
    query: QuerySection = QuerySection()
    """Which episodes of the events are taken; actions are the model's."""
    evaluation: LogEvaluationConfig = LogEvaluationConfig()

    def problems(self, path: str = "") -> Iterator[Problem]:
        """Yields everything wrong beyond single keys."""
        if not self.model:
            yield Problem("model", "a path", "nothing", "Or give --model")
        yield from column_problems("columns", self.columns)
        if self.simulation is not None:
            yield from self.simulation.problems("simulation")
        if not self.data_path:
            yield from self._problems_without_log()
        if self.output_path is not None and not self.output_path.endswith(".json"):
            yield Problem("output_path", "a file that ends in .json", repr(self.output_path))
        yield from local_problems("output_path", self.output_path)
        yield from local_problems("training_copy_dir", self.training_copy_dir)
        if self.temperature is not None and self.policy != "softmax":
            yield Problem("temperature", f"absent with policy {self.policy}", f"{self.temperature:g}",
                          "It is of softmax")  # fmt: skip
        if self.query.actions:
            yield Problem("query.actions", "absent", str(list(self.query.actions)), "They are the model's")
        yield from self.query.problems("query")
        yield from self.evaluation.problems("evaluation")
        if self.timeline is not None:
            yield from self._timeline_problems(self.timeline)

    def _problems_without_log(self) -> Iterator[Problem]:
        if self.simulation is None:
            yield Problem("data_path", "a log here, an environment in `simulation`, or both", "neither",
                          "Or give --data, --env")  # fmt: skip
            return
        unread = [key for key in self.changed if key in ("training_copy_dir", "timeline", "query")]
        unread += [f"evaluation.{key}" for key in self.evaluation.changed if key not in (*_OF_INTERVALS, *_OF_TRAINING)]
        for key in unread:
            yield Problem(key, "its default without data_path", "another value", "It is about the log")

    def _timeline_problems(self, timeline: TimelineSection) -> Iterator[Problem]:
        yield from timeline.rule_problems("timeline")
        if timeline.steps > 1:
            yield Problem("timeline.steps", "1", str(timeline.steps),
                          "A row that sums up several decisions cannot be weighted by one of them")  # fmt: skip
        if timeline.evalTableName is not None:
            yield Problem("timeline.evalTableName", "absent", repr(timeline.evalTableName),
                          "evaluation.held_out_share says which episodes are scored")  # fmt: skip
        if timeline.inputTableName not in ("", self.data_path):
            yield Problem("timeline.inputTableName", "data_path, or absent", repr(timeline.inputTableName))
