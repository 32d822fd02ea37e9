"""The table of algorithms."""

from typing import Final

from reagent_lite.algorithms.boosting import Boosting
from reagent_lite.algorithms.crr import CRR
from reagent_lite.algorithms.dqn import DQN
from reagent_lite.algorithms.iql import IQL
from reagent_lite.algorithms.policy_learner import PolicyLearner

ALGORITHMS: Final[dict[str, type[PolicyLearner]]] = {learner.name: learner for learner in (DQN, CRR, IQL, Boosting)}
"""Learners by the config's `algorithm`."""
