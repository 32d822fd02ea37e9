"""Logs of decisions among items: by id beside a table of items, and with the features repeated in every row."""

from pathlib import Path

import numpy as np
from helpers.logs import Row, write_lines

ITEMS: tuple[Row, ...] = (
    {"item_id": "tea", "price": 2.0, "7": 0.25},
    {"item_id": "milk", "price": 1.0, "7": 0.1},
    {"item_id": "bread", "price": 3.5, "7": -0.5},
    {"item_id": 12, "price": 0.5, "7": 1.5},
    {"item_id": "jam", "price": 4.0, "7": 0.75},
)
NAMES = tuple(str(item["item_id"]) for item in ITEMS)


def features_of(name: str) -> dict[str, float]:
    return {key: value for key, value in ITEMS[NAMES.index(str(name))].items() if key != "item_id"}


def write_items(folder: Path, *others: Row, name: str = "items.jsonl") -> Path:
    return write_lines(folder / name, [*ITEMS, *others])


def events(episodes: int = 60, seed: int = 0) -> list[Row]:
    """Episodes of 1 to 5 decisions, each drawn alike among 2 to 5 items; cheap items pay in one kind of state."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for episode in range(episodes):
        length = int(rng.integers(1, 6))
        for step in range(length):
            x = round(float(rng.normal()), 3)
            offered = [ITEMS[k] for k in rng.permutation(len(ITEMS))[: rng.integers(2, 6)]]
            item = offered[int(rng.integers(len(offered)))]
            rows.append(
                {"mdp_id": f"e{episode}", "sequence_number": step, "state_features": {"0": x, "1": step / 5},
                 "action": item["item_id"], "reward": round(x * item["price"] + float(rng.normal()) / 10, 3),
                 "possible_actions": [offer["item_id"] for offer in offered],
                 "action_probability": 1 / len(offered), "terminal": step == length - 1}
            )  # fmt: skip
    return rows


def repeated(rows: list[Row]) -> list[Row]:
    """The same rows with the features of the items in place of their ids."""
    return [
        {**row, "action": features_of(row["action"]),
         "possible_actions": [features_of(name) for name in row["possible_actions"]]}
        for row in rows
    ]  # fmt: skip


def transitions(rows: list[Row]) -> list[Row]:
    """The same rows with what followed each; the last of an episode is terminal."""
    pairs = list(zip(rows, [*rows[1:], {}], strict=True))
    assert all(row["terminal"] == (after.get("mdp_id") != row["mdp_id"]) for row, after in pairs)
    return [
        {**row, "next_state_features": after.get("state_features", {}), "next_action": after.get("action"),
         "possible_next_actions": after.get("possible_actions", [])}
        for row, after in ((row, {} if row["terminal"] else after) for row, after in pairs)
    ]  # fmt: skip
