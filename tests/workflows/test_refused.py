"""A run that is refused leaves its output folder as it was: an earlier run's files stay, a new folder is not made."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from oracles.logs import candidate_rows, random_rows, write_lines
from oracles.resuming import Tree, candidates, logged, simulated
from oracles.runs import merged, trained

from reagent_lite.errors import ReagentLiteError

BUILDERS: dict[str, Callable[[Path], Tree]] = {
    "dqn": logged,
    "parametric": candidates,
    "simulated": lambda folder: simulated(folder, actions=["left", "right"]),
}


def refusals(kind: str, folder: Path) -> dict[str, Tree]:
    """Returns changes of a config that are found out only with the input at hand."""
    norm = folder / "norm.json"
    norm.write_text(json.dumps({"7": {"feature_type": "CONTINUOUS", "mean": 0.0, "stddev": 1.0}}))
    if kind == "simulated":
        return {
            "no environment": {"simulation": {"env": "none"}},
            "other actions": {"actions": ["a", "b", "c"]},
            "no warm start": {"training": {"warm_start_model_path": str(folder / "none")}},
        }
    make = random_rows if kind == "dqn" else candidate_rows
    bad = [*make(100), {**make(1)[0], "reward": "much"}]
    return {
        "no data": {"training_data_path": str(folder / "out" / "configs.json")},
        "a bad row": {"training_data_path": str(write_lines(folder / "bad.jsonl", bad))},
        "no rows": {"training_data_path": str(write_lines(folder / "empty.jsonl", []))},
        "no eval data": {"eval_data_path": str(folder / "none.jsonl")},
        "no normalization": {"state_norm_data_path": str(folder / "none.json")},
        "a normalization of other features": {"state_norm_data_path": str(norm)},
        "an override of no feature": {"norm_params": {"feature_overrides": {"999": "ENUM"}}},
        "no warm start": {"training": {"warm_start_model_path": str(folder / "none")}},
        "no such outcome": {"publish_if": {"estimator": "MAGIC", "outcome": "none", "lower_bound_above": 0}},
    }


def found(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != ".lock"]
    return {str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_refused_run_changes_nothing(kind: str, tmp_path: Path) -> None:
    good = BUILDERS[kind](tmp_path)
    for name in ("report.html", "learning_curve.png", "rollout.gif", "config.json", "metrics.jsonl", ".lock",
                 "state_features_norm.json", "model/manifest.json", "checkpoints/other"):  # fmt: skip
        file = tmp_path / "out" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")
    before = found(tmp_path / "out")
    for name, changes in refusals(kind, tmp_path).items():
        for out in ("out", "fresh"):
            with pytest.raises(ReagentLiteError) as error:
                trained(merged(good, changes) | {"model_output_path": str(tmp_path / out)})
            assert f"Nearest there: {tmp_path}/out" not in str(error.value), name
        assert found(tmp_path / "out") == before, name
        assert not (tmp_path / "fresh").exists(), name
