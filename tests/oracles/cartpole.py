"""CartPole in NumPy: a small simulator of its own that writes logs in the training-file schema and plays policies.

Dynamics, limits and starts of Barto, Sutton & Anderson (1983) as in Gymnasium's CartPole: Euler steps of 0.02 s,
force 10 N, ends at |x| > 2.4 m or |angle| > 12 degrees, reward 1 a step, starts uniform in +-0.05.
"""

from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .logs import write_lines

Array = NDArray[np.float64]
Policy = Callable[[Array], NDArray[np.int64]]
LIMIT = 200
# left and right as candidates: the force's sign, and a feature that only the second one has
CANDIDATES = [{"0": -1.0}, {"0": 1.0, "1": 1.0}]


def start(count: int, rng: np.random.Generator) -> Array:
    """Start states [count, 4]: position (m), velocity (m/s), angle (rad), angular velocity (rad/s)."""
    return rng.uniform(-0.05, 0.05, (count, 4))


def step(state: Array, action: NDArray[np.int64]) -> tuple[Array, NDArray[np.bool_]]:
    """One step: next states [n, 4] and whether they are beyond the limits [n]."""
    x, x_dot, theta, theta_dot = state.T
    force = np.where(action == 1, 10.0, -10.0)
    total, polemass_length = 1.1, 0.05
    cos, sin = np.cos(theta), np.sin(theta)
    temp = (force + polemass_length * theta_dot**2 * sin) / total
    theta_acc = (9.8 * sin - cos * temp) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / total))
    after = np.stack(
        (
            x + 0.02 * x_dot,
            x_dot + 0.02 * (temp - polemass_length * theta_acc * cos / total),
            theta + 0.02 * theta_dot,
            theta_dot + 0.02 * theta_acc,
        ),
        1,
    )
    return after, (np.abs(after[:, 0]) > 2.4) | (np.abs(after[:, 2]) > 12 * 2 * np.pi / 360)


def write_log(file: Path, num_rows: int, seed: int = 0, candidates: bool = False) -> float:
    """Writes transitions of the uniformly random policy as JSON lines; returns its mean episode return.

    With `candidates` the actions are CANDIDATES, for parametric DQN.
    """
    rng = np.random.default_rng(seed)
    every = CANDIDATES if candidates else [1, 1]
    rows: list[dict[str, Any]] = []
    for episode in count():
        if len(rows) >= num_rows:
            break
        state, fell, first = start(1, rng), False, len(rows)
        while not fell and len(rows) - first < LIMIT:
            action = int(rng.integers(2))
            after, (fell,) = step(state, np.array([action]))
            rows.append({
                "mdp_id": str(episode), "sequence_number": len(rows) - first, "state_features": features(state),
                "action": CANDIDATES[action] if candidates else action, "reward": 1.0, "action_probability": 0.5,
                "possible_actions": every, "next_state_features": features(after), "next_action": None,
                "possible_next_actions": every, "time_diff": 1, "terminal": False, "truncated": False,
            })  # fmt: skip
            state = after
        for row, following in pairwise(rows[first:]):
            row["next_action"] = following["action"]
        rows[-1] |= {"terminal": bool(fell), "truncated": not fell}
        if fell:
            rows[-1]["possible_next_actions"] = [] if candidates else [0, 0]
    write_lines(file, rows)
    return len(rows) / episode


def features(state: Array) -> dict[str, float]:
    return {str(i): float(value) for i, value in enumerate(state[0])}


def play(policy: Policy, episodes: int, seed: int = 1, limit: int = LIMIT) -> Array:
    """Returns of `episodes` episodes side by side, [episodes]."""
    state = start(episodes, np.random.default_rng(seed))
    returns, running = np.zeros(episodes), np.ones(episodes, bool)
    for _ in range(limit):
        state, fell = step(state, policy(state))
        returns += running
        running &= ~fell
    return returns
