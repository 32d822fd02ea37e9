"""Which config may continue which run, where it goes on, and what other ranks get: by hand."""

import re
from typing import Any

import pytest
import torch
from helpers.runs import merged

from reagent_lite.config import DqnConfig, check, expand_config
from reagent_lite.errors import ConfigError
from reagent_lite.training.resume import ReadOrder, complete_config, position_in, regroup_state, require_same_learning

SAVED = {"epochs": 2, "seed": 0, "node_index": 1, "training": {"learning_rate": 0.1, "layers": [-1, 8, -1]},
         "checkpoint": {"keep": 2}, "data": {"layout": "shards", "residency": "auto"}}  # fmt: skip
CONFIG = check(DqnConfig, {"training_data_path": "log", "model_output_path": "out", "actions": ["a", "b"]})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"node_index": 0, "num_nodes": 2, "rendezvous": {"port": 3}, "use_gpu": True},
        {"checkpoint": {"keep": 5, "every_steps": 3, "patience": 3}},
        {"data": {"residency": "host"}},
        {"epochs": 7},
        {"publish_if": {"outcome": "x"}},  # a key that runs of before did not have
    ],
    ids=str,
)
def test_configs_that_learn_the_same(changes: dict[str, Any]) -> None:
    require_same_learning(SAVED, merged(SAVED, changes), "step_000007", may_grow=True)


def test_a_key_that_the_saved_config_does_not_have_has_its_default() -> None:
    saved = expand_config(CONFIG)
    del saved["evaluation"]["learn_from_scored"]
    assert complete_config(CONFIG, saved) == expand_config(CONFIG)
    assert complete_config(CONFIG, {**saved, "no_more": 1}) == {**saved, "no_more": 1}


def test_configs_that_learn_something_else_are_refused_by_key() -> None:
    now = merged(SAVED, {"training": {"learning_rate": 0.2}, "epochs": 3, "data": {"layout": "replicas"},
                         "checkpoint": {"keep_best": True}})  # fmt: skip
    with pytest.raises(ConfigError) as error:
        require_same_learning(SAVED, now, "step_000007", may_grow=False)
    problems = {problem.where: str(problem) for problem in error.value.problems}
    assert problems.keys() == {"training.learning_rate", "epochs", "data.layout", "checkpoint.keep_best"}
    assert re.search(
        r"expected 0\.1.*step_000007.*got 0\.2.*checkpoint\.resume=false", problems["training.learning_rate"]
    )


@pytest.mark.parametrize(
    ("now", "step", "rows", "position"),
    [
        (ReadOrder(order={"minibatch": 10}, steps=10, rows=95), 13, 125, (13, 125, 0)),
        # another order begins epoch 1 again, of which 3 steps of 10 rows were done; between two epochs, nothing
        (ReadOrder(order={"minibatch": 20}, steps=5, rows=95), 13, 125, (5, 95, 30)),
        (ReadOrder(order={"minibatch": 20}, steps=5, rows=95), 20, 190, (10, 190, 0)),
    ],
)
def test_where_a_run_goes_on(now: ReadOrder, step: int, rows: int, position: tuple[int, int, int]) -> None:
    saved = {"step": step, "rows": rows, "order": {"minibatch": 10}, "steps_per_epoch": 10, "rows_per_epoch": 95}
    assert position_in(saved, now) == position


@pytest.mark.parametrize("world", [1, 3])
def test_sums_of_other_ranks_keep_their_mean(world: int) -> None:
    states = [
        {"meter": {"steps": 2, "sums": {"x": torch.tensor(value)}}, "rng": {"cpu": torch.tensor([rank])}}
        for rank, value in enumerate((1.0, 5.0))
    ]
    # two ranks over two steps: (1 + 5) / (2 ranks · 2 steps) = 1.5
    parts = [regroup_state(states, rank, {"step": 4}, keep_sums=True) for rank in range(world)]
    assert sum(float(part["meter"]["sums"]["x"]) for part in parts) / (world * 2) == 1.5
    assert [part["source"] for part in parts] == [{"step": 4}] * world
    assert [int(part["rng"]["cpu"]) for part in parts if "rng" in part] == [0, 1][:world]
    assert regroup_state(states, 0, {}, keep_sums=False)["meter"] == {"steps": 0}
