"""Exported models that play: exact values, pages, faults, and returns beside the estimates of a log."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.bundles import bilinear_bundle, linear_bundle
from helpers.logs import write_lines
from helpers.played import around, gridworld_log, played, world
from helpers.reports import UNDEFINED, Page, game
from helpers.simulated import skip_without_gpu
from oracles import gridworld

from reagent_lite.errors import ReagentLiteError
from reagent_lite.evaluation.interval import Interval
from reagent_lite.evaluation.played import MODEL, RANDOM, EstimatedReturn
from reagent_lite.tasks.evaluate import Evaluated


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worlds")


@pytest.mark.parametrize(
    ("epsilon", "keys"),
    [(0.5, {}), (0.0, {}), (0.2, {"policy": "greedy"}), (0.2, {"policy": "softmax", "temperature": 2.0})],
)
def test_exact_values_are_inside_the_intervals(
    tmp_path: Path, worlds: Path, epsilon: float, keys: dict[str, Any]
) -> None:
    """Models whose softmax is epsilon-greedy around their largest value; at twice the temperature its square root."""
    policy = gridworld.epsilon_greedy(0.0 if keys.get("policy") == "greedy" else epsilon)
    if "temperature" in keys:
        policy = np.sqrt(policy) / np.maximum(np.sqrt(policy).sum(1, keepdims=True), 1e-30)
    truth = float(gridworld.policy_values(policy)[gridworld.START])
    _, report = played(tmp_path, world(worlds, epsilon), "gridworld", 4000,
                       evaluation={"confidence_level": 0.99}, **keys)  # fmt: skip
    earned, random = report["model"]["simulated"], report["simulation"]["random"]
    assert around(earned["discounted_return"], truth, 0.25)
    assert around(random["discounted_return"], 0.332371, 0.1)
    # 10 on entering the goal, which nothing but the limit of 1000 steps keeps anyone from
    assert earned["return"]["value"] == pytest.approx(10 * (1 - earned["truncated_share"]))
    assert epsilon > 0 or earned["mean_length"] < 8.5  # 8 steps, but for slips


def test_a_limit_and_a_discount_by_hand(tmp_path: Path) -> None:
    """No pole falls within 5 steps: 1 + .5 + .25 + .125 + .0625, always, at a constant that does not matter.

    Returns that do not vary have no interval.
    """
    model = linear_bundle(tmp_path / "model", np.zeros((2, 1)), ("left", "right"), (2,))
    settings = {"time_limit": 5, "env_parameters": {"gravity": 9.5}}
    outcome, report = played(tmp_path, model, "cartpole_v0", 50, gamma=0.5, simulation=settings)
    assert report["model"]["simulated"] == {
        "return": {"value": 5, "low": None, "high": None},
        "discounted_return": {"value": 1.9375, "low": None, "high": None},
        "mean_length": 5, "truncated_share": 1,
    }  # fmt: skip
    assert (outcome.episodes, outcome.rows, outcome.difference) == (0, 0, None)
    assert outcome.scores["simulation/discounted_return/mean"] == 1.9375


def test_fixed_actions_are_candidates_too(tmp_path: Path) -> None:
    """CartPole's actions as features (1, 0) and (0, 1): the same decisions as by name, the same luck and return."""
    weight = np.array([[-8.0, -0.5], [8.0, 0.25]])
    named = linear_bundle(tmp_path / "named", weight, ("left", "right"), (2, 0))
    listed = bilinear_bundle(tmp_path / "listed", weight, (2, 0), (0, 1))
    by_name, other = (played(tmp_path, model, "cartpole_v0", 300)[1]["model"]["simulated"] for model in (named, listed))
    assert by_name["return"]["value"] > 22
    assert other["return"]["value"] == pytest.approx(by_name["return"]["value"], rel=1e-3)


def test_the_difference_of_two_models(tmp_path: Path, worlds: Path) -> None:
    """4.003114 - 1.028097; that of near policies is far narrower than two intervals apart from each other."""
    near_value = float(gridworld.policy_values(gridworld.epsilon_greedy(0.22))[gridworld.START])
    for epsilon, value, widest in ((0.8, 1.028097, 0.25), (0.22, near_value, 0.1)):
        keys: dict[str, Any] = {"against": str(world(worlds, epsilon)), "evaluation": {"confidence_level": 0.99}}
        outcome, report = played(tmp_path, world(worlds, 0.2), "gridworld", 4000, **keys)
        figure = report["simulation"]["difference"]["discounted_return"]
        assert around(figure, 4.003114 - value, widest)
        assert outcome.difference["simulation/discounted_return"] == [figure["value"], figure["low"], figure["high"]]
    alone = report["model"]["simulated"]["discounted_return"]
    assert figure["high"] - figure["low"] < 0.6 * 2**0.5 * (alone["high"] - alone["low"])


LOUD = """
#define NUM_ACTIONS 2
#define OBSERVATION_SIZE 2
#define TIME_LIMIT 3
#define PARAMETERS(P) P(shown, 1.0f) P(paid, 1.0f)
#define STATE(FIELD, ARRAY) FIELD(int, left)
DECLARE_ENVIRONMENT
DEVICE void reset(State &s, Random &random) { s.left = 3; }
DEVICE void observe(const State &s, float *observation) {
  observation[0] = observation[1] = shown * float(s.left) * 1e30f;
}
DEVICE float step(State &s, int action, Random &random, bool &terminated) {
  s.left -= 1;
  terminated = false;
  return paid * 1e30f * (action == 1 ? 1e-30f : 2e-30f);
}
"""


@pytest.mark.parametrize(
    ("policy", "parameters", "said"),
    [
        # 10 times 3e38 is infinite
        ("softmax", {"shown": 1e8}, "probabilities of every choice"),
        ("greedy", {"shown": 1e8}, "probabilities of every choice"),
        ("softmax", {"shown": 1e20}, "observations of loud: expected finite"),
        ("greedy", {"paid": 1e30}, "rewards of loud: expected finite"),
    ],
)
def test_values_that_are_not_finite(tmp_path: Path, policy: str, parameters: dict[str, float], said: str) -> None:
    """Action 1 leads by 1e30 times a positive state, and always is what a softmax takes."""
    (tmp_path / "loud.cuh").write_text(LOUD)
    weight = np.array([[1.0, -1.0], [1.0, -1.0]]) * (10.0 if said.startswith("prob") else 1e-30)
    model = linear_bundle(tmp_path / "model", weight, ("0", "1"), (0, 1))
    with pytest.raises(ReagentLiteError, match=said):
        played(
            tmp_path, model, str(tmp_path / "loud.cuh"), 10, policy=policy, simulation={"env_parameters": parameters}
        )


@pytest.fixture(scope="module")
def cart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pushes right where the pole leans right."""
    weight = np.array([[0.0, 0.0, -8.0, -2.0], [0.0, 0.0, 8.0, 2.0]])
    return linear_bundle(tmp_path_factory.mktemp("cart") / "model", weight, ("left", "right"), (0, 1, 2, 3))


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("env", "keys", "said"),
    [
        ("no/such.cuh", {}, r"simulation\.env: expected a \.cuh file"),
        ("cartpole_v0", {"simulation": {"env_parameters": {"gravty": 1}}}, r"simulation\.env_parameters: .* 'gravity'"),
        ("gridworld", {}, "actions L, R, U, D of gridworld, got left, right"),
        ("mountain_car", {}, "features among 0 to 1 of mountain_car, got 2, 3"),
        ("recommend", {}, "expected a model of candidates"),
        pytest.param("cartpole_v0", {"simulation": {"backend": "cuda"}}, ".",
                     marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
        ("cartpole_v0", {"against": "more"}, "against .*more: .* features among 0 to 3 of cartpole_v0, got 4"),
    ],
)  # fmt: skip
def test_what_does_not_fit(tmp_path: Path, cart: Path, env: str, keys: dict[str, Any], said: str) -> None:
    linear_bundle(Path("more"), np.zeros((2, 5)), ("right", "left"), (0, 1, 2, 3, 4))
    with pytest.raises(ReagentLiteError, match=said) as raised:
        played(tmp_path, cart, env, **keys)
    assert raised.value.exit_code == 2


@pytest.mark.gpu
def test_a_gpu_plays_the_same_episodes(tmp_path: Path, cart: Path) -> None:
    skip_without_gpu()
    cpu, other = (played(tmp_path, cart, "cartpole_v0", 100, simulation={"backend": name})[0].scores
                  for name in ("cpu", "cuda"))  # fmt: skip
    assert cpu == pytest.approx(other)


def test_log_and_page_of_two_models_without_a_log(tmp_path: Path, cart: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One decision, one section, and no estimates."""
    idle = linear_bundle(tmp_path / "idle", np.zeros((2, 4)), ("left", "right"), (0, 1, 2, 3))
    outcome, report = played(tmp_path, cart, "cartpole_v0", 200, against=str(idle), gamma=0.99)
    assert outcome.decision["choice"] == report["decision"]["choice"] == "ship"
    assert re.search("(?s)(?=.*  Random actions  )(?=.*playing model: 200 of 200 episodes)", caplog.text)
    page = Page(Path(outcome.page).read_text())
    assert page.text["h2"] == ["Who gains and who loses", "Who gets what", "Simulation", "Data lineage", "Config"]
    assert "there is no log" in " ".join(page.text["dd"])
    assert str(Interval(**report["simulation"]["difference"]["return"])) in " ".join(page.text["html"])


def both(folder: Path, rows: list[dict[str, Any]]) -> tuple[Evaluated, dict[str, Any]]:
    """A policy of epsilon 0.5, worth 2.588442 at the start, on a log and in simulation."""
    log = write_lines(folder / "grid.jsonl", rows)
    evaluation = {"bootstrap_resamples": 200, "models": {"final_fit_passes": 2}, "held_out_share": 0.6}
    return played(folder, world(folder, 0.5), "gridworld", 2000, data_path=str(log), evaluation=evaluation)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """600 episodes of epsilon 0.8 by NumPy."""
    return gridworld_log(gridworld.simulate(gridworld.epsilon_greedy(0.8), 600, np.random.default_rng(1)))


def test_log_and_simulation_side_by_side(
    tmp_path: Path, rows: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """Both aim at the exact value, and JSON, text and page say so."""
    outcome, report = both(tmp_path, rows)
    simulated = report["model"]["simulated"]["discounted_return"]
    estimates = report["model"]["cpe"]["outcomes"][0]["sequential"]["estimates"]
    figures = {estimate["name"]: estimate["figure"] for estimate in estimates}
    for figure in (simulated, figures["MAGIC"], figures["Weighted_Per_Decision_Importance_Sampling"]):
        assert figure["low"] <= 2.588442 <= figure["high"]
    assert (report["simulation"]["comparable"], report["simulation"]["remarks"]) == (True, [])
    assert "The discounted return is the quantity" in caplog.text
    assert re.search(rf"in simulation +{re.escape(str(Interval(**simulated)))} ", caplog.text)
    assert f"in simulation{Interval(**simulated)}" in re.sub("<[^>]*>", "", Path(outcome.page).read_text())


def test_a_cut_log_is_not_held_against_whole_episodes(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    """Nobody is at the goal within 6 steps: a log cut there says 0, and the policy is worth 2.588442."""
    outcome, report = both(tmp_path, [row for row in rows if row["sequence_number"] < 6])
    assert outcome.scores["CPE/Reward/Weighted_Per_Decision_Importance_Sampling"] == 0
    said = "100.0% of the scored episodes were cut, none after more than 6"
    assert (report["simulation"]["comparable"], said in report["simulation"]["remarks"][0]) == (False, True)
    assert said in Path(outcome.page).read_text()


CUT = "12.5% of the scored episodes were cut before their end"


@pytest.mark.parametrize(
    ("keys", "apart", "remarks"),
    [
        ({}, (), ()),
        ({"by_time": True}, ("by time_diff",), ()),
        # a step beyond the horizon counts 0.99^100 = 0.37, or 0.9^100 = 3e-5
        ({"horizon": 100}, ("count 100 steps of an episode",), ()),
        ({"horizon": 100, "gamma": 0.9}, (), ()),
        ({"longest": 201}, ("up to 201 steps, simulated ones end at 200",), ()),
        ({"longest": 201, "gamma": 0.9}, (), ()),
        # 0.99^200 = 0.134
        ({"cut": 0.25, "cut_share": 0.125, "longest": 150}, (), ("ends 25.0% of the simulated episodes at step 200, "
                                                                 "where a reward still counts 0.13", CUT)),
        ({"cut": 0.25, "gamma": 0.9}, (), ()),
        # returns of 100 steps are no returns of 150
        ({"cut_share": 0.125}, ("none after more than 100 steps",), (CUT,)),
        ({"cut_share": 0.125, "gamma": 0.9}, (), (CUT,)),
        # the last episode of each file, as where logging just ends
        ({"cut_share": 0.005}, (), (CUT.replace("12.5", "0.5"),)),
    ],
)  # fmt: skip
def test_what_keeps_them_apart(keys: dict[str, Any], apart: tuple[str, ...], remarks: tuple[str, ...]) -> None:
    """A log of up to 100 steps an episode beside up to 150 played ones, which are cut at 200; gamma 0.99."""
    estimated = {"gamma": 0.99, "by_time": False, "horizon": 1000, "longest": 100, "cut_share": 0.0, "cut": 0.0} | keys
    played = game(UNDEFINED, UNDEFINED, UNDEFINED)
    played = replace(played, policies={MODEL: replace(played.policies[MODEL], cut_share=estimated.pop("cut")),
                                       RANDOM: replace(played.policies[RANDOM], cut_share=1.0)})  # fmt: skip
    estimate = EstimatedReturn(**estimated)
    for sentences, parts in ((estimate.obstacles(played), apart), (estimate.remarks(played), remarks)):
        assert all(part in sentence for sentence, part in zip(sentences, parts, strict=True)), sentences
