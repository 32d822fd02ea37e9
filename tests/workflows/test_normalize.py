"""workflows.normalize as a user runs it: files, skipping, use in training, drift, and what it refuses."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import commands
from helpers.disks import small_disk
from helpers.logs import candidate_rows, random_rows, write_lines
from helpers.runs import Runner, trained

from reagent_lite.data.features.normalization_files import read_normalization
from reagent_lite.data.stage_folder import StageManifest
from reagent_lite.errors import ConfigError, DataError
from reagent_lite.tasks.normalize import Normalized

FILES = {"state_features_norm.json", "statistics.json", "manifest.json"}


def normalized(folder: Path, **changes: Any) -> Normalized:
    """Normalizes log.jsonl of a folder into its folder norm."""
    return commands.normalized(str(folder / "log.jsonl"), folder / "norm", **changes)


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def written(folder: Path, name: str = "statistics.json") -> dict[str, Any]:
    return json.loads((folder / "norm" / name).read_text())


def test_on_the_command_line_and_into_a_training_run(run: Runner, small: dict[str, Any], tmp_path: Path) -> None:
    norm = {"output_dir": str(tmp_path / "norm")}
    done = run("normalize", {"training_data_path": small["training_data_path"], "norm_params": norm}).ok
    assert done.outcome | {"seconds": 0} == {
        "folder": str(tmp_path / "norm"), "skipped": False, "parametric": False, "rows": 200,
        "features": {"state_features": 3}, "types": {"state_features": {"CONTINUOUS": 3}}, "drift": None, "seconds": 0,
    }  # fmt: skip
    assert names(tmp_path / "norm") == FILES
    # a run without the file fits its own; where all rows are in its sample, the numbers are the same
    trained(small)
    features = (
        read_normalization(str(tmp_path / folder / "state_features_norm.json")).features for folder in ("norm", "out")
    )
    for given, fitted in zip(*features, strict=True):
        assert replace(fitted, mean=given.mean, stddev=given.stddev) == given
        assert (given.mean, given.stddev) == (pytest.approx(fitted.mean, abs=1e-12), pytest.approx(fitted.stddev))


def test_the_steps_of_2019_with_one_config(run: Runner, small: dict[str, Any], tmp_path: Path) -> None:
    """A training config for both; its output_dir is the data's folder, from which nothing is removed."""
    data = Path(small["training_data_path"])
    file = data.parent / "state_features_norm.json"
    tree = small | {
        "state_norm_data_path": str(file),
        "norm_params": {"output_dir": str(data.parent), "cols_to_norm": ["state_features"]},
    }
    before = names(data.parent)
    done = run("normalize", tree).ok
    assert done.outcome["features"] == {"state_features": 3}
    assert names(data.parent) >= before | {file.name}
    assert not names(data.parent) & {"manifest.json", "statistics.json"}
    features = json.loads(file.read_bytes()).keys()
    # without the first step training fits the file, and a second run reads it
    file.unlink()
    trained(tree)
    assert json.loads(file.read_bytes()).keys() == features
    made = file.stat().st_mtime_ns
    trained(tree | {"model_output_path": str(tmp_path / "second")})
    assert file.stat().st_mtime_ns == made
    with pytest.raises(DataError, match=r"typo\.json"):
        trained(tree | {"state_norm_data_path": str(tmp_path / "typo.json"), "model_output_path": str(tmp_path / "no")})
    assert "Did you mean 'rl.gamma'" in run("normalize", tree | {"gama": 1}).err


def test_parametric_columns_are_told_apart(tmp_path: Path) -> None:
    write_lines(tmp_path / "log.jsonl", candidate_rows(300))
    outcome = normalized(tmp_path)
    assert (outcome.parametric, outcome.features) == (True, {"state_features": 3, "action": 2})
    assert names(tmp_path / "norm") == FILES | {"action_norm.json"}
    action = read_normalization(str(tmp_path / "norm" / "action_norm.json"))
    # feature 5 numbers the candidates of a row from 0, of at most 7
    assert [(f.feature_id, str(f.feature_type)) for f in action.features] == [(0, "CONTINUOUS"), (5, "ENUM")]
    assert normalized(tmp_path, norm={"cols_to_norm": ["action"]}).features == {"action": 2}
    assert names(tmp_path / "norm") == {"action_norm.json", "statistics.json", "manifest.json"}


def test_statistics_say_why(tmp_path: Path) -> None:
    """Twenty-five times 1, 2, 3, 4: mean 2.5, squares 25 · (2.25 + 0.25) · 2 = 125."""
    states = [{"0": i % 4 + 1, "1": i / 7 if i % 2 else -1337.1337} for i in range(100)]
    rows = [{"mdp_id": "e", "sequence_number": i, "state_features": x, "action": "a"} for i, x in enumerate(states)]
    write_lines(tmp_path / "log.jsonl", rows)
    normalized(tmp_path, norm={"feature_overrides": {"1": "CLIP_LOG"}})
    first, second = written(tmp_path)["columns"]["state_features"]["features"].values()
    assert re.match("[^,]*, 4 distinct", first["reason"])
    expected = {"count": 100, "share_present": 1.0, "mean": 2.5, "stddev": (125 / 99) ** 0.5}
    assert {name: first[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert (first["feature_type"], first["possible_values"]) == ("ENUM", [1.0, 2.0, 3.0, 4.0])
    assert second["reason"] == "overridden; by itself CONTINUOUS"


def test_nothing_is_done_twice(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log.jsonl", random_rows(200))
    assert not normalized(tmp_path).skipped
    stamps = {file: file.stat().st_mtime_ns for file in (tmp_path / "norm").iterdir()}
    again = normalized(tmp_path)
    assert (again.skipped, again.rows, again.types) == (True, 200, {"state_features": {"CONTINUOUS": 3}})
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "norm").iterdir()} == stamps
    assert not normalized(tmp_path, seed=1).skipped
    write_lines(log, random_rows(200, seed=1))
    assert not normalized(tmp_path).skipped
    manifest = StageManifest.read(str(tmp_path / "norm"))
    assert (manifest.kind, manifest.rows, manifest.state_ids, manifest.parent) == ("normalization", 200, (0, 1, 2), "")


def test_drift_against_a_reference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Feature 0 moves by two deviations, feature 1 not at all; 2 and 9 are in one of the two only."""
    rng = np.random.default_rng(2)

    def rows(shift: float, other: str) -> list[dict[str, Any]]:
        return [
            {
                "mdp_id": "e",
                "sequence_number": i,
                "action": "a",
                "state_features": {"0": row[0], "1": row[1], other: row[2]},
            }
            for i, row in enumerate((np.array([shift, 0, 0]) + rng.normal(size=(1000, 3))).tolist())
        ]

    write_lines(tmp_path / "log.jsonl", rows(2.0, "2"))
    reference = write_lines(tmp_path / "reference.jsonl", rows(0.0, "9"))
    outcome = normalized(tmp_path, reference_data_path=str(reference))
    assert outcome.drift == {"state_features": {"large": 1, "stable": 1}}
    drift = written(tmp_path, "drift.json")["state_features"]
    assert {feature["feature_id"]: feature["verdict"] for feature in drift["features"]} == {0: "large", 1: "stable"}
    assert (drift["only_in_training"], drift["only_in_reference"]) == ([2], [9])
    assert caplog.messages[-2:] == ["only in the training data: 2", "only in the reference: 9"]
    assert normalized(tmp_path, reference_data_path=str(reference)).skipped
    write_lines(reference, rows(0.0, "2"))
    assert not normalized(tmp_path, reference_data_path=str(reference)).skipped
    assert not normalized(tmp_path).skipped
    assert "drift.json" not in names(tmp_path / "norm")


def test_what_is_refused_and_that_a_folder_with_other_things_is_not_replaced(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log.jsonl", random_rows(200))
    (tmp_path / "norm").mkdir()
    assert not normalized(tmp_path).skipped  # an empty one is
    (tmp_path / "norm" / "thesis.txt").write_text("years of work")
    assert normalized(tmp_path).skipped
    for changes, message in (
        ({"norm": {"cols_to_norm": ["action"], "output_dir": str(tmp_path / "other")}}, "where actions are names"),
        ({"seed": 1}, r"got .*norm with thesis\.txt"),
        ({"norm": {"output_dir": str(log)}}, "alone, got the file"),
        ({"norm": {"output_dir": str(log / "norm")}}, r"a writable folder, got .*log\.jsonl: "),
    ):
        with pytest.raises(ConfigError, match=message):
            normalized(tmp_path, **changes)
    assert (tmp_path / "norm" / "thesis.txt").read_text() == "years of work"


def test_a_full_disk_keeps_what_stood(tmp_path: Path) -> None:
    write_lines(tmp_path / "log.jsonl", random_rows(200))
    rows = [{"state_features": {str(k): i * k % 97 + 0.5 for k in range(120)}, "action": "a"} for i in range(60)]
    with small_disk(tmp_path / "disk", size="64k", files=64) as disk:
        norm = {"output_dir": str(disk / "norm")}
        normalized(tmp_path, norm=norm)
        with pytest.raises(DataError, match="got No space left on device"):
            normalized(tmp_path, norm=norm, training_data_path=str(write_lines(tmp_path / "wide.jsonl", rows)))
        assert names(disk) == {"norm"}
        assert normalized(tmp_path, norm=norm).skipped
