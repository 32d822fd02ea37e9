"""A log as people keep it, with columns and features of their own names, from the file to decisions by name."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers.runs import quick, trained

import reagent_lite
from reagent_lite.config import check
from reagent_lite.config.convert_config import ConvertConfig
from reagent_lite.errors import ConfigError
from reagent_lite.export import load_bundle
from reagent_lite.tasks.convert import convert

COLUMNS = {
    "mdp_id": "session",
    "sequence_number": "at",
    "state_features": ["age", "income"],
    "action": "shown",
    "action_probability": "p",
    "reward": "clicked",
    "terminal": "last",
}


@pytest.mark.usefixtures("caches")
def test_a_model_maps_the_columns_of_its_training_log(tmp_path: Path) -> None:
    """Without a config `score` and `evaluate` read a log by its own names, or by the standard ones, like training."""
    # who has a positive income answers mail, the others answer calls; 200 sessions of 6 decisions
    rng = np.random.default_rng(0)
    log = pd.DataFrame(
        {
            "session": np.repeat([f"s{number}" for number in range(200)], 6),
            "at": pd.date_range("2026-01-01", periods=1200, freq="3min"),
            "age": np.repeat(rng.integers(20, 60, 200), 6),
            "income": rng.normal(size=1200),
            "shown": rng.choice(["mail", "call"], 1200),
            "p": 0.5,
            "last": np.arange(1200) % 6 == 5,
        }
    )
    log["clicked"] = ((log["shown"] == "mail") == (log["income"] > 0)).astype(float)
    log.to_csv(tmp_path / "own.csv", index=False)
    tree = quick(tmp_path / "own.csv", tmp_path / "out", epochs=2, actions=["mail", "call"])
    model = trained(tree | {"data": {"columns": COLUMNS}}).model
    assert load_bundle(model).columns == COLUMNS

    expected = reagent_lite.score(model, log, config={"policy": "greedy", "columns": COLUMNS})
    assert expected.column("mdp_id").to_pylist() == log["session"].tolist()
    converted = tmp_path / "converted"
    convert(check(ConvertConfig, {"data_path": str(tmp_path / "own.csv"), "columns": COLUMNS,
                                  "output_path": str(converted / "log.parquet")}))  # fmt: skip
    # rows to decide have no outcome
    for rows in (log, tmp_path / "own.csv", log.drop(columns=["clicked", "last", "p"]), converted):
        assert reagent_lite.score(model, rows, config={"policy": "greedy"}).equals(expected)
    with pytest.raises(ConfigError, match=r'keep: .* no features, got \["income"\]'):
        reagent_lite.score(model, log, config={"keep": ["income"]})

    # as with columns of a config, which the report's name depends on
    scores = reagent_lite.evaluate(model, log, config={"columns": COLUMNS}).scores
    assert reagent_lite.evaluate(model, log).scores == reagent_lite.evaluate(model, converted).scores == scores != {}
