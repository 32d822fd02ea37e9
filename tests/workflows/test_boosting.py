"""Runs with algorithm boosting: from a file or a frame to a model in every format, in one process and in two."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pandas as pd
import pytest
from helpers.items import ITEMS, repeated, write_items
from helpers.logs import write_lines
from helpers.resuming import Laboratory
from helpers.runs import ALONE, Runner, Tree, checked, merged, quick, trained

import reagent_lite
from reagent_lite.errors import ConfigError

BOOSTING: Tree = {"algorithm": "boosting", "rl": {"gamma": 0}, "training": None}


def offers(count: int = 1500) -> pd.DataFrame:
    """Mail pays for people of 40 and older in the north, a call elsewhere; 0.9 against 0.1."""
    random = np.random.default_rng(0)
    age = random.integers(18, 80, count)
    region = random.choice(["north", "south"], count)
    offer = random.choice(["call", "mail"], count)
    right = (offer == "mail") == ((age >= 40) & (region == "north"))
    reward = (random.random(count) < np.where(right, 0.9, 0.1)).astype(int)
    return pd.DataFrame({"age": age + 0.0, "region": region, "offer": offer, "bought": reward, "propensity": 0.5})


def config(folder: Path, **sections: Any) -> Tree:
    columns = {"state_features": ["age", "region"], "action": "offer", "reward": "bought"}
    own = {"actions": ["call", "mail"], "data": {"columns": columns, "training_copy_dir": str(folder / "copies")},
           "norm_params": {"feature_overrides": {"age": "CONTINUOUS"}}}  # fmt: skip
    return merged(quick(folder / "offers.csv", folder / "out", **own, **BOOSTING), sections)


def right_choices(model: Any) -> float:
    people = offers(400)
    decided = reagent_lite.load_bundle(model).predict_rows(people[["age", "region"]].to_dict("records"))
    expected = ((people["age"] >= 40) & (people["region"] == "north")).to_numpy()
    return float((decided.greedy == expected).mean())


def test_a_file_of_offers_to_a_policy(tmp_path: Path, run: Runner) -> None:
    offers().to_csv(tmp_path / "offers.csv", index=False)
    done = run("dqn", config(tmp_path)).ok
    assert right_choices(done.outcome["model"]) > 0.97
    assert (done.outcome["steps"], done.outcome["rows"]) == (0, 1500)
    assert "trees; on rows that it has not seen it explains" in done.err
    document = json.loads((tmp_path / "out/model/evaluation.json").read_text())
    fit = document["reward_model"]
    assert fit["trees"] > 0
    assert fit["products"] > 0
    assert fit["error"] < 0.8 * fit["linear_error"] < fit["constant_error"]
    graph = onnx.load(tmp_path / "out/model/model.onnx").graph
    assert sum(node.op_type == "TreeEnsembleRegressor" for node in graph.node) == 1
    shown = f"linear with {fit['products']} products of two features and {fit['trees']} trees, chosen on rows"
    assert shown in (tmp_path / "out/report.html").read_text()


def test_two_processes_have_the_model_of_one(tmp_path: Path, run: Runner) -> None:
    offers().to_csv(tmp_path / "offers.csv", index=False)
    outcome = run("dqn", config(tmp_path, num_processes_per_node=2)).outcome
    two = reagent_lite.load_bundle(outcome["model"]).predict_rows([{"age": 50.0, "region": "north"}])
    trained(config(tmp_path, model_output_path=str(tmp_path / "one")))
    one = reagent_lite.load_bundle(tmp_path / "one/model").predict_rows([{"age": 50.0, "region": "north"}])
    np.testing.assert_allclose(two.q, one.q, atol=1e-4)


def test_an_unfinished_run_continues_to_the_same_model(tmp_path: Path) -> None:
    offers().to_csv(tmp_path / "offers.csv", index=False)
    assert Laboratory(config(tmp_path), ALONE, tmp_path).differences([0]) == []


@pytest.mark.parametrize("by_id", [False, True], ids=["features", "item table"])
def test_candidates_with_features(tmp_path: Path, by_id: bool) -> None:
    """Among items the dearest is right for a positive x, the cheapest for a negative one."""
    random = np.random.default_rng(0)
    rows = []
    for _ in range(800):
        x = float(random.normal())
        item = ITEMS[int(random.integers(len(ITEMS)))]
        reward = x * item["price"] + float(random.normal())
        rows.append({"state_features": {"0": x}, "action": item["item_id"], "reward": reward,
                     "possible_actions": [item["item_id"] for item in ITEMS], "action_probability": 0.2})  # fmt: skip
    file = write_lines(tmp_path / "log.jsonl", rows if by_id else repeated(rows))
    items = {"data": {"items": str(write_items(tmp_path))}} if by_id else {}
    outcome = trained(quick(file, tmp_path / "out", actions=None, **BOOSTING, **items))
    bundle = reagent_lite.load_bundle(outcome.model)
    choices = [{key: value for key, value in item.items() if key != "item_id"} for item in ITEMS]
    decided = bundle.predict_rows([{"0": 2.0}, {"0": -2.0}], [choices, choices])
    assert decided.greedy.tolist() == [4, 3]


def test_a_boost_is_added_to_values_that_do_not_depend_on_it(tmp_path: Path) -> None:
    offers().to_csv(tmp_path / "offers.csv", index=False)
    people = [{"age": 50.0, "region": "north"}, {"age": 20.0, "region": "south"}]
    plain = reagent_lite.load_bundle(trained(config(tmp_path)).model).predict_rows(people).q
    boosted = config(tmp_path, rl={"gamma": 0, "reward_boost": {"mail": -1e6}}, model_output_path=str(tmp_path / "b"))
    values = reagent_lite.load_bundle(trained(boosted).model).predict_rows(people).q
    np.testing.assert_allclose(values[:, 0], plain[:, 0], atol=1e-6)
    np.testing.assert_allclose(values[:, 1], plain[:, 1] - 1e6, rtol=1e-6)
    assert ((plain > 0) & (plain < 1)).all()  # expected rewards of events are probabilities


def test_a_price_that_is_paid_or_not(tmp_path: Path) -> None:
    """Rewards of 0 and 25 give 25 times the values of 0 and 1."""
    people = [{"age": 50.0, "region": "north"}, {"age": 20.0, "region": "south"}]
    offers().to_csv(tmp_path / "offers.csv", index=False)
    events = reagent_lite.load_bundle(trained(config(tmp_path)).model).predict_rows(people).q
    offers().assign(bought=25 * offers()["bought"]).to_csv(tmp_path / "offers.csv", index=False)
    paid = config(tmp_path, model_output_path=str(tmp_path / "paid"))
    prices = reagent_lite.load_bundle(trained(paid).model).predict_rows(people).q
    np.testing.assert_allclose(prices, 25 * events, rtol=1e-5)


def test_a_few_users_as_episodes_are_checked_on_other_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frame = offers(600).assign(user=np.arange(600) // 300, step=np.arange(600), end=False)
    frame.to_csv(tmp_path / "offers.csv", index=False)
    episodes = {"mdp_id": "user", "sequence_number": "step", "terminal": "end"}
    columns = config(tmp_path)["data"]["columns"] | episodes
    tree = config(tmp_path, timeline={"addTerminalStateRow": True})
    outcome = trained(tree | {"data": tree["data"] | {"columns": columns}})
    fit = json.loads(Path(outcome.model, "evaluation.json").read_text())["reward_model"]
    assert 0 < fit["error"] <= fit["linear_error"] < fit["constant_error"]
    assert "there are too few episodes to check it on others" in caplog.text


def test_a_dry_run_plans_no_steps(tmp_path: Path, run: Runner) -> None:
    offers().to_csv(tmp_path / "offers.csv", index=False)
    planned = run("dqn", config(tmp_path), "--dry_run")
    assert "there are no optimizer steps" in planned.err + planned.out
    assert "per epoch" not in planned.err + planned.out


@pytest.mark.parametrize(
    ("sections", "where"),
    [
        ({"rl": {"gamma": 0.9}}, "rl.gamma: expected 0 with algorithm boosting"),
        ({"epochs": 3}, "epochs: expected its default with algorithm boosting"),
        ({"training": {"learning_rate": 0.1}}, "training.learning_rate"),
        ({"training": {"layers": [-1, 64, 1], "activations": ["relu", "linear"]}}, "training.layers"),
        ({"data": {"global_minibatch_size": 64}}, "data.global_minibatch_size"),
        ({"training": {"weight_init_min_std": 0.1}}, "training.weight_init_min_std"),
        ({"training": {"cuda_graph": False}}, "training.cuda_graph"),
        ({"rainbow": {"bcq": True}}, "rainbow.bcq"),
        ({"simulation": {"env": "cartpole_v0", "share": 0.5}}, "algorithm: expected dqn, crr or iql"),
        ({"crr": {}}, "crr: expected absent with algorithm boosting"),
    ],
)
def test_what_has_no_effect_is_refused(tmp_path: Path, sections: Tree, where: str) -> None:
    with pytest.raises(ConfigError) as refused:
        checked(config(tmp_path, **sections))
    assert where in str(refused.value)


def test_a_minibatch_size_is_said_to_have_no_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is not refused, as resolved configs have one."""
    offers(300).to_csv(tmp_path / "offers.csv", index=False)
    trained(config(tmp_path))
    assert "training.minibatch_size" not in caplog.text
    resolved = json.loads((tmp_path / "out/config.json").read_text())
    trained(merged(resolved, {"model_output_path": str(tmp_path / "again")}))
    assert "training.minibatch_size has no effect: algorithm boosting takes no steps" in caplog.text


def test_values_that_predict_worse_than_a_line_are_named(tmp_path: Path) -> None:
    """One step of a network: a line explains a third of what the offers earn."""
    frame = offers()
    right = frame["bought"].to_numpy()
    frame.assign(age=np.where(frame["offer"] == "mail", 70.0 * right, 70.0 - 70 * right)).to_csv(
        tmp_path / "offers.csv", index=False
    )
    own = {"algorithm": None, "evaluation": {"learn_from_scored": False}, "training": {"minibatch_size": 2000}}
    outcome = trained(config(tmp_path, **own))
    document = json.loads(Path(outcome.model, "evaluation.json").read_text())
    errors = document["reward_model"]
    assert errors["linear_error"] < 0.5 * errors["constant_error"]
    assert any("A linear model predicts the rewards" in warning for warning in document["warnings"])
