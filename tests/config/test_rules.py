"""Contradictions and values that no key takes, one at a time: which key is named, and in what words."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from helpers.roles import role
from helpers.runs import merged

from reagent_lite.algorithms.registry import ALGORITHMS
from reagent_lite.config import DqnConfig, ParametricDqnConfig, check, expand_config, load_config
from reagent_lite.config.algorithm import CRRConfig, IQLConfig
from reagent_lite.config.convert_config import ConvertConfig
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.config.normalize_config import NormalizeConfig
from reagent_lite.config.section import Section
from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.config.simulate_config import LOG_SUFFIXES, SimulateConfig
from reagent_lite.config.timeline_config import TimelineConfig
from reagent_lite.data.formats.format_table import ENCODINGS
from reagent_lite.errors import ConfigError

OUT, PLAYED, LOGGED = {"model_output_path": "out"}, {"env": "cartpole_v1"}, {"training_data_path": "a.jsonl"}
NAMED = {"actions": ["0", "1"]}
BASES: dict[str, tuple[type[Section], dict[str, Any]]] = {
    "logged": (DqnConfig, OUT | LOGGED | NAMED),
    "alone": (DqnConfig, OUT | {"simulation": PLAYED}),
    "beside": (DqnConfig, OUT | LOGGED | NAMED | {"simulation": PLAYED | {"share": 0.25}}),
    "candidates": (ParametricDqnConfig, OUT | LOGGED),
    "evaluate": (EvaluateConfig, {"model": "m", "simulation": PLAYED}),
    "serve": (ServeConfig, {"model": "m", "log": "l"}),
    "simulate": (SimulateConfig, PLAYED | {"output_path": "out/log.jsonl"}),
    "convert": (ConvertConfig, {"data_path": "a.jsonl", "output_path": "b.csv"}),
    "evaluate a log": (EvaluateConfig, {"model": "m", "data_path": "d"}),
    "evaluate by playing": (EvaluateConfig, {"model": "m", "simulation": {"env": "x"}}),
    "collect": (DqnConfig, {**role(Path("/run"), "collect"), "model_output_path": ""}),
    "normalize": (NormalizeConfig, {"training_data_path": "x", "norm_params": {"output_dir": "norm"}}),
    "timeline": (TimelineConfig, {"timeline": {"inputTableName": "x", "outputTableName": "y"}}),
    "shard": (ShardConfig, {"data_path": ["/data/a", "/data/c"], "output_path": "/disk/part"}),
}
RULES: list[tuple[str, str | dict[str, Any], str, str]] = [
    ("logged", 'epochs="3e"', "epochs", "valid integer"),
    ("serve", "host=", "host", "an address to listen on, got nothing"),
    ("logged", "training.minibatch_size=1.5", "training.minibatch_size", "valid integer"),
    ("logged", 'actions=["a","b","a"]', "actions", "'a' 2 times"),
    ("logged", 'actions=["a",""]', "actions", 'names that are not empty, got ["a", ""]'),
    ("logged", "actions=[a,b]", "--set actions", "quotes from the shell"),
    ("logged", "rl=null", "rl", "an object, got null"),
    ("logged", "rl.value_bounds=[1]", "rl.value_bounds", "or null, got [1] (array)"),
    ("logged", "publish_if.lower_bound_above=high", "publish_if.lower_bound_above", '"logged" or number'),
    ("logged", 'data.columns={"mdp_id":3}', "data.columns.mdp_id", "got 3 (integer)"),
    ("logged", "checkpoint.patience=3", "checkpoint.patience", "absent while keep_best is false"),
    ("logged", "training.lr=0.1", "training.lr", "Known keys: minibatch_size,"),
    ("logged", 'actions=["a"]', "actions", "at least two"),
    ("logged", 'rl.reward_boost={"2":1.0}', "rl.reward_boost.2", "one of ['0', '1']"),
    ("logged", "rl.multi_steps=2 rl.use_seq_num_diff_as_time_diff=true", "rl.multi_steps", "null"),
    ("logged", "rl.q_network_loss=bce_with_logits", "rl.q_network_loss", "gamma 0.9"),
    ("logged", "rl.target_action_distribution=[0.5,0.5]", "rl.target_action_distribution", "not supported"),
    ("logged", 'rl.state_feature_params={"a":1}', "rl.state_feature_params", "not supported"),
    ("logged", 'training.cnn_parameters={"a":1}', "training.cnn_parameters", "not supported"),
    ("logged", 'training.factorization_parameters={"a":1}', "training.factorization_parameters", "not supported"),
    ("logged", 'training.activations=["relu","relu","relu"] rainbow.dueling_architecture=false',
     "training.activations.2", "linear"),
    ("logged", "rainbow.categorical=true rainbow.quantile=true", "rainbow.quantile", "C51 or QR-DQN"),
    ("logged", "rainbow.quantile=true rl.q_network_loss=huber", "rl.q_network_loss", "own loss"),
    ("logged", "rainbow.categorical=true rl.value_bounds=[0,1]", "rl.value_bounds", "rainbow.qmin"),
    ("logged", "rl.value_bounds=[1,1]", "rl.value_bounds", "low < high"),
    ("logged", "rl.value_bounds=[0,1] rl.q_network_loss=bce_with_logits rl.gamma=0", "rl.value_bounds",
     "rewards themselves"),
    ("logged", "algorithm=crrr", "algorithm", "'dqn', 'crr', 'iql' or 'boosting', got \"crrr\""),
    ("logged", "crr.beta=2", "crr", 'Or set algorithm to "crr"'),
    ("logged", "algorithm=crr crr.beta=0", "crr.beta", "greater than 0"),
    ("logged", "algorithm=iql iql.expectil=0.9", "iql.expectil", "Did you mean 'expectile'?"),
    ("logged", "algorithm=crr rl.cql_alpha=0.5", "rl.cql_alpha", "its default with algorithm crr"),
    ("logged", "algorithm=iql rainbow.bcq=true", "rainbow.bcq", "its default with algorithm iql"),
    ("logged", "rainbow.bcq=true rl.maxq_learning=false", "rainbow.bcq", "nothing to restrict"),
    ("logged", "rendezvous.lost_after_seconds=2.0", "rendezvous.lost_after_seconds", "at least three heartbeats (3)"),
    ("logged", "data.global_minibatch_size=8 training.minibatch_size=8", "data.global_minibatch_size", "both"),
    ("logged", 'norm_params.feature_overrides={"x":"ENUMM"}', "norm_params.feature_overrides.x", "ENUM"),
    ("logged", 'norm_params.cols_to_norm=["action"]', "norm_params.cols_to_norm", "state_features"),
    ("logged", "action_norm_data_path=a.json", "action_norm_data_path", "parametric_dqn"),
    ("logged", "training_data_path=", "training_data_path", "Or give a simulation section"),
    ("logged", "model_output_path=s3://bucket/run", "model_output_path", "expected a local path"),
    ("logged", "norm_params.output_dir=gs://bucket/run", "norm_params.output_dir", "expected a local path"),
    ("logged", "data.training_copy_dir=http://host/x", "data.training_copy_dir", "expected a local path"),
    ("logged", "parallel=none use_all_avail_gpus=true", "use_all_avail_gpus", "false with parallel"),
    ("logged", "parallel=none num_processes_per_node=2", "num_processes_per_node", "absent or 1 with parallel"),
    ("logged", "parallel=dp use_all_avail_gpus=true num_nodes=2", "num_nodes", "absent or 1 with parallel"),
    ("logged", "parallel=dp use_gpu=true", "use_all_avail_gpus", "without a GPU set parallel to"),
    ("logged", "parallel=dp use_gpu=false", "parallel", "over the GPUs"),
    ("logged", "parallel=dp training.use_batch_norm=true", "training.use_batch_norm", "false with parallel"),
    ("logged", "parallel=fsdp", "parallel", "'ddp', 'dp' or 'none'"),
    ("evaluate", 'columns={"reward":"r"}', "columns", "its default without data_path"),
    ("candidates", 'actions=["0","1"]', "actions", "workflows.dqn"),
    ("candidates", 'rl.reward_boost={"0":1.0}', "rl.reward_boost", "no names to boost"),
    ("alone", "simulation.env=", "simulation.env", "got nothing"),
    ("alone", "simulation.epsilon_start=0.1 simulation.epsilon_end=0.2", "simulation.epsilon_end",
     "at most epsilon_start"),
    ("alone", "simulation.num_envs=100 simulation.replay.capacity=299", "simulation.replay.capacity", "at least 300"),
    ("alone", "simulation.replay.prioritised=true", "simulation.replay.prioritised", "'prioritized'"),
    ("alone", "simulation.enviroment=x", "simulation.enviroment", "unknown key"),
    ("alone", "simulation.share=0.5", "simulation.share", "absent or 1"),
    ("beside", "simulation.auto_scale=true", "simulation.auto_scale", "false with training_data_path"),
    ("alone", "simulation.auto_scale=true data.global_minibatch_size=8", "data.global_minibatch_size",
     "where the search begins"),
    # 10 000 warm-up steps are 157 of each of 64 environments, and one more to learn from
    ("alone", "simulation.total_steps=10111", "simulation.total_steps", "at least 10112"),
    ("alone", f"simulation.time_limit={2**24 + 1}", "simulation.time_limit", "at most 16777216 steps"),
    ("alone", "simulation.epsilon_start=0.05", "simulation.epsilon_start", "at least rl.epsilon (0.1)"),
    ("alone", "simulation.exploration=softmax simulation.epsilon_end=0.0", "simulation.epsilon_end", "softmax"),
    ("alone", "simulation.replay.beta=0.5", "simulation.replay.beta", "prioritized is false"),
    ("alone", "data.residency=host", "data.residency", "logged rows"),
    ("alone", "norm_params.num_samples=5000", "norm_params.num_samples", "logged rows"),
    ("alone", "evaluation.calc_cpe_in_training=false", "evaluation.calc_cpe_in_training", "logged rows"),
    ("alone", "evaluation.max_episodes=50", "evaluation.max_episodes", "logged rows"),
    ("alone", "epochs=3", "epochs", "simulation.total_steps"),
    ("alone", "eval_data_path=x", "eval_data_path", "absent without training_data_path"),
    ("alone", "simulation.backend=cuda use_gpu=false", "simulation.backend", "use_gpu is false"),
    ("alone", "rl.value_bounds=rewards", "rl.value_bounds", "not known in advance"),
    ("alone", "simulation.env=gymnasium:Taxi-v4 simulation.auto_scale=true", "simulation.auto_scale", "false with"),
    ("alone", "simulation.env=gymnasium:Taxi-v4 simulation.math=fast", "simulation.math", "steps in Python"),
    ("alone", "simulation.env=gymnasium:Taxi-v4 simulation.backend=cuda", "simulation.backend", "auto or cpu"),
    ("alone", 'simulation.env_parameters={"gravity":"low"}', "simulation.env_parameters.gravity", "a finite number"),
    ("alone", 'simulation.env_parameters={"gravity":[9,true]}', "simulation.env_parameters.gravity[1]", "got true"),
    ("alone", 'simulation.env_parameters={"gravity":[]}', "simulation.env_parameters.gravity", "got []"),
    ("beside", "simulation.share=0 simulation.num_envs=128", "simulation.num_envs", "share is 0"),
    ("beside", "simulation.share=0 simulation.replay.prioritized=true", "simulation.replay", "share is 0"),
    ("beside", "simulation.share=null", "simulation.share", "with training_data_path"),
    ("beside", "simulation.total_steps=50000", "simulation.total_steps", "absent with training_data_path"),
    ("beside", "simulation.num_evaluations=5", "simulation.num_evaluations", "absent with training_data_path"),
    ("beside", "rl.value_bounds=rewards", "rl.value_bounds", "not known in advance"),
    ("beside", "rl.temperature=auto", "rl.temperature", "a number with a simulation"),
    ("logged", "rl.temperature=auto rl.softmax_policy=0", "rl.temperature", "only a softmax has a temperature"),
    ("logged", "rl.temperature=cold", "rl.temperature", "auto"),
    ("logged", "evaluation.propensities=guess", "evaluation.propensities", "estimate"),
    ("beside", "actions=[]", "actions", "at least two"),
    ("beside", "rl.use_seq_num_diff_as_time_diff=true", "rl.use_seq_num_diff_as_time_diff", "one step"),
    ("beside", 'rl.reward_boost={"up":1.0}', "rl.reward_boost.up", "one of"),
    ("simulate", "env=", "env", "nothing"),
    ("simulate", "output_path=", "output_path", "a path"),
    ("simulate", "output_path=log.tsv", "output_path", ".jsonl.gz"),
    ("simulate", "output_path=out/.parquet", "output_path", ".parquet"),
    ("simulate", "output_path=s3://bucket/log.jsonl", "output_path", "a local path"),
    ("simulate", "rows=10 episodes=3", "episodes", "rows 10, episodes 3"),
    ("simulate", "rows=null", "rows", "episodes instead"),
    ("simulate", "format=rows", "format", "'transitions'"),
    ("simulate", "format=transitions ds=2026-01-01", "ds", "Only events"),
    ("simulate", "policy.kind=epsilon_greedy", "policy.model", "nothing"),
    ("simulate", "policy.kind=random policy.model=m", "policy.model", "absent with kind random"),
    ("simulate", "policy.kind=softmax policy.model=m policy.epsilon=0.2", "policy.epsilon", "absent with kind softmax"),
    ("simulate", "policy.kind=epsilon_greedy policy.model=m policy.temperature=2.0", "policy.temperature", "softmax"),
    ("simulate", "policy.kind=greedy policy.model=m", "policy.kind", "'epsilon_greedy'"),
    ("simulate", "value_of={}", "value_of.model", "kind greedy"),
    ("simulate", "value_of.model=m value_of.epsilon=0.3", "value_of.epsilon", "absent with kind greedy"),
    ("simulate", "backend=cuda use_gpu=false", "backend", "while use_gpu is false"),
    ("convert", {"data_path": ""}, "data_path", ""),
    ("convert", {"output_path": "x.tsv"}, "output_path", ".csv"),
    ("convert", {"output_path": "a/.csv"}, "output_path", ".csv"),
    ("convert", {"output_path": "s3://bucket/x.csv"}, "output_path", "a local path"),
    ("convert", {"output_path": "x.minari"}, "output_path", ""),
    ("convert", {"actions": ["a"]}, "actions", ""),
    ("convert", {"datapath": "x"}, "datapath", "'data_path'"),
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
    ("logged", {"publish_if": {"estimator": "sequential_doubly_robst"}}, "publish_if.estimator", "'Sequential_Do"),
    ("logged", {"publish_if": {"estimator": "MAGICK"}}, "publish_if.estimator", "Did you mean 'MAGIC'?"),
    ("logged", {"publish_if": {"lower_bound_above": "best"}}, "publish_if.lower_bound_above", "logged"),
    ("logged", {"publish_if": {}, "training_data_path": "", "simulation": {"env": "x"}}, "publish_if", "absent"),
    ("logged", {"data": {"items": "items.jsonl"}}, "data.items", "absent"),
    ("candidates", {"data": {"item_id": "sku"}}, "data.item_id", "absent"),
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
    ("timeline", {"output": "events"}, "output", ""),
    ("timeline", {"timeline": {"inputTable": "x"}}, "timeline.inputTable", "Did you mean 'inputTableName'"),
    ("timeline", {"engine": "spark"}, "master", "a Spark master"),
    ("timeline", {"query": {"actions": ["a", "a"]}}, "query.actions", "every name once"),
    ("shard", {"output_path": ""}, "output_path", "a folder on this machine's disk"),
    ("shard", {"num_nodes": 3}, "node_index", "this machine's number, 0 to 2"),
    ("shard", {"node_index": 1}, "node_index", "0 to 0"),
    ("shard", {"num_nodes": 0}, "num_nodes", "greater"),
    ("shard", {"node_index": 2, "num_nodes": 2}, "node_index", "0 to 1"),
    ("shard", {"output_path": "s3://bucket/x"}, "output_path", "a local path"),
    ("shard", {"layout": "parts"}, "layout", "'shards' or 'replicas'"),
    ("shard", {"numnodes": 2}, "numnodes", "Did you mean 'num_nodes'?"),
    *((base, {key: path}, key, f"got {got}")
      for base, key in (("logged", "training_data_path"), ("normalize", "training_data_path"), ("shard", "data_path"))
      for path, got in [
         ([], "an empty list"),
         (["a", ""], "an empty path"),
         (["a", "b", "a"], "'a' 2 times"),
         (3, "3 (integer)"),
         (["a", 3], '["a", 3] (array)'),
     ]),
]  # fmt: skip


@pytest.mark.parametrize(("base", "changes", "where", "words"), RULES)
def test_a_contradiction_is_named(
    base: str, changes: str | dict[str, Any], where: str, words: str, tmp_path: Path
) -> None:
    """Changes are an object, or keys and values as for `--set`."""
    model, tree = BASES[base]
    (tmp_path / "x.json").write_text(json.dumps(merged(tree, {} if isinstance(changes, str) else changes)))
    with pytest.raises(ConfigError) as caught:
        load_config(model, str(tmp_path / "x.json"), changes.split(" ") if isinstance(changes, str) else [])
    assert words in {problem.where: str(problem) for problem in caught.value.problems}[where]


@pytest.mark.parametrize("base", BASES)
def test_a_resolved_config_reads_back_as_itself(base: str) -> None:
    config = check(*BASES[base])
    assert check(BASES[base][0], expand_config(config)) == config


@pytest.mark.parametrize(
    ("changes", "section", "temperature"),
    [
        ({"algorithm": "dqn"}, None, 0.01),
        ({"algorithm": "crr"}, CRRConfig(), 1.0),
        ({"algorithm": "iql"}, IQLConfig(), 1.0),
        ({"algorithm": "crr", "rl": {"temperature": 0.5}}, CRRConfig(), 0.5),
    ],
)
def test_sections_and_temperature_follow_the_algorithm(
    changes: dict[str, Any], section: Section | None, temperature: float
) -> None:
    """A resolved config has the section of its algorithm alone; absent, softmax of values is sharp, of logits not."""
    model, tree = BASES["logged"]
    config = check(model, tree | changes)
    assert (config.section, config.temperature) == (section, temperature)
    sections = [name for name in ("crr", "iql") if expand_config(config)[name] is not None]
    assert sections == [changes["algorithm"]] * (section is not None)
    assert check(model, expand_config(config)) == config


def test_every_algorithm_that_is_named_has_a_learner() -> None:
    assert get_args(DqnConfig.model_fields["algorithm"].annotation) == tuple(ALGORITHMS)


@pytest.mark.parametrize(
    ("base", "changes", "share"), [("logged", {}, 0.0), ("alone", {}, 1.0), ("beside", {}, 0.25),
                                   ("beside", {"share": 0.0}, 0.0)]
)  # fmt: skip
def test_how_much_is_simulated(base: str, changes: dict[str, float], share: float) -> None:
    model, tree = BASES[base]
    time_differences = {"rl": {"use_seq_num_diff_as_time_diff": not share}}  # which a simulation does not learn from
    config = check(model, tree | time_differences | ({"simulation": tree["simulation"] | changes} if changes else {}))
    assert config.simulated_share == share


def test_episodes_replace_the_default_of_rows() -> None:
    config = check(SimulateConfig, BASES["simulate"][1] | {"episodes": 5, "value_of": {"kind": "random"}})
    assert (config.rows, config.episodes) == (None, 5)


def test_every_suffix_has_a_writer() -> None:
    assert set(LOG_SUFFIXES) == set(ENCODINGS)
