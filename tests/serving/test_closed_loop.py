"""Serve, log, train, three times over: of a shop, whose models keep what they promise, and of recommendations."""

import shutil
from contextlib import closing
from functools import partial
from pathlib import Path

import httpx
import numpy as np
import pytest
from helpers.bundles import bilinear_bundle
from helpers.runs import trained
from oracles import recommend
from oracles.shop import loop
from serving.conftest import flush, rows_of
from serving.test_server import Server

from reagent_lite.whole_files import appearing_folder

SESSIONS = (40, 160, 500, 400)  # of each round; the last one is not trained on
STATE = tuple(range(17))
ITEM = tuple(range(100, 109))


def clicks(server: Server, sessions: int, rng: np.random.Generator, prefix: str) -> np.ndarray:
    """Plays sessions through the server; returns the clicks of each."""

    words = partial(rng.integers, 0, 2**32, dtype=np.uint64)
    users, earned, running = recommend.start(words(size=(sessions, 10))), np.zeros(sessions), np.arange(sessions)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        while len(running):
            seen, lists = recommend.observation(users), recommend.items(words(size=(len(running), recommend.SLOTS, 10)))
            rows = [
                {"mdp_id": f"{prefix}-{running[n]}", "sequence_number": int(users.steps[n]),
                 "state_features": dict(zip(map(str, STATE), seen[n].tolist(), strict=True)),
                 "possible_actions": [dict(zip(map(str, ITEM), item, strict=True))
                                      for item in lists[n, : users.offered[n]].tolist()]}
                for n in range(len(running))
            ]  # fmt: skip
            decisions = client.post("/decide", json={"rows": rows}).raise_for_status().json()["decisions"]
            item = lists[np.arange(len(running)), [decision["index"] for decision in decisions]]
            clicked = rng.random(len(running)) < recommend.click_probability(users, item)
            users, left = recommend.step(users, item, clicked, words(size=(len(running), 3)))
            for decision, click, last in zip(decisions, clicked, left, strict=True):
                body = {"decision_id": decision["decision_id"], "reward": float(click), "terminal": bool(last)}
                client.post("/reward", json=body).raise_for_status()
            earned[running] += clicked
            running = running[~left]
            users = recommend.Users(**{name: getattr(users, name)[~left] for name in users.__slots__})
    return earned


def test_a_shop_serves_and_learns_and_keeps_its_promises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One loop, from the CSV to the third model; tests/benchmarks/RESULTS.md counts a hundred."""
    laps = list(loop(tmp_path, np.random.default_rng(0), sold_rows=600, served_rows=300))
    assert [lap.low <= lap.served <= lap.high for lap in laps] == [True] * 3
    assert [lap.low <= lap.truth <= lap.high for lap in laps] == [True] * 3
    for number in (1, 2):  # of old and served rows
        assert f"shop.csv: 600 rows, {600 / (600 + 300 * number):.1%}" in caplog.text
    rewards = [row["reward"] for row in rows_of(tmp_path / "served")]
    assert (len(rewards), sum(rewards)) == (900, pytest.approx(300 * sum(lap.served for lap in laps)))


@pytest.mark.slow
def test_three_rounds_of_serving_and_training_earn_more_each_time(tmp_path: Path) -> None:
    log, model, rng = tmp_path / "log", tmp_path / "model", np.random.default_rng(0)
    bilinear_bundle(model, np.zeros((len(ITEM), len(STATE))), STATE, ITEM)  # chooses by chance
    earned = []
    for number, sessions in enumerate(SESSIONS):
        with closing(Server(model, log, "max_body_kb=10000.0", f"seed={number}")) as server:
            earned.append(clicks(server, sessions, rng, f"round{number}"))
            server.stop()
        flush(log, "candidates")
        if number == len(SESSIONS) - 1:
            break
        outcome = trained({
            "training_data_path": str(log), "model_output_path": str(tmp_path / f"round{number}"), "use_gpu": False,
            "epochs": 20, "rl": {"gamma": 0.9, "softmax_policy": 0, "epsilon": 0.1, "target_update_rate": 0.02},
            "rainbow": {"dueling_architecture": False},
            "training": {"layers": [-1, 64, 64, 1], "activations": ["relu", "relu", "linear"], "minibatch_size": 128,
                         "l2_decay": 0.0, "lr_policy": "exponential", "lr_decay": 0.85},
            "evaluation": {"calc_cpe_in_training": False},
        })  # fmt: skip
        with appearing_folder(model, served=True) as folder:
            shutil.copytree(outcome.model, folder, dirs_exist_ok=True)
    means = [float(counts.mean()) for counts in earned]
    assert means == sorted(means)
    assert means[3] > 1.3 * means[0]
