"""The config of docs/embeddings.md runs."""

import json
import re
from pathlib import Path

import pytest
from helpers.logs import write_lines
from helpers.runs import ROOT, merged, trained
from oracles.catalog import events, visits

from reagent_lite.export import load_bundle


@pytest.mark.slow
def test_the_config_of_the_page_runs(tmp_path: Path) -> None:
    (config,) = re.findall(r"```json\n(.*?)```", (ROOT / "docs" / "embeddings.md").read_text(encoding="utf-8"), re.S)
    rows = events(visits(200, 30, 6, 1), 2)
    for number, row in enumerate(rows):
        row["state_features"]["user"] = f"u{number % 40}"
    log = write_lines(tmp_path / "visits.jsonl", rows)
    small = {"training_data_path": str(log), "model_output_path": str(tmp_path / "out"), "epochs": 1}
    bundle = load_bundle(Path(str(trained(merged(json.loads(config), small)).model)))
    assert bundle.features["state"].keys() == {"hour", "user", "seen"}
    assert bundle.features["action"].keys() == {"item"}
