"""Who gets what, who gains and who loses: policies whose rules are known, from a frame to the page."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.bundles import bilinear_bundle, linear_bundle
from helpers.logs import write_lines
from helpers.runs import merged, quick

import reagent_lite
from reagent_lite.evaluation.explanation import Explanation

ROWS = 3000
AB = ("a", "b")
QUICK = {"models": {"final_fit_passes": 1}, "bootstrap_resamples": 100}


def frame(seed: int = 0) -> pd.DataFrame:
    """Policy p takes b for the old, mostly; that is better, but not in IT. `p1` is its probability of the action."""
    rng = np.random.default_rng(seed)
    age = rng.integers(18, 80, ROWS).astype(float)
    country = rng.choice(["DE", "FR", "IT"], ROWS)
    b = rng.random(ROWS) < 0.5
    likes_b = np.where(age > 45, 0.9, 0.1)
    good = np.where(country == "IT", -1.0, 1.0) * np.where(age > 45, 1.0, -1.0)
    return pd.DataFrame({
        "age": age, "country": country, "shop": rng.integers(0, 1000, ROWS).astype(str), "constant": 1.0,
        "sparse": np.where(rng.random(ROWS) < 0.99, np.nan, 1.0), "action": np.where(b, "b", "a"),
        "reward": good * b + 0.5 * rng.normal(size=ROWS), "action_probability": 0.5,
        "p": [{"a": 1 - share, "b": share} for share in likes_b], "p1": np.where(b, likes_b, 1 - likes_b),
    })  # fmt: skip


FEATURES = ["age", "country", "shop", "constant", "sparse"]


def evaluated(folder: Path, log: pd.DataFrame, models: Any, features: list[str] = FEATURES, **keys: Any) -> Any:
    config = {
        "columns": {"state_features": features}, "actions": list(AB), "output_path": folder / "e.json",
        "evaluation": QUICK, **keys,
    }  # fmt: skip
    return reagent_lite.evaluate(models, log, config=config)


@pytest.mark.usefixtures("caches")
def test_a_column_of_probabilities(tmp_path: Path) -> None:
    result = evaluated(tmp_path, frame(), "column:p")
    tree = result.policy_tree
    assert set(tree.rows_with) == {"age at most 45", "age above 45"}
    old = tree[tree.rows_with == "age above 45"].set_index("choice")
    assert old.new.to_dict() == pytest.approx({"a": 0.1, "b": 0.9})
    assert old.logged.to_dict() == pytest.approx({"a": 0.5, "b": 0.5}, abs=0.07)
    document = result.explanations["model"]
    assert document == json.loads(Path(result.report).read_text())["model"]["explanation"]
    assert document["tree"]["fidelity"] == pytest.approx(0.9)
    assert document["tree"]["best_possible_fidelity"] == pytest.approx(0.9)
    assert document["tree"]["fidelity_without_splits"] == pytest.approx(0.54, abs=0.03)
    assert document["importance"]["of_the_tree"]
    importance = result.importance.set_index("feature").change
    assert importance["age"] > 0.3
    assert importance.drop("age").max() == 0
    segments = result.segments.set_index("rows_with")
    assert segments.loc["country IT", "standing"] == "loses"
    assert segments.loc["country other than IT", "standing"] == "gains"
    assert segments.loc["country IT", "difference"] == pytest.approx(-0.4, abs=0.15)  # half a reward, 0.8 of the time
    parts = segments.drop("all segments")
    assert (parts.share * parts.difference).sum() == pytest.approx(segments.loc["all segments", "difference"])
    choices = result.segment_choices.set_index(["rows_with", "choice"])
    assert choices.loc[("country IT", "b"), "new"] == pytest.approx(0.5, abs=0.06)
    page = Path(result.page).read_text()
    for words in ("Who gains and who loses", "1. country IT", "Who gets what", "age above 45", "b 90%, a 10%"):
        assert words in page


@pytest.mark.usefixtures("caches")
def test_parts_that_are_unknown_have_reasons(tmp_path: Path) -> None:
    log = frame()
    one = evaluated(tmp_path, log, "column:p1")
    document = one.explanations["model"]
    assert (document["tree"], document["importance"]) == (None, None)
    assert "only the probability of the logged action" in document["absent"]["tree"]
    assert set(one.segments.rows_with) == {"country IT", "country other than IT", "all segments"}
    assert one.policy_tree.empty
    assert list(one.importance.columns) == ["policy", "feature", "change"]
    unweighted = evaluated(tmp_path, log.drop(columns="action_probability"), "column:p")
    assert unweighted.segments.empty
    assert "no propensity" in unweighted.explanations["model"]["absent"]["segments"]
    assert "no propensity" in Path(unweighted.page).read_text()
    assert not unweighted.policy_tree.empty
    assert "there is no log" in str(Explanation.without_log().json())


@pytest.mark.usefixtures("caches")
def test_policies_without_features_or_rules(tmp_path: Path) -> None:
    log = frame().head(600)
    nothing = evaluated(tmp_path, log, "column:p", features=["constant"])
    assert set(nothing.policy_tree.rows_with) == {"all rows"}
    assert nothing.importance.change.tolist() == [0.0]
    assert nothing.segments.rows_with.tolist() == ["all rows", "all segments"]
    uniform = evaluated(tmp_path, log, "uniform")
    assert uniform.importance.change.max() == 0
    assert not uniform.explanations["model"]["importance"]["of_the_tree"]
    assert set(uniform.policy_tree.rows_with) == {"all rows"}


@pytest.mark.usefixtures("caches")
def test_each_of_several_policies_is_explained(tmp_path: Path) -> None:
    several = evaluated(tmp_path, frame(), ["column:p", "uniform"])
    assert set(several.segments.policy) == {"column:p", "uniform"}
    alone = evaluated(tmp_path, frame(), "column:p")
    wide, narrow = (result.segments.set_index(["policy", "rows_with"]) for result in (several, alone))
    of_both, of_one = wide.loc[("column:p", "country IT")], narrow.loc[("model", "country IT")]
    assert of_both.difference == pytest.approx(of_one.difference)
    assert of_both.low < of_one.low  # the level is divided by the number of policies


def test_a_model_of_named_actions(tmp_path: Path) -> None:
    """q = (x, y): the model takes b where y > x; z has no effect."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(2000, 3)).round(3)
    rows = [
        {"state_features": {str(k): float(v) for k, v in enumerate(value)},
         "action": AB[number % 2], "reward": float(rng.normal()), "action_probability": 0.5,
         "possible_actions": list(AB)}
        for number, value in enumerate(values)
    ]  # fmt: skip
    model = linear_bundle(tmp_path / "model", np.array([[1.0, 0, 0], [0, 1.0, 0]]), AB, (0, 1, 2))
    log = write_lines(tmp_path / "log.jsonl", rows)
    result = reagent_lite.evaluate(
        str(model),
        str(log),
        config={"policy": "greedy", "gamma": 0.9, "output_path": tmp_path / "e.json", "evaluation": QUICK},
    )
    importance = result.importance.set_index("feature").change
    # y' > x instead of y > x: independent differences agree in sign where x is far out; P = arccos(1/2) / pi
    assert importance.to_dict() == pytest.approx({"0": 1 / 3, "1": 1 / 3, "2": 0.0}, abs=0.04)
    tree = result.explanations["model"]["tree"]
    assert tree["best_possible_fidelity"] == 1
    assert 0.8 < tree["fidelity"] < 1
    assert "2" not in " ".join(leaf["rows_with"].split()[0] for leaf in tree["leaves"])


def test_a_model_of_candidates(tmp_path: Path) -> None:
    """q = price times s, s = 1 or -1: the dearest candidate where s = 1, else the cheapest; weight has no effect."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(1500):
        count = int(rng.integers(2, 4))
        lists = [{"7": float(price), "8": 1.0} for price in rng.integers(1, 10, count)]
        rows.append({
            "state_features": {"0": float(rng.choice([-1, 1]))},
            "action": lists[0], "reward": float(rng.normal()), "action_probability": 1 / count,
            "possible_actions": lists,
        })  # fmt: skip
    model = bilinear_bundle(tmp_path / "model", np.array([[1.0], [0.0]]), (0,), (7, 8))
    log = write_lines(tmp_path / "log.jsonl", rows)
    result = reagent_lite.evaluate(
        str(model),
        str(log),
        config={"policy": "greedy", "gamma": 0.9, "output_path": tmp_path / "e.json", "evaluation": QUICK},
    )
    tree = result.explanations["model"]["tree"]
    assert tree["fidelity"] > 0.85 > tree["fidelity_without_splits"]
    likely = max(tree["leaves"], key=lambda leaf: leaf["probability"])
    assert "candidate 7" in likely["rows_with"]
    assert sum(leaf["share"] for leaf in tree["leaves"]) == pytest.approx(1)
    importance = result.importance.set_index("feature").change
    assert importance["0"] == pytest.approx(0.5, abs=0.06)
    assert importance["candidate 7"] > 0.4
    assert importance["candidate 8"] == 0
    for _, shares in result.segment_choices.groupby("rows_with"):
        assert shares.new.sum() == pytest.approx(1)
        assert shares.logged.sum() == pytest.approx(1)


def test_a_run_explains_its_policy(tmp_path: Path) -> None:
    """Features of a run are normalized: those that fill no column, and categories of several, are shuffled whole."""
    features = ["age", "country", "constant"]
    log = frame(1).drop(columns=["p", "p1", "shop", "sparse"]).head(1500)
    training = {"learning_rate": 0.02, "l2_decay": 0.0, "minibatch_size": 100}
    tree = quick(Path(), tmp_path / "out", epochs=6, training=training)
    keys = {"training_data_path": "", "data": {"columns": {"state_features": features}}, "evaluation": QUICK}
    run = reagent_lite.train(merged(tree, keys), log)
    importance = run.importance.set_index("feature").change
    assert importance["age"] > 0.1
    assert importance["country"] > 0.02
    assert importance["constant"] == 0
    assert not run.segments.empty
    assert "Who gains and who loses" in (tmp_path / "out/report.html").read_text()
    assert "explanation" in json.loads((tmp_path / "out/model/evaluation.json").read_text())
