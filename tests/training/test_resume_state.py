"""Which config may continue which run, where it goes on, and what other ranks get: by hand."""

import pytest
import torch

from reagent_lite.errors import ConfigError
from reagent_lite.training.checkpoint import flat, nested
from reagent_lite.training.resume import ReadOrder, position_in, regrouped, require_same_learning

SAVED = {"epochs": 2, "seed": 0, "node_index": 1, "training": {"learning_rate": 0.1, "layers": [-1, 8, -1]},
         "checkpoint": {"keep": 2}, "data": {"layout": "shards", "residency": "auto"}}  # fmt: skip


def changed(**sections: object) -> dict[str, object]:
    merged: dict[str, object] = {}
    for name, value in {**SAVED, **sections}.items():
        old = SAVED.get(name)
        merged[name] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


@pytest.mark.parametrize(
    "now",
    [
        changed(),
        changed(node_index=0, num_nodes=2, rendezvous={"port": 3}, use_gpu=True),
        changed(checkpoint={"keep": 5, "every_steps": 3}),
        changed(data={"residency": "host"}),
        changed(epochs=7),
    ],
    ids=["the same", "elsewhere", "saved otherwise", "in other memory", "longer"],
)
def test_configs_that_learn_the_same(now: dict[str, object]) -> None:
    require_same_learning(SAVED, now, "step_000007", may_grow=True)


def test_configs_that_learn_something_else_are_refused_by_key() -> None:
    now = changed(training={"learning_rate": 0.2}, epochs=3, data={"layout": "replicas"})
    with pytest.raises(ConfigError) as error:
        require_same_learning(SAVED, now, "step_000007", may_grow=False)
    assert {problem.where for problem in error.value.problems} == {"training.learning_rate", "epochs", "data.layout"}
    first = next(problem for problem in error.value.problems if problem.where == "training.learning_rate")
    assert str(first) == (
        "training.learning_rate: expected 0.1 as in the unfinished run of checkpoint step_000007, got 0.2. "
        "Give another model_output_path, or begin anew with --set checkpoint.resume=false"
    )


def test_the_same_order_goes_on_where_it_stopped() -> None:
    now = ReadOrder(order={"minibatch": 10}, steps=10, rows=95)
    saved = {"step": 13, "rows": 125, **now.as_json()}
    assert position_in(saved, now) == (13, 125, 0)


def test_another_order_begins_the_epoch_again() -> None:
    now = ReadOrder(order={"minibatch": 20}, steps=5, rows=95)
    saved = {"step": 13, "rows": 125, "order": {"minibatch": 10}, "steps_per_epoch": 10, "rows_per_epoch": 95}
    assert position_in(saved, now) == (5, 95, 30)  # epoch 1 again; 3 steps of 10 rows were done of it
    saved |= {"step": 20, "rows": 190}
    assert position_in(saved, now) == (10, 190, 0)


def test_sums_of_other_ranks_keep_their_mean() -> None:
    states = [
        {"meter": {"steps": 2, "sums": {"x": torch.tensor(value)}}, "rng": {"cpu": torch.tensor([rank])}}
        for rank, value in enumerate((1.0, 5.0))
    ]
    # two ranks over two steps: (1 + 5) / (2 ranks · 2 steps) = 1.5
    for world in (1, 3):
        parts = [regrouped(states, rank, {"step": 4}, between=True) for rank in range(world)]
        total = sum(float(part["meter"]["sums"]["x"]) for part in parts)
        assert total / (world * 2) == 1.5
        assert [part["source"] for part in parts] == [{"step": 4}] * world
        assert [int(part["rng"]["cpu"]) for part in parts if "rng" in part] == [0, 1][:world]
    assert regrouped(states, 0, {}, between=False)["meter"] == {"steps": 0}


def test_trees_are_taken_apart_and_put_together() -> None:
    tree = {"a": {"b": torch.ones(2), "c": 3}, "d": 0.1, "e": True, "nothing": {}}
    leaves = flat(tree)
    assert sorted(leaves) == ["a/b", "a/c", "d", "e"]
    again = nested(leaves)
    assert again["a"]["b"].tolist() == [1, 1]
    assert (int(again["a"]["c"]), float(again["d"]), bool(again["e"])) == (3, 0.1, True)
