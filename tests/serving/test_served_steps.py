"""A server of a model that reads several steps: which steps each decision has, and what is forgotten."""

import asyncio
import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.bundles import linear_bundle
from helpers.logs import write_lines
from serving.conftest import IDS, NAMES, Open, TestClient, Worker

from reagent_lite.config import check
from reagent_lite.config.score_config import ScoreConfig
from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.export import load_bundle
from reagent_lite.serving.app import create_app
from reagent_lite.serving.decision_log import DecisionLog
from reagent_lite.serving.recent_steps import forget_old_episodes
from reagent_lite.serving.served_model import ServedModel
from reagent_lite.tasks.score import score

# columns of the states: [step? x3 age] for each of three steps; q of "mail" is x3 two steps ago, of "call" age one step
# ago, of "wait" the number of steps
WEIGHT = np.array([[0, 1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1, 0, 0, 0], [1, 0, 0, 1, 0, 0, 1, 0, 0]])


def stacked(folder: Path, name: str = "steps", history: int = 3) -> Path:
    return linear_bundle(folder / name, WEIGHT[:, -3 * history :], NAMES, IDS, history=history)


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    return stacked(tmp_path)


@pytest.fixture
def server(steps: Path, opened: Open) -> Worker:
    return opened(steps)


def state(number: float) -> dict[str, float]:
    return {"3": number, "age": -number}


def row(episode: str | None, number: int, **keys: Any) -> dict[str, Any]:
    return {"mdp_id": episode, "sequence_number": number, "state_features": state(number / 10), **keys}


def expected(*numbers: float) -> list[float]:
    """The policy, a softmax at temperature 1 of q, after steps whose features are these numbers, by hand."""
    before = [0.0, 0.0, *numbers]
    q = np.array([before[-3], -before[-2], min(len(numbers), 3)])
    return (np.exp(q) / np.exp(q).sum()).tolist()


def decided(server: Worker, *rows: dict[str, Any]) -> list[tuple[int, float]]:
    decisions = server.post("/decide", rows=list(rows))["decisions"]
    return [(decision["index"], decision["propensity"]) for decision in decisions]


def is_policy(decision: tuple[int, float], *numbers: float) -> bool:
    """Whether a decision was drawn from the policy after these steps."""
    return decision[1] == pytest.approx(expected(*numbers)[decision[0]], rel=1e-5)


def test_decisions_are_those_of_offline_scores_at_every_step(server: Worker, steps: Path, tmp_path: Path) -> None:
    rows = [row("a", number) for number in range(6)]
    decisions = [decided(server, each)[0] for each in rows]
    numbers = [each["state_features"]["3"] for each in rows]
    assert all(is_policy(decision, *numbers[: step + 1]) for step, decision in enumerate(decisions))
    tree = {"model": str(steps), "data_path": str(write_lines(tmp_path / "rows.jsonl", rows)), "policy": "greedy",
            "all_scores": True, "output_path": str(tmp_path / "scores.parquet")}  # fmt: skip
    score(check(ScoreConfig, tree))
    q = np.array([[each[name] for name in NAMES] for each in pd.read_parquet(tmp_path / "scores.parquet").scores])
    policy = np.exp(q) / np.exp(q).sum(1, keepdims=True)
    drawn = [index for index, _ in decisions]
    np.testing.assert_allclose(policy[np.arange(6), drawn], [propensity for _, propensity in decisions], rtol=1e-5)
    # the log has single steps, from which the next model learns
    assert [logged["state_features"] for logged in server.waiting_rows()] == [each["state_features"] for each in rows]


def test_rows_of_one_request_follow_each_other(server: Worker) -> None:
    rows = [row("a", 1), row("b", 5), row("a", 2), row("a", 3), row("b", 6)]
    a, b, a2, a3, b2 = decided(server, *rows)
    assert is_policy(a, 0.1)
    assert is_policy(a2, 0.1, 0.2)
    assert is_policy(a3, 0.1, 0.2, 0.3)
    assert is_policy(b, 0.5)
    assert is_policy(b2, 0.5, 0.6)
    (a4,) = decided(server, row("a", 4))
    assert is_policy(a4, 0.2, 0.3, 0.4)


def test_without_an_mdp_id_each_decision_is_a_start(server: Worker) -> None:
    rows = [{"state_features": state(0.1)}, {"state_features": state(0.2)}]
    assert [is_policy(decision, number) for decision, number in zip(decided(server, *rows), (0.1, 0.2), strict=True)]
    assert server.log.read("SELECT count(*) FROM steps") == [(0,)]


def test_a_row_between_others_has_the_steps_before_it(server: Worker) -> None:
    for number in (1, 2, 5):
        decided(server, row("a", number))
    (late,) = decided(server, row("a", 3))
    assert is_policy(late, 0.2, 0.3)  # the last two steps are kept, 0.2 and 0.5
    (last,) = decided(server, row("a", 6))
    assert is_policy(last, 0.3, 0.5, 0.6)


def test_without_sequence_numbers_the_order_is_that_of_arrival(server: Worker) -> None:
    for number in (1, 2, 3):
        (decision,) = decided(server, {"mdp_id": "a", "state_features": state(number / 10)})
    assert is_policy(decision, 0.1, 0.2, 0.3)


def test_a_reward_that_ends_an_episode_forgets_it(server: Worker) -> None:
    ids = [server.post("/decide", rows=[row("a", number)])["decisions"][0]["decision_id"] for number in (1, 2)]
    server.post("/reward", decision_id=ids[0], reward=1.0)
    assert is_policy(decided(server, row("a", 3))[0], 0.1, 0.2, 0.3)
    server.post("/reward", decision_id=ids[1], reward=1.0, terminal=True)  # late: row 3 begins anew
    assert is_policy(decided(server, row("a", 4))[0], 0.3, 0.4)
    (decision,) = server.post("/decide", rows=[row("a", 5)])["decisions"]
    server.post("/reward", decision_id=decision["decision_id"], reward=1.0, terminal=True)
    assert server.log.read("SELECT count(*) FROM steps") == [(0,)]
    assert is_policy(decided(server, row("a", 6))[0], 0.6)


def test_all_workers_and_a_restarted_server_know_the_steps(server: Worker, steps: Path) -> None:
    decided(server, row("a", 1))
    config = ServeConfig(model=str(steps), log=str(server.folder), seed=6)
    with closing(DecisionLog(config, choices="named actions", epoch=server.log.epoch)) as log:
        app = create_app(config, 1, ServedModel(config.model), log)
        with TestClient(app, "http://localhost") as client:
            (decision,) = client.post("/decide", json={"rows": [row("a", 2)]}).json()["decisions"]
    assert is_policy((decision["index"], decision["propensity"]), 0.1, 0.2)
    assert is_policy(decided(server, row("a", 3))[0], 0.1, 0.2, 0.3)


def test_another_process_decides_about_the_episode_meanwhile(server: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    decided(server, row("a", 1))
    kept = server.app.state.worker.decider._steps
    keep = kept.keep
    calls = []

    def interrupted(database: Any, episodes: Any) -> None:
        if not calls:  # the other process has added step 2
            content = json.dumps([[1, state(0.1)], [2, state(0.2)]])
            database.execute("UPDATE steps SET version = version + 1, steps = ?", (content,))
        calls.append(1)
        keep(database, episodes)

    monkeypatch.setattr(kept, "keep", interrupted)
    (decision,) = decided(server, row("a", 3))
    assert len(calls) >= 2
    # the transaction of the first try was undone, and the second read the steps again
    assert is_policy(decision, 0.1, 0.3)


def test_a_repeated_request_has_its_first_answer_and_adds_no_step(server: Worker) -> None:
    decided(server, row("a", 1))
    first = server.post("/decide", rows=[row("a", 2)])
    assert server.post("/decide", rows=[row("a", 2)]) == first
    assert is_policy(decided(server, row("a", 3))[0], 0.1, 0.2, 0.3)


def test_a_refused_row_adds_no_step(server: Worker) -> None:
    decided(server, row("a", 1))
    server.refusal("/decide", rows=[row("a", 2), {"mdp_id": "a", "state_features": {"unknown": 1.0}}])
    server.refusal("/decide", rows=[row("a", 2, possible_actions=["nothing"])])
    assert is_policy(decided(server, row("a", 3))[0], 0.1, 0.3)


def test_requests_at_once_share_a_prediction(server: Worker) -> None:
    decider = server.app.state.worker.decider
    from reagent_lite.serving.bodies import NamedRow

    async def both() -> list[bytes]:
        rows = [[NamedRow.model_validate(row("a", number))] for number in (1, 2)]
        return list(await asyncio.gather(*map(decider.decide, rows)))

    first, second = (json.loads(answer)["decisions"][0] for answer in asyncio.run(both()))
    assert is_policy((first["index"], first["propensity"]), 0.1)
    assert is_policy((second["index"], second["propensity"]), 0.1, 0.2)


def test_large_requests_have_steps_too(server: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reagent_lite.serving.deciding.LARGE_CHOICES", 4)
    decisions = decided(server, *(row("a", number) for number in range(1, 5)))
    numbers = [0.1, 0.2, 0.3, 0.4]
    assert all(is_policy(decision, *numbers[: step + 1]) for step, decision in enumerate(decisions))


def test_episodes_beyond_the_limit_are_forgotten(server: Worker) -> None:
    for number, episode in enumerate("abcd"):
        decided(server, row(episode, number))
    forget_old_episodes(server.log, 2)
    assert server.log.read("SELECT episode FROM steps ORDER BY episode") == [("c",), ("d",)]
    forget_old_episodes(server.log, 2)
    assert server.log.read("SELECT count(*) FROM steps") == [(2,)]


def test_a_model_of_one_step_keeps_nothing(worker: Worker) -> None:
    worker.post("/decide", rows=[row("a", 1)])
    assert worker.log.read("SELECT count(*) FROM sqlite_master WHERE name = 'steps'") == [(0,)]
    forget_old_episodes(worker.log, 2)


def test_a_newer_model_with_another_history_is_refused(server: Worker, steps: Path, tmp_path: Path) -> None:
    other = stacked(tmp_path, "other", 2)
    for file in list(steps.iterdir()):
        file.unlink()
    for file in other.iterdir():
        (steps / file.name).write_bytes(file.read_bytes())
    server.poll()
    assert "expected data.history 3, as of the served model, got 2" in server.model.refusal
    assert load_bundle(steps).history == 2
