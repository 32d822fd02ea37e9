"""From a CSV file with texts to a policy that depends on them: inspected, trained, scored, evaluated and compared."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.commands import normalized
from helpers.events import make
from helpers.logs import write_json, write_lines
from helpers.runs import Runner, absent, merged, quick, trained

from reagent_lite import load_bundle
from reagent_lite.config import check
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.config.score_config import ScoreConfig
from reagent_lite.errors import BundleError, DataError
from reagent_lite.tasks.evaluate import evaluate
from reagent_lite.tasks.score import score

BEST = {"DE": "mail", "FR": "call", "US": "none"}
NAMES = ("call", "mail", "none")


def offers(count: int = 900, seed: int = 0, countries: tuple[str, ...] = tuple(BEST)) -> pd.DataFrame:
    """Decisions of their own: the offer that is best in a country is clicked, the others never are."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame({"country": rng.choice(countries, count), "offer": rng.choice(NAMES, count)})
    clicks = (frame["country"].map(BEST) == frame["offer"]).astype(int)
    return frame.assign(age=rng.integers(18, 80, count) + 0.5, propensity=1 / 3, click=clicks)


@pytest.mark.timeout(900)
def test_from_a_csv_with_texts_to_scores_and_an_evaluation(tmp_path: Path, run: Runner) -> None:
    offers().to_csv(tmp_path / "offers.csv", index=False)
    assert run("inspect", {}, "--data", str(tmp_path / "offers.csv"), "--output", str(tmp_path / "x.json")).ok
    tree = json.loads((tmp_path / "x.json").read_text())
    assert tree["data"]["columns"]["state_features"] == ["country", "age"]
    tree = merged(tree, {"use_gpu": False, "evaluation": {"models": {"final_fit_passes": 1}}})
    done = run("dqn", tree, timeout=400).ok
    assert "count as other" not in done.err
    model = tmp_path / done.outcome["model"]
    greedy = load_bundle(model).predict_rows([{"age": 40.0, "country": home} for home in BEST]).greedy
    assert [NAMES[index] for index in greedy] == list(BEST.values())

    fresh = offers(200, seed=1, countries=(*BEST, "Atlantis"))
    fresh.to_parquet(tmp_path / "fresh.parquet")
    fresh.assign(country=3.5).to_csv(tmp_path / "numbers.csv", index=False)
    keys = {"model": str(model), "output_path": str(tmp_path / "scores.csv"), "policy": "greedy"}
    scored = run("score", {**keys, "data_path": str(tmp_path / "fresh.parquet")}).ok
    assert scored.outcome["other_values"] == {"country": int((fresh["country"] == "Atlantis").sum())}
    chosen = pd.read_csv(tmp_path / "scores.csv", keep_default_na=False)["action"]
    familiar = fresh["country"] != "Atlantis"
    assert (chosen[familiar] == fresh["country"][familiar].map(BEST)).all()
    with pytest.raises(DataError, match=r"numbers\.csv:2: expected a string for feature country"):
        score(check(ScoreConfig, {**keys, "data_path": str(tmp_path / "numbers.csv")}))
    log = {
        "model": str(model),
        "data_path": str(tmp_path / "fresh.parquet"),
        "evaluation": {"models": {"final_fit_passes": 1}},
    }
    assert evaluate(check(EvaluateConfig, log)).rows > 0


def of_choices(log: Path, out: Path, **sections: Any) -> Path:
    """Trains on candidates, and returns the model."""
    keys = {"epochs": 40, "actions": None, "training": {"learning_rate": 0.02}, "rl": {"temperature": 0.05}}
    return Path(str(trained(quick(log, out, **keys, **sections)).model))


def candidates(count: int = 300, seed: int = 0, kinds: str = "abc") -> list[dict[str, Any]]:
    """Decisions among candidates of a kind: kind b pays 1, others nothing."""
    rng = np.random.default_rng(seed)

    def row() -> dict[str, Any]:
        possible = [{"price": round(float(rng.random()), 3), "kind": str(kind)} for kind in rng.choice([*kinds], 3)]
        action = possible[int(rng.integers(3))]
        return {"state_features": {"0": 1.0 + float(rng.random())}, "possible_actions": possible, "action": action,
                "reward": float(action["kind"] == "b"), "action_probability": 1 / 3}  # fmt: skip

    return [row() for _ in range(count)]


def test_candidates_with_texts_and_levels_that_are_new_later(tmp_path: Path) -> None:
    model = of_choices(write_lines(tmp_path / "log.jsonl", candidates()), tmp_path / "out")
    fresh = [{name: row[name] for name in ("state_features", "possible_actions")}
             for row in candidates(60, seed=1, kinds="abz")]  # fmt: skip
    for row in fresh:
        row["possible_actions"][0]["kind"] = "b"
    keys = {"model": str(model), "data_path": str(write_lines(tmp_path / "fresh.jsonl", fresh)),
            "output_path": str(tmp_path / "scores.jsonl"), "policy": "greedy"}  # fmt: skip
    unseen = sum(candidate["kind"] == "z" for row in fresh for candidate in row["possible_actions"])
    assert score(check(ScoreConfig, keys)).other_values == {"kind": unseen}
    scores = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    chosen = [row["possible_actions"][scored["index"]] for row, scored in zip(fresh, scores, strict=True)]
    assert [scored["action"] for scored in scores] == [
        {"price": pytest.approx(candidate["price"], abs=1e-6), "kind": candidate["kind"]} for candidate in chosen
    ]
    assert np.mean([candidate["kind"] == "b" for candidate in chosen]) > 0.9


def test_levels_go_through_normalize_timeline_and_a_given_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    number = np.arange(300)
    events = offers(300).rename(columns={"offer": "action", "click": "reward", "propensity": "action_probability"})
    events = events.assign(mdp_id=[f"e{episode}" for episode in number // 3], sequence_number=number % 3,
                           terminal=number % 3 == 2,
                           state_features=events[["age", "country"]].to_dict("records"))  # fmt: skip
    for features in events["state_features"][:270]:  # a first block without texts
        del features["country"]
    log = write_lines(tmp_path / "events.jsonl", events.drop(columns=["age", "country"]).to_dict("records"))
    make(tmp_path, log, {"query": {"actions": list(NAMES)}}, actionDiscrete=True)
    normalized(str(tmp_path / "train"), tmp_path / "norm")
    file = tmp_path / "norm" / "state_features_norm.json"
    assert json.loads(json.loads(file.read_text())["country"])["levels"] == ["DE", "FR", "US"]

    fewer = {"age": {"feature_type": "ENUM", "possible_values": [20.5, 30.5]},
             "country": {"feature_type": "ENUM", "levels": ["DE"]}}  # fmt: skip
    write_json(file, fewer)
    trained(quick(tmp_path / "train", tmp_path / "out", actions=list(NAMES), state_norm_data_path=str(file)))
    others = {"country": events["country"][270:] != "DE", "age": ~events["age"].isin([20.5, 30.5])}
    assert not absent(
        caplog.text, *(f"state feature {feature}: {other.sum()} values are other" for feature, other in others.items())
    )


def test_items_with_texts_in_the_log_the_model_and_a_newer_table(tmp_path: Path) -> None:
    kinds = {f"i{number}": "abc"[number % 3] for number in range(9)}
    table = pd.DataFrame({"item_id": list(kinds), "price": np.arange(9) / 4, "kind": list(kinds.values())})
    table.to_csv(tmp_path / "items.csv", index=False)
    rng = np.random.default_rng(0)
    possible = [rng.choice(list(kinds), 3, replace=False).tolist() for _ in range(300)]
    rows = [{"state_features": {"0": 1.0 + float(rng.random())}, "possible_actions": names, "action": names[0],
             "reward": float(kinds[names[0]] == "b"), "action_probability": 1 / 3} for names in possible]  # fmt: skip
    log = write_lines(tmp_path / "log.jsonl", rows)
    model = of_choices(log, tmp_path / "out", data={"items": str(tmp_path / "items.csv")})
    assert load_bundle(model).levels["action"] == {"kind": ("a", "b", "c")}
    keys = {"model": str(model), "data_path": str(log), "output_path": str(tmp_path / "s.jsonl"), "policy": "greedy"}
    table.assign(kind=["new", *table["kind"][1:]]).to_csv(tmp_path / "newer.csv", index=False)
    scored = score(check(ScoreConfig, {**keys, "items": str(tmp_path / "newer.csv")}))
    chosen = [json.loads(line)["action"] for line in (tmp_path / "s.jsonl").read_text().splitlines()]
    pays = [kinds[item] == "b" for item, names in zip(chosen, possible, strict=True) if "b" in map(kinds.get, names)]
    assert np.mean(pays) > 0.9
    assert scored.other_values == {"kind": sum("i0" in names for names in possible)}
    table.assign(kind=np.arange(9) / 2).to_csv(tmp_path / "numbers.csv", index=False)
    with pytest.raises(BundleError, match=r"numbers\.csv: kind: expected strings"):
        score(check(ScoreConfig, {**keys, "items": str(tmp_path / "numbers.csv")}))
