"""One table of values: the same in training, in a bundle, and over HTTP."""

import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.bundles import category_bundle
from helpers.logs import write_lines
from helpers.transitions import code_of_text
from serving.conftest import Open

from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.errors import BundleError, DataError

NAN = math.nan
REFUSED = None
JSON = {"headers": {"content-type": "application/json"}}
DE = float(code_of_text("DE"))
NUMBER, CATEGORY = "age", "country"
PLAIN: list[tuple[str, Any, float | None]] = [
    (NUMBER, 1, 1.0), (NUMBER, 2.5, 2.5), (NUMBER, -0.0, 0.0), (NUMBER, True, 1.0), (NUMBER, False, 0.0),
    (NUMBER, None, NAN), (NUMBER, 1e-50, 0.0), (NUMBER, 3.4e38, float(np.float32(3.4e38))), (NUMBER, 1e39, REFUSED),
    (NUMBER, 10**300, REFUSED), (NUMBER, "1", REFUSED), (NUMBER, "NA", REFUSED), (NUMBER, [1], REFUSED),
    (NUMBER, {"a": 1}, REFUSED), (CATEGORY, "DE", DE), (CATEGORY, None, NAN),
    (CATEGORY, "NA", float(code_of_text("NA"))),
    (CATEGORY, "", float(code_of_text(""))), (CATEGORY, 1, REFUSED), (CATEGORY, True, REFUSED),
    (CATEGORY, "x" * 200, float(code_of_text("x" * 200))), (CATEGORY, "x" * 201, REFUSED), (CATEGORY, ["DE"], REFUSED),
]  # fmt: skip
"""(feature, JSON, its number in matrices; REFUSED if there is none)."""
OF_FRAMES: list[tuple[str, Any, float | None]] = [
    (NUMBER, NAN, NAN), (NUMBER, pd.NA, NAN), (NUMBER, pd.NaT, NAN), (NUMBER, np.bool_(True), 1.0),
    (NUMBER, np.float32(0.5), 0.5), (NUMBER, np.int8(-3), -3.0), (NUMBER, Decimal("1.5"), 1.5),
    (NUMBER, math.inf, REFUSED), (NUMBER, 1 + 2j, REFUSED), (CATEGORY, NAN, NAN), (CATEGORY, pd.NA, NAN),
]  # fmt: skip
"""The same for objects of Python, NumPy and pandas, which JSON does not have."""
OTHERS: dict[str, Any] = {NUMBER: 7.0, CATEGORY: "FR", "3": 2.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return category_bundle(tmp_path_factory.mktemp("values") / "model", np.zeros((2, 5)), ("mail", "call"))


def test_one_table(model: Path, opened: Open, tmp_path: Path) -> None:
    worker = opened(model)
    bundle = worker.model.bundle
    columns = {str(feature): column for column, feature in enumerate(bundle.state_feature_ids)}
    for number, (feature, value, expected) in enumerate((*PLAIN, *OF_FRAMES)):
        state = OTHERS | {feature: value}
        results: dict[str, float | None] = {}
        try:
            results["bundle"] = float(bundle.states([state])[0, columns[feature]])
        except BundleError:
            results["bundle"] = REFUSED
        if number < len(PLAIN) or value is NAN:
            answer = worker.client.post("/decide", content=json.dumps({"rows": [{"state_features": state}]}), **JSON)
            if answer.status_code == 200:
                logged = worker.waiting_rows()[-1]["state_features"].get(feature, NAN)
                results["server"] = float(np.float32(code_of_text(logged) if isinstance(logged, str) else logged))
            else:
                assert answer.status_code == 422
                results["server"] = REFUSED
        if number < len(PLAIN):
            states = (OTHERS, OTHERS, state)
            rows = [{"state_features": row, "action": "mail", "reward": float(row is state)} for row in states]
            log = write_lines(tmp_path / f"{number}.jsonl", rows)
            try:
                copy = prepare_training_copy(
                    Log(str(log), actions=("mail", "call"), directory=str(tmp_path / "copies"))
                )
                ids = [str(name) for name in copy.state_ids]
                results["training"] = float(copy.state[int(copy.reward[:3].argmax()), ids.index(feature)])
            except DataError:
                results["training"] = REFUSED
        for where, result in results.items():
            assert result == pytest.approx(expected, nan_ok=True), (feature, value, where)


def test_spare_keys_are_ignored_on_request(model: Path, opened: Open) -> None:
    worker = opened(model)
    state = {"age": 2.5, "trace": "abc", "parent": {"id": 7}}
    rows = [{"state_features": state, "request_id": 9}]
    assert worker.refusal("/decide", rows=rows)[0] == 422
    worker.post("/decide", rows=rows, ignore_unknown=True)
    assert worker.waiting_rows()[-1]["state_features"] == {"age": 2.5}
    assert worker.refusal("/decide", rows=[{"state_features": {"trace": 1}}], ignore_unknown=True)[0] == 422
    bundle = worker.model.bundle
    np.testing.assert_array_equal(
        bundle.predict_rows([state], ignore_unknown=True).q, bundle.predict_rows([{"age": 2.5}]).q
    )
    with pytest.raises(BundleError, match="'trace'"):
        bundle.predict_rows([state])
