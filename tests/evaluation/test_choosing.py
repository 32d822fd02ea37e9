"""Episodes that choose among runs are not those that decide."""

from pathlib import Path

import numpy as np
import pytest
from helpers.logs import write_lines
from helpers.resuming import simulated
from helpers.runs import ALONE, Tree, checked, merged, metrics, quick, trained

from reagent_lite.evaluation.policy_models import split_log
from reagent_lite.evaluation.scored_episodes import ScoredEpisodes, find_hashes
from reagent_lite.run.logged import Data, prepare

ROWS = 400


@pytest.fixture
def noise(tmp_path: Path) -> Tree:
    """A log of single decisions whose rewards all differ; five rows have the same user."""
    rng = np.random.default_rng(1)
    rows = [
        {"mdp_id": f"e{number}", "sequence_number": 0, "state_features": {"0": rng.normal()}, "user": f"u{number // 5}",
         "action": "ab"[rng.integers(2)], "reward": float(number), "action_probability": 0.5, "terminal": True,
         "possible_actions": ["a", "b"]}
        for number in range(ROWS)
    ]  # fmt: skip
    settings = {"learn_from_scored": None, "choosing_share": 0.5, "held_out_share": 0.5}
    return quick(write_lines(tmp_path / "log.jsonl", rows), tmp_path / "out", epochs=2, rl={"gamma": 0.0},
                 evaluation=settings)  # fmt: skip


def divided(data: Data, share: float | None, units: np.ndarray | None = None) -> tuple[ScoredEpisodes, ScoredEpisodes]:
    return data.scored.divide(data.sides, share, units)


def test_each_scored_episode_chooses_or_decides_and_none_is_learned_from(noise: Tree) -> None:
    config = checked(noise)
    data = prepare(config, ALONE)
    whole = data.scored
    assert divided(data, None) == (whole, whole)
    for share in (0.2, 0.5):
        choosing, deciding = divided(data, share)
        assert sorted([*choosing.hashes, *deciding.hashes]) == whole.hashes.tolist()
        assert sorted([*choosing.numbers, *deciding.numbers]) == whole.numbers.tolist()
        assert abs(len(choosing.numbers) / len(whole.numbers) - share) < 0.15
        assert find_hashes(choosing.hashes, choosing.episode.view(np.uint64)).min() >= 0
    split = split_log(data.sides, whole, config.evaluation)
    assert (split.choosing.hashes.tolist(), split.scored.hashes.tolist()) == tuple(
        part.hashes.tolist() for part in divided(data, 0.5)
    )
    learned = {*data.learned.usable.tolist()}
    assert not learned & {*whole.numbers.tolist()}
    assert {*split.fitted.tolist()} | {*split.checked.tolist()} <= learned


def test_episodes_of_a_unit_stay_together(noise: Tree) -> None:
    data = prepare(checked(noise), ALONE)
    units = np.asarray(data.sides.scored.origin_line) // 5
    parts = [np.unique(units[data.sides.scored.episode[part.numbers]]) for part in divided(data, 0.5, units)]
    assert not {*parts[0]} & {*parts[1]}
    assert min(map(len, parts)) > 20


def test_a_run_has_scores_of_both_parts(noise: Tree, tmp_path: Path) -> None:
    """The logged reward of each part is the mean of its rows' rewards."""
    data = prepare(checked(noise), ALONE)
    choosing, deciding = (data.sides.scored.reward[part.numbers].mean() for part in divided(data, 0.5))
    scores = trained(noise).scores
    assert scores["choosing/CPE/Reward/Logged_Reward"] == pytest.approx(choosing)
    assert scores["CPE/Reward/Logged_Reward"] == pytest.approx(deciding)
    first, *_ = metrics(tmp_path / "out")  # after the last epoch, the final evaluation follows
    assert first["CPE/Reward/Logged_Reward"] == pytest.approx(choosing)
    without = merged(noise, {"evaluation": {**noise["evaluation"], "choosing_share": None}})
    assert not any("choosing" in tag for tag in trained({**without, "model_output_path": f"{tmp_path}/2"}).scores)


def test_in_simulation_the_evaluations_during_the_run_choose(tmp_path: Path) -> None:
    tree = simulated(tmp_path, evaluation={"choosing_share": 0.5}) | {"model_output_path": str(tmp_path / "out")}
    scores = trained(tree).scores
    last = [line["simulation/return/mean"] for line in metrics(Path(tree["model_output_path"])) if "epoch" in line][-1]
    assert scores["choosing/simulation/return/mean"] == last != scores["simulation/return/mean"]


def test_the_best_of_twenty_equal_policies_is_seldom_shipped(noise: Tree) -> None:
    """The interval on episodes that chose the policy excludes 0 in 1 - 0.975^20 = 40 % of logs, on others in 2.5 %."""
    data = prepare(checked(noise), ALONE)
    choosing, deciding = (np.searchsorted(data.scored.hashes, part.hashes) for part in (divided(data, 0.5)))
    rng = np.random.default_rng(2)
    logs, policies = 1000, 20
    shipped = {"apart": 0, "same": 0}
    for _ in range(logs):
        # (w - 1) r of a policy that takes other actions than a uniform log of two: +r or -r
        differences = rng.normal(size=len(data.scored.hashes)) * rng.choice(
            [-1, 1], (policies, len(data.scored.hashes))
        )
        best = differences[:, choosing].mean(1).argmax()
        for name, episodes in (("apart", deciding), ("same", choosing)):
            values = differences[best, episodes]
            shipped[name] += values.mean() - 1.96 * values.std(ddof=1) / len(values) ** 0.5 > 0
    assert shipped["apart"] < logs * (0.025 + 3 * (0.025 * 0.975 / logs) ** 0.5)
    assert shipped["same"] > 0.3 * logs
