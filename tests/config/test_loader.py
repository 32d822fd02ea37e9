"""Every error of a file at once, with path, expected, got and the nearest key."""

import itertools
import json
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import merged
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from reagent_lite.config import DqnConfig, ParametricDqnConfig, check, expand_config, fingerprint, load_config
from reagent_lite.config.convert_config import ConvertConfig
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.config.simulate_config import SimulateConfig
from reagent_lite.errors import ConfigError

GOOD: dict[str, Any] = {"training_data_path": "a.json", "model_output_path": "out", "actions": ["0", "1"]}


def faults(tree: dict[str, Any], model: type = DqnConfig) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        check(model, tree)
    return {problem.where: str(problem) for problem in caught.value.problems}


DEFAULTS_OF_2019: dict[str, dict[str, Any]] = {
    "rl": {
        "gamma": 0.9, "epsilon": 0.1, "target_update_rate": 0.001, "maxq_learning": True, "temperature": 0.01,
        "softmax_policy": 1, "use_seq_num_diff_as_time_diff": False, "time_diff_unit_length": 1.0,
        "q_network_loss": "mse", "set_missing_value_to_zero": False, "multi_steps": None,
        "tensorboard_logging_freq": None, "predictor_atol_check": 0, "predictor_rtol_check": 5e-5,
        "ratio_different_predictions_tolerance": 0,
    },
    "rainbow": {
        "double_q_learning": True, "dueling_architecture": True, "bcq": False, "bcq_drop_threshold": 0.1,
        "categorical": False, "num_atoms": 51, "qmin": -100, "qmax": 200, "c51_l2_decay": 0, "quantile": False,
    },
    "training": {
        "learning_rate": 0.001, "optimizer": "ADAM", "layers": [-1, 256, 128, 1],
        "activations": ["relu", "relu", "linear"], "lr_policy": "fixed", "lr_decay": 0.999, "dropout_ratio": 0,
        "use_batch_norm": False, "weight_init_min_std": 0, "l2_decay": 0.01, "clip_grad_norm": None,
        "minibatches_per_step": 1, "warm_start_model_path": None, "do_not_warm_start_optimizer": False,
        "cnn_parameters": None, "factorization_parameters": None,
    },
    "norm_params": {
        "num_samples": 100_000, "max_unique_enum_values": 100, "quantile_size": 20, "quantile_k2_threshold": 1000,
        "skip_box_cox": False, "skip_quantiles": True, "feature_overrides": {},
    },
    "evaluation": {"calc_cpe_in_training": True},
}  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "world", "tree", "expected"),
    [
        (1, 1, {}, 64),
        (3_000, 1, {}, 64),  # 47 steps an epoch
        (12_000, 1, {}, 256),  # 187.5, nearer to 256 than to 128 as a power; 47 steps
        (100_000, 1, {}, 2048),  # 49 steps
        (100_000, 4, {}, 2048),  # the same step: 512 for each process
        (100_000, 1, {"training": {"minibatches_per_step": 4}}, 512),
        (50_000_000, 1, {}, 4096),  # the default of 2019
        (3_000, 1, {"training": {"minibatch_size": 4096}}, 4096),
        (3_000, 2, {"data": {"global_minibatch_size": 100}}, 100),
        (None, 1, {}, 4096),
    ],
)
def test_the_minibatch_follows_the_number_of_rows(
    rows: int | None, world: int, tree: dict[str, Any], expected: int
) -> None:
    config = check(DqnConfig, GOOD | tree).with_minibatch_for(rows, world)
    assert config.minibatch_over(world) == expected
    assert check(DqnConfig, expand_config(config)) == config


def test_defaults_are_the_contracts() -> None:
    tree = expand_config(check(DqnConfig, GOOD))
    assert {section: {key: tree[section][key] for key in keys} for section, keys in DEFAULTS_OF_2019.items()} == (
        DEFAULTS_OF_2019
    )
    assert (tree["use_all_avail_gpus"], tree["num_nodes"], tree["num_processes_per_node"]) == (False, 1, None)


def test_every_error_at_once() -> None:
    problems = faults(
        GOOD
        | {
            "epoch": 3,
            "use_gpu": "yes",
            "rl": {"gama": 0.5, "gamma": 1.5, "multi_steps": 0},
            "actions": [1, 2],
            "training": {"layers": [-1, 0, 1], "optimizer": "ADAMM", "activations": ["relu", "linear"]},
            "rainbow": {"qmin": 300},
        }
    )
    words = {
        "actions.0": "", "actions.1": "", "epoch": "Did you mean 'epochs'?", "use_gpu": 'got "yes" (string)',
        "rl.gama": "Did you mean 'gamma'?", "rl.gamma": "got 1.5 (number)", "rl.multi_steps": "",
        "training.layers.1": "", "training.optimizer": "Adam", "rainbow.qmin": "",
    }  # fmt: skip
    assert {where: words.get(where, "") in text for where, text in problems.items()} == dict.fromkeys(words, True)


PLAY = {"env": "cartpole_v0", "output_path": "out/log.jsonl"}


@pytest.mark.parametrize(
    ("model", "tree", "where", "words"),
    [
        (DqnConfig, GOOD | {"gamma": 0.9}, "gamma", "Did you mean 'rl.gamma'?"),
        (DqnConfig, GOOD | {"learning_rate": 0.1}, "learning_rate", "Did you mean 'training.learning_rate"),
        (DqnConfig, GOOD | {"learning_rat": 0.1}, "learning_rat", "Did you mean 'training.learning_rate"),
        (DqnConfig, GOOD | {"training": {"gama": 0.1}}, "training.gama", "Did you mean 'rl.gamma"),
        (DqnConfig, GOOD | {"rl": {"epoch": 1}}, "rl.epoch", "Did you mean 'epochs' at the top level"),
        (DqnConfig, GOOD | {"state_norm_path": "a"}, "state_norm_path", "Did you mean 'state_norm_data_path"),
        # in sections that may be null, and below others
        (SimulateConfig, PLAY | {"value_of": {"kind": "random", "temperture": 1}}, "value_of.temperture",
         "Did you mean 'temperature'?"),
        (SimulateConfig, PLAY | {"value_of": {"kind": "random", "zzz": 1}}, "value_of.zzz", "Known keys: kind, model"),
        (SimulateConfig, PLAY | {"value_of": {"kind": "random", "num_envs": 1}}, "value_of.num_envs", "the top level"),
        (SimulateConfig, PLAY | {"temperature": 1}, "temperature", "policy.temperature"),
        (DqnConfig, GOOD | {"simulation": {"env": "cartpole_v0", "replay": {"capasity": 3}}},
         "simulation.replay.capasity", "Did you mean 'capacity'?"),
        (DqnConfig, GOOD | {"env": "x"}, "env", "Did you mean 'simulation.env'?"),
        (DqnConfig, GOOD | {"prioritized": True}, "prioritized", "simulation.replay.prioritized"),
        (DqnConfig, GOOD | {"simulation": 3}, "simulation", "an object"),
        # wishes
        (DqnConfig, GOOD | {"continuous_actions": True}, "continuous_actions", "docs/not_included.md"),
        (DqnConfig, GOOD | {"slate": {"size": 3}}, "slate", "Slates and rankings are not included"),
        (DqnConfig, GOOD | {"rl": {"gaeLambda": 0.9}}, "rl.gaeLambda", "Policy gradients are not included"),
        (DqnConfig, GOOD | {"training": {"use_lstm": True}}, "training.use_lstm", "Recurrent policies are"),
        (DqnConfig, GOOD | {"algorithm": "TD3-BC"}, "algorithm", "Continuous actions are not included"),
        (DqnConfig, GOOD | {"algorithm": "cqr"}, "algorithm", "got \"cqr\" (string)"),
        (SimulateConfig, PLAY | {"policy": {"kind": "ppo"}}, "policy.kind", "Policy gradients are not included"),
    ],
)  # fmt: skip
def test_the_nearest_key_is_named_by_its_full_path(model: type, tree: dict[str, Any], where: str, words: str) -> None:
    assert words in faults(tree, model)[where]


SAMPLES = [
    (model, json.loads((Path(__file__).resolve().parents[2] / "configs" / name).read_text()))
    for model, name in ((DqnConfig, "icu_sepsis/dqn.json"), (ParametricDqnConfig, "cartpole/parametric_dqn.json"),
                        (DqnConfig, "cartpole/online.json"))
]  # fmt: skip
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()))
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=6)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), sample=st.sampled_from(SAMPLES))
def test_random_faults_are_refused_or_valid(
    data: st.DataObject, sample: tuple[type[DqnConfig], dict[str, Any]]
) -> None:
    model, tree = sample[0], json.loads(json.dumps(sample[1]))
    for _ in range(data.draw(st.integers(1, 4))):
        node, key = tree, data.draw(st.sampled_from(sorted(tree)))
        while isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
            node = node[key]
            key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        node[key] = data.draw(VALUES)
    try:
        check(model, tree)
    except ConfigError as error:
        problems = list(map(str, error.problems))
        assert len(set(problems)) == len(problems) > 0


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("[" * 100_000 + "]" * 100_000, "at most 100 levels"),
        ("[" * 150 + "]" * 150, "at most 100 levels"),
        ("1" * 5_000, "at most 4,300 digits"),
        (str(2**63), "64 bits"),
        (r'"a\u0000b"', r"a\u0000b"),
        (r'"a\ud800b"', r"a\ud800b"),
    ],
)
@pytest.mark.parametrize("key", ["epochs", "model_output_path", "other"])
def test_values_that_json_can_hold_and_no_key_takes(key: str, value: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    in_a_file = json.dumps({**GOOD, key: 0}).replace(f'"{key}": 0', f'"{key}": {value}')
    for text, sets in ((in_a_file, ()), (json.dumps(GOOD), (f"{key}={value}",))):
        file.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(words)):
            load_config(DqnConfig, str(file), sets)


REST = json.dumps(GOOD)[1:]


@pytest.mark.parametrize(
    ("text", "path", "sets", "words"),
    [
        ('{\n "epochs": 1,\n "epochs": 2,\n}', "x.json", (), r"x\.json:4: expected JSON"),
        ('{"epochs": 1, "epochs": 2, ' + REST, "x.json", (), "epochs: expected every key once, got 2 times"),
        ('{"rl": {"gamma": NaN}, ' + REST, "x.json", (), "gamma"),
        ("{" + REST, "xx.json", (), r"Did you mean .*x\.json"),
        ("{" + REST, ".", (), r"got Is a directory$"),
        ("{" + REST, "a\0b", (), "expected a readable JSON file, got embedded null byte"),
        ("{" + REST, None, ("a." * 100_000 + "b=1",), "at most 100 levels"),
        ("{" + REST, None, ("gamma",), "--set gamma"),
        ("{" + REST, None, ("seed=1", "seed.x=1"), "an object at seed"),
    ],
    ids=itertools.count(),
)
def test_errors_of_files_and_overrides_name_their_place(
    text: str, path: str | None, sets: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(DqnConfig, path, sets)


def test_overrides_take_json_or_text(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(GOOD), encoding="utf-8-sig")  # with a mark before the text
    config = load_config(
        DqnConfig, str(tmp_path / "x.json"), ("rl.gamma=0.5", "training.optimizer=sgd", 'actions=["x","y"]')
    )
    assert (config.rl.gamma, config.training.optimizer_class, config.actions) == (0.5, "SGD", ("x", "y"))
    played = load_config(SimulateConfig, None, ("env=e", "output_path=a.csv", "value_of=null", "value_of.kind=random"))
    assert played.value_of.kind == "random"  # a section that is null is filled


def test_fingerprint_does_not_depend_on_the_node() -> None:
    prints = [fingerprint(check(DqnConfig, GOOD | changes)) for changes in ({}, {"node_index": 0}, {"epochs": 2})]
    assert [prints[0] == other for other in prints] == [True, True, False]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("rl.maxq_learning", "1", True),
        ("rainbow.dueling_architecture", "0", False),
        ("use_gpu", "0.0", False),
        ("epochs", '"5"', 5),
        ("node_index", '"0"', 0),
        ("rl.gamma", '"0.5"', 0.5),
        ("rl.gamma", '"1e-1"', 0.1),
        ("rl.reward_boost", '{"a": "2"}', {"a": 2.0}),
        ("training.layers", '["-1", 64, "8", 1]', (-1, 64, 8, 1)),
        ("rl.tensorboard_logging_freq", "0", 0),
        # with dueling_architecture the last one was never used
        ("training.activations", '["relu", "relu", "relu"]', ("relu", "relu", "relu")),
        ("init_method", '"/mnt/my share/dqn.lock"', "file:///mnt/my%20share/dqn.lock"),
        # what a key takes stays as it is
        ("model_output_path", '"5"', "5"),
        ("rl.softmax_policy", "1", 1),
        ("actions", '["a", "2"]', ("a", "2")),
    ],
)
def test_values_that_code_of_2019_read(key: str, text: str, value: object) -> None:
    training = {"layers": [-1, 8, 4, 1], "activations": ["relu", "relu", "linear"]}
    section, _, name = key.rpartition(".")
    change = {section: {name: json.loads(text)}} if section else {name: json.loads(text)}
    config = check(DqnConfig, merged({**GOOD, "actions": ["a", "b"], "training": training}, change))
    read = attrgetter(key)(config)
    assert (read, type(read)) == (value, type(value))


MODELS = {"learning_rate": 0.01, "target_update_rate": 0.2, "minibatch_size": 64, "final_fit_passes": 3}


def test_keys_under_former_names_are_moved() -> None:
    new = check(DqnConfig, GOOD | {"evaluation": {"models": MODELS | {"fit_passes": 2, "max_fit_rows": 9}}})
    old = check(DqnConfig, GOOD | {"evaluation": MODELS | {"fit_passes": 2, "models": {"max_fit_rows": 9}}})
    assert old == new
    assert fingerprint(old) == fingerprint(new)
    assert old.evaluation.models.final_fit_passes == 3
    alone = {"model": "m", "data_path": "d"}
    assert check(EvaluateConfig, alone | {"evaluation": MODELS}).evaluation.models.minibatch_size == 64
    assert EvaluationConfig(**{"final_fit_passes": 3}) == EvaluationConfig(models={"final_fit_passes": 3})


def test_a_key_under_two_names_has_one_value() -> None:
    both = {"final_fit_passes": 3, "models": {"final_fit_passes": 4}}
    ((where, text),) = faults(GOOD | {"evaluation": both}).items()
    assert where == "evaluation.final_fit_passes"
    assert "is 3, but models.final_fit_passes, its name now, is 4" in text
    both["models"] = {"final_fit_passes": 3}
    assert check(DqnConfig, GOOD | {"evaluation": both}).evaluation.models.final_fit_passes == 3
    with pytest.raises(ValidationError, match="every key under one name"):
        EvaluationConfig(**{"fit_passes": 1, "models": {"fit_passes": 2}})


def test_faults_of_keys_under_former_names_are_named() -> None:
    wrong = faults(GOOD | {"evaluation": {"final_fit_passes": 0, "max_fit_rows": "many"}})
    assert list(wrong) == ["evaluation.models.final_fit_passes", "evaluation.models.max_fit_rows"]
    no_section = faults(GOOD | {"evaluation": {"final_fit_passes": 1, "models": 5}})
    assert "5 (integer)" in no_section["evaluation.models"]
    only_in_training = faults({"model": "m", "data_path": "d", "evaluation": {"fit_passes": 2}}, EvaluateConfig)
    assert list(only_in_training) == ["evaluation.models.fit_passes"]


@pytest.mark.parametrize(
    ("model", "former", "current"),
    [
        (ConvertConfig, {"input_path": "a.csv"}, {"data_path": "a.csv"}),
        (ShardConfig, {"training_data_path": "a", "local_path": "b"}, {"data_path": "a", "output_path": "b"}),
        (DqnConfig, GOOD | {"query": {"actions": ["0", "1"]}}, GOOD),  # as in the config of workflows.timeline
        (DqnConfig, GOOD | {"simulation": {"env": "x", "share": 0, "cuda_graph": False}},
         GOOD | {"simulation": {"env": "x", "share": 0}, "training": {"cuda_graph": False}}),
    ],
)  # fmt: skip
def test_other_keys_with_former_names(model: type, former: dict[str, Any], current: dict[str, Any]) -> None:
    rest = {"output_path": "b.csv"} if model is ConvertConfig else {}
    assert check(model, rest | former) == check(model, rest | current)
