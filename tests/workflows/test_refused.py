"""A run that is refused leaves its output folder as it was: an earlier run's files stay, a new folder is not made."""

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.bundles import linear_bundle
from helpers.logs import candidate_rows, random_rows, write_json, write_lines
from helpers.resuming import Tree, candidates, logged, simulated
from helpers.runs import merged, trained

from reagent_lite.config import check
from reagent_lite.config.convert_config import ConvertConfig
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.config.inspect_config import InspectConfig
from reagent_lite.config.normalize_config import NormalizeConfig
from reagent_lite.config.score_config import ScoreConfig
from reagent_lite.config.section import Section
from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.config.simulate_config import SimulateConfig
from reagent_lite.config.timeline_config import TimelineConfig
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.data.timeline.stage import run_timeline
from reagent_lite.errors import ReagentLiteError
from reagent_lite.serving.workers import run_workers
from reagent_lite.tasks.convert import convert
from reagent_lite.tasks.evaluate import evaluate
from reagent_lite.tasks.inspect import inspect
from reagent_lite.tasks.normalize import normalize
from reagent_lite.tasks.score import score
from reagent_lite.tasks.shard import shard
from reagent_lite.tasks.simulate import simulate

BUILDERS: dict[str, Callable[[Path], Tree]] = {
    "dqn": logged,
    "parametric": candidates,
    "simulated": lambda folder: simulated(folder, actions=["left", "right"]),
}


def refusals(kind: str, folder: Path) -> dict[str, Tree]:
    """Returns changes of a config that are found out only with the input at hand."""
    norm = write_json(folder / "norm.json", {"7": {"feature_type": "CONTINUOUS", "mean": 0.0, "stddev": 1.0}})
    if kind == "simulated":
        return {
            "no environment": {"simulation": {"env": "none"}},
            "other actions": {"actions": ["a", "b", "c"]},
            "no warm start": {"training": {"warm_start_model_path": str(folder / "none")}},
        }
    make = random_rows if kind == "dqn" else candidate_rows
    bad = [*make(100), {**make(1)[0], "reward": "much"}]
    items = str(write_lines(folder / "items.jsonl", [{"item_id": "tea", "0": 1.0}] * 2))
    return {
        "no data": {"training_data_path": str(folder / "out" / "configs.json")},
        "a bad row": {"training_data_path": str(write_lines(folder / "bad.jsonl", bad))},
        "no rows": {"training_data_path": str(write_lines(folder / "empty.jsonl", []))},
        "no eval data": {"eval_data_path": str(folder / "none.jsonl")},
        "no normalization": {"state_norm_data_path": str(folder / "none.json")},
        "a normalization of other features": {"state_norm_data_path": str(norm)},
        "an override of no feature": {"norm_params": {"feature_overrides": {"999": "ENUM"}}},
        "no warm start": {"training": {"warm_start_model_path": str(folder / "none")}},
        **({"a table that has an item twice": {"data": {"items": items}}} if kind == "parametric" else {}),
        "no such outcome": {"publish_if": {"estimator": "MAGIC", "outcome": "none", "lower_bound_above": 0}},
    }


def contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {
        file: (file.read_bytes(), file.stat().st_mtime_ns)
        for file in folder.rglob("*")
        if file.is_file() and file.name != ".lock"
    }


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_refused_run_changes_nothing(kind: str, tmp_path: Path) -> None:
    good = BUILDERS[kind](tmp_path)
    for name in ("report.html", "learning_curve.png", "rollout.gif", "config.json", "metrics.jsonl", ".lock",
                 "state_features_norm.json", "model/manifest.json", "checkpoints/other"):  # fmt: skip
        write_json(tmp_path / "out" / name, {})
    before = contents(tmp_path / "out")
    for name, changes in refusals(kind, tmp_path).items():
        for out in ("out", "fresh"):
            with pytest.raises(ReagentLiteError) as error:
                trained(merged(good, changes) | {"model_output_path": str(tmp_path / out)})
            assert f"Nearest there: {tmp_path}/out" not in str(error.value), name
        assert contents(tmp_path / "out") == before, name
        assert not (tmp_path / "fresh").exists(), name


def commands(folder: Path) -> dict[str, tuple[Callable[..., object], type[Section], Tree]]:
    """Returns commands with an input that is found wrong late, and outputs two folders below one that is there."""
    model = linear_bundle(folder / "model", np.eye(2), ("a", "b"), (0, 1))
    out = folder / "new" / "deep"
    damaged = shutil.copytree(model, folder / "damaged")
    (damaged / "golden.json").write_text("{}")
    rows = random_rows(300)
    bad = str(write_lines(folder / "bad.jsonl", [*rows, {**rows[0], "state_features": {"0": "much"}}]))
    event = {"mdp_id": "a", "sequence_number": 1, "state_features": {"0": 1.0}, "action": "a", "reward": 1.0}
    (folder / "broken.jsonl").write_text(json.dumps(rows[0]) + "\n{")
    events = str(write_lines(folder / "events.jsonl", [event] * 30 + [{**event, "reward": "much"}]))
    played = {"env": "cartpole_v1", "output_path": str(out / "log.jsonl"), "episodes": 1}
    return {
        "convert": (convert, ConvertConfig, {"data_path": bad, "output_path": str(out / "log.parquet")}),
        "any that reads rows": (lambda _: prepare_training_copy(Log(bad, actions=("a", "b"))), ConvertConfig,
                                {"data_path": bad, "output_path": "log.jsonl"}),
        "convert to lines": (convert, ConvertConfig, {"data_path": bad, "output_path": str(out / "log.jsonl")}),
        "evaluate": (evaluate, EvaluateConfig,
                     {"model": str(model), "data_path": bad, "output_path": str(out / "evaluation.json")}),
        "inspect": (inspect, InspectConfig, {"data_path": bad, "output_path": str(out / "config.json")}),
        "normalize": (normalize, NormalizeConfig,
                      {"training_data_path": bad, "norm_params": {"output_dir": str(out / "norm")}}),
        "score": (score, ScoreConfig,
                  {"model": str(model), "data_path": bad, "output_path": str(out / "scores.parquet")}),
        "score by a damaged model": (
            score, ScoreConfig,
            {"model": str(damaged), "data_path": str(write_lines(folder / "good.jsonl", rows)),
             "output_path": str(out / "scores.parquet")}),
        "serve": (run_workers, ServeConfig, {"model": str(damaged), "log": str(out), "port": 0}),
        "serve at no address": (run_workers, ServeConfig, {"model": str(model), "log": str(out), "host": "no.host."}),
        "simulate": (simulate, SimulateConfig, {**played, "policy": {"kind": "softmax", "model": str(damaged)}}),
        "simulate nothing": (simulate, SimulateConfig, {**played, "env": "none"}),
        "timeline": (run_timeline, TimelineConfig,
                     {"timeline": {"inputTableName": events, "outputTableName": str(out / "train"),
                                   "evalTableName": str(folder / "other" / "deep" / "eval")}}),
        "shard": (shard, ShardConfig,
                  {"data_path": str(folder / "broken.jsonl"), "output_path": str(out / "shard")}),
    }  # fmt: skip


def test_a_refused_command_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for name, (command, model, tree) in commands(tmp_path).items():
        before = {*tmp_path.rglob("*")}
        with pytest.raises(ReagentLiteError):
            command(check(model, tree))
        assert {*tmp_path.rglob("*")} <= before, name
