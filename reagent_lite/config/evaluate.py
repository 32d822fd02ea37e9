"""The whole JSON of `workflows.evaluate`: a policy, perhaps a second one, and what they are evaluated on.

That is a log, an environment in which they play, or both.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from reagent_lite.config.columns import LogColumns
from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.config.items import Name
from reagent_lite.config.paths import DataPath
from reagent_lite.config.section import (
    Count,
    Episodes,
    Fraction,
    LocalPath,
    Names,
    NoEffect,
    Positive,
    Section,
    Seed,
    Share,
    keys_of,
)
from reagent_lite.config.simulate import output_problems
from reagent_lite.config.timeline import QuerySection, TimelineSection
from reagent_lite.errors import Problem

_OF_TRAINING = ("calc_cpe_in_training", "figures_share", "fit_passes", "learn_from_scored")
_OF_INTERVALS = ("confidence_level", "bootstrap_resamples")
"""Keys of `evaluation` that have an effect without a log as well."""

UNIFORM = "uniform"
LOGGED = "logged"
COLUMN = "column:"
"""Policies that are no models: words, and what precedes the name of a log's column."""


def is_model(policy: str) -> bool:
    """Returns whether `model` or `against` is the folder of an exported model."""
    return policy not in (UNIFORM, LOGGED) and not policy.startswith(COLUMN)


class LogEvaluationConfig(EvaluationConfig):
    """How a policy's value is estimated from a log that it need not have learned from."""

    held_out_share: Fraction = 0.5
    """Share of the log's episodes that are scored; reward and value models are fitted to the others. All are scored if
    of no policy more than the probability of the logged action is known."""

    final_fit_passes: Count = 40
    """Passes when they are fitted; fewer where the loss on rows kept apart no longer falls."""

    unsupported: ClassVar = dict.fromkeys(_OF_TRAINING, "Only used in training")


class PlayedEnvironmentConfig(EnvironmentConfig):
    """An environment in which the exported models play; its constants are named as in training."""

    backend: Literal["auto", "cuda", "cpu"] = "auto"
    """Where the environment runs; auto: on the CPU, where exported models decide."""
    evaluation_episodes: Episodes = 1000
    """Episodes of each policy, side by side; every policy meets the same starts and the same luck."""


class EvaluateConfig(Section):
    """`python -m workflows.evaluate`: estimates what a policy is worth, on a log or in simulation."""

    model: str = ""
    """Folder of an exported model; or a policy that needs none, on a log: "uniform", all possible actions alike;
    "logged", the logging policy; "column:NAME", probabilities in a column of the log."""
    against: str | None = None
    """Another model or policy, named likewise; the difference of the two is estimated as well."""
    actions: Names = ()
    """Names of the log's actions, if neither policy is a model, which knows them; absent: candidates."""
    data_path: DataPath = ""
    """The log: events, of which transitions are made first, or transitions, in any format that training reads; or a
    list of several logs; absent: only `simulation` is used."""
    columns: LogColumns = {}
    items: str | None = None
    """Table of the items that actions of the log name by id, as data.items of training; absent: the model's own, if it
    has one."""
    item_id: Name | None = None
    """Name of the item table's column of ids; absent: that of the model's training, else item_id."""
    simulation: PlayedEnvironmentConfig | None = None
    """An environment to play in; absent: only the log is used."""
    output_path: LocalPath | None = None
    """JSON file of all estimates, and beside it the same as a page, `.html`; replaced if they are there. Absent: beside
    the model's folder, under a name of its own for every model, log and config. Required if neither policy is a
    model."""
    write_scored_rows: bool = False
    """List the scored rows in the JSON file: {file: [line, ...]}; in Parquet and Arrow files, the row."""
    policy: Literal["acting", "greedy", "softmax"] = "acting"
    """Policy of a model. acting: the one it was exported with, which its `act` draws from; greedy: the largest value;
    softmax: a softmax of the values."""
    temperature: Positive | None = None
    """Temperature of policy softmax; absent: the rl.temperature that each model was trained with."""
    gamma: Share | None = None
    """Discount per step of a return; absent: the rl.gamma that `model`, or else `against`, was trained with. Required
    without a model unless every episode is one row."""
    seed: Seed = 0
    """Seed of resamples, of the models that are fitted, and of simulated episodes, which no training run has seen."""
    training_copy_dir: LocalPath | None = None
    """Folder for the memory-mapped copy of the log, as data.training_copy_dir in training."""
    timeline: TimelineSection | None = None
    """How transitions are made of events; absent: by its defaults."""
    query: QuerySection = QuerySection()
    """Which episodes of the events are taken; actions are the model's."""
    evaluation: LogEvaluationConfig = LogEvaluationConfig()

    @property
    def given(self) -> dict[str, str]:
        """{key: policy} of those that are no models."""
        policies = {"model": self.model, "against": self.against}
        return {key: policy for key, policy in policies.items() if policy and not is_model(policy)}

    @property
    def without_model(self) -> bool:
        """Whether no policy is a model."""
        return bool(self.given) and not any(policy and is_model(policy) for policy in (self.model, self.against))

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            lambda config: not config.data_path and config.simulation is not None,
            (
                *("columns", "items", "training_copy_dir", "timeline", "query", "write_scored_rows"),
                *keys_of("evaluation", LogEvaluationConfig, but=(*_OF_INTERVALS, *_OF_TRAINING)),
            ),
            "its default without data_path",
            "Only used with a log",
        ),
        NoEffect(
            lambda config: config.policy != "softmax",
            ("temperature",),
            "absent with policy {0.policy}",
            "Only used by softmax",
        ),
        NoEffect(lambda config: True, ("query.actions",), "absent", "They are the model's"),
        NoEffect(lambda config: config.items is None, ("item_id",), "absent without items"),
        NoEffect(lambda config: config.actions, ("items",), "absent beside actions", "Items have features, not names"),
        NoEffect(lambda config: not config.without_model, ("actions",), "absent, as a model knows the actions"),
        NoEffect(
            lambda config: config.without_model,
            ("policy",),
            "its default without a model",
            "It is the policy of a model",
        ),
        NoEffect(
            lambda config: config.timeline,
            ("timeline.steps",),
            "1",
            "A row that sums up several decisions cannot be weighted by one of them",
        ),
        NoEffect(
            lambda config: config.timeline and config.timeline.inputTableName != config.data_path,
            ("timeline.inputTableName",),
            "data_path, or absent",
        ),
        NoEffect(
            lambda config: config.timeline,
            ("timeline.evalTableName",),
            "absent",
            "evaluation.held_out_share says which episodes are scored",
        ),
    )

    def rules(self) -> Iterator[Problem]:
        """Yields missing models and logs."""
        if not self.model:
            yield self.wrong("model", "a path, uniform, logged or column:NAME", "Or give --model")
        yield from self._policy_problems()
        if self.simulation is None and not self.data_path:
            expected = "a log here, an environment in `simulation`, or both"
            yield self.wrong("data_path", expected, "Or give --data, --env", got="neither")
        if self.output_path is not None:
            yield from output_problems(self.output_path, (".json",))

    def _policy_problems(self) -> Iterator[Problem]:
        """Yields what policies that are no models lack."""
        for key, policy in self.given.items():
            if policy == COLUMN:
                yield self.wrong(key, "column:NAME with the name of a column")
        if self.given and self.simulation is not None:
            yield Problem("simulation", "absent with a policy that is no model", "given", "It cannot play")
        if self.without_model and self.output_path is None:
            yield self.wrong("output_path", "a path, as there is no model beside which the report could lie")
