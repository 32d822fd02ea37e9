"""The whole JSON of `workflows.evaluate`: one or two policies, with a log, an environment or both."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from reagent_lite.config.column_names import LogColumns
from reagent_lite.config.embedding_config import Embeddings
from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.config.evaluation import EvaluationConfig, EvaluationModelsConfig
from reagent_lite.config.items import WITHOUT_ITEMS, Name, PossibleItems
from reagent_lite.config.paths import FOR_SEVERAL_LOGS, DataPath, SameEpisodes, logs_of
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
from reagent_lite.config.simulate_config import output_problems
from reagent_lite.config.timeline_config import QuerySection, TimelineSection
from reagent_lite.errors import Problem, join_names

_TRAINING_KEYS = ("calc_cpe_in_training", "choosing_share", "figures_share", "learn_from_scored")
_ONLY_IN_TRAINING = "Only used in training"
UNIFORM = "uniform"
LOGGED = "logged"
COLUMN = "column:"
"""Policies other than models: two words, and the prefix of the name of a log's column."""


def is_model(policy: str) -> bool:
    """Returns whether `model` or `against` names the folder of an exported model."""
    return policy not in (UNIFORM, LOGGED) and not policy.startswith(COLUMN)


class LogEvaluationModelsConfig(EvaluationModelsConfig):
    """Training of the reward model and the value model behind estimates."""

    final_fit_passes: Count | None = None
    """Passes over the rows that the models are fitted to; fewer if the loss on held-out rows stops falling. Absent: 5,
    or at least 120 steps in at most 40 passes."""

    unsupported: ClassVar = {"fit_passes": _ONLY_IN_TRAINING}


class LogEvaluationConfig(EvaluationConfig):
    """Estimation of a policy's value from any log."""

    held_out_share: Fraction = 0.5
    """Share of the log's episodes that are scored; reward and value models are fitted to the others. All episodes are
    scored if only the probability of the logged action is known for every policy."""
    models: LogEvaluationModelsConfig = LogEvaluationModelsConfig()

    unsupported: ClassVar = dict.fromkeys(_TRAINING_KEYS, _ONLY_IN_TRAINING)


class PlayedEnvironmentConfig(EnvironmentConfig):
    """An environment for the exported models to play in; its constants have the same names as in training."""

    backend: Literal["auto", "cuda", "cpu"] = "auto"
    """Device of the environment; auto: the CPU, where exported models run."""
    evaluation_episodes: Episodes = 1000
    """Episodes of each policy, side by side, with the same starts and random numbers for every policy."""


class EvaluateConfig(Section):
    """`python -m workflows.evaluate`: estimates the value of a policy, on a log or in simulation."""

    model: DataPath = ""
    """Folder of an exported model, or another policy on a log: "uniform", equal probabilities of all possible actions;
    "logged", the logging policy; "column:NAME", probabilities in a column of the log. Or a list of several: the level
    is divided among them, so that the decision about the best one holds although it was chosen."""
    fitted_on: dict[str, DataPath] = {}
    """{column of a policy: the log that it was made from}. If that is the evaluated log, estimates flatter the policy
    and cannot justify a decision to ship it, as for a model that was trained on the log."""
    looks: Count = 1
    """How often the log is evaluated while it grows, all evaluations together: the level of every interval is divided
    by it."""
    against: str | None = None
    """A second model or policy; the difference between the two is estimated as well."""
    actions: Names = ()
    """Names of the log's actions if neither policy is a model; absent: candidates. A model knows its actions."""
    data_path: DataPath = ""
    """The log, in any format that training reads: transitions, or events, which are paired to transitions first. Or a
    list of several logs. Absent: only `simulation` is used."""
    columns: LogColumns = {}
    same_episodes: SameEpisodes = None
    embeddings: Embeddings = {}
    items: str | None = None
    """Table of the items that actions of the log name by id, as data.items in training; absent: the model's own, if it
    has one."""
    item_id: Name | None = None
    """Name of the item table's column of ids; absent: the name in the model's training, else item_id."""
    possible_items: PossibleItems = None
    """As data.possible_items in training; absent: as in the training of the model whose items are read."""
    simulation: PlayedEnvironmentConfig | None = None
    """An environment to play in; absent: only the log is used."""
    output_path: LocalPath | None = None
    """JSON file of all estimates; a page with the same content, `.html`, is written next to it. Older files are
    replaced. Absent: next to the model's folder, with a different name for every model, log and config. Required if
    neither policy is a model."""
    write_scored_rows: bool = False
    """List the scored rows in the JSON file: {file: [line, ...]}, with row numbers for Parquet and Arrow files."""
    policy: Literal["acting", "greedy", "softmax"] = "acting"
    """Policy of a model. acting: the policy it was exported with, which its `act` draws from; greedy: the largest
    value; softmax: a softmax of the values."""
    temperature: Positive | None = None
    """Temperature of policy softmax; absent: the rl.temperature that each model was trained with."""
    gamma: Share | None = None
    """Discount per step of a return; absent: the rl.gamma that `model`, or else `against`, was trained with. Required
    without a model unless every episode is one row."""
    seed: Seed = 0
    """Seed of resamples, of the fitted models, and of simulated episodes, which differ from those of training runs."""
    training_copy_dir: LocalPath | None = None
    """Folder for the memory-mapped copy of the log, as data.training_copy_dir in training."""
    timeline: TimelineSection | None = None
    """Pairing of events to transitions; absent: the defaults of the section."""
    query: QuerySection = QuerySection()
    """Episodes of the events to use; actions are the model's."""
    evaluation: LogEvaluationConfig = LogEvaluationConfig()

    @property
    def other_policies(self) -> dict[str, str]:
        """{key: policy} of policies other than models."""
        return {key: policy for key, policy in self.policies.items() if policy and not is_model(policy)}

    @property
    def policies(self) -> dict[str, str]:
        """{key: policy}: model, of several also model_2, model_3 and so on, and against."""
        first, *others = logs_of(self.model)
        against = {} if self.against is None else {"against": self.against}
        return {"model": first, **{f"model_{number}": name for number, name in enumerate(others, 2)}, **against}

    @property
    def level(self) -> float:
        """Level of each interval with which those of all models and looks hold together; Bonferroni (1936)."""
        return 1 - (1 - self.evaluation.confidence_level) / (self.looks * len(logs_of(self.model)))

    @property
    def without_model(self) -> bool:
        """Whether no policy is a model."""
        policies = [policy for policy in self.policies.values() if policy]
        return bool(policies) and not any(map(is_model, policies))

    required: ClassVar = {"model": ("a path, uniform, logged or column:NAME", "Or give --model")}
    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            lambda config: not config.data_path and config.simulation is not None,
            (
                *(
                    "columns",
                    "embeddings",
                    "items",
                    "fitted_on",
                    "looks",
                    "training_copy_dir",
                    "timeline",
                    "query",
                    "write_scored_rows",
                ),
                *keys_of("evaluation", LogEvaluationConfig, but=("confidence_level", *_TRAINING_KEYS)),
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
        NoEffect(lambda config: isinstance(config.data_path, str), ("same_episodes",), *FOR_SEVERAL_LOGS),
        WITHOUT_ITEMS,
        NoEffect(lambda config: config.actions, ("items",), "absent with actions", "Items have features, not names"),
        NoEffect(
            lambda config: not config.without_model,
            ("actions", "embeddings"),
            "absent, as a model knows the actions and the ids of its features",
        ),
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
            "A row that spans several decisions cannot be weighted by one of them",
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
            "evaluation.held_out_share chooses the scored episodes",
        ),
    )

    def rules(self) -> Iterator[Problem]:
        """Yields Problems of the policies, of a missing log or environment, and of an output that is no JSON file."""
        yield from self._policy_problems()
        if self.simulation is None and not self.data_path:
            expected = "a log, an environment in `simulation`, or both"
            yield self.wrong("data_path", expected, "Or give --data, --env", got="neither")
        if self.output_path is not None:
            yield from output_problems(self.output_path, (".json",))

    def _policy_problems(self) -> Iterator[Problem]:
        """Yields faults of policies other than models."""
        for key, policy in self.other_policies.items():
            if policy == COLUMN:
                yield self.wrong(key, "column:NAME with the name of a column")
        several = len(logs_of(self.model)) > 1
        if several and self.against is not None:
            yield self.wrong("against", "absent with several models, which are compared with the logging policy")
        if several and self.simulation is not None:
            yield Problem(
                "simulation", "absent with several models", "given", "Simulate one model, or one against another"
            )
        columns = {policy.removeprefix(COLUMN) for policy in self.policies.values() if policy.startswith(COLUMN)}
        for name in sorted(self.fitted_on.keys() - columns):
            yield self.wrong("fitted_on", f"columns of policies: {join_names(sorted(columns))}", got=repr(name))
        if self.other_policies and self.simulation is not None:
            yield Problem("simulation", "absent with a policy other than a model", "given", "Only a model can play")
        if self.without_model and self.output_path is None:
            yield self.wrong("output_path", "a path, as no policy is a model")
