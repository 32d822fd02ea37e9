"""Features of ids from a log to a served model: named actions, and candidates that share a table with the state."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.logs import write_lines
from helpers.runs import checked, merged, quick, trained
from oracles.catalog import OFFERED, events, policy_value, visits
from safetensors.torch import load_file

from reagent_lite.algorithms.registry import ALGORITHMS
from reagent_lite.categories import code_of
from reagent_lite.config import check
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.config.normalize_config import NormalizeConfig
from reagent_lite.config.score_config import ScoreConfig
from reagent_lite.config.timeline_config import TimelineConfig
from reagent_lite.data.features.normalization_files import read_normalization, write_normalization
from reagent_lite.data.timeline.stage import run_timeline
from reagent_lite.errors import BundleError, ConfigError, DataError
from reagent_lite.export import load_bundle
from reagent_lite.feature_ids import id_of
from reagent_lite.models.embeddings import learned_tables
from reagent_lite.tasks.evaluate import evaluate
from reagent_lite.tasks.normalize import normalize
from reagent_lite.tasks.score import score
from reagent_lite.types import Actions, Embedding, SourceSpec, TransitionBatch

EMBEDDINGS: dict[str, Any] = {"user": {"dim": 4, "max_ids": 30}, "seen": {"dim": 3, "length": 3, "buckets": 50}}
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")


def rows(count: int = 400, *, seed: int = 0) -> list[dict[str, Any]]:
    """Episodes of two decisions; users have a favorite action, in `u<number>` even numbers the first."""
    rng = np.random.default_rng(seed)
    result = []
    for number in range(count):
        user = int(rng.integers(40))
        action = int(rng.integers(2))
        result.append(
            {"mdp_id": f"e{number // 2}", "sequence_number": number % 2, "action": "LR"[action],
             "state_features": {"age": float(rng.normal()), "user": f"u{user}",
                                "seen": [int(item) for item in rng.integers(200, size=rng.integers(5))]},
             "reward": float(action == user % 2), "action_probability": 0.5, "terminal": number % 2 == 1}
        )  # fmt: skip
    return result


def config(log: Path, out: Path, **sections: Any) -> dict[str, Any]:
    tree = quick(log, out, epochs=2, actions=["L", "R"])
    return merged(tree, {"data": {"embeddings": EMBEDDINGS}, "training": {"layers": [-1, 8, -1]}, **sections})


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("log") / "log.jsonl", rows())


@pytest.fixture(scope="module")
def model(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(str(trained(config(log, tmp_path_factory.mktemp("out"))).model))


def test_the_most_frequent_ids_have_a_vector_and_others_are_counted(log: Path, model: Path) -> None:
    parameters = json.loads((model / "normalization.json").read_bytes())["state"]
    user = json.loads(parameters["user"])
    assert user["embedding"] == {"table": "user", "rows": 32, "dim": 4, "length": 1, "pooling": "mean", "scores": False}
    counts = Counter(row["state_features"]["user"] for row in rows())
    ordered = sorted(counts, key=lambda name: (-counts[name], code_of(name)))
    assert user["possible_values"] == sorted(map(code_of, ordered[:30]))
    assert json.loads(parameters["seen"])["possible_values"] is None
    bundle = load_bundle(model)
    states = bundle.states([row["state_features"] for row in rows()])
    assert bundle.others(states) == {id_of("user"): sum(counts[name] for name in ordered[30:])}


def test_all_files_and_forms_of_a_row_give_the_same_values(model: Path) -> None:
    bundle = load_bundle(model)
    states = [row["state_features"] for row in rows(60)]
    expected = bundle.predict(bundle.states(states)).q
    assert np.array_equal(bundle.predict(pd.DataFrame(states)).q, expected)
    texts = [{**state, "seen": [str(item) for item in state["seen"]]} for state in states]
    assert np.array_equal(bundle.predict(bundle.states(texts)).q, expected)
    values = torch.from_numpy(bundle.states(states))
    script = torch.jit.load(model / "model.torchscript")
    torch.testing.assert_close(script((values, ~values.isnan()))[1].numpy(), expected, rtol=1e-4, atol=1e-5)
    assert not np.array_equal(bundle.predict(bundle.states([{**state, "seen": []} for state in states])).q, expected)


def test_values_that_are_no_ids_are_refused(model: Path) -> None:
    bundle = load_bundle(model)
    with pytest.raises(BundleError, match="a list of ids"):
        bundle.states([{"seen": [0.5]}])
    with pytest.raises(BundleError, match=r"feature ids among age, user, seen"):
        bundle.states([{"saw": 1}])


@pytest.mark.parametrize(
    "sections",
    [
        {"rainbow": {"bcq": True}},
        {"rainbow": {"bcq": True}, "evaluation": {"propensities": "estimate"}},
        {"rainbow": {"quantile": True, "dueling_architecture": True}},
        {"algorithm": "crr"},
        {"algorithm": "iql"},
    ],
    ids=["bcq", "bcq of an estimate", "dueling quantiles", "crr", "iql"],
)
def test_every_learner_takes_them(sections: dict[str, Any]) -> None:
    """Each network of a learner has a table, of which the vectors of a batch's ids have a gradient."""
    torch.manual_seed(0)
    spec = SourceSpec(
        num_state_features=3,
        action_names=("L", "R"),
        state_embeddings=(Embedding(table="seen", rows=9, dim=3, length=2),),
    )
    tree = {**config(Path("x"), Path("y"), **sections), "data": {}}
    learner = ALGORITHMS[tree.get("algorithm", "dqn")].build(checked(tree, "dqn"), spec, None)
    state = torch.tensor([[0.5, 3.0, 0.0], [1.5, 4.0, 3.0]])
    actions = Actions(mask=torch.ones(2, 2, dtype=torch.bool))
    ones = torch.ones(2)
    batch = TransitionBatch(
        state=state, actions=actions, action=torch.tensor([0, 1]), reward=ones, steps=ones, bootstrap=ones,
        next_state=state, next_actions=actions, next_action=torch.tensor([1, 0]), propensity=ones / 2,
        metrics=torch.zeros(2, 0), weight=ones / 2,
    )  # fmt: skip
    loss, _ = learner(batch)
    loss.backward()
    tables = learned_tables(learner)
    networks = {"bcq": 2, "crr": 2, "iql": 3}.get(tree.get("algorithm", ""), 1)
    imitates = "bcq" in sections.get("rainbow", {}) and "evaluation" not in sections
    assert len(tables) == networks + imitates
    for table in tables:
        assert table.grad is not None
        assert (table.grad != 0).any(1).nonzero().flatten().tolist() == [3, 4]
    scores = learner.scorer(state, actions.mask, None)
    assert scores.shape == (2, 2)
    assert learner.restriction(state, actions.mask, None).any(1).all()


@pytest.mark.slow
def test_a_user_that_one_hot_levels_lack_is_learned(tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log.jsonl", rows(800))
    training = {"training": {"learning_rate": 0.01, "layers": [-1, 16, -1]}, "epochs": 10, "rl": {"gamma": 0.0}}
    states = [{"age": 0.0, "user": f"u{user}"} for user in range(40)]
    right = np.arange(40) % 2

    def share_right(data: dict[str, Any], name: str) -> float:
        sections = {**training, "norm_params": {"max_unique_enum_values": 10}}
        tree = merged(config(log, tmp_path / name, **sections), {"data": data})
        bundle = load_bundle(Path(str(trained(tree).model)))
        return float((bundle.predict(bundle.states(states)).greedy == right).mean())

    all_ids = {"user": {"dim": 4}, "seen": {"length": 3}}
    assert share_right({"embeddings": all_ids}, "vectors") == 1.0
    assert share_right({"embeddings": {"seen": {"length": 3}}}, "one_hot") < 0.8


def test_evaluation_and_scores_of_a_model(log: Path, model: Path, tmp_path: Path) -> None:
    tree = {"model": str(model), "data_path": str(log), "output_path": str(tmp_path / "evaluation.json"),
            "evaluation": {"propensities": "estimate"}}  # fmt: skip
    events, transitions = (
        evaluate(check(EvaluateConfig, tree | sections)).scores
        for sections in ({}, {"timeline": {"outputTableName": str(tmp_path / "transitions")}})
    )
    assert events == transitions
    assert any(value is not None for value in events.values())
    scores = tmp_path / "scores.parquet"
    score(
        check(ScoreConfig, {"model": str(model), "data_path": str(log), "output_path": str(scores), "policy": "greedy"})
    )
    frame = pd.read_parquet(scores)
    bundle = load_bundle(model)
    expected = bundle.predict(bundle.states([row["state_features"] for row in rows()]))
    assert frame["index"].tolist() == expected.greedy.tolist()


def test_a_timeline_of_the_log_trains_the_same_model(log: Path, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "transitions"
    section = {"inputTableName": str(log), "outputTableName": str(out)}
    tree = {"timeline": section, "query": {"actions": ["L", "R"]}, "embeddings": EMBEDDINGS}
    run_timeline(check(TimelineConfig, tree))
    other = Path(str(trained(config(out, tmp_path / "out")).model))
    assert (other / "weights.safetensors").read_bytes() == (model / "weights.safetensors").read_bytes()
    with pytest.raises(DataError, match="embeddings of seen, user"):
        trained(merged(config(out, tmp_path / "out2"), {"data": {"embeddings": {"user": {}}}}))


def test_normalize_fits_the_same_tables(log: Path, model: Path, tmp_path: Path) -> None:
    tree = {"training_data_path": str(log), "norm_params": {"output_dir": str(tmp_path / "norm")},
            "embeddings": EMBEDDINGS}  # fmt: skip
    normalize(check(NormalizeConfig, tree))
    file = tmp_path / "norm" / "state_features_norm.json"
    spec = read_normalization(str(file))
    of_model = json.loads((model / "normalization.json").read_bytes())["state"]
    assert json.loads(file.read_bytes()) == of_model
    write_normalization(tmp_path / "again.json", spec)
    assert read_normalization(str(tmp_path / "again.json")) == spec
    given = trained(config(log, tmp_path / "out", state_norm_data_path=str(file)))
    assert (Path(str(given.model)) / "weights.safetensors").read_bytes() == (model / "weights.safetensors").read_bytes()


def test_an_item_table_has_the_ids_of_its_items(tmp_path: Path) -> None:
    visitors = visits(300, 20, 4, 1)
    named = [
        {**event, "action": event["action"]["item"], "possible_actions": [c["item"] for c in event["possible_actions"]]}
        for event in events(visitors, 2)
    ]
    tables = {"seen": {"length": 4, "table": "item"}, "item": {"table": "item"}}
    by_features = merged(
        quick(write_lines(tmp_path / "features.jsonl", events(visitors, 2)), tmp_path / "a", epochs=1, actions=None),
        {"data": {"embeddings": tables}, "rl": {"gamma": 0.0}},
    )
    items = write_lines(tmp_path / "items.jsonl", [{"item": f"i{number}"} for number in range(20)])
    data = {"embeddings": tables, "items": str(items), "item_id": "item"}
    by_ids = merged(
        quick(write_lines(tmp_path / "ids.jsonl", named), tmp_path / "b", epochs=1, actions=None),
        {"data": data, "rl": {"gamma": 0.0}},
    )
    models = [Path(str(trained(tree).model)) for tree in (by_features, by_ids)]
    first, second = ((path / "weights.safetensors").read_bytes() for path in models)
    assert first == second
    bundle = load_bundle(models[1])
    states = bundle.states(visitors.states[:5])
    by_name = bundle.predict(states, candidates=[[f"i{item}" for item in row] for row in visitors.offered[:5]]).q
    other = load_bundle(models[0])
    assert np.array_equal(by_name, other.predict(states, candidates=other.candidates(visitors.candidates[:5])).q)


@pytest.mark.slow
def test_embeddings_find_the_better_policy_of_a_catalog(tmp_path: Path) -> None:
    visitors = visits(20_000, 500, 10, 1)
    test = visits(3_000, 500, 10, 99)
    log = write_lines(tmp_path / "log.jsonl", events(visitors, 2))

    def value(**data: Any) -> float:
        tree = {"defaults": "2026", "training_data_path": str(log), "model_output_path": str(tmp_path / str(len(data))),
                "rl": {"gamma": 0.0}, "norm_params": {"max_unique_enum_values": 100}, "data": data}  # fmt: skip
        bundle = load_bundle(Path(str(trained(tree).model)))
        return policy_value(test, lambda s, c: bundle.predict(bundle.states(s), candidates=bundle.candidates(c)).greedy)

    table = {"table": "item", "dim": 8}
    both = value(embeddings={"seen": {"length": 10, **table}, "item": table})
    assert both > 0.85 * test.best > 1.5 * test.uniform
    assert OFFERED == 6


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"algorithm": "boosting", "rl": {"gamma": 0.0}}, "algorithm: expected dqn, crr or iql with data.embeddings"),
        ({"data": {"embeddings": {"w": {"scores": True}}}}, "w.pooling"),
        ({"data": {"embeddings": {"w": {"buckets": 5, "max_ids": 7}}}}, "w.max_ids"),
        ({"data": {"embeddings": {"a": {"table": "t", "dim": 2}, "b": {"table": "t"}}}}, "b.dim: expected 2, as a has"),
        ({"data": {"embeddings": {"a": {"table": "t.1"}, "b": {"table": "t_1"}}}}, "b.table: expected a name that"),
        ({"data": {"embeddings": {"\n": {}}}}, "as a feature id"),
        ({"data": {"embeddings": {"w": {"length": 0}}}}, "length"),
    ],
)
def test_configs_that_cannot_be_combined(changes: dict[str, Any], where: str) -> None:
    tree = {**config(Path("x"), Path("y")), "training": {}, **changes}
    with pytest.raises(ConfigError) as caught:
        checked(tree)
    assert where in str(caught.value)


def test_an_embedding_of_no_feature_is_refused(log: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.embeddings\.usr.*Did you mean"):
        trained(config(log, tmp_path, data={"embeddings": {"usr": {}, "seen": {"length": 2}}}))


def test_policies_without_a_model_declare_their_ids(log: Path, model: Path, tmp_path: Path) -> None:
    """Users of even numbers earn 1 by the first action, others by the second: 1 is the value of `right`.

    A model of rewards knows that from ids alone.
    """
    right = tmp_path / "right.jsonl"
    logged = []
    for row in rows(1200):
        second = float(int(row["state_features"]["user"][1:]) % 2)
        logged.append({**row, "p": {"L": 1 - second, "R": second}})
    tree = {
        "model": "column:p", "data_path": str(write_lines(right, logged)), "actions": ["L", "R"], "gamma": 0.0,
        "output_path": str(tmp_path / "evaluation.json"), "columns": {},
        "evaluation": {"bootstrap_resamples": 100},
        "timeline": {"addTerminalStateRow": True},
    }  # fmt: skip
    with pytest.raises(DataError, match="declare the feature in data"):
        evaluate(check(EvaluateConfig, tree))
    tables = {"user": {"dim": 4}, "seen": {"length": 3}}
    scores = evaluate(check(EvaluateConfig, {**tree, "embeddings": tables})).scores
    assert scores["CPE/Reward/Direct_Method_Reward"] == pytest.approx(1.0, abs=0.1)
    with pytest.raises(ConfigError, match=r"embeddings\.usr: .* Did you mean user"):
        evaluate(check(EvaluateConfig, {**tree, "embeddings": {**tables, "usr": {}}}))
    with pytest.raises(ConfigError, match=r"embeddings: expected absent, as a model knows"):
        check(EvaluateConfig, {"model": str(model), "data_path": str(log), "embeddings": tables})


def test_a_warm_start_keeps_the_vector_of_each_id(log: Path, model: Path, tmp_path: Path) -> None:
    """Other users have other rows in a table of as many, listed anew; by the earlier file they are others."""
    renamed = []
    for row in rows():
        state = row["state_features"]
        renamed.append({**row, "state_features": {**state, "user": state["user"].replace("u1", "v")}})
    new = write_lines(tmp_path / "new.jsonl", renamed)
    training = {"warm_start_model_path": str(model.parent), "learning_rate": 1e-12, "l2_decay": 0.0}
    with pytest.raises(ConfigError, match="got others of state feature user"):
        trained(config(new, tmp_path / "out", training={"layers": [-1, 8, -1], **training}))
    given = {"state_norm_data_path": str(model.parent / "state_features_norm.json")}
    tree = config(new, tmp_path / "out", training={"layers": [-1, 8, -1], **training}, **given)
    second = Path(str(trained(tree).model))
    before, after = (load_file(path / "weights.safetensors") for path in (model, second))
    for name in before:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-6)
    ours, theirs = (json.loads((path / "normalization.json").read_bytes()) for path in (model, second))
    assert theirs == ours
