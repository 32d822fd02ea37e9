"""A recommender whose best policy is known: it depends on ids alone, of users' earlier items and of what is offered.

item i        has a hidden genre, one of GENRES
visit         likes LIKED genres, has seen SEEN items of them, and is offered OFFERED items of any genre
reward        1 with probability GOOD if the chosen item's genre is liked, else with probability BAD
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

GENRES = 6
LIKED = 2
OFFERED = 6
GOOD = 0.8
BAD = 0.1


@dataclass(frozen=True)
class Visits:
    """N visits.

    Attributes:
        liked: [N, GENRES] bool.
        seen: for each visit the numbers of earlier items.
        offered: [N, OFFERED] numbers of items.
        good: [N, OFFERED] bool, whether the genre of the item is liked.
    """

    liked: NDArray[np.bool_]
    seen: list[NDArray[np.int64]]
    offered: NDArray[np.int64]
    good: NDArray[np.bool_]

    @property
    def states(self) -> list[dict[str, Any]]:
        return [{"seen": [f"i{item}" for item in items], "hour": 12.0} for items in self.seen]

    @property
    def candidates(self) -> list[list[dict[str, Any]]]:
        return [[{"item": f"i{item}"} for item in items] for items in self.offered.tolist()]

    def value(self, choice: NDArray[np.int64]) -> float:
        """Returns the expected reward of choices [N] among the offered items."""
        return float(np.where(self.good[np.arange(len(choice)), choice], GOOD, BAD).mean())

    @property
    def best(self) -> float:
        """The expected reward of the best policy."""
        return float(np.where(self.good.any(1), GOOD, BAD).mean())

    @property
    def uniform(self) -> float:
        """The expected reward of uniform choices."""
        return float(np.where(self.good, GOOD, BAD).mean())


def visits(count: int, items: int, longest: int, seed: int) -> Visits:
    """Returns visits to a catalog of `items`, whose genres do not depend on the seed."""
    genre = np.random.default_rng(7).integers(GENRES, size=items)
    of_genre = [np.flatnonzero(genre == number) for number in range(GENRES)]
    rng = np.random.default_rng(seed)
    liked = np.zeros((count, GENRES), bool)
    seen = []
    for row in range(count):
        genres = rng.choice(GENRES, LIKED, replace=False)
        liked[row, genres] = True
        pool = np.concatenate([of_genre[number] for number in genres])
        seen.append(rng.choice(pool, rng.integers(longest // 2, longest + 1)))
    offered = rng.integers(items, size=(count, OFFERED))
    return Visits(liked, seen, offered, liked[np.arange(count)[:, None], genre[offered]])


def events(of: Visits, seed: int) -> list[dict[str, Any]]:
    """Returns a log of uniform choices, one decision a row."""
    rng = np.random.default_rng(seed)
    choice = rng.integers(OFFERED, size=len(of.seen))
    good = of.good[np.arange(len(choice)), choice]
    reward = rng.random(len(choice)) < np.where(good, GOOD, BAD)
    return [
        {"state_features": state, "action": offered[k], "possible_actions": offered, "reward": float(paid),
         "action_probability": 1 / OFFERED}
        for state, offered, k, paid in zip(of.states, of.candidates, choice.tolist(), reward.tolist(), strict=True)
    ]  # fmt: skip


def policy_value(
    of: Visits, greedy: Callable[[list[dict[str, Any]], list[list[dict[str, Any]]]], NDArray[np.int64]]
) -> float:
    """Returns the expected reward of a policy's greedy choices."""
    return of.value(greedy(of.states, of.candidates))
