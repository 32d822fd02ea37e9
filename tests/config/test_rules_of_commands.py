"""Contradictions in configs of commands and roles, one at a time: which key is named, and what is expected."""

from pathlib import Path
from typing import Any

import pytest
from oracles.roles import role
from oracles.runs import merged

from reagent_lite.config import DqnConfig, ParametricDqnConfig, check
from reagent_lite.config.convert import ConvertConfig
from reagent_lite.config.evaluate import EvaluateConfig
from reagent_lite.config.normalize import NormalizeConfig
from reagent_lite.config.section import Section
from reagent_lite.config.shard import ShardConfig
from reagent_lite.errors import ConfigError

Tree = dict[str, Any]
BASES: dict[str, tuple[type[Section], Tree]] = {
    "convert": (ConvertConfig, {"input_path": "a.jsonl", "output_path": "b.csv"}),
    "evaluate a log": (EvaluateConfig, {"model": "m", "data_path": "d"}),
    "evaluate by playing": (EvaluateConfig, {"model": "m", "simulation": {"env": "x"}}),
    "train": (DqnConfig, {"training_data_path": "x", "model_output_path": "y", "actions": ["a", "b"]}),
    "train on items": (ParametricDqnConfig, {"training_data_path": "x", "model_output_path": "y"}),
    "collect": (DqnConfig, {**role(Path("/run"), "collect"), "model_output_path": ""}),
    "normalize": (NormalizeConfig, {"training_data_path": "x", "norm_params": {"output_dir": "norm"}}),
    "shard": (ShardConfig, {"training_data_path": ["/data/a", "/data/c"], "shards_path": "/share"}),
}
LISTS: list[tuple[Any, str]] = [
    ([], "an empty list"),
    (["a", ""], "an empty path"),
    (["a", "b", "a"], "'a' 2 times"),
    (3, "3 (integer)"),
    (["a", 3], '["a", 3] (array)'),
]
CASES: list[tuple[str, Tree, str, str]] = [
    ("convert", {"input_path": ""}, "input_path", ""),
    ("convert", {"output_path": "x.tsv"}, "output_path", ".csv"),
    ("convert", {"output_path": "a/.csv"}, "output_path", ".csv"),
    ("convert", {"output_path": "s3://bucket/x.csv"}, "output_path", "a local path"),
    ("convert", {"output_path": "x.minari"}, "output_path", ""),
    ("convert", {"actions": ["a"]}, "actions", ""),
    ("convert", {"inputpath": "x"}, "inputpath", "'input_path'"),
    ("evaluate a log", {"policy": "greedy", "temperature": 0.5}, "temperature", "absent"),
    ("evaluate a log", {"evaluation": {"calc_cpe_in_training": False}}, "evaluation.calc_cpe_in_training", ""),
    ("evaluate a log", {"timeline": {"steps": 2}}, "timeline.steps", "expected 1"),
    ("evaluate a log", {"timeline": {"evalTableName": "x"}}, "timeline.evalTableName", "absent"),
    ("evaluate a log", {"query": {"actions": ["a"]}}, "query.actions", "absent"),
    ("evaluate a log", {"output_path": "s3://bucket/e.json"}, "output_path", "a local path"),
    ("evaluate a log", {"actions": ["a"]}, "actions", "absent"),
    ("evaluate a log", {"model": "uniform"}, "output_path", "a path"),
    ("evaluate a log", {"model": "column:"}, "model", "column:NAME"),
    ("evaluate a log", {"model": "logged", "policy": "greedy"}, "policy", "its default"),
    ("evaluate a log", {"simulation": {"env": "x"}, "against": "uniform"}, "simulation", "absent"),
    ("evaluate by playing", {"simulation": {"env": ""}}, "simulation.env", "the name"),
    ("evaluate by playing", {"simulation": {"evaluation_episodes": 0}}, "simulation.evaluation_episodes", "greater"),
    ("evaluate by playing", {"simulation": {"episodes": 5}}, "simulation.episodes", "'evaluation_episodes'?"),
    ("evaluate by playing", {"training_copy_dir": "y"}, "training_copy_dir", "its default"),
    ("evaluate by playing", {"timeline": {}}, "timeline", "its default"),
    ("evaluate by playing", {"query": {"tableSample": 5}}, "query", "its default"),
    ("evaluate by playing", {"evaluation": {"max_horizon": 5}}, "evaluation.max_horizon", "its default"),
    ("evaluate by playing", {"evaluation": {"bootstrap_resamples": 500}}, "evaluation.bootstrap_resamples", "its def"),
    ("evaluate by playing", {"write_scored_rows": True}, "write_scored_rows", "its default"),
    ("train", {"publish_if": {"estimator": "sequential_doubly_robst"}}, "publish_if.estimator", "'Sequential_Doubly_R"),
    ("train", {"publish_if": {"estimator": "MAGICK"}}, "publish_if.estimator", "Did you mean 'MAGIC'?"),
    ("train", {"publish_if": {"lower_bound_above": "best"}}, "publish_if.lower_bound_above", "logged"),
    ("train", {"publish_if": {}, "training_data_path": "", "simulation": {"env": "x"}}, "publish_if", "absent"),
    ("train", {"data": {"items": "items.jsonl"}}, "data.items", "absent"),
    ("train on items", {"data": {"item_id": "sku"}}, "data.item_id", "absent"),
    ("collect", {"simulation": {"mode": "both"}}, "simulation.dataset", ""),
    ("collect", {"simulation": {"dataset": None}}, "simulation.dataset", ""),
    ("collect", {"simulation": {"dataset": {}}}, "simulation.dataset.path", ""),
    ("collect", {"simulation": {"dataset": {"path": "d", "edits": True}}}, "simulation.dataset.max_bytes", ""),
    ("collect", {"simulation": {"auto_scale": True}}, "simulation.auto_scale", ""),
    ("collect", {"training_data_path": "log.jsonl", "actions": ["a", "b"]}, "training_data_path", ""),
    ("collect", {"num_processes_per_node": 2}, "simulation.mode", ""),
    ("collect", {"use_all_avail_gpus": True}, "simulation.mode", ""),
    ("normalize", {"training_data_path": ""}, "training_data_path", "a path"),
    ("normalize", {"norm_params": {"output_dir": None}}, "norm_params.output_dir", ""),
    ("normalize", {"norm_params": {"output_dir": "s3://bucket/norm"}}, "norm_params.output_dir", "a local path"),
    ("normalize", {"norm_params": {"cols_to_norm": []}}, "norm_params.cols_to_norm", ""),
    ("normalize", {"norm_params": {"cols_to_norm": ["action"]}, "parametric": False}, "norm_params.cols_to_norm",
     "while parametric is false"),
    ("normalize", {"drift": {"psi_large": 0.1}}, "drift.psi_large", ""),
    ("normalize", {"drift": {"psi_large": 0.1}}, "drift.psi_moderate", ""),
    ("shard", {"shards_path": "/data/c/shards"}, "shards_path", "which is inside /data/c"),
    *((base, {"training_data_path": path}, "training_data_path", f"got {got}")
      for base in ("train", "normalize", "shard") for path, got in LISTS),
]  # fmt: skip


@pytest.mark.parametrize(("base", "changes", "where", "words"), CASES)
def test_a_contradiction_is_named(base: str, changes: Tree, where: str, words: str) -> None:
    model, tree = BASES[base]
    with pytest.raises(ConfigError) as caught:
        check(model, merged(tree, changes))
    problems = {problem.where: str(problem) for problem in caught.value.problems}
    assert words in problems[where]


@pytest.mark.parametrize("base", BASES)
def test_bases_are_valid(base: str) -> None:
    check(*BASES[base])


def test_policies_without_a_model_and_figures_of_a_played_one_are_allowed() -> None:
    check(EvaluateConfig, {"model": "logged", "data_path": "d", "output_path": "e.json", "actions": ["a"]})
    check(EvaluateConfig, {"model": "m", "simulation": {"env": "x"}, "evaluation": {"confidence_level": 0.9}})
