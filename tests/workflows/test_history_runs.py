"""`data.history` from a log to a model: every learner, what is exported, and what is refused."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.logs import write_lines
from helpers.runs import ROOT, checked, merged, quick, trained
from safetensors.numpy import load_file

from reagent_lite.config import check
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.config.score_config import ScoreConfig
from reagent_lite.config.timeline_config import TimelineConfig
from reagent_lite.data.features.normalization_files import parse_normalization
from reagent_lite.data.timeline.stage import run_timeline
from reagent_lite.errors import BundleError, ConfigError
from reagent_lite.export import load_bundle
from reagent_lite.models.preprocessor import build_preprocessor
from reagent_lite.tasks.evaluate import evaluate
from reagent_lite.tasks.score import score

pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")


def rows(episodes: int = 60, *, seed: int = 0) -> list[dict[str, Any]]:
    """Events in which x is noise and c a category; the reward is 1 if the action says whether x two steps ago was > 0.

    Without three steps of history nothing can be known about the reward, except in the first two rows, where it is 0.
    """
    rng = np.random.default_rng(seed)
    result = []
    for episode in range(episodes):
        length = int(rng.integers(1, 8))
        values = rng.normal(size=length)
        for number, value in enumerate(values):
            action = int(rng.integers(2))
            earned = number >= 2 and action == int(values[number - 2] > 0)
            result.append(
                {"mdp_id": f"e{episode}", "sequence_number": number, "action": "ab"[action], "reward": float(earned),
                 "state_features": {"x": round(float(value), 4), "c": ["u", "v"][number % 2]},
                 "possible_actions": ["a", "b"], "action_probability": 0.5, "terminal": number == length - 1}
            )  # fmt: skip
    return result


def steps_of(log: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Returns for each row of a log in order the states of its episode so far."""
    return [
        [before["state_features"] for before in log[: number + 1] if before["mdp_id"] == row["mdp_id"]]
        for number, row in enumerate(log)
    ]


def of_candidates(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the same events with candidates in place of named actions."""
    choices = {"a": {"choice": 0.0}, "b": {"choice": 1.0}}
    return [row | {"action": choices[row["action"]], "possible_actions": list(choices.values())} for row in log]


def config(log: Path, out: Path, **sections: Any) -> dict[str, Any]:
    tree = quick(log, out, epochs=2, norm_params={"min_present_values": 2})
    return merged(tree, {"data": {"history": 3}, **sections})


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("log") / "log.jsonl", rows())


@pytest.fixture(scope="module")
def model(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(str(trained(config(log, tmp_path_factory.mktemp("out"))).model))


@pytest.mark.parametrize(
    "sections",
    [
        {"rainbow": {"bcq": True}},
        {"rainbow": {"bcq": True}, "evaluation": {"propensities": "estimate"}},
        {"rainbow": {"quantile": True, "dueling_architecture": True}, "rl": {"multi_steps": 3}},
        {"algorithm": "crr"},
        {"algorithm": "iql"},
        {"algorithm": "boosting", "rl": {"gamma": 0.0}, "epochs": None, "training": None},
    ],
    ids=["bcq", "bcq estimated", "quantile", "crr", "iql", "boosting"],
)
def test_all_learners_learn_from_several_steps(log: Path, tmp_path: Path, sections: dict[str, Any]) -> None:
    result = trained(config(log, tmp_path / "out", **sections))
    assert load_bundle(str(result.model)).history == 3


def test_candidates_are_of_the_present_step(tmp_path: Path) -> None:
    log = of_candidates(rows())
    result = trained(config(write_lines(tmp_path / "log.jsonl", log), tmp_path / "out", actions=None))
    bundle = load_bundle(str(result.model))
    assert (len(bundle.state_feature_ids), bundle.action_feature_ids) == (3 * 3, bundle.action_feature_ids)
    assert len(bundle.action_feature_ids) == 1
    prediction = bundle.predict_rows(steps_of(log), [row["possible_actions"] for row in log])
    assert prediction.q.shape == (len(log), 2)


def test_the_report_names_steps(model: Path) -> None:
    importance = json.loads((model / "evaluation.json").read_bytes())["explanation"]["importance"]
    assert {"x", "c"} == set(importance["changes"])


def test_a_policy_of_what_was_two_steps_ago_is_learned(log: Path, tmp_path: Path) -> None:
    train = write_lines(tmp_path / "log.jsonl", rows(500, seed=1))
    sections = {"rl": {"gamma": 0.0}, "epochs": 20, "training": {"layers": [-1, 32, -1], "learning_rate": 0.01},
                "evaluation": {"calc_cpe_in_training": False}}  # fmt: skip
    with_history, without = (
        load_bundle(str(trained(config(train, tmp_path / name, **sections, data={"history": history})).model))
        for name, history in (("with", 3), ("without", 1))
    )
    unseen = rows(200, seed=2)
    wanted = {number: int(steps[-3]["x"] > 0) for number, steps in enumerate(steps_of(unseen)) if len(steps) >= 3}
    q = with_history.predict_rows(steps_of(unseen)).q
    assert np.mean([q[number].argmax() == best for number, best in wanted.items()]) > 0.9
    q = without.predict_rows([row["state_features"] for row in unseen]).q
    assert 0.4 < np.mean([q[number].argmax() == best for number, best in wanted.items()]) < 0.6


def test_all_files_and_forms_of_a_row_give_the_same_values(model: Path) -> None:
    bundle = load_bundle(model)
    assert "of the last 3 steps" in repr(bundle)
    log = rows(20, seed=3)
    states = bundle.states(steps_of(log))
    expected = bundle.predict(states).q
    assert np.array_equal(bundle.predict(pd.DataFrame(states, columns=[*map(str, bundle.state_feature_ids)]).replace(
        {name: {code: text for text, code in codes(bundle).items()} for name in map(str, bundle.state_feature_ids)
         if name.startswith("c")})).q, expected)  # fmt: skip
    values = torch.from_numpy(states)
    script = torch.jit.load(model / "model.torchscript")
    torch.testing.assert_close(script((values, ~values.isnan()))[1].numpy(), expected, rtol=1e-4, atol=1e-5)
    # a single map is the start of an episode; more steps than the model reads are left out
    start = log[0]["state_features"]
    assert np.array_equal(bundle.predict_rows([start]).q, bundle.predict_rows([[start]]).q)
    long = [{"x": float(number), "c": "u"} for number in range(9)]
    assert np.array_equal(bundle.predict_rows([long]).q, bundle.predict_rows([long[-3:]]).q)
    assert not np.array_equal(bundle.predict_rows([long]).q, bundle.predict_rows([long[-2:]]).q)
    with pytest.raises(BundleError, match=r"states\[1\]: expected a map for each step, the present one last, got no s"):
        bundle.states([start, []])
    with pytest.raises(BundleError, match=r"states\[0\]\[1\]: expected feature ids among x, c"):
        bundle.states([[start, {"y": 1.0}]])


def codes(bundle: Any) -> dict[str, float]:
    """Returns the codes of the category's levels."""
    return {level: float(bundle.states([{"c": level}])[0, list(map(str, bundle.state_feature_ids)).index("c")])
            for level in bundle.levels["state"]["c"]}  # fmt: skip


def test_a_bundle_says_how_many_steps_it_reads(model: Path) -> None:
    manifest = json.loads((model / "manifest.json").read_bytes())
    assert (manifest["history"], len(manifest["state_feature_ids"])) == (3, 2)
    assert set(json.loads((model / "normalization.json").read_bytes())["state"]) == {"x", "c"}
    card = (model / "MODEL_CARD.md").read_text()
    assert "last 3 steps" in card
    assert "| input `values` | float32 | rows, 9 |" in card


def test_statistics_are_those_of_single_steps(log: Path, model: Path, tmp_path: Path) -> None:
    result = trained(config(log, tmp_path / "out", data={"history": 1}))
    without = Path(str(result.model))
    assert (without / "normalization.json").read_bytes() == (model / "normalization.json").read_bytes()
    assert "history" not in json.loads((without / "manifest.json").read_bytes())


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"data": {"history": 0}}, "data.history"),
        ({"data": {"history": 2, "embeddings": {"c": {"dim": 2}}}}, "absent with data.history above 1"),
    ],
)
def test_what_is_not_supported_is_refused(log: Path, tmp_path: Path, sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        checked(config(log, tmp_path / "out", **sections))


def test_the_recurrent_network_of_the_guide(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = re.findall("```python\n(from torch.+?)```", (ROOT / "docs/history.md").read_text(), re.DOTALL)
    (tmp_path / "steps_in_turn.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    network = {"network": "steps_in_turn:Recurrent", "minibatch_size": 32}
    result = trained(config(log, tmp_path / "out", training=network))
    bundle = load_bundle(str(result.model))
    weights = {name.removeprefix("network."): torch.from_numpy(value)
               for name, value in load_file(Path(str(result.model)) / "weights.safetensors").items()}  # fmt: skip
    states = steps_of(rows(20, seed=7))
    spec = parse_normalization(
        json.loads((Path(str(result.model)) / "normalization.json").read_bytes())["state"], where=""
    )
    values = torch.from_numpy(bundle.states(states))
    with torch.no_grad():
        steps = build_preprocessor(replace(spec, history=3))(values, ~values.isnan()).view(len(states), 3, -1)
        recurrent = torch.nn.GRU(steps.shape[2], 64, batch_first=True)
        recurrent.load_state_dict({name.removeprefix("recurrent."): value for name, value in weights.items()
                                   if name.startswith("recurrent.")})  # fmt: skip
        q = recurrent(steps)[0][:, -1] @ weights["values.weight"].T + weights["values.bias"]
    np.testing.assert_allclose(bundle.predict_rows(states).q, q, rtol=1e-4, atol=1e-5)


def test_a_feature_with_the_name_of_an_earlier_step_is_refused(tmp_path: Path) -> None:
    log = [row | {"state_features": {"x": 1.0 * number, "x (1 step ago)": 2.0 * number}}
           for number, row in enumerate(rows())]  # fmt: skip
    with pytest.raises(ConfigError, match=r"data\.history: expected .* got 3 and x \(1 step ago\)"):
        trained(config(write_lines(tmp_path / "log.jsonl", log), tmp_path / "out"))


@pytest.mark.parametrize("order", ["in order", "interleaved"])
def test_scores_are_those_of_the_steps_of_each_episode(model: Path, tmp_path: Path, order: str) -> None:
    log = rows(30, seed=4)
    expected = {(row["mdp_id"], row["sequence_number"]): steps for row, steps in zip(log, steps_of(log), strict=True)}
    if order == "interleaved":  # over two files
        log = [log[number] for number in np.random.default_rng(0).permutation(len(log))]
    for part in range(2):
        write_lines(tmp_path / f"rows/{part}.jsonl", log[part * len(log) // 2 : (part + 1) * len(log) // 2])
    tree = {"model": str(model), "data_path": str(tmp_path / "rows"), "policy": "greedy", "all_scores": True,
            "output_path": str(tmp_path / "scores.parquet")}  # fmt: skip
    score(check(ScoreConfig, tree))
    scores = pd.read_parquet(tmp_path / "scores.parquet")
    keys = list(zip(scores.mdp_id, scores.sequence_number, strict=True))
    assert keys == [(row["mdp_id"], row["sequence_number"]) for row in log]
    q = load_bundle(model).predict_rows([expected[key] for key in keys]).q
    np.testing.assert_allclose([[each["a"], each["b"]] for each in scores.scores], q, rtol=1e-5, atol=1e-6)


def test_rows_without_episodes_are_scored_as_starts(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = [{"state_features": row["state_features"]} for row in rows(20, seed=4)]
    tree = {"model": str(model), "data_path": str(write_lines(tmp_path / "rows.jsonl", log)), "policy": "greedy",
            "output_path": str(tmp_path / "scores.parquet")}  # fmt: skip
    score(check(ScoreConfig, tree))
    assert "rows need mdp_id and sequence_number" in caplog.text
    q = load_bundle(model).predict_rows([row["state_features"] for row in log]).q
    assert pd.read_parquet(tmp_path / "scores.parquet")["index"].tolist() == q.argmax(1).tolist()


def test_a_log_is_evaluated_with_the_steps_of_each_episode(log: Path, model: Path, tmp_path: Path) -> None:
    unseen = rows(60, seed=5)
    file = write_lines(tmp_path / "unseen.jsonl", unseen)
    tree = {"model": str(model), "data_path": str(file), "output_path": str(tmp_path / "e.json"), "gamma": 0.9,
            "write_scored_rows": True, "evaluation": {"bootstrap_resamples": 100, "final_fit_passes": 1}}  # fmt: skip
    evaluate(check(EvaluateConfig, tree))
    report = json.loads((tmp_path / "e.json").read_bytes())
    scored = [int(line) - 1 for lines in report["log"]["scored_lines"].values() for line in lines]
    assert 20 < len(scored) < len(unseen)
    states = [steps_of(unseen)[number] for number in scored]
    expected = load_bundle(model).predict_rows(states).propensities[:, 1].mean()
    assert report["model"]["actions"]["b"]["policy"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("other", ["one step", "two steps", "logged", "uniform"])
def test_policies_of_different_histories_are_compared(log: Path, model: Path, tmp_path: Path, other: str) -> None:
    path = other
    if "step" in other:
        history = {"one step": 1, "two steps": 2}[other]
        path = str(trained(config(log, tmp_path / "out", data={"history": history})).model)
    unseen = rows(60, seed=5)
    tree = {"model": path, "against": str(model), "data_path": str(write_lines(tmp_path / "unseen.jsonl", unseen)),
            "output_path": str(tmp_path / "e.json"), "gamma": 0.9, "write_scored_rows": True,
            "evaluation": {"bootstrap_resamples": 100, "final_fit_passes": 1}}  # fmt: skip
    evaluate(check(EvaluateConfig, tree))
    report = json.loads((tmp_path / "e.json").read_bytes())
    scored = [int(line) - 1 for lines in report["log"]["scored_lines"].values() for line in lines]
    states = [steps_of(unseen)[number] for number in scored]
    expected = load_bundle(model).predict_rows(states).propensities[:, 1].mean()
    assert report["against"]["actions"]["b"]["policy"] == pytest.approx(expected, rel=1e-4)
    if "step" in other:
        bundle = load_bundle(path)
        of_model = bundle.predict_rows(states if bundle.history > 1 else [steps[-1] for steps in states])
        share = of_model.propensities[:, 1].mean()
        assert report["model"]["actions"]["b"]["policy"] == pytest.approx(share, rel=1e-4)


def test_events_and_a_timeline_of_them_are_the_same_steps(log: Path, model: Path, tmp_path: Path) -> None:
    tree = {"timeline": {"inputTableName": str(log), "outputTableName": str(tmp_path / "made"), "actionDiscrete": True},
            "query": {"actions": ["a", "b"]}}  # fmt: skip
    run_timeline(check(TimelineConfig, tree))
    result = trained(config(tmp_path / "made", tmp_path / "out"))
    states = steps_of(rows(20, seed=6))
    expected = load_bundle(model).predict_rows(states).q
    np.testing.assert_allclose(load_bundle(str(result.model)).predict_rows(states).q, expected, rtol=1e-4, atol=1e-5)
