"""Answers over HTTP: those of the bundle, rankings by hand, what is refused, limits, and the server's own OpenAPI."""

import asyncio
import itertools
import math
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import httpx
import numpy as np
import pandas as pd
import pytest
from helpers.bundles import bilinear_bundle, linear_bundle
from hypothesis import HealthCheck, given, settings
from jsonschema import Draft202012Validator
from serving.conftest import ITEMS, NAMES, Open, Worker, acted, drawn

from reagent_lite.export import load_bundle


def test_actions_and_propensities_are_those_of_the_bundle(named: Path, worker: Worker) -> None:
    rows: list[dict[str, Any]] = [
        {"state_features": {"3": 1.5, "age": -0.5}, "possible_actions": None},
        {"state_features": {"3": 0.2}, "possible_actions": ["wait", "mail"]},
        {"state_features": {"age": None, "3": 2.0}, "possible_actions": ["call"]},
    ]
    bundle, rng = load_bundle(named), np.random.default_rng([5, 0])
    mask = np.array([[True, True, True], [True, False, True], [False, True, False]])
    answers = [worker.post("/decide", rows=rows) for _ in range(4)]
    assert [drawn(answer) for answer in answers] == [acted(bundle, rows, rng, mask=mask) for _ in range(4)]
    assert drawn(answers[0])[2] == (1, 1)
    assert f'"sha256": "{answers[0]["model"]}"' in (named / "manifest.json").read_text()
    decisions = [decision for answer in answers for decision in answer["decisions"]]
    assert all(decision["action"] == NAMES[decision["index"]] for decision in decisions)
    assert len({decision["decision_id"] for decision in decisions}) == 12


def test_candidates_are_ranked(candidates: Path, opened: Open) -> None:
    worker = opened(candidates)
    lists = [[{"7": 1, "8": 0}, {"7": 3.0}, {"8": -1.0, "7": 2.0}], [{"7": 1.0}]]
    rows = [{"state_features": {"3": 2.0, "age": 1.0}, "possible_actions": offered} for offered in lists]
    assert worker.post("/rank", rows=rows)["rankings"] == [
        [{"index": 1, "score": 6.0}, {"index": 2, "score": 3.0}, {"index": 0, "score": 2.0}],
        [{"index": 0, "score": 2.0}],
    ]
    assert worker.log.waiting == 0


def test_rows_may_have_the_names_of_the_training_log(worker: Worker) -> None:
    worker.model.bundle.columns = {"mdp_id": "session", "state_features": ["age", "3"], "possible_actions": "offers",
                                   "reward": "clicked", "terminal": "last"}  # fmt: skip
    row = {"session": "7", "age": -0.5, "3": 1.5, "offers": ["wait"]}
    (decision,) = worker.post("/decide", rows=[row])["decisions"]
    (logged,) = worker.waiting_rows()
    assert (logged["mdp_id"], logged["state_features"], logged["action"]) == ("7", {"age": -0.5, "3": 1.5}, "wait")
    worker.post("/reward", decision_id=decision["decision_id"], clicked=1.0, last=True)
    assert worker.post("/decide", rows=[{"state_features": {"3": 1.0}, "possible_actions": ["mail"]}])
    status, problem = worker.refusal("/decide", rows=[row | {"state_features": {"3": 1.0}}])
    assert (status, problem["got"]) == (422, "unknown key 'age'")


def test_lists_of_numbers_and_flags_are_read_as_in_a_log(tmp_path: Path, opened: Open) -> None:
    worker = opened(linear_bundle(tmp_path / "model", np.array([[1.0, 0], [0, 1], [0, 0]]), NAMES, (0, 1)))
    row = {"state_features": [0.5, None], "possible_actions": [0, 1, 1]}
    worker.post("/decide", rows=[row])
    worker.post("/decide", rows=[{"state_features": {"0": 0.5}, "possible_actions": ["call", "wait"]}])
    first, second = worker.waiting_rows()
    assert first["state_features"] == {"0": 0.5}
    assert first["possible_actions"] == second["possible_actions"] == ["call", "wait"]
    assert first["action_probability"] == second["action_probability"] == 0.5
    schemas = worker.client.get("/openapi.json").json()["components"]["schemas"]
    validator = Draft202012Validator({"$ref": "#/components/schemas/NamedRow", "components": {"schemas": schemas}})
    for refused in (
        {"state_features": [1, 2, 3]}, {"state_features": [None]}, {"state_features": []},
        {"state_features": [1, "2"]}, {"state_features": [1], "possible_actions": [0, 0, 0]},
        {"state_features": [1], "possible_actions": [1, 1]}, {"state_features": [1], "possible_actions": [1, 2, 0]},
    ):  # fmt: skip
        assert worker.client.post("/decide", json={"rows": [refused]}).status_code == 422, refused
        assert not validator.is_valid(refused), refused
    assert validator.is_valid(row)


ROW = {"state_features": {"3": 1.0}}
JSON = {"headers": {"content-type": "application/json"}}
REFUSED: list[tuple[str, Any, str, str]] = [
    ("/decide", b"{", "body", "at character 2"),
    ("/decide", b'{"rows": [{"state_features": {"3": NaN}}]}', "body.rows.0.state_features", "not null"),
    ("/decide", b'{"rows": [{"state_features": {"3": -Infinity}}]}', "body", "Infinity"),
    ("/decide", {"ignore_unknown": "yes", "rows": [ROW]}, "body.ignore_unknown", ""),
    ("/decide", b'{"rows": [{"state_features": {"3": 1.0, "3": 2.0}}]}', "body", "the key '3' twice"),
    ("/decide", b'{"rows": [{"state_features": {"3": 1e39}}]}', "body.rows.0.state_features.3", ""),
    ("/decide", {"rows": []}, "body.rows", ""),
    ("/decide", {"rows": [ROW | {"state_features": {"4": 1.0}}]}, "states[0]", ""),
    ("/decide", {"rows": [ROW | {"state_features": {"3": "1.0"}}]}, "states[0], feature 3", ""),
    ("/decide", {"rows": [ROW | {"state_features": {"3": [True]}}]}, "body.rows.0.state_features.3", ""),
    ("/decide", {"rows": [{}]}, "body.rows.0.state_features", ""),
    ("/decide", {"rows": [{"state_features": {}}]}, "body.rows.0.state_features", ""),
    ("/decide", {"rows": [ROW | {"state_features": {"3": None}}]}, "body.rows.0.state_features", ""),
    ("/decide", {"rows": [ROW, ROW | {"possible_actions": ["mail", "fax"]}]}, "rows.1.possible_actions", ""),
    ("/decide", {"rows": [ROW | {"possible_actions": ["mail", "mail"]}]}, "rows.0.possible_actions", ""),
    ("/decide", {"rows": [ROW | {"possible_actions": []}]}, "body.rows.0.possible_actions", ""),
    ("/decide", {"rows": [ROW | {"mdp_id": 7.5}]}, "body.rows.0.mdp_id", ""),
    ("/decide", {"rows": [ROW | {"sequence_number": 2**53 + 1}]}, "body.rows.0.sequence_number", ""),
    ("/decide", {"row": [ROW]}, "body", "Did you mean 'rows'?"),
    ("/decide", {"rows": [ROW | {"mdp": "7"}]}, "body", "Did you mean 'mdp_id'?"),
    ("/decide", {"rows": [ROW | {"rows": 7}]}, "body", "Known keys: state_features"),
    ("/reward", {"decision_id": "1", "reward": 1.0, "terminate": True}, "body", "Did you mean 'terminal'?"),
    ("/reward", b'{"reward": 1, "decision_id": "1", "reward": 2}', "body", "the key 'reward' twice"),
    ("/reward", b"[" * 101, "body", "more than 100 nested"),
]


@pytest.mark.parametrize(("path", "body", "where", "word"), REFUSED, ids=[str(body)[:60] for _, body, _, _ in REFUSED])
def test_wrong_rows_are_refused_and_none_is_logged(worker: Worker, path: str, body: Any, where: str, word: str) -> None:
    answer = worker.client.post(path, **{"content" if isinstance(body, bytes) else "json": body}, **JSON)
    assert (answer.status_code, worker.log.waiting) == (422, 0)
    problems = answer.json()["problems"]
    assert any(problem["where"].startswith(where) and word in str(problem) for problem in problems), problems


def test_equal_candidates_are_one_as_a_log_cannot_tell_them_apart(candidates: Path, opened: Open) -> None:
    worker = opened(candidates)
    items = [{"7": 0.0}, {"7": -0.0, "8": None}, {"8": 2.0}, {"8": 2.0}, {"8": 1e-50}]
    row = {"state_features": {"3": 1.0, "age": 0.0}, "possible_actions": items}  # all values are 0
    decided = worker.post("/decide", rows=[row] * 50)["decisions"]
    assert {decision["index"] for decision in decided} == {0, 2, 4}
    assert all(decision["action"] == items[decision["index"]] for decision in decided)
    assert [decision["propensity"] for decision in decided] == pytest.approx([1 / 3] * 50)
    assert all(row["possible_actions"] == [items[0], items[2], items[4]] for row in worker.waiting_rows())
    assert len(worker.post("/rank", rows=[row])["rankings"][0]) == 5


@pytest.mark.parametrize(
    ("status", "method", "path", "given", "key", "words"),
    [
        (404, "GET", "/decisions", {}, "where", "GET /decisions"),
        (405, "GET", "/decide", {}, "expected", "a path and method of /docs"),
        (400, "POST", "/decide", {"content": b'{"\xff": 1}', **JSON}, "expected", "a body in UTF-8"),
        (422, "POST", "/decide", {"content": b'{"rows": []}', "headers": {"content-type": "text/plain"}},
         "todo", "content-type: application/json"),
        (500, "POST", "/decide", {"json": {"rows": [ROW]}}, "got", "ZeroDivisionError"),
    ],
)  # fmt: skip
def test_every_refusal_has_one_form(
    status: int, method: str, path: str, given: Any, key: str, words: str, worker: Worker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(worker.model.bundle, "predict", lambda *_: 1 / 0)
    answer = worker.client.request(method, path, **given)
    ((problem, *_),) = answer.json().values()
    assert (answer.status_code, [*answer.json()], [*problem]) == (
        status, ["problems"], ["where", "expected", "got", "todo"],
    )  # fmt: skip
    assert words in problem[key]


def test_bodies_that_are_too_large(named: Path, opened: Open) -> None:
    worker = opened(named, max_body_kb=1.0)
    for content in (b" " * 1001, iter([b" " * 600] * 2)):  # with its length, and in pieces
        answer = worker.client.post("/decide", content=content)
        assert (answer.status_code, answer.json()["problems"][0]["expected"]) == (413, "at most 1000 bytes")
    assert 'reagent_requests_total{path="/decide",status="413"} 2.0' in worker.client.get("/metrics").text


def test_a_body_that_does_not_arrive_in_time_is_answered(named: Path, opened: Open) -> None:
    worker, send = opened(named, request_seconds=0.05), AsyncMock()

    async def slowly() -> dict[str, Any]:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b" ", "more_body": True}

    scope = {"type": "http", "method": "POST", "path": "/decide", "headers": [], "query_string": b""}
    asyncio.run(worker.app(scope, slowly, send))
    assert [call.args[0].get("status") for call in send.await_args_list] == [408, None]


def test_a_reward_comes_once_and_is_counted(worker: Worker) -> None:
    (decision,) = worker.post("/decide", rows=[ROW | {"possible_actions": ["call"]}])["decisions"]
    given = {"decision_id": decision["decision_id"], "reward": 2.5, "metrics": {"clicks": 1.0}}
    rewards = (given, given, {"decision_id": "0-1", "reward": 1.0})
    assert [worker.client.post("/reward", json=reward).status_code for reward in rewards] == [204, 409, 404]
    page = worker.client.get("/metrics").text
    for line in ('rewards_total{result="joined"} 1.0', 'rewards_total{result="again"} 1.0',
                 'rewards_total{result="unknown"} 1.0', 'decisions_total{action="call"} 1.0',
                 'features_missing_total{feature="age"} 1.0',
                 'request_seconds_count{path="/reward"} 3.0'):  # fmt: skip
        assert f"reagent_{line}\n" in page
    assert worker.client.get("/healthz").json() == {"model": worker.model.version, "waiting": 1}


def together(worker: Worker, bodies: list[Any]) -> list[httpx.Response]:
    """Sends decisions that arrive in one turn of the server's loop."""

    async def answers() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(worker.app), base_url="http://localhost") as client:
            return await asyncio.gather(*(client.post("/decide", json=body) for body in bodies))

    return asyncio.run(answers())


@pytest.mark.parametrize("kind", ["named", "candidates", "items"])
def test_a_repeated_request_gets_its_first_decisions(kind: str, opened: Open, request: pytest.FixtureRequest) -> None:
    worker = opened(request.getfixturevalue(kind))
    choices = {
        "named": {},
        "candidates": {"possible_actions": [{"7": 0.0}, {"7": -0.0}, {"8": 1.0}, {"7": None, "8": 2.0}]},
        "items": {"possible_actions": ["12", "tea too", "tea", "milk"]},
    }[kind]
    row = ROW | choices | {"mdp_id": "7"}
    body = {"rows": [row | {"sequence_number": n} for n in range(100)]}
    first = worker.post("/decide", **body)
    worker.post("/reward", decision_id=first["decisions"][0]["decision_id"], reward=1.0)
    other = {"rows": [ROW | choices]}
    answers = together(worker, [other, body, other, body])
    assert [answer.json() for answer in answers[1::2]] == [first] * 2
    assert len({answer.json()["decisions"][0]["decision_id"] for answer in answers}) == 3
    assert worker.log.waiting == len(body["rows"]) + 2
    twice = row | {"sequence_number": 100}
    changed = twice | {"sequence_number": 3, "state_features": {"3": 1.5}}
    for rows, got in (([twice] * 2, "a new row"), ([changed], "other features"), ([body["rows"][0], twice], "a new")):
        status, problem = worker.refusal("/decide", rows=rows)
        assert (status, got in problem["got"], worker.log.waiting) == (409, True, 102)


def test_more_requests_than_a_worker_handles_at_once_are_told_to_come_later(
    named: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reagent_lite.serving.limits._MOST_AT_ONCE", 2)
    worker = opened(named)
    for _ in range(2):
        answers = together(worker, [{"rows": [ROW]}] * 5)
        assert [answer.status_code for answer in answers] == [200, 200, 503, 503, 503]
    problem = answers[4].json()["problems"][0]
    assert (problem["where"], problem["todo"]) == ("requests", "Try again later")
    assert 'reagent_unavailable_total{reason="requests"} 6.0' in worker.client.get("/metrics").text
    assert worker.client.get("/healthz").json()["waiting"] == worker.log.waiting == 4


def test_a_row_without_a_value_is_refused_beside_others(candidates: Path, opened: Open) -> None:
    worker, items = opened(candidates), [{"7": 1.0, "8": 1e38}]
    bodies = [{"rows": [{"state_features": {"age": age}, "possible_actions": items}]} for age in (0.5, 1e38, 0.25)]
    answers = together(worker, bodies)  # 1e38 * 1e38 is no float32
    assert [answer.status_code for answer in answers] == [200, 422, 200]
    status, problem = worker.refusal("/rank", **bodies[1])
    assert (status, problem["where"]) == (422, "rows.0.possible_actions")
    assert (answers[1].json()["problems"][0]["where"], worker.log.waiting) == ("rows.0.possible_actions", 2)


@pytest.mark.parametrize("kind", ["named", "candidates"])
def test_requests_that_wait_together_are_decided_together_and_answered_apart(
    kind: str, opened: Open, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, bundle = opened(request.getfixturevalue(kind)), load_bundle(request.getfixturevalue(kind))
    rows: list[dict[str, Any]] = [
        {"state_features": {"3": n, "age": 0.5}, "mdp_id": f"{n}",
         "possible_actions": [{"7": float(k), "8": 1.0} for k in range(1 + n % 3)] if kind == "candidates" else None}
        for n in range(207)
    ]  # fmt: skip
    bodies = [{"rows": rows[begin:end]} for begin, end in itertools.pairwise([0, 3, 4, 6, 7, 207])]
    unknown = {"rows": [{**rows[0], "state_features": {"4": 1.0}}]}
    predict = Mock(side_effect=worker.model.bundle.predict)
    monkeypatch.setattr(worker.model.bundle, "predict", predict)
    monkeypatch.setattr("reagent_lite.serving.deciding.MOST_CHOICES", 300)

    first, *answers = together(worker, [unknown, *bodies])
    assert first.status_code == 422
    assert [len(call.args[0]) for call in predict.call_args_list] == [100, 100, 7]  # of 3 choices each
    decided = [answer.json()["decisions"] for answer in answers]
    assert [len(decisions) for decisions in decided] == [3, 1, 2, 1, 200]
    rng, expected, decisions = np.random.default_rng([5, 0]), [], [*itertools.chain(*decided)]
    for part in (rows[:100], rows[100:200], rows[200:]):
        lists = [row["possible_actions"] for row in part if kind == "candidates"]
        expected += acted(bundle, part, rng, **({"candidates": bundle.candidates(lists)} if lists else {}))
    assert drawn({"decisions": decisions}) == expected
    logged = [(row["mdp_id"], row["decision_id"]) for row in worker.waiting_rows()]
    assert logged == [(f"{n}", decision["decision_id"]) for n, decision in enumerate(decisions)]


@pytest.mark.parametrize("kind", ["named actions", "candidates", "items"])
def test_the_openapi_holds(kind: str, opened: Open, tmp_path: Path) -> None:
    # of one feature, which is clamped, so that no value is too large
    bundle = (
        linear_bundle(tmp_path / "model", np.array([[1.0], [0], [-1]]), NAMES, (3,))
        if kind == "named actions"
        else bilinear_bundle(tmp_path / "model", np.eye(1), (3,), (7,), ITEMS if kind == "items" else None)
    )
    # schemathesis starts the application and does not stop it
    worker = opened(bundle, poll_seconds=3600, hosts=("testserver",))  # the name that schemathesis calls it by
    import schemathesis  # takes a second, which other tests need not wait for

    schema = schemathesis.openapi.from_asgi("/openapi.json", worker.app)
    operations = [operation.ok() for operation in schema.get_all_operations()]
    assert {"POST /decide", "POST /reward", "GET /healthz"} <= {operation.label for operation in operations}
    for operation in operations:

        @given(case=operation.as_strategy())
        @settings(max_examples=20, deadline=None, derandomize=True, database=None,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        def conforms(case: Any) -> None:
            case.call_and_validate()

        conforms()


def test_true_and_false_are_one_and_zero_and_the_log_has_numbers(worker: Worker) -> None:
    worker.post("/decide", rows=[{"state_features": {"3": True, "age": None}}, {"state_features": {"3": False}}])
    assert [row["state_features"] for row in worker.waiting_rows()] == [{"3": 1.0}, {"3": 0.0}]
    bundle = worker.model.bundle
    features = [{"3": True, "age": np.bool_(False)}, {"3": math.nan, "age": pd.NA}, {"3": None, "age": 2}]
    alike = [{"3": 1.0, "age": 0.0}, {}, {"age": 2.0}]
    assert bundle.predict_rows(features).q.tolist() == bundle.predict_rows(alike).q.tolist()


def test_an_id_of_an_episode_has_one_spelling_as_in_training(worker: Worker) -> None:
    """A repeated request is known by it, and a unit of a rollout stays with its model."""
    ids = [7, 7.0, "7", "7.0", " 7 ", "-0", "007", "7.5", "a7"]
    for number, mdp_id in enumerate(ids):
        worker.post("/decide", rows=[ROW | {"mdp_id": mdp_id, "sequence_number": number}])
    assert [row["mdp_id"] for row in worker.waiting_rows()] == ["7"] * 5 + ["0", "007", "7.5", "a7"]
    assert worker.refusal("/decide", rows=[ROW | {"mdp_id": True}])[0] == 422
