"""`algorithm`: the learning algorithm, and a section for each algorithm that has keys of its own.

To add an algorithm, add its section here and to `SECTIONS`, and its name and key to `AlgorithmConfig`.
"""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, model_validator

from reagent_lite.config.section import Count, Fraction, NoEffect, Positive, PositiveShare, Section
from reagent_lite.errors import Problem

Q_TEMPERATURE = 0.01
"""Default of rl.temperature for a policy made of values."""


class AlgorithmSection(Section):
    """Keys of one algorithm."""

    temperature: ClassVar[float] = Q_TEMPERATURE
    """Default of rl.temperature."""
    nearer: ClassVar[str] = "a larger rl.cql_alpha"
    """Keys that keep the policy nearer to the log, in addition to rl.temperature and rl.epsilon, in words."""
    takes_steps: ClassVar[bool] = True
    """Whether a run learns by optimizer steps; otherwise the model is fitted before the evaluation."""
    unused: ClassVar[tuple[str, ...]] = ()
    """Keys of other sections that have no effect with the algorithm."""


class ActorSection(AlgorithmSection):
    """An algorithm with a policy network, the actor, in addition to the critic Q."""

    temperature: ClassVar[float] = 1.0
    """Default of rl.temperature: at 1 the softmax of the actor's logits is the policy that was learned."""
    unused: ClassVar[tuple[str, ...]] = (
        "rl.maxq_learning",
        "rl.cql_alpha",
        "rainbow.double_q_learning",
        "rainbow.bcq",
        "rainbow.categorical",
        "rainbow.quantile",
    )


class CRRConfig(ActorSection):
    """Critic Regularized Regression: the actor imitates logged actions, mainly those that the critic finds better."""

    weights: Literal["exp", "binary"] = "exp"
    """Weight of a logged action with advantage A = Q(s, a) - mean of Q under the actor. exp: exp(A / beta); binary: 1
    if A is above 0, else 0."""
    beta: Positive = 1.0
    """Used by exp: a larger value keeps the actor nearer to the log; in units of the return."""
    max_weight: Positive = 20.0
    """Used by exp: the largest weight."""

    nearer: ClassVar[str] = "a larger crr.beta"


class IQLConfig(ActorSection):
    """Implicit Q-learning: values of logged actions only; the actor imitates those that are better than usual."""

    expectile: Fraction = 0.7
    """The value of a state is this expectile of Q over its logged actions: 0.5 is the mean, near 1 the best."""
    beta: Positive = 3.0
    """The weight of a logged action is exp(beta * (Q(s, a) - V(s))): near 0 imitates the log; per unit of the
    return."""
    max_weight: Positive = 100.0
    """The largest weight."""

    nearer: ClassVar[str] = "a smaller iql.beta"


class BoostingConfig(AlgorithmSection):
    """A linear or logistic model of the reward of a decision; products and trees if they predict unseen rows better."""

    most_trees: Count = 100
    """Largest number of trees for each named action, and in all for candidates; errors on unseen rows choose it. With
    more than 40 actions there are at most 4096 trees in all."""
    depth: Annotated[int, Field(ge=1, le=8)] = 4
    """Largest depth of a tree."""
    leaves: Annotated[int, Field(ge=2, le=256)] = 8
    """Largest number of leaves of a tree."""
    shrinkage: PositiveShare = 0.1
    """Factor of each tree; a smaller one needs more trees."""

    nearer: ClassVar[str] = "a larger rl.epsilon"
    takes_steps: ClassVar[bool] = False
    unused: ClassVar[tuple[str, ...]] = (
        *("epochs", "checkpoint.keep_best"),
        "rl.maxq_learning",
        "rl.cql_alpha",
        "rl.multi_steps",
        "rl.target_update_rate",
        "rl.q_network_loss",
        "rl.value_bounds",
        "rl.tensorboard_logging_freq",
        *("rainbow.categorical", "rainbow.quantile", "rainbow.bcq", "rainbow.c51_l2_decay"),
        *("rainbow.double_q_learning", "rainbow.dueling_architecture"),
        *("data.global_minibatch_size", "training.layers", "training.activations"),
        *("training.network", "training.minibatches_per_step", "training.learning_rate", "training.optimizer"),
        *("training.lr_policy", "training.lr_decay", "training.dropout_ratio", "training.use_batch_norm"),
        *("training.l2_decay", "training.clip_grad_norm", "training.warm_start_model_path"),
        *("training.weight_init_min_std", "training.cuda_graph", "training.do_not_warm_start_optimizer"),
    )


SECTIONS: Final[dict[object, type[AlgorithmSection]]] = {
    "dqn": AlgorithmSection,
    "crr": CRRConfig,
    "iql": IQLConfig,
    "boosting": BoostingConfig,
}
"""Section of each algorithm; dqn has none of its own in a config, as its keys are in rl and rainbow."""


class AlgorithmConfig(Section):
    """Choice of the algorithm."""

    algorithm: Literal["dqn", "crr", "iql", "boosting"] = "dqn"
    """dqn: values Q and a policy made of them; keys of rl and rainbow choose variants (double, dueling, SARSA, BCQ,
    C51, QR-DQN, CQL). crr, iql: a critic, and a policy network that imitates the better part of the log. boosting: for
    decisions with one reward each (gamma 0): a linear model of the reward and boosted trees, without optimizer
    steps."""
    crr: CRRConfig | None = None
    """Keys of algorithm crr; absent: its defaults."""
    iql: IQLConfig | None = None
    """Keys of algorithm iql; absent: its defaults."""
    boosting: BoostingConfig | None = None
    """Keys of algorithm boosting; absent: its defaults."""

    @model_validator(mode="before")
    @classmethod
    def _with_section(cls, tree: Any) -> Any:
        """Fills in the algorithm's section if it is absent."""
        name = tree.get("algorithm") if isinstance(tree, dict) else None
        if not isinstance(name, str) or name not in AlgorithmConfig.model_fields or name == "algorithm":
            return tree
        return {**tree, name: {} if tree.get(name) is None else tree[name]}

    @property
    def section(self) -> AlgorithmSection | None:
        """The algorithm's section; None for dqn, whose keys are in rl and rainbow."""
        return getattr(self, self.algorithm, None)

    @property
    def takes_steps(self) -> bool:
        """Whether the run learns by optimizer steps."""
        return self.section is None or self.section.takes_steps

    def algorithm_rules(self) -> Iterator[Problem]:
        """Yields a Problem for each section of another algorithm and each key without effect."""
        for name in AlgorithmConfig.model_fields:
            section = getattr(self, name)
            if isinstance(section, AlgorithmSection) and name != self.algorithm:
                yield self.wrong(name, f"absent with algorithm {self.algorithm}", f'Or set algorithm to "{name}"')
        unused = () if self.section is None else self.section.unused
        expected = f"its default with algorithm {self.algorithm}"
        yield from NoEffect(lambda _: True, unused, expected, "It has no effect").problems(self)


def default_temperature(algorithm: object) -> float:
    """Returns the default of rl.temperature for the name of an algorithm."""
    named = algorithm if isinstance(algorithm, str) else ""
    return SECTIONS.get(named, AlgorithmSection).temperature


def ways_nearer() -> str:
    """Returns for each algorithm what keeps its policy nearer to the log, in words."""
    return "; ".join(f"{name}: {section.nearer}" for name, section in SECTIONS.items())
