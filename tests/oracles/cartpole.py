"""CartPole in NumPy: a small simulator of its own that writes logs in the training-file schema and plays policies.

Dynamics, limits and starts of Barto, Sutton & Anderson (1983) as in Gymnasium's CartPole: Euler steps of 0.02 s,
force 10 N, ends at |x| > 2.4 m or |angle| > 12 degrees, reward 1 a step, starts uniform in +-0.05.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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
    x_acc = temp - polemass_length * theta_acc * cos / total
    after = np.stack(
        (x + 0.02 * x_dot, x_dot + 0.02 * x_acc, theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc), 1
    )
    return after, (np.abs(after[:, 0]) > 2.4) | (np.abs(after[:, 2]) > 12 * 2 * np.pi / 360)


def write_log(file: Path, rows: int, seed: int = 0, candidates: bool = False) -> float:
    """Writes transitions of the uniformly random policy as JSON lines; returns its mean episode return.

    With `candidates` the actions are CANDIDATES, for parametric DQN.
    """
    rng = np.random.default_rng(seed)
    returns, written, episode = [], 0, 0
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as out:
        while written < rows:
            states, actions, fell = [start(1, rng)], [], False
            while not fell and len(actions) < LIMIT:
                actions.append(int(rng.integers(2)))
                after, ended = step(states[-1], np.array(actions[-1:]))
                states.append(after)
                fell = bool(ended[0])
            returns.append(len(actions))
            for t, action in enumerate(actions):
                last = t == len(actions) - 1
                over = fell and last
                every = CANDIDATES if candidates else [1, 1]
                row = {
                    "mdp_id": str(episode),
                    "sequence_number": t,
                    "state_features": features(states[t]),
                    "action": CANDIDATES[action] if candidates else action,
                    "reward": 1.0,
                    "action_probability": 0.5,
                    "possible_actions": every,
                    "next_state_features": features(states[t + 1]),
                    "next_action": None if last else (CANDIDATES[actions[t + 1]] if candidates else actions[t + 1]),
                    "possible_next_actions": ([] if candidates else [0, 0]) if over else every,
                    "time_diff": 1,
                    "terminal": over,
                    "truncated": last and not fell,
                }
                out.write(json.dumps(row) + "\n")
            written += len(actions)
            episode += 1
    return float(np.mean(returns))


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
        if not running.any():
            break
    return returns
