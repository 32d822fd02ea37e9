"""Requests by chance, most of them at the edge of what is allowed: what was answered is a log that training reads."""

import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers.events import make
from serving.conftest import ITEMS, NAMES, Open

from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log

NUMBERS = (*(0.0, -0.0, 1, 0.1, 1e-46, -7.5, None) * 5, -3.4e38, 3.4e38, 1e300, "1", True)
TEXTS = (*("7", "é", "\x00", "0-20261123T000000000000-0", "a" * 200, "\n") * 5, "", 7)
ORDERS = (*range(60), *(1.0, 2**53, -(2**53), None) * 5, 2**53 + 1, 0.5)


def features(rng: random.Random, ids: tuple[str, ...]) -> Any:
    return {name: rng.choice(NUMBERS) for name in rng.sample(ids, rng.randrange(len(ids) + 1))}


def row(rng: random.Random, kind: str) -> dict[str, Any]:
    choices = {
        "candidates": [features(rng, ("7", "8")) for _ in range(rng.randrange(4))],
        "items": rng.sample(("tea", "milk", 12, "12", "tea too", "tea", "beer"), rng.randrange(4)),
        "named": rng.sample((*NAMES, *NAMES, "fax"), rng.randrange(4)),
    }
    optional = {"mdp_id": rng.choice(TEXTS), "sequence_number": rng.choice(ORDERS), "possible_actions": choices[kind]}
    needed = ("candidates", "possible_actions")
    kept = {key: value for key, value in optional.items() if (kind, key) == needed or rng.random() < 0.5}
    return {"state_features": features(rng, ("3", "age")), **kept}


def reward(rng: random.Random, decision_id: str) -> dict[str, Any]:
    optional = {"terminal": rng.choice((True, False)), "metrics": {str(rng.choice(TEXTS)): rng.choice(NUMBERS)}}
    kept = {key: value for key, value in optional.items() if rng.random() < 0.5}
    return {"decision_id": decision_id, "reward": rng.choice(NUMBERS), **kept}


@pytest.mark.parametrize("kind", ["named", "candidates", "items"])
def test_what_is_answered_can_be_trained_on(
    kind: str, opened: Open, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    worker, rng, answered = opened(request.getfixturevalue(kind), reward_seconds=1e-6), random.Random(0), 0
    for _ in range(600):
        answer = worker.client.post("/decide", json={"rows": [row(rng, kind) for _ in range(rng.randrange(3))]})
        assert answer.status_code in (200, 409, 422), answer.text
        for decision in answer.json().get("decisions", ()):
            answered += 1
            rewarded = worker.client.post("/reward", json=reward(rng, decision["decision_id"]))
            assert rewarded.status_code in (204, 422), rewarded.text
    worker.log.rotate()
    assert worker.log.written == answered > 100
    frame = pd.DataFrame(ITEMS.values, columns=[*map(str, ITEMS.feature_ids)]).assign(item_id=ITEMS.ids)
    frame.to_parquet(tmp_path / "table.parquet")
    table = {"items": str(tmp_path / "table.parquet")} if kind == "items" else {}
    made = make(tmp_path, worker.folder, table, actionDiscrete=kind == "named")
    copy = prepare_training_copy(Log(made.train, actions=NAMES if kind == "named" else None))
    assert (made.refused_rows, made.train_rows) == (0, len(copy))
    assert len(copy) > 50
