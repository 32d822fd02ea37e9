"""`algorithm`: what is learned from the transitions, and a section for each algorithm that has keys of its own.

To add one: its section here, its name and its key in `AlgorithmConfig`.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from reagent_lite.config.section import Fraction, NoEffect, Positive, Section
from reagent_lite.errors import Problem

Q_TEMPERATURE = 0.01
"""rl.temperature where it is absent and the policy is made of values."""


class ActorSection(Section):
    """An algorithm whose policy is a network of its own, the actor, beside the critic Q."""

    temperature: ClassVar[float] = 1.0
    """rl.temperature where it is absent: at 1 the softmax of the actor's logits is the policy that was learned."""
    unused: ClassVar[tuple[str, ...]] = (
        "rl.maxq_learning",
        "rl.cql_alpha",
        "rainbow.double_q_learning",
        "rainbow.bcq",
        "rainbow.categorical",
        "rainbow.quantile",
    )
    """Keys of other sections that have no effect with it."""


class CRRConfig(ActorSection):
    """Critic Regularized Regression: the actor imitates logged actions, the better ones by the critic more."""

    weights: Literal["exp", "binary"] = "exp"
    """Of a logged action with advantage A = Q(s, a) - mean of Q under the actor: exp: exp(A / beta); binary: 1 if A is
    above 0, else 0."""
    beta: Positive = 1.0
    """exp: the larger, the nearer the actor stays to the log; in units of the return."""
    max_weight: Positive = 20.0
    """exp: the largest weight."""


class IQLConfig(ActorSection):
    """Implicit Q-learning: values from logged actions alone; the actor imitates those that are better than usual."""

    expectile: Fraction = 0.7
    """Of Q over the logged actions of a state, the expectile that is its value: 0.5 is the mean, near 1 the best."""
    beta: Positive = 3.0
    """The weight of a logged action is exp(beta * (Q(s, a) - V(s))): 0 imitates the log; per unit of the return."""
    max_weight: Positive = 100.0
    """The largest weight."""


class AlgorithmConfig(Section):
    """Keys that choose the algorithm."""

    algorithm: Literal["dqn", "crr", "iql"] = "dqn"
    """dqn: values Q, and a policy made of them; its variants (double, dueling, SARSA, BCQ, C51, QR-DQN, CQL) are keys
    of rl and rainbow. crr, iql: a critic, and a policy network that imitates the better part of the log."""
    crr: CRRConfig | None = None
    """Keys of algorithm crr; absent: its defaults."""
    iql: IQLConfig | None = None
    """Keys of algorithm iql; absent: its defaults."""

    @model_validator(mode="before")
    @classmethod
    def _with_section(cls, tree: Any) -> Any:
        """Gives the algorithm's section its defaults where the file has none."""
        name = tree.get("algorithm") if isinstance(tree, dict) else None
        if not isinstance(name, str) or name not in AlgorithmConfig.model_fields or name == "algorithm":
            return tree
        return {**tree, name: {} if tree.get(name) is None else tree[name]}

    @property
    def section(self) -> ActorSection | None:
        """The algorithm's own section; None for dqn, whose keys are in rl and rainbow."""
        return getattr(self, self.algorithm, None)

    def algorithm_rules(self) -> Iterator[Problem]:
        """Yields sections of other algorithms, and keys that have no effect with this one."""
        for name in AlgorithmConfig.model_fields:
            section = getattr(self, name)
            if isinstance(section, ActorSection) and name != self.algorithm:
                yield self.wrong(name, f"absent with algorithm {self.algorithm}", f'Or set algorithm to "{name}"')
        unused = () if self.section is None else self.section.unused
        expected = f"its default with algorithm {self.algorithm}"
        yield from NoEffect(lambda _: True, unused, expected, "It has no effect there").problems(self)


def default_temperature(algorithm: object) -> float:
    """Returns rl.temperature where it is absent, for the name of an algorithm."""
    return ActorSection.temperature if algorithm in ("crr", "iql") else Q_TEMPERATURE
