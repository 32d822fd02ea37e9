"""Small logs with known answers, as files."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from oracles import gridworld

Row = dict[str, Any]
Rows = list[Row]


def written(file: Path, content: str | bytes) -> Path:
    """Writes a file, and returns it."""
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def write_lines(file: Path, rows: Iterable[Row]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    return written(file, "".join(json.dumps(row) + "\n" for row in rows))


def write_json(file: Path, tree: Any) -> Path:
    return write_lines(file, [tree])


def episode_code(mdp_id: str) -> int:
    """Returns the first 8 bytes of BLAKE2b, the number of an episode in the training copies of every machine."""
    return int.from_bytes(hashlib.blake2b(mdp_id.encode(), digest_size=8).digest(), "little")


def split_mix(value: int) -> int:
    """Returns a step of SplitMix64 (Steele, Lea and Flood 2014) in plain integers."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def random_rows(count: int, seed: int = 0, *, missing: float = 0.1) -> list[dict[str, Any]]:
    """Transitions over 3 features and actions "a", "b" in episodes of 10 rows, some features missing."""
    rng = np.random.default_rng(seed)

    def features() -> dict[str, float]:
        return {str(i): round(float(x), 4) for i, x in enumerate(rng.normal(size=3)) if rng.random() > missing}

    rows, state = [], features()
    for i in range(count):
        last, after = i % 10 == 9, features()
        rows.append(
            {
                "mdp_id": str(i // 10),
                "sequence_number": i % 10,
                "state_features": state,
                "action": ["a", "b"][int(rng.integers(2))],
                "reward": round(float(rng.normal()), 4),
                "action_probability": 0.5,
                "possible_actions": [1, 1],
                "next_state_features": {} if last else after,
                "next_action": "" if last else ["a", "b"][int(rng.integers(2))],
                "possible_next_actions": [0, 0] if last else [1, 1],
                "time_diff": 0 if last else 1,
            }
        )
        state = features() if last else after
    return rows


def candidate_rows(count: int, seed: int = 0, most: int = 7) -> list[dict[str, Any]]:
    """Transitions with 1 to `most` candidates of 2 features in each row, in episodes of 10 rows."""
    rng = np.random.default_rng(seed)

    def candidates() -> list[dict[str, float]]:
        return [{"0": round(float(rng.normal()), 4), "5": float(k)} for k in range(rng.integers(1, most + 1))]

    rows = random_rows(count, seed)
    now = candidates()
    for row in rows:
        last, after = row["possible_next_actions"] == [0, 0], candidates()
        row |= {
            "possible_actions": now,
            "action": now[int(rng.integers(len(now)))],
            "possible_next_actions": [] if last else after,
            "next_action": {} if last else after[int(rng.integers(len(after)))],
        }
        now = candidates() if last else after
    return rows


def gridworld_rows(*, sarsa: bool, parametric: bool) -> list[dict[str, Any]]:
    """Every transition of the 5 x 5 gridworld as often as it is likely, so that the mean over rows is exact.

    For SARSA every next action of the random policy is enumerated too. States are one ENUM feature; a parametric
    candidate is one ENUM feature that numbers the pair (state, action).
    """
    allowed = gridworld.allowed()

    def choice(state: int, action: int) -> Any:
        return {"0": int(4 * state + action)} if parametric else int(action)

    def choices(state: int) -> list[Any]:
        return (
            [choice(state, a) for a in np.flatnonzero(allowed[state])]
            if parametric
            else allowed[state].astype(int).tolist()
        )

    rows = []
    for state, action, after in np.argwhere(gridworld.transition_matrix()):
        over = not allowed[after].any()
        nexts = (
            [None] if over or not sarsa else [choice(after, following) for following in np.flatnonzero(allowed[after])]
        )
        row = {
            "state_features": {"0": int(state)},
            "action": choice(state, action),
            "reward": 10.0 if after == gridworld.GOAL else 0.0,
            "possible_actions": choices(state),
            "next_state_features": {"0": int(after)},
            "possible_next_actions": choices(after),
            "terminal": bool(over),
        }
        times = round(100 * gridworld.transition_matrix()[state, action, after]) * (12 // len(nexts) if sarsa else 1)
        rows += [each for following in nexts for each in [{**row, "next_action": following}] * times]
    return rows


def enum_normalization(file: Path, feature: str, values: Iterable[int]) -> Path:
    spec = {"feature_type": "ENUM", "possible_values": list(values), "mean": 0, "stddev": 1}
    return write_json(file, {feature: json.dumps(spec)})
