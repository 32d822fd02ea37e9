"""Defaults of 2026: which keys they fill in, and what they become for logs of several sizes."""

import json
from typing import Any

import pytest
from helpers.runs import ROOT, merged

from reagent_lite.config import DqnConfig, ParametricDqnConfig, WorkflowConfig, check, expand_config, leaves
from reagent_lite.config.loader import read_tree

LOG = {"model_output_path": "out", "training_data_path": "a.jsonl", "actions": ["0", "1"]}
ALONE = {"model_output_path": "out", "simulation": {"env": "cartpole_v1"}}


def of_2026(tree: dict[str, Any]) -> DqnConfig:
    return check(DqnConfig, LOG | tree | {"defaults": "2026"})


def differences(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys in which a config of 2026 differs from that of 2019."""
    before = leaves(expand_config(check(DqnConfig, tree)))
    after = leaves(expand_config(check(DqnConfig, tree | {"defaults": "2026"})))
    return {key: value for key, value in after.items() if before[key] != value}


NETWORK = {
    "defaults": "2026", "rl.gamma": 0.99, "rl.target_update_rate": 0.01, "rainbow.dueling_architecture": False,
    "training.optimizer": "ADAMW", "training.layers": [-1, 128, 64, -1],
}  # fmt: skip
OF_A_LOG = {
    "epochs": None, "training.lr_policy": "exponential", "training.lr_decay": None,
    "norm_params.whole_numbers": "continuous", "norm_params.max_unique_enum_values": 1000,
}  # fmt: skip
OF_VALUES = {
    "rl.epsilon": 0, "rl.softmax_policy": 0, "rl.cql_alpha": None, "rl.value_bounds": "rewards",
    "rl.value_scale": "returns",
}  # fmt: skip


@pytest.mark.parametrize(
    ("tree", "lacking"),
    [
        ({}, ()),
        ({"simulation": {"env": "cartpole_v1", "share": 0}}, ()),
        ({"algorithm": "iql"}, tuple(OF_VALUES)),
        ({"simulation": {"env": "cartpole_v1", "share": 0.5}}, tuple(OF_VALUES)),
        ({"rainbow": {"categorical": True}}, ("rl.value_bounds", "rl.value_scale")),
        ({"rainbow": {"quantile": True}}, ("rl.value_scale",)),
        ({"rl": {"gamma": 0, "q_network_loss": "bce_with_logits"}}, ("rl.gamma", "rl.value_bounds", "rl.value_scale")),
        ({"rl": {"gamma": 1}}, ("rl.gamma", "rl.value_bounds")),
        (
            {"norm_params": {"max_unique_enum_values": 716}},
            ("norm_params.whole_numbers", "norm_params.max_unique_enum_values"),
        ),
    ],
)
def test_absent_keys_that_have_an_effect_are_filled_in(tree: dict[str, Any], lacking: tuple[str, ...]) -> None:
    expected = {key: value for key, value in (NETWORK | OF_A_LOG | OF_VALUES).items() if key not in lacking}
    assert differences(merged(LOG, tree)) == expected


DECISIONS = {
    "defaults": "2026", "rl.gamma": 0, "rl.softmax_policy": 0, "norm_params.whole_numbers": "continuous",
    "norm_params.max_unique_enum_values": 1000,
}  # fmt: skip


def test_decisions_get_the_few_keys_of_a_fitted_model() -> None:
    tree = LOG | {"algorithm": "boosting"}
    before = leaves(expand_config(check(DqnConfig, tree | {"rl": {"gamma": 0}}))) | {"rl.gamma": 0.9}
    after = leaves(expand_config(check(DqnConfig, tree | {"defaults": "2026"})))
    assert {key: value for key, value in after.items() if before[key] != value} == DECISIONS
    given = tree | {"defaults": "2026", "rl": {"softmax_policy": 1}, "norm_params": {"max_unique_enum_values": 9}}
    config = check(DqnConfig, given)
    assert (config.rl.gamma, config.rl.softmax_policy, config.norm_params.whole_numbers) == (0, 1, "enum")


def test_a_simulation_gets_those_of_a_network_alone() -> None:
    assert differences(ALONE) == NETWORK


def test_candidates_get_the_same() -> None:
    tree = {key: LOG[key] for key in ("model_output_path", "training_data_path")}
    config = check(ParametricDqnConfig, tree | {"defaults": "2026"})
    assert (config.rl.cql_alpha, config.rl.value_scale, config.epochs) == (None, "returns", None)


def test_keys_that_are_present_win_even_if_they_have_the_default_of_2019() -> None:
    of_2019 = expand_config(check(DqnConfig, LOG))
    assert expand_config(of_2026(of_2019)) == of_2019 | {"defaults": "2026"}
    config = of_2026({"rl": {"gamma": 0.9}, "training": {"l2_decay": 0.2, "minibatch_size": 50}, "epochs": 3})
    assert (config.rl.gamma, config.training.l2_decay, config.rl.cql_alpha) == (0.9, 0.2, None)
    config = config.with_length_for(5_000, 4_000, 1)
    assert (config.training.minibatch_size, config.epochs) == (50, 3)
    assert config.training.lr_decay == pytest.approx(0.05 ** (1 / 3))


@pytest.mark.parametrize(
    ("rows", "world", "parts", "continues", "minibatch", "epochs"),
    [
        (100, 1, 1, True, 128, 5_000),
        (2_400, 1, 1, True, 128, 264),  # 19 steps each
        (16_000, 1, 1, True, 128, 40),
        (16_000, 2, 1, True, 128, 40),  # the same step: 64 for each process
        (16_000, 1, 4, True, 128, 40),
        (1_000_000, 1, 1, True, 256, 2),
        (10_000_000, 1, 1, True, 2048, 2),
        (500_000_000, 1, 1, True, 4096, 1),
        (16_000, 1, 1, False, 128, 16),
        (10_000_000, 1, 1, False, 2048, 1),
    ],
)
def test_minibatch_and_epochs_follow_the_number_of_rows(
    rows: int, world: int, parts: int, continues: bool, minibatch: int, epochs: int
) -> None:
    """At least 5,000 optimizer steps, 2,000 where each row is an independent decision."""
    config = of_2026({"training": {"minibatches_per_step": parts}})
    config = config.with_length_for(2 * rows, rows, world, continues=continues)
    assert (config.minibatch_over(world) * parts, config.epochs) == (minibatch, epochs)
    assert config.training.lr_decay == pytest.approx(0.05 ** (1 / epochs))
    assert config.rl.cql_alpha == (0.1 if continues else 0)
    assert check(DqnConfig, expand_config(config)) == config


def test_an_unfinished_run_keeps_its_numbers() -> None:
    config = of_2026({})
    before = config.with_length_for(5_000, 4_000, 1).with_rl(value_scale=(7.0, 2.5))
    assert config.with_numbers_of(json.loads(json.dumps(expand_config(before)))) == before
    given = of_2026(
        {"epochs": 7, "training": {"minibatch_size": 9, "lr_decay": 0.5}, "rl": {"value_scale": None, "cql_alpha": 2}}
    )
    assert given.with_numbers_of(expand_config(before)) == given


@pytest.mark.parametrize(("given", "expected"), [({}, 1024), ({"models": {"minibatch_size": 64}}, 64)])
def test_an_unfinished_run_keeps_the_former_minibatch_of_models(given: dict[str, Any], expected: int) -> None:
    """Its default was 1,024 rows, under a former name."""
    saved = expand_config(check(DqnConfig, LOG | {"evaluation": {"minibatch_size": 1024}}))
    config = check(DqnConfig, LOG | {"evaluation": given})
    assert config.with_numbers_of(saved).evaluation.models.minibatch_size == expected


def test_null_asks_for_them_in_a_config_of_2019_too() -> None:
    config = check(DqnConfig, LOG | {"epochs": None, "training": {"lr_decay": None}}).with_length_for(12_000, 9_600, 1)
    assert (config.training.minibatch_size, config.epochs) == (256, 132)


def test_a_config_object_counts_only_the_keys_that_it_was_given() -> None:
    config = DqnConfig(**(LOG | {"defaults": "2026", "rl": {"gamma": 0.5}}))
    assert (config.rl.gamma, config.rl.cql_alpha) == (0.5, None)
    assert check(DqnConfig, read_tree(config)[0]) == config


@pytest.mark.parametrize(
    "file", sorted(ROOT.glob("configs/*/*.json")), ids=lambda file: f"{file.parent.name}/{file.name}"
)
def test_training_configs_of_this_repository_have_them(file: Any) -> None:
    tree = json.loads(file.read_text())
    if "model_output_path" in tree:
        assert tree["defaults"] == "2026"
        assert WorkflowConfig.model_validate_json(file.read_text()).defaults == "2026"
