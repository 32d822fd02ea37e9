"""Episodes of two policies behind one server, in a world of three states whose values are exact.

An action 1 moves on with another probability than an action 0, and earns by the state. The server is played here from
the definition: a unit's policy is drawn once, and the propensity is the ratio of the mixture's densities after and
before a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CURRENT = np.array([[0.9, 0.1], [0.8, 0.2], [0.9, 0.1]])
NEW = np.array([[0.9, 0.1], [0.2, 0.8], [0.1, 0.9]])
THIRD = np.array([[0.5, 0.5], [0.1, 0.9], [0.6, 0.4]])
"""[3, 2] probabilities of each action in each state."""
MOVE = np.array([[0.3, 0.7], [0.5, 0.6], [0.4, 0.2]])
"""[3, 2] probability of the next state being (state + 1) % 3; otherwise the state stays."""
CLICK = np.array([[0.2, 0.3], [0.4, 0.2], [0.1, 0.5]])
"""[3, 2] probability of a reward of 1."""


def value(policy: Floats, steps: int, gamma: float = 1.0) -> float:
    """Returns the exact value of a policy from state 0."""
    after = np.zeros(3)
    for _ in range(steps):
        moved = MOVE * np.roll(after, -1)[:, None] + (1 - MOVE) * after[:, None]
        after = (policy * (CLICK + gamma * moved)).sum(1)
    return float(after[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """N units of T steps.

    Attributes:
        is_new, share: [N].
        state, action, reward: [N, T].
        current, new: [N, T] both policies' probabilities of the action.
        propensity: [N, T] that of a unit that stays with its policy.
        own, stepwise: [N, T] the two guesses: the probability of the unit's policy, and p new + (1 - p) current.
    """

    is_new: NDArray[np.bool_]
    share: Floats
    state: NDArray[np.int64]
    action: NDArray[np.int64]
    reward: Floats
    current: Floats
    new: Floats
    propensity: Floats
    own: Floats
    stepwise: Floats


def play(share: Floats, steps: int, rng: np.random.Generator, current_policy: Floats = CURRENT) -> Episodes:
    """Plays one unit for each share."""
    count = len(share)
    is_new = rng.random(count) < share
    columns: dict[str, list[NDArray]] = {name: [] for name in Episodes.__slots__ if name not in ("is_new", "share")}
    state = np.zeros(count, np.int64)
    of_current, of_new = np.ones(count), np.ones(count)
    for _ in range(steps):
        policy = np.where(is_new[:, None], NEW[state], current_policy[state])
        action = (rng.random(count) >= policy[:, 0]).astype(int)
        current, new = current_policy[state, action], NEW[state, action]
        before = share * of_new + (1 - share) * of_current
        of_current, of_new = of_current * current, of_new * new
        row = {
            "state": state, "action": action, "reward": (rng.random(count) < CLICK[state, action]).astype(float),
            "current": current, "new": new, "propensity": (share * of_new + (1 - share) * of_current) / before,
            "own": np.where(is_new, new, current), "stepwise": share * new + (1 - share) * current,
        }  # fmt: skip
        for name, values in row.items():
            columns[name].append(values)
        state = np.where(rng.random(count) < MOVE[state, action], (state + 1) % 3, state)
    return Episodes(is_new=is_new, share=share, **{name: np.stack(part, 1) for name, part in columns.items()})


def log_of(episodes: Episodes) -> list[dict]:
    """Returns the rows of a served log, in the order of time; units begin one after the other and overlap."""
    count, steps = episodes.state.shape
    order = sorted((unit + 3 * step, unit, step) for unit in range(count) for step in range(steps))
    return [
        {
            "mdp_id": f"u{unit}", "sequence_number": step, "state_features": {"0": float(episodes.state[unit, step])},
            "action": "ab"[episodes.action[unit, step]], "possible_actions": ["a", "b"],
            "reward": episodes.reward[unit, step], "terminal": step == steps - 1,
            "action_probability": episodes.propensity[unit, step],
            "policy": "new" if episodes.is_new[unit] else "current", "share": episodes.share[unit],
            "probability_current": episodes.current[unit, step], "probability_new": episodes.new[unit, step],
            "metrics": {"views": 1.0}, "decided": 1_000_000 * (1 + time),
        }
        for time, unit, step in order
    ]  # fmt: skip
