"""CartPole by Gymnasium: one step of given states, and logs of random actions in the training-file schema."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from numpy.typing import NDArray

LIMIT = 200


def step(state: NDArray[np.float64], action: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """One step of states [n, 4]: next states [n, 4] and whether they are beyond the limits [n]."""
    env = CartPoleVectorEnv(num_envs=len(state))
    env.reset()
    env.state = state.T
    _, _, fell, _, _ = env.step(action)
    return env.state.T, fell


def write_log(file: Path, num_rows: int) -> None:
    """Writes whole episodes of the uniformly random policy as JSON lines, at least so many rows."""
    env = CartPoleEnv()
    rows: list[dict[str, Any]] = []
    while len(rows) < num_rows:
        episode = len(rows)
        state, _ = env.reset(seed=episode)
        actions = np.random.default_rng(episode).integers(2, size=LIMIT).tolist()
        for position, (action, following) in enumerate(zip(actions, [*actions[1:], None], strict=True)):
            after, _, fell, _, _ = env.step(action)
            rows.append({
                "mdp_id": str(episode), "sequence_number": position, "state_features": features(state),
                "action": action, "reward": 1.0, "action_probability": 0.5, "possible_actions": [1, 1],
                "next_state_features": features(after), "next_action": None if fell else following,
                "possible_next_actions": [0, 0] if fell else [1, 1], "time_diff": 1,
                "terminal": fell, "truncated": position == LIMIT - 1 and not fell,
            })  # fmt: skip
            state = after
            if fell:
                break
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def features(state: NDArray[np.float32]) -> dict[str, float]:
    return {str(i): float(value) for i, value in enumerate(state)}
