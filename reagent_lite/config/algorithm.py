"""`algorithm`: the learning algorithm, and a section for each algorithm that has keys of its own.

To add an algorithm, add its section here, and its name and key to `AlgorithmConfig`.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from reagent_lite.config.section import Fraction, NoEffect, Positive, Section
from reagent_lite.errors import Problem

Q_TEMPERATURE = 0.01
"""Default of rl.temperature for a policy made of values."""


class ActorSection(Section):
    """An algorithm with a policy network, the actor, beside the critic Q."""

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
    """Keys of other sections that have no effect with the algorithm."""


class CRRConfig(ActorSection):
    """Critic Regularized Regression: the actor imitates logged actions, mainly those that the critic finds better."""

    weights: Literal["exp", "binary"] = "exp"
    """Weight of a logged action with advantage A = Q(s, a) - mean of Q under the actor. exp: exp(A / beta); binary: 1
    if A is above 0, else 0."""
    beta: Positive = 1.0
    """Used by exp: a larger value keeps the actor nearer to the log; in units of the return."""
    max_weight: Positive = 20.0
    """Used by exp: the largest weight."""


class IQLConfig(ActorSection):
    """Implicit Q-learning: values of logged actions only; the actor imitates those that are better than usual."""

    expectile: Fraction = 0.7
    """The value of a state is this expectile of Q over its logged actions: 0.5 is the mean, near 1 the best."""
    beta: Positive = 3.0
    """The weight of a logged action is exp(beta * (Q(s, a) - V(s))): near 0 imitates the log; per unit of the
    return."""
    max_weight: Positive = 100.0
    """The largest weight."""


class AlgorithmConfig(Section):
    """Choice of the algorithm."""

    algorithm: Literal["dqn", "crr", "iql"] = "dqn"
    """dqn: values Q and a policy made of them; keys of rl and rainbow choose variants (double, dueling, SARSA, BCQ,
    C51, QR-DQN, CQL). crr, iql: a critic, and a policy network that imitates the better part of the log."""
    crr: CRRConfig | None = None
    """Keys of algorithm crr; absent: its defaults."""
    iql: IQLConfig | None = None
    """Keys of algorithm iql; absent: its defaults."""

    @model_validator(mode="before")
    @classmethod
    def _with_section(cls, tree: Any) -> Any:
        """Fills in the algorithm's section if it is absent."""
        name = tree.get("algorithm") if isinstance(tree, dict) else None
        if not isinstance(name, str) or name not in AlgorithmConfig.model_fields or name == "algorithm":
            return tree
        return {**tree, name: {} if tree.get(name) is None else tree[name]}

    @property
    def section(self) -> ActorSection | None:
        """The algorithm's section; None for dqn, whose keys are in rl and rainbow."""
        return getattr(self, self.algorithm, None)

    def algorithm_rules(self) -> Iterator[Problem]:
        """Yields the sections of other algorithms, and the keys that have no effect with this one."""
        for name in AlgorithmConfig.model_fields:
            section = getattr(self, name)
            if isinstance(section, ActorSection) and name != self.algorithm:
                yield self.wrong(name, f"absent with algorithm {self.algorithm}", f'Or set algorithm to "{name}"')
        unused = () if self.section is None else self.section.unused
        expected = f"its default with algorithm {self.algorithm}"
        yield from NoEffect(lambda _: True, unused, expected, "It has no effect").problems(self)


def default_temperature(algorithm: object) -> float:
    """Returns the default of rl.temperature for the name of an algorithm."""
    return ActorSection.temperature if algorithm in ("crr", "iql") else Q_TEMPERATURE
