"""Exported models on logs. Their policies are known by hand: state feature k is the logarithm of action k's share."""

import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import commands
from helpers.bundles import bilinear_bundle, linear_bundle
from helpers.logs import episode_code, random_rows, write_lines
from helpers.runs import Runner, merged, over_candidates, trained
from scipy.special import softmax

from reagent_lite.cli import main_alone
from reagent_lite.errors import BundleError, ConfigError, DataError
from reagent_lite.evaluation.cpe import MODELED, WEIGHTED
from reagent_lite.rl.estimators import ESTIMATORS
from reagent_lite.rl.policies import EpsilonGreedy, Softmax, TargetPolicy
from reagent_lite.tasks.evaluate import Evaluated, evaluate
from workflows.evaluate import COMMAND

AB = ("a", "b")

ALL = 0.999999  # of the episodes are scored, but for the one of the largest hash, which is fitted to


def row(name: str, shares: Sequence[float], action: int, reward: float, propensity: float | None, at: int = 0,
        last: bool = True) -> dict[str, Any]:  # fmt: skip
    """A row whose state says what softmax(q) of the bundle of `known` is."""
    features = {str(k): math.log(share) for k, share in enumerate(shares)}
    return {
        "mdp_id": name, "sequence_number": at, "state_features": features, "action": "abcdefghijkl"[action],
        "reward": reward, "action_probability": propensity, "possible_actions": [1] * len(shares),
        "next_state_features": {} if last else features, "next_action": "" if last else "a",
        "possible_next_actions": [0] * len(shares) if last else [1] * len(shares),
    }  # fmt: skip


def by_hash(episodes: Iterable[str]) -> list[str]:
    """Names of episodes, that of the largest hash last: of a few it is the one that is fitted to."""
    return sorted(episodes, key=episode_code)


def names(count: int) -> list[str]:
    return by_hash(f"episode {i}" for i in range(count))


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """q = state."""
    return linear_bundle(tmp_path_factory.mktemp("bundles") / "known", np.eye(2), AB, (0, 1))


def evaluated(log: Path, model: Path, /, **keys: Any) -> tuple[Evaluated, dict[str, Any]]:
    evaluation = {
        "bootstrap_resamples": 200,
        "models": {"final_fit_passes": 1},
        "held_out_share": ALL,
        **keys.pop("evaluation", {}),
    }
    settings = {"gamma": 0.9, **keys, "evaluation": evaluation}
    return commands.evaluated(model, str(log), log.parent / "report" / "e.json", **settings)


def estimates(report: dict[str, Any], key: str = "model") -> dict[str, dict[str, Any]]:
    return {
        estimate["name"]: estimate
        for family in ("one_step", "sequential")
        for estimate in report[key]["cpe"]["outcomes"][0][family]["estimates"]
    }


def three_rows(tmp_path: Path) -> Path:
    """learning.md: propensities .2, .5, .4; rewards 4, 5, 7; policy .4, .3, .7 of the logged action."""
    a, b, c, other = names(4)
    rows = [
        row(a, (0.4, 0.6), 0, 4, 0.2), row(b, (0.7, 0.3), 1, 5, 0.5), row(c, (0.7, 0.3), 0, 7, 0.4),
        row(other, (0.5, 0.5), 0, 100, 0.5),
    ]  # fmt: skip
    return write_lines(tmp_path / "log.jsonl", [{**row, "metrics": {"cost": -2 * row["reward"]}} for row in rows])


@pytest.mark.parametrize(
    ("exported", "keys", "shown", "expected"),
    [
        # weights .4/.2 = 2, .3/.5 = .6, .7/.4 = 1.75: (8 + 3 + 12.25) / 3
        (Softmax(1.0), {}, "softmax of q at temperature 1", 7.75),
        # greedy takes b, a, a; it agrees with the log (a, b, a) in the third row: 7 / .4 / 3
        (Softmax(1.0), {"policy": "greedy"}, "greedy", 7 / 0.4 / 3),
        # at temperature .5 the shares are squared: .16 / .52, .09 / .58, .49 / .58
        (Softmax(1.0), {"policy": "softmax", "temperature": 0.5}, "softmax of q at temperature 0.5",
         (0.16 / 0.52 / 0.2 * 4 + 0.09 / 0.58 / 0.5 * 5 + 0.49 / 0.58 / 0.4 * 7) / 3),
        # the model's own: .05 where it does not agree with the log, .95 where it does
        (EpsilonGreedy(0.1), {}, "epsilon-greedy at epsilon 0.1",
         (0.05 / 0.2 * 4 + 0.05 / 0.5 * 5 + 0.95 / 0.4 * 7) / 3),
        # no model: weights .5/.2, .5/.5, .5/.4
        (Softmax(1.0), {"model": "uniform", "actions": ["a", "b"]}, "uniform", (10 + 5 + 8.75) / 3),
    ],
)  # fmt: skip
def test_which_policy(
    tmp_path: Path, exported: TargetPolicy, keys: dict[str, Any], shown: str, expected: float
) -> None:
    model = linear_bundle(tmp_path / "model", np.eye(2), AB, (0, 1), policy=exported)
    outcome, report = evaluated(three_rows(tmp_path), model, **keys)
    scores = [outcome.scores[f"CPE/{name}/IPS_Reward"] for name in ("Reward", "cost")]
    assert scores == pytest.approx([expected, -2 * expected], abs=1e-5)
    assert report["model"]["actions"]["b"]["logged"] == pytest.approx(1 / 3)
    assert shown in report["model"]["policy"]


def test_reports_without_a_name_of_their_own_lie_beside_the_model(tmp_path: Path) -> None:
    """Another log of the same name, another model in the same place, another policy: none overwrites the first."""
    log, model = three_rows(tmp_path), tmp_path / "run" / "model"

    def report(**keys: Any) -> Path:
        return Path(evaluated(log, model, output_path=None, **keys)[0].report)

    linear_bundle(model, np.eye(2), AB, (0, 1))
    reports = [report(), report(), report(policy="greedy")]
    assert reports[0] == reports[1]
    assert (reports[0].parent, reports[0].name[:15]) == (tmp_path / "run", "evaluation_log_")
    linear_bundle(model, 2 * np.eye(2), AB, (0, 1))
    reports.append(report())
    log.write_text(log.read_text().replace('"reward": 4', '"reward": 3'))
    assert len({*reports, report()}) == 4


def bandit(tmp_path: Path, count: int = 400) -> Path:
    """One step; a pays 1 and b pays 3, taken alike often; feature 0 is always 1, so that W is a policy's logits."""
    actions = np.random.default_rng(0).integers(2, size=count).tolist()
    rows = [row(str(i), (math.e, 1.0), action, (1.0, 3.0)[action], 0.5) for i, action in enumerate(actions)]
    return write_lines(tmp_path / "bandit.jsonl", rows)


def constant(folder: Path, shares: Sequence[float], order: tuple[str, ...] = AB) -> Path:
    """A model that takes its choices with the same shares in every state of `bandit`."""
    return linear_bundle(folder, np.array([[math.log(share), 0] for share in shares]), order, (0, 1))


def test_two_models_and_their_difference(tmp_path: Path) -> None:
    """.2 * 1 + .8 * 3 = 2.6 against .8 * 1 + .2 * 3 = 1.4, whose actions stand in another order."""
    model, against = constant(tmp_path / "one", (0.2, 0.8)), constant(tmp_path / "other", (0.2, 0.8), ("b", "a"))
    outcome, report = evaluated(bandit(tmp_path), model, against=str(against),
                             evaluation={"held_out_share": 0.5, "models": {"final_fit_passes": 150}})  # fmt: skip
    for name in ("Direct_Method_Reward", "Fitted_Q_Evaluation", "Doubly_Robust_Reward", "MAGIC"):
        assert estimates(report)[name]["figure"]["value"] == pytest.approx(2.6, abs=0.02)
        assert estimates(report, "against")[name]["figure"]["value"] == pytest.approx(1.4, abs=0.02)
        value, low, high = outcome.difference[f"CPE/Reward/{name}"]
        assert value == pytest.approx(1.2, abs=0.03)
        assert 1 < (low or 0) <= value + 1e-6 <= (high or 0) + 2e-6
    assert report["difference"]["Reward"]["Self_Normalized_IPS_Reward"]["reason"] == "model is better"


def test_the_same_policy_with_actions_in_another_order(known: Path, tmp_path: Path) -> None:
    """Masks and probabilities go by name: nothing differs, also where only one action is possible."""
    same = linear_bundle(tmp_path / "same", np.eye(2)[::-1].copy(), ("b", "a"), (0, 1))
    rows = [row(name, (0.3, 0.7), i % 2, i, 0.5) for i, name in enumerate(names(31))]
    for i in range(0, 31, 3):
        rows[i] |= {"possible_actions": [1 - i % 2, i % 2], "action_probability": 1.0}
    outcome, report = evaluated(write_lines(tmp_path / "log.jsonl", rows), known, against=str(same))
    weighted = [name for name, estimator in ESTIMATORS.items() if not estimator.model]
    np.testing.assert_allclose([outcome.difference[f"CPE/Reward/{name}"] for name in weighted], 0, atol=1e-6)
    expected = sum(i * (1 if i % 3 == 0 else (0.6, 1.4)[i % 2]) for i in range(30)) / 30
    assert estimates(report)["IPS_Reward"]["figure"]["value"] == pytest.approx(expected, abs=1e-5)


def choice(
    name: str, choices: list[dict[str, float]], action: int, propensity: float | None, reward: float
) -> dict[str, Any]:
    """A row of candidates that ends its episode, for the model q_k = f_k * s with one feature each, s = 1."""
    return {
        "mdp_id": name, "sequence_number": 0, "state_features": {"0": 1.0}, "action": choices[action],
        "reward": reward, "action_probability": propensity, "possible_actions": choices,
        "next_state_features": {}, "next_action": {}, "possible_next_actions": [],
    }  # fmt: skip


def test_candidates(tmp_path: Path) -> None:
    """Softmax over the list's features, here logarithms of shares, against the shares in a column; as learning.md.

    The column's lists are as long as possible_actions; the fourth row is fitted to.
    """
    model = bilinear_bundle(tmp_path / "model", np.ones((1, 1)), (0,), (7,))
    shares = [(0.4, 0.6), (0.2, 0.3, 0.5), (0.7, 0.3), (1.0,)]
    logged = ((0, 0.2, 4.0), (1, 0.5, 5.0), (0, 0.4, 7.0), (0, 1.0, 9.0))
    rows = [choice(name, [{"7": math.log(share)} for share in of_row], *values) | {"p": of_row}
            for name, of_row, values in zip(names(4), shares, logged, strict=True)]  # fmt: skip
    outcome, report = evaluated(write_lines(tmp_path / "log.jsonl", rows), model, against="column:p")
    assert outcome.scores["CPE/Reward/IPS_Reward"] == pytest.approx(7.75, abs=1e-5)
    assert (outcome.difference or {})["CPE/Reward/IPS_Reward"] == pytest.approx([0, 0, 0], abs=1e-5)
    choices = report["model"]["candidates"]
    assert (report["model"]["actions"], choices["rows"]) == ({}, 3)
    assert choices["probability"] == pytest.approx((0.4 + 0.3 + 0.7) / 3, abs=1e-5)
    rows[1]["p"] = (0.5, 0.5)
    with pytest.raises(DataError, match="in p as possible_actions has, got 2"):
        evaluated(write_lines(tmp_path / "log.jsonl", rows), Path("column:p"))


def test_without_propensities(known: Path, tmp_path: Path) -> None:
    log = hidden_log(tmp_path, 31, 3)
    rows = [json.loads(line) for line in log.read_text().splitlines()][:-3]  # the last episode is fitted to
    outcome, report = evaluated(log, known, against=str(known))
    assert {name for name, each in estimates(report).items() if "no propensity" in each["reason"]} == set(WEIGHTED)
    verdicts = {name: "do not use" if name in WEIGHTED else "support only" for name in ESTIMATORS}
    assert {name: each["verdict"] for name, each in estimates(report).items()} == verdicts
    returns = [0.9 ** row["sequence_number"] * row["reward"] for row in rows]
    assert outcome.scores["CPE/Reward/Logged_Reward"] == pytest.approx(np.mean([row["reward"] for row in rows]))
    assert outcome.scores["CPE/Reward/Logged_Return"] == pytest.approx(sum(returns) / 30)
    assert report["difference"]["Reward"]["IPS_Reward"]["value"] is None
    assert any("no propensity" in warning for warning in outcome.warnings)


def hidden_log(tmp_path: Path, episodes: int, length: int, propensity: float | None = None) -> Path:
    """A log by softmax of the state's two features, with the propensity of its first row alone; b pays 1."""
    rng = np.random.default_rng(5)
    steps = [*itertools.product(names(episodes), range(length))]
    shares = rng.uniform(0.2, 0.8, len(steps)).tolist()
    actions = (rng.random(len(steps)) > shares).astype(int).tolist()
    rows = [row(name, (share, 1 - share), action, float(action), None, at, at == length - 1)
            for (name, at), share, action in zip(steps, shares, actions, strict=True)]  # fmt: skip
    return write_lines(tmp_path / "log.jsonl", [rows[0] | {"action_probability": propensity}, *rows[1:]])


def test_estimated_propensities(known: Path, tmp_path: Path) -> None:
    """The policy is the logging one: weights are about 1, and the estimate is near the mean return."""
    log = hidden_log(tmp_path, 400, 3, propensity=0.9)
    estimated: dict[str, Any] = {"propensities": "estimate", "held_out_share": 0.5}
    outcome, report = evaluated(log, known, against="logged", evaluation=estimated)
    overlap = report["model"]["cpe"]["overlap"]
    assert (overlap["calibration"]["calibrated"], overlap["calibration"]["rows"]) == (True, 1200)
    assert overlap["mean_weight"]["value"] == pytest.approx(1, abs=0.05)
    estimate = outcome.scores["CPE/Reward/Weighted_Per_Decision_Importance_Sampling"]
    assert estimate == pytest.approx(outcome.scores["CPE/Reward/Logged_Return"], abs=0.3)
    assert [
        each["reason"]
        for each in (report["decision"], *estimates(report).values())
        if "propensities are estimated; calibrated" not in each["reason"]
    ] == []
    assert any(warning.startswith("1 of 1,200 rows have a propensity") for warning in outcome.warnings)
    assert "Calibration of the estimated" in Path(outcome.page).read_text()


def test_estimated_propensities_of_candidates(tmp_path: Path) -> None:
    """Two or three candidates of a feature f, taken by the softmax of f s, which is the model's policy too."""
    model, rng = bilinear_bundle(tmp_path / "model", np.ones((1, 1)), (0,), (7,)), np.random.default_rng(2)
    lists = [rng.normal(size=2 + number % 2) for number in range(1500)]
    logged = [int(rng.choice(len(features), p=softmax(features))) for features in lists]
    rows = [choice(str(number), [{"7": float(value)} for value in features], index, None, float(features[index]))
            for number, (features, index) in enumerate(zip(lists, logged, strict=True))]  # fmt: skip
    _, report = evaluated(write_lines(tmp_path / "log.jsonl", rows), model, policy="softmax", temperature=1.0,
                          evaluation={"propensities": "estimate", "held_out_share": 0.5})  # fmt: skip
    figures, overlap = report["model"]["candidates"], report["model"]["cpe"]["overlap"]
    assert overlap["calibration"]["calibrated"]
    exact = np.mean([softmax(features)[index] for features, index in zip(lists, logged, strict=True)])
    assert figures["propensity"] == pytest.approx(exact, abs=0.02)
    assert overlap["mean_weight"]["value"] == pytest.approx(1, abs=0.03)


def test_one_episode(known: Path, tmp_path: Path) -> None:
    """It is scored; there is none to fit to, and no interval."""
    rows = [row("only", (0.5, 0.5), 0, 2.0, 0.25, 0, last=False), row("only", (0.5, 0.5), 1, 1.0, 0.5, 1)]
    by_name = estimates(evaluated(write_lines(tmp_path / "log.jsonl", rows), known)[1])
    # weights 2 and 2 * 1: 2 * 2 + 0.9 * 2 * 1
    expected = {"value": pytest.approx(5.8, abs=1e-5), "low": None, "high": None}
    assert by_name["Per_Decision_Importance_Sampling"]["figure"] == expected
    assert {name for name, each in by_name.items() if "no other episode" in each["reason"]} == set(MODELED)


def test_many_actions_that_the_log_never_has_are_counted(tmp_path: Path) -> None:
    """a and b are logged; c has a share of 0.2, d to l share 0.4: eight are named, the likeliest first.

    An unknown action is not the first action.
    """
    model = linear_bundle(tmp_path / "twelve", np.eye(12), tuple("abcdefghijkl"), tuple(range(12)))
    rows = [row(str(i), (0.2, 0.2, 0.2, *[0.4 / 9] * 9), i % 2, 1.0, 0.5) for i in range(61)]
    outcome, _ = evaluated(write_lines(tmp_path / "log.jsonl", [*rows[1:], rows[0] | {"action": None}]), model)
    assert "not scored: 1 episode with an unknown action" in outcome.warnings
    first, *others, rest = (warning for warning in outcome.warnings if "no row" in warning)
    assert first.startswith("model takes 'c' in 20.0%")
    assert ["in 4.4%" in warning for warning in others] == [True] * 7
    assert re.match(r"model takes 2 more actions.*8\.9%", rest)


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("keys", "error", "said"),
    [
        ({"data_path": "other.jsonl"}, DataError, 'actions a, b, .* got "c"'),
        ({"model": "candidates"}, DataError, "an object .* in possible_actions, got 1"),
        ({"against": "candidates"}, BundleError, "a, b, got candidates"),
        ({"model": "none"}, DataError, "features 8, 9, got 0, 1"),
        ({"model": "column:new", "actions": ["a", "b"]}, DataError, r"bandit.jsonl:1: expected a column 'new'"),
    ],
)
def test_what_does_not_fit(
    known: Path,
    tmp_path: Path,
    keys: dict[str, Any],
    error: type[Exception],
    said: str,
) -> None:
    write_lines(Path("other.jsonl"), [row("x", (0.5, 0.5), 2, 1.0, 0.5)])
    bilinear_bundle(Path("candidates"), np.ones((1, 1)), (0,), (7,))
    linear_bundle(Path("none"), np.zeros((2, 2)), AB, (8, 9))
    with pytest.raises(error, match=said):
        evaluated(bandit(tmp_path, 4), known, **keys)


def test_features_that_the_log_lacks_or_the_model_does_not_know(tmp_path: Path) -> None:
    """The log has 0 and 1."""
    outcome, _ = evaluated(bandit(tmp_path, 40), linear_bundle(tmp_path / "some", np.zeros((2, 3)), AB, (1, 5, 6)))
    unknown, missing = outcome.warnings
    assert unknown.endswith("left out: 0")
    assert re.fullmatch("2 of 3 state features.*: 5, 6", missing)
    assert outcome.scores["CPE/Reward/IPS_Reward"] == pytest.approx(outcome.scores["CPE/Reward/Logged_Reward"])


def test_a_model_on_the_log_that_it_learned_from(small: dict[str, Any], tmp_path: Path) -> None:
    """Discount and network are those of its config; a warning says that it has seen the log.

    Rows 2 units of time apart at 4 units a step: a return is discounted by sqrt(0.25) a row.
    """
    log, rows = Path(small["training_data_path"]), [{**row, "time_diff": 2} for row in random_rows(200)]
    write_lines(log, rows)
    rl = {"gamma": 0.25, "use_seq_num_diff_as_time_diff": True, "time_diff_unit_length": 4.0}
    model = Path(str(trained({**small, "rl": rl}).model))
    outcome, _ = evaluated(log, model, gamma=None)
    (warning,) = outcome.warnings
    assert "trained on this very log" in warning
    assert evaluated(log, model, gamma=None)[0].scores == outcome.scores  # the same seed gives the same numbers
    *_, fitted = by_hash({row["mdp_id"] for row in rows})
    returns = [0.5 ** row["sequence_number"] * row["reward"] for row in rows if row["mdp_id"] != fitted]
    assert outcome.scores["CPE/Reward/Logged_Return"] == pytest.approx(sum(returns) / 19, abs=1e-6)
    # the model keeps the median of its log, to be compared with other logs
    kept = json.loads((model / "evaluation.json").read_bytes())["time_discount"]
    assert kept == {"time_diff": 2.0, "unit_length": 4.0, "discount": 0.5}
    write_lines(tmp_path / "minutes.jsonl", [{**row, "time_diff": 2 / 60} for row in rows])
    assert any("time_diff is 0.0333333 here and was 2 in training" in warning
               for warning in evaluated(tmp_path / "minutes.jsonl", model, gamma=None)[0].warnings)  # fmt: skip
    write_lines(tmp_path / "ms.jsonl", [{**row, "time_diff": 2000} for row in rows])
    with pytest.raises(DataError, match=r"a discount below 0.001 in 100%.*unit of the log that the model was trained"):
        evaluated(tmp_path / "ms.jsonl", model, gamma=None)


@pytest.mark.parametrize(
    ("flags", "data_path", "env"),
    [(("--data", "123"), "123", None), (("--env", "cartpole_v0"), "", "cartpole_v0"),
     (("--set", "simulation.env=cartpole_v0"), "", "cartpole_v0")],
)  # fmt: skip
def test_flags_without_a_config(
    flags: tuple[str, str], data_path: str, env: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path that looks like JSON is a path all the same."""
    assert main_alone(COMMAND, evaluate, ["--model", "null", *flags, "--dry_run=all"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert (tree["model"], tree["data_path"], tree["evaluation"]["held_out_share"]) == ("null", data_path, 0.5)
    assert (tree["simulation"] or {}).get("env") == env
    assert env is None or tree["simulation"]["evaluation_episodes"] == 1000


def test_the_command_line_alone(run: Runner, known: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags win over the config; the last line is JSON; a model that is not there is one message."""
    log = three_rows(tmp_path)
    tree = {"model": "nowhere", "evaluation": {"bootstrap_resamples": 100, "held_out_share": ALL}}
    done = run("evaluate", tree | {"gamma": 1.0}, "--model", str(known), "--data", str(log))
    assert done.ok.outcome["scores"]["CPE/Reward/IPS_Reward"] == pytest.approx(7.75, abs=1e-5)
    assert re.search(r"\n +(Self Normalized )?IPS", done.err), done.err
    for arguments, words in (
        (["--model", "nowhere", "--data", str(log)], "^bundle error:\nnowhere: "),
        ([], "(?s)(?=.*Or give --model)(?=.*data_path: expected a log)"),
    ):
        assert main_alone(COMMAND, evaluate, arguments) == 2
        out, err = capsys.readouterr()
        assert (out, bool(re.search(words, err))) == ("", True)


@pytest.mark.parametrize("parametric", [False, True])
def test_training_and_this_workflow_estimate_alike(small: dict[str, Any], tmp_path: Path, parametric: bool) -> None:
    """The same episodes, order of rows and first weights: what differs is the rounding of the exported model."""
    settings = {
        "held_out_share": 0.5,
        "models": {"final_fit_passes": 30, "minibatch_size": 64},
        "bootstrap_resamples": 100,
    }
    tree = merged(small, {"evaluation": settings, **(over_candidates(tmp_path) if parametric else {})})
    model = Path(str(trained(tree).model))
    _, report = evaluated(Path(tree["training_data_path"]), model, gamma=None, evaluation=settings)
    expected = estimates({"model": json.loads((model / "evaluation.json").read_text())})
    evaluated_alone = estimates(report)
    assert evaluated_alone.keys() == expected.keys() == ESTIMATORS.keys()
    for name, estimate in expected.items():
        for key in ("figure", "difference"):
            assert evaluated_alone[name][key] == pytest.approx(estimate[key], rel=2e-3, abs=2e-4), name


def given(tmp_path: Path, rows: list[dict[str, Any]], **keys: Any) -> tuple[Evaluated, dict[str, Any]]:
    """Evaluates policies that are no models."""
    usual = {"gamma": None, "actions": list(AB), "evaluation": {"held_out_share": 0.5, **keys.pop("evaluation", {})}}
    return evaluated(write_lines(tmp_path / "log.jsonl", rows), Path(keys.pop("model")), **usual | keys)


def bandit_rows(**column: list[Any]) -> list[dict[str, Any]]:
    """Propensities .2, .5, .4 of a, b, a; rewards 4, 5, 7; columns by name."""
    logged = zip(names(4)[:3], (0, 1, 0), (4, 5, 7), (0.2, 0.5, 0.4), strict=True)
    rows = [row(name, (0.5, 0.5), *values) for name, *values in logged]
    return [row | {key: values[number] for key, values in column.items()} for number, row in enumerate(rows)]


def test_a_policy_in_a_column_against_the_logging_policy(tmp_path: Path) -> None:
    """Weights .4/.2, .3/.5, .7/.4: (8 + 3 + 12.25) / 3 = 7.75; the logging policy has the mean, 16 / 3."""
    rows = bandit_rows(new=[0.4, 0.3, 0.7])
    outcome, report = given(tmp_path, rows, model="column:new", against="logged", write_scored_rows=True)
    assert (outcome.episodes, outcome.rows, report["gamma"]) == (3, 3, 1.0)
    assert outcome.scores["CPE/Reward/IPS_Reward"] == pytest.approx(7.75, abs=1e-5)
    assert outcome.scores["CPE/Reward/Logged_Reward"] == pytest.approx(16 / 3)
    assert (outcome.difference or {})["CPE/Reward/IPS_Reward"][0] == pytest.approx(7.75 - 16 / 3, abs=1e-5)
    assert "only the probability of the logged action" in estimates(report)["Direct_Method_Reward"]["reason"]
    assert report["log"]["scored_lines"] == {str(tmp_path / "log.jsonl"): [1, 2, 3]}
    assert "column:new" in Path(outcome.page).read_text()


def test_a_column_of_a_models_probabilities_is_that_model(known: Path, tmp_path: Path) -> None:
    """Events, whose column goes through the timeline; all estimates agree, those by fitted models as well."""
    rng = np.random.default_rng(0)
    shares, actions = rng.uniform(0.1, 0.9, 120).round(4).tolist(), rng.integers(2, size=120)
    events = [
        {"mdp_id": str(number // 3), "sequence_number": number % 3, "action": AB[action], "terminal": number % 3 == 2,
         "state_features": {"0": math.log(share), "1": math.log(1 - share)}, "possible_actions": list(AB),
         "reward": float(rng.normal()), "action_probability": 0.5, "p": {"a": share, "b": 1 - share}}
        for number, (share, action) in enumerate(zip(shares, actions, strict=True))
    ]  # fmt: skip
    settings = {"held_out_share": 0.5, "models": {"final_fit_passes": 20}, "max_horizon": 5}
    log = write_lines(tmp_path / "events.jsonl", events)
    _, report = evaluated(log, known, against="column:p", evaluation=settings)
    by_column = estimates(report, "against")
    for name, estimate in estimates(report).items():
        assert by_column[name]["figure"] == pytest.approx(estimate["figure"], rel=1e-3, abs=1e-4), name
    assert report["against"]["actions"]["a"]["policy"] == pytest.approx(report["model"]["actions"]["a"]["policy"])


def test_a_column_is_not_known_at_states_that_are_no_rows(tmp_path: Path) -> None:
    """The first row of each episode leads to another state than the second row has; a row's reward needs none."""
    rows = [
        row(name, ((0.3, 0.7), (0.6, 0.4))[at], at, 1.0, 0.5, at, at == 1) | {"p": {"a": 0.5, "b": 0.5}}
        for name in names(6)
        for at in range(2)
    ]
    _, report = given(tmp_path, rows, model="column:p", gamma=0.9)
    unknown = {name for name, each in estimates(report).items() if "the next state of 6 rows" in each["reason"]}
    assert unknown == {name for name, estimator in ESTIMATORS.items() if estimator.model and estimator.sequential}


@pytest.mark.parametrize(
    ("usual", "value", "possible", "said"),
    [
        (0.5, "x", [0, 1], "2: .* number in p, got .x."),
        (0.5, None, [0, 1], "2: .* in p, got null"),
        (0.5, -0.1, [0, 1], "2: .* from 0 to 1 in p, got -0.1"),
        (0.5, 1.5, [0, 1], "2: .* from 0 to 1 in p, got 1.5"),
        ({"a": 1.0}, {"a": 0.5, "b": 0.4}, [1, 1], "2: .* sum is 1, got 0.9"),
        ({"a": 1.0}, {"a": 0.5, "c": 0.5}, [1, 1], "2: .* of a, b in p, got .*c"),
        ({"a": 1.0}, {"a": 0.5, "b": 0.5}, [0, 1], "2: .* not possible, got 0.5"),
        ([1.0, 0.0], [0.5, 0.5], [0, 1], r"1: .* in p, got \[1.0, 0.0\]"),
    ],
)
def test_probabilities_that_are_none(tmp_path: Path, usual: Any, value: Any, possible: list[int], said: str) -> None:
    rows = bandit_rows(p=[usual, value, usual], possible_actions=[[1, 1], possible, [1, 1]])
    with pytest.raises(DataError, match=f"log.jsonl:{said}"):
        given(tmp_path, rows, model="column:p")


def test_episodes_of_several_rows_need_a_discount_without_a_model(tmp_path: Path) -> None:
    rows = [row("0", (0.5, 0.5), 0, 1.0, 0.5, at, at == 1) for at in range(2)]
    with pytest.raises(ConfigError, match="gamma: expected a number"):
        given(tmp_path, rows, model="logged")
    outcome, _ = given(tmp_path, rows, model="logged", gamma=0.5)
    assert outcome.scores["CPE/Reward/Per_Decision_Importance_Sampling"] == 1.5


@pytest.mark.parametrize(("kind", "events"), [("csv", True), ("struct", False), ("map", True)])
def test_probabilities_in_other_formats(tmp_path: Path, kind: str, events: bool) -> None:
    """JSON text in CSV, structs and maps in Parquet, also through a timeline: 7.75 as above."""
    column = [{"a": 0.4, "b": 0.6}, {"a": 0.7, "b": 0.3}, {"a": 0.7, "b": 0.3}]
    rows = [*bandit_rows(p=column), row(names(4)[-1], (0.5, 0.5), 0, 100, 0.5) | {"p": {"a": 1.0, "b": 0.0}}]
    frame = pd.DataFrame(rows).drop(columns="next_state_features")
    if events:
        frame = frame[[name for name in frame if "next" not in name]].assign(terminal=True)
    log = tmp_path / f"log.{'csv' if kind == 'csv' else 'parquet'}"
    if kind == "csv":
        frame.map(lambda value: json.dumps(value) if isinstance(value, dict | list) else value).to_csv(log, index=False)
    else:
        as_map = {"p": pa.map_(pa.string(), pa.float64())} if kind == "map" else {}
        pq.write_table(pa.table({name: pa.array(frame[name].tolist(), as_map.get(name)) for name in frame}), log)
    scores = evaluated(log, Path("column:p"), gamma=None, actions=list(AB))[0].scores
    assert scores["CPE/Reward/IPS_Reward"] == pytest.approx(7.75, abs=1e-5)
