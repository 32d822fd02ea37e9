"""workflows.normalize as a user runs it: files, skipping, use in training, drift, and what it refuses."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.disks import small_disk
from oracles.logs import candidate_rows, random_rows, write_lines
from oracles.runs import Runner, trained

from reagent_lite.config import check
from reagent_lite.config.normalize import NormalizeConfig
from reagent_lite.data.features.normalization import read_normalization
from reagent_lite.data.stage import StageManifest
from reagent_lite.errors import ConfigError, DataError
from workflows.normalize import Normalized, normalize

FILES = {"state_features_norm.json", "statistics.json", "manifest.json"}


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "training_data_path": str(folder / "log.jsonl"),
        "norm_params": {"output_dir": str(folder / "norm")},
    } | changes


def normalized(folder: Path, **changes: Any) -> Normalized:
    return normalize(check(NormalizeConfig, config(folder, **changes)))


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()} if folder.exists() else set()


def written(folder: Path, name: str = "statistics.json") -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((folder / "norm" / name).read_text())
    return tree


def test_on_the_command_line_and_into_a_training_run(run: Runner, small: dict[str, Any], tmp_path: Path) -> None:
    data = small["training_data_path"]
    tree = {"training_data_path": data, "norm_params": {"output_dir": str(tmp_path / "norm")}}
    done = run("normalize", tree)
    assert done.code == 0, done.err
    assert done.outcome | {"seconds": 0} == {
        "folder": str(tmp_path / "norm"), "skipped": False, "parametric": False, "rows": 200,
        "features": {"state_features": 3}, "types": {"state_features": {"CONTINUOUS": 3}}, "drift": None, "seconds": 0,
    }  # fmt: skip
    assert "200 rows; actions are names" in done.err
    assert names(tmp_path / "norm") == FILES
    # a run without the file fits its own; where all rows are in its sample, the numbers are the same
    trained(small)
    files = [read_normalization(str(tmp_path / folder / "state_features_norm.json")) for folder in ("norm", "out")]
    for given, fitted in zip(files[0].features, files[1].features, strict=True):
        assert replace(fitted, mean=given.mean, stddev=given.stddev) == given
        assert (given.mean, given.stddev) == (pytest.approx(fitted.mean, abs=1e-12), pytest.approx(fitted.stddev))


def test_parametric_columns_are_told_apart(tmp_path: Path) -> None:
    write_lines(tmp_path / "log.jsonl", candidate_rows(300))
    outcome = normalized(tmp_path)
    assert (outcome.parametric, outcome.features) == (True, {"state_features": 3, "action": 2})
    assert names(tmp_path / "norm") == FILES | {"action_norm.json"}
    action = read_normalization(str(tmp_path / "norm" / "action_norm.json"))
    # feature 5 numbers the candidates of a row from 0, of at most 7
    assert [(f.feature_id, str(f.feature_type)) for f in action.features] == [(0, "CONTINUOUS"), (5, "ENUM")]
    assert action.features[1].possible_values == tuple(map(float, range(7)))
    assert {"rows", "sampled", "features"} == set(written(tmp_path)["columns"]["action"])
    only = normalized(tmp_path, norm_params={"output_dir": str(tmp_path / "norm"), "cols_to_norm": ["action"]})
    assert (only.features, names(tmp_path / "norm")) == (
        {"action": 2},
        {"action_norm.json", "statistics.json", "manifest.json"},
    )


def test_statistics_say_why(tmp_path: Path) -> None:
    """Twenty-five times 1, 2, 3, 4: mean 2.5, squares 25 · (2.25 + 0.25) · 2 = 125."""
    states = [{"0": i % 4 + 1, "1": i / 7 if i % 2 else -1337.1337} for i in range(100)]
    rows = [{"mdp_id": "e", "sequence_number": i, "state_features": x, "action": "a"} for i, x in enumerate(states)]
    write_lines(tmp_path / "log.jsonl", rows)
    norm = {"output_dir": str(tmp_path / "norm"), "feature_overrides": {"1": "CLIP_LOG"}}
    normalized(tmp_path, norm_params=norm)
    first, second = written(tmp_path)["columns"]["state_features"]["features"].values()
    assert (first["feature_type"], first["reason"].split(", ")[1]) == ("ENUM", "4 distinct")
    assert (first["count"], first["share_present"], first["mean"]) == (100, 1.0, 2.5)
    assert first["stddev"] == pytest.approx(math.sqrt(125 / 99), rel=1e-12)
    assert (first["possible_values"], first["quantiles"]["0.5"]) == ([1.0, 2.0, 3.0, 4.0], 2.5)
    assert (second["feature_type"], second["share_present"]) == ("CLIP_LOG", 0.5)
    assert second["reason"] == "overridden; by itself CONTINUOUS"


def test_nothing_is_done_twice(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log.jsonl", random_rows(200))
    assert not normalized(tmp_path).skipped
    before = [(file.name, file.stat().st_mtime_ns) for file in (tmp_path / "norm").iterdir()]
    again = normalized(tmp_path)
    assert (again.skipped, again.rows, again.types) == (True, 200, {"state_features": {"CONTINUOUS": 3}})
    assert [(file.name, file.stat().st_mtime_ns) for file in (tmp_path / "norm").iterdir()] == before
    log.touch()  # another time, the same bytes
    assert normalized(tmp_path).skipped
    assert not normalized(tmp_path, seed=1).skipped
    write_lines(log, random_rows(200, seed=1))
    assert not normalized(tmp_path).skipped
    (tmp_path / "norm" / "statistics.json").unlink()
    assert not normalized(tmp_path).skipped
    assert names(tmp_path / "norm") == FILES
    manifest = StageManifest.read(str(tmp_path / "norm"))
    assert manifest is not None
    assert (manifest.kind, manifest.rows, manifest.state_ids, manifest.parent) == ("normalization", 200, (0, 1, 2), "")
    assert [file.name for file in manifest.inputs] == ["training/log.jsonl"]
    entries = {name: entry["rows"] for name, entry in manifest.files.items()}
    assert entries == {"state_features_norm.json": 3, "statistics.json": 3}


def test_drift_against_a_reference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Feature 0 moves by two deviations, feature 1 not at all; 2 and 9 are in one of the two only."""
    rng = np.random.default_rng(2)

    def rows(shift: float, other: str) -> list[dict[str, Any]]:
        values = np.array([shift, 0, 0]) + rng.normal(size=(1000, 3))
        states = [dict(zip(("0", "1", other), row, strict=True)) for row in values.tolist()]
        return [
            {"mdp_id": "e", "sequence_number": i, "action": "a", "state_features": state}
            for i, state in enumerate(states)
        ]

    write_lines(tmp_path / "log.jsonl", rows(2.0, "2"))
    reference = write_lines(tmp_path / "reference.jsonl", rows(0.0, "9"))
    outcome = normalized(tmp_path, reference_data_path=str(reference))
    assert outcome.drift == {"state_features": {"large": 1, "stable": 1}}
    drift = written(tmp_path, "drift.json")["state_features"]
    assert {feature["feature_id"]: feature["verdict"] for feature in drift["features"]} == {0: "large", 1: "stable"}
    assert (drift["only_in_training"], drift["only_in_reference"]) == ([2], [9])
    # two normals two deviations apart: 2 Φ(1) − 1
    assert drift["features"][0]["ks"] == pytest.approx(0.6827, abs=0.06)
    lines = caplog.messages[caplog.messages.index("drift of state_features against the reference") :]
    assert [line.split()[:2] for line in lines[2:4]] == [["0", "large"], ["1", "stable"]]
    assert lines[4:] == ["only in the training data: 2", "only in the reference: 9"]
    assert normalized(tmp_path, reference_data_path=str(reference)).skipped
    write_lines(reference, rows(0.0, "2"))
    assert not normalized(tmp_path, reference_data_path=str(reference)).skipped
    assert not normalized(tmp_path).skipped
    assert "drift.json" not in names(tmp_path / "norm")
    other = write_lines(tmp_path / "other.jsonl", [{"state_features": {"77": i}, "action": "a"} for i in range(30)])
    with pytest.raises(DataError, match="got 0, 1, 2 against 77"):
        normalized(tmp_path, reference_data_path=str(other))


def test_names_of_features_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"state_features": {"age": i + 0.5, "3": i % 2}, "action": "a"} for i in range(40)]
    log = write_lines(tmp_path / "log.jsonl", rows)
    norm = {"output_dir": str(tmp_path / "norm"), "feature_overrides": {"age": "CLIP_LOG"}}
    normalized(tmp_path, norm_params=norm, reference_data_path=str(log))
    spec = json.loads((tmp_path / "norm" / "state_features_norm.json").read_text())
    assert list(spec) == list(written(tmp_path)["columns"]["state_features"]["features"]) == ["3", "age"]
    assert [feature["feature_id"] for feature in written(tmp_path, "drift.json")["state_features"]["features"]] == [
        3,
        "age",
    ]
    assert caplog.messages[-1].split()[:2] == ["age", "stable"]


def test_what_the_config_cannot_say(tmp_path: Path) -> None:
    tree = {"norm_params": {"cols_to_norm": []}, "drift": {"psi_large": 0.1}}
    with pytest.raises(ConfigError) as caught:
        check(NormalizeConfig, tree)
    assert {problem.where for problem in caught.value.problems} == {
        "training_data_path", "norm_params.output_dir", "norm_params.cols_to_norm", "drift.psi_large",
        "drift.psi_moderate",
    }  # fmt: skip
    for changes, message in (
        ({"output_dir": "s3://bucket/norm"}, "norm_params.output_dir: expected a local path"),
        ({"output_dir": "norm", "cols_to_norm": ["action"]}, "while parametric is false"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(NormalizeConfig, config(tmp_path, parametric=False, norm_params=changes))


def test_features_of_candidates_are_not_those_of_names(tmp_path: Path) -> None:
    write_lines(tmp_path / "log.jsonl", random_rows(200))
    norm = {"output_dir": str(tmp_path / "norm"), "cols_to_norm": ["action"]}
    with pytest.raises(ConfigError, match="where actions are names"):
        normalized(tmp_path, norm_params=norm)


def test_a_folder_with_other_things_is_not_replaced(tmp_path: Path) -> None:
    write_lines(tmp_path / "log.jsonl", random_rows(200))
    (tmp_path / "norm").mkdir()
    assert not normalized(tmp_path).skipped  # an empty one is
    (tmp_path / "norm" / "thesis.txt").write_text("years of work")
    assert normalized(tmp_path).skipped
    with pytest.raises(ConfigError, match=r"got .*norm with thesis\.txt"):
        normalized(tmp_path, seed=1)
    assert (tmp_path / "norm" / "thesis.txt").read_text() == "years of work"
    with pytest.raises(ConfigError, match="alone, got the file"):
        normalized(tmp_path, norm_params={"output_dir": str(tmp_path / "log.jsonl")})
    with pytest.raises(ConfigError, match=r"a writable folder, got .*log\.jsonl: "):
        normalized(tmp_path, norm_params={"output_dir": str(tmp_path / "log.jsonl" / "norm")})


def test_a_full_disk_keeps_what_stood(tmp_path: Path) -> None:
    write_lines(tmp_path / "log.jsonl", random_rows(200))
    wide = [{"state_features": {str(k): (i * k) % 97 + 0.5 for k in range(120)}, "action": "a"} for i in range(60)]
    write_lines(tmp_path / "wide.jsonl", wide)
    with small_disk(tmp_path / "disk", size="64k", files=64) as disk:
        norm = {"output_dir": str(disk / "norm")}
        normalized(tmp_path, norm_params=norm)
        before = (disk / "norm" / "statistics.json").read_bytes()
        with pytest.raises(DataError, match="got No space left on device"):
            normalized(tmp_path, norm_params=norm, training_data_path=str(tmp_path / "wide.jsonl"))
        assert (disk / "norm" / "statistics.json").read_bytes() == before
        assert names(disk) == {"norm"}
        assert normalized(tmp_path, norm_params=norm).skipped


def test_long_tables_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"state_features": {str(k): i + k for k in range(45)}, "action": "a"} for i in range(60)]
    log = write_lines(tmp_path / "log.jsonl", rows)
    normalized(tmp_path, reference_data_path=str(log))
    tree = written(tmp_path, "drift.json")["state_features"]
    assert len(tree["features"]) == 45
    table = caplog.messages
    assert table[-1] == "5 more in drift.json"
    assert len(table) - table.index("drift of state_features against the reference") == 1 + 1 + 40 + 1
