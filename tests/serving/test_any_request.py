"""Requests by chance, most of them at the edge of what is allowed: what was answered is a log that training reads."""

import random
from pathlib import Path
from typing import Any

import pytest
from oracles.events import make
from oracles.logs import write_lines
from serving.conftest import ITEMS, NAMES, Open

from reagent_lite.data.copy.training_copy import prepare_training_copy

NUMBERS = (*(0.0, -0.0, 1, 0.1, 1e-46, -7.5, None) * 5, -3.4e38, 3.4e38, 1e300, "1", True)
TEXTS = (*("7", "é", "\x00", "0-20261123T000000000000-0", "a" * 200, "\n") * 5, "", 7)
ORDERS = (*(0, -1, 1.0, 2**53, -(2**53), None) * 5, 2**53 + 1, 0.5)


def features(rng: random.Random, ids: tuple[str, ...]) -> Any:
    return {name: rng.choice(NUMBERS) for name in rng.sample(ids, rng.randrange(len(ids) + 1))}


def row(rng: random.Random, kind: str) -> dict[str, Any]:
    request = {"state_features": features(rng, ("3", "age"))}
    if rng.random() < 0.7:
        request["mdp_id"] = rng.choice(TEXTS)
    if rng.random() < 0.7:
        request["sequence_number"] = rng.choice(ORDERS)
    if kind == "candidates":
        request["possible_actions"] = [features(rng, ("7", "8")) for _ in range(rng.randrange(4))]
    elif kind == "items" and rng.random() < 0.7:
        request["possible_actions"] = rng.sample(("tea", "milk", 12, "12", "tea too", "tea", "beer"), rng.randrange(4))
    elif rng.random() < 0.5 and kind == "named":
        request["possible_actions"] = rng.sample((*NAMES, *NAMES, "fax"), rng.randrange(4))
    return request


def reward(rng: random.Random, decision_id: str) -> dict[str, Any]:
    request = {"decision_id": decision_id, "reward": rng.choice(NUMBERS)}
    if rng.random() < 0.5:
        request["terminal"] = rng.choice((True, False))
    if rng.random() < 0.5:
        request["metrics"] = {str(rng.choice(TEXTS)): rng.choice(NUMBERS)}
    return request


@pytest.mark.parametrize("kind", ["named", "candidates", "items"])
def test_what_is_answered_can_be_trained_on(
    kind: str, opened: Open, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    worker, rng, answered = opened(request.getfixturevalue(kind), reward_seconds=1e-6), random.Random(0), 0
    for _ in range(600):
        answer = worker.client.post("/decide", json={"rows": [row(rng, kind) for _ in range(rng.randrange(3))]})
        assert answer.status_code in (200, 422), answer.text
        if answer.status_code == 200:
            decisions = answer.json()["decisions"]
            answered += len(decisions)
            for decision in decisions:
                rewarded = worker.client.post("/reward", json=reward(rng, decision["decision_id"]))
                assert rewarded.status_code in (204, 422), rewarded.text
    assert answered > 100
    worker.log.rotate()
    assert worker.log.written == answered
    table = {}
    if kind == "items":
        write_lines(tmp_path / "table.jsonl", [
            {"item_id": item, **dict(zip(map(str, ITEMS.feature_ids), values, strict=True))}
            for item, values in zip(ITEMS.ids, ITEMS.values.tolist(), strict=True)
        ])  # fmt: skip
        table = {"items": str(tmp_path / "table.jsonl")}
    made = make(tmp_path, worker.folder, table, actionDiscrete=kind == "named")
    assert made.refused_rows == 0
    copy = prepare_training_copy(made.train, actions=NAMES if kind == "named" else None)
    assert len(copy) == made.train_rows > 50
