"""Truth of the recommendation environment in float64: written from its description, with the same random words.

Arrays: N users, K slots, 8 topics; an item is 8 topics and a quality.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from oracles.gridworld import Array
from oracles.philox import Words, below, uniform

Integers = NDArray[np.int64]
TOPICS, SLOTS, FEWEST, LENGTH = 8, 10, 5, 50
START_WORDS, ITEM_WORDS, STEP_WORDS = 10, 10, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Users:
    """Where N sessions stand: interest and satiation [N, 8]; steps done, misses and slots on offer [N]."""

    interest: Array
    satiation: Array
    steps: Integers
    misses: Integers
    offered: Integers


def unit(topics: Array) -> Array:
    """Of length 1 along the last axis."""
    return topics / np.linalg.norm(topics, axis=-1, keepdims=True)


def mixture(words: Words) -> Array:
    """Topics [..., 8] of words [..., 9]: the first says how sharp, the others weigh."""
    return unit((0.125 + 0.875 * uniform(words[..., 1:])) ** (2.0 ** below(words[..., :1], 5)))


def offer(words: Words) -> Integers:
    """How many slots are on offer: 5 to 10."""
    return FEWEST + below(words, SLOTS - FEWEST + 1)


def start(words: Words) -> Users:
    """New users from words [N, 10]."""
    nothing = np.zeros(len(words), dtype=np.int64)
    return Users(
        interest=mixture(words[:, :9]),
        satiation=np.zeros((len(words), TOPICS)),
        steps=nothing,
        misses=nothing,
        offered=offer(words[:, 9]),
    )


def items(words: Words) -> Array:
    """Items [..., 9] of words [..., 10]."""
    return np.concatenate([mixture(words[..., :9]), 2 * uniform(words[..., 9:]) - 1], -1)


def click_probability(users: Users, item: Array) -> Array:
    """[N] that the user clicks on an item [N, 9]."""
    topics = item[:, :TOPICS]
    return 1 / (
        1 + np.exp(-(2 * (users.interest * topics).sum(1) + item[:, TOPICS] - 1.5 * (users.satiation * topics).sum(1)))
    )


def hazard(misses: Integers) -> Array:
    """[N] probability that a user leaves after a step, given the misses so far."""
    return 0.005 * misses


def step(users: Users, item: Array, clicked: NDArray[np.bool_], words: Words) -> tuple[Users, NDArray[np.bool_]]:
    """Where an item [N, 9] and the user's answer lead, and whether the session ends.

    Words [N, 3] are those of the step: the click's, the hazard's, the next offer's.
    """
    topics = item[:, :TOPICS]
    after = Users(
        interest=unit(users.interest + 0.1 * clicked[:, None] * topics),
        satiation=0.8 * users.satiation + topics,
        steps=users.steps + 1,
        misses=users.misses + ~clicked,
        offered=offer(words[:, 2]),
    )
    return after, (uniform(words[:, 1]) < hazard(after.misses)) | (after.steps >= LENGTH)


def observation(users: Users) -> Array:
    """[N, 17]: interest, satiation, part of the session that is over."""
    return np.concatenate([users.interest, users.satiation, users.steps[:, None] / LENGTH], 1)
