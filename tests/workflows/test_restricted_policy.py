"""BCQ on logged rows; that it is evaluated and plays as exported is in test_evaluate.py and test_exported_play.py."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.logs import write_lines
from oracles.runs import quick, trained
from safetensors.torch import load_file

from reagent_lite.export import load_bundle


@pytest.mark.parametrize("parametric", [False, True])
def test_bcq_takes_what_the_estimated_logging_policy_takes(tmp_path: Path, parametric: bool) -> None:
    """The log has a in 95 % of the rows with a positive feature, and b in 95 % of the others; b pays more."""
    rng = np.random.default_rng(0)
    choices: list[Any] = [{"7": 1.0, "8": 0.0}, {"7": 0.0, "8": 1.0}] if parametric else ["a", "b"]
    signs = rng.choice((-1.0, 1.0), 1500)
    taken = ((rng.random(1500) < 0.95) == (signs < 0)).astype(int)
    rows = [
        {"mdp_id": str(number), "sequence_number": 0, "state_features": {"0": sign}, "action": choices[index],
         "reward": float(index), "possible_actions": choices, "terminal": True}
        for number, (sign, index) in enumerate(zip(signs.tolist(), taken.tolist(), strict=True))
    ]  # fmt: skip
    log = write_lines(tmp_path / "log.jsonl", rows)
    tree = quick(log, tmp_path / "out", rainbow={"bcq": True, "bcq_drop_threshold": 0.3}, epochs=3,
                 evaluation={"propensities": "estimate"}, norm_params={"feature_overrides": {
                     key: "DO_NOT_PREPROCESS" for key in (("0", "7", "8") if parametric else ("0",))}})  # fmt: skip
    if parametric:
        del tree["actions"]
    model = Path(str(trained(tree).model))
    lists = [[choices] * 2] if parametric else []
    predicted = load_bundle(model).predict_rows([{"0": 1.0}, {"0": -1.0}], *lists)
    assert predicted.mask.tolist() == [[True, False], [False, True]]
    assert 0 <= float(load_file(model / "weights.safetensors")["behavior_cloning.share"]) < 0.2
