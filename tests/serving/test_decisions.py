"""Answers over HTTP: those of the bundle, rankings by hand, what is refused, limits, and the server's own OpenAPI."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from oracles.bundles import bilinear_bundle, linear_bundle
from serving.conftest import ITEMS, NAMES, Open, Worker, acted, drawn

from reagent_lite.export import load_bundle

STATES = [{"3": 1.5, "age": -0.5}, {"3": 0.2}, {"age": None, "3": 2.0}]


def test_actions_and_propensities_are_those_of_the_bundle(named: Path, opened: Open) -> None:
    worker = opened(named)
    allowed = [None, ["wait", "mail"], ["call"]]
    rows = [{"state_features": s, "possible_actions": a} for s, a in zip(STATES, allowed, strict=True)]
    bundle, rng = load_bundle(named), np.random.default_rng([5, 0])
    mask = np.array([[True, True, True], [True, False, True], [False, True, False]])
    ids = set()
    for _ in range(4):
        answer = worker.post("/decide", rows=rows)
        assert drawn(answer) == acted(bundle, rows, rng, mask=mask)
        assert all(decision["action"] == NAMES[decision["index"]] for decision in answer["decisions"])
        assert f'"sha256": "{answer["model"]}"' in (named / "manifest.json").read_text()
        ids |= {decision["decision_id"] for decision in answer["decisions"]}
    assert drawn(answer)[2] == (1, 1)
    assert len(ids) == 12


def test_candidates_are_chosen_and_ranked(candidates: Path, opened: Open) -> None:
    worker = opened(candidates)
    lists = [[{"7": 1, "8": 0}, {"7": 3.0}, {"8": -1.0, "7": 2.0}], [{"7": 1.0}]]
    rows = [{"state_features": {"3": 2.0, "age": 1.0}, "possible_actions": offered} for offered in lists]
    ranked = worker.post("/rank", rows=rows)["rankings"]
    assert ranked[0] == [{"index": 1, "score": 6.0}, {"index": 2, "score": 3.0}, {"index": 0, "score": 2.0}]
    assert ranked[1] == [{"index": 0, "score": 2.0}]
    assert worker.log.waiting == 0
    answer, bundle = worker.post("/decide", rows=rows), load_bundle(candidates)
    assert drawn(answer) == acted(bundle, rows, np.random.default_rng([5, 0]), candidates=bundle.candidates(lists))
    for offered, decision in zip(lists, answer["decisions"], strict=True):
        assert decision["action"] == offered[decision["index"]]


def test_rows_may_have_the_names_of_the_training_log(named: Path, opened: Open) -> None:
    worker = opened(named)
    worker.model.bundle.columns = {"mdp_id": "session", "state_features": ["age", "3"], "possible_actions": "offers",
                                   "reward": "clicked", "terminal": "last"}  # fmt: skip
    row = {"session": "7", "age": -0.5, "3": 1.5, "offers": ["wait"]}
    (decision,) = worker.post("/decide", rows=[row])["decisions"]
    (logged,) = worker.waiting_rows()
    assert (logged["mdp_id"], logged["state_features"], logged["action"]) == ("7", {"age": -0.5, "3": 1.5}, "wait")
    worker.post("/reward", decision_id=decision["decision_id"], clicked=1.0, last=True)
    assert worker.post("/decide", rows=[{"state_features": {"3": 1.0}, "possible_actions": ["mail"]}])
    answer = worker.client.post("/decide", json={"rows": [row | {"state_features": {"3": 1.0}}]})
    assert answer.status_code == 422
    assert answer.json()["problems"][0]["got"] == "unknown key 'age'"


ROW = {"state_features": {"3": 1.0}}
ID = {"decision_id": "1", "reward": 1.0}
REFUSED: list[tuple[str, Any, str, str]] = [
    ("/decide", b"{", "body", "at character 2"),
    ("/decide", b'{"rows": [{"state_features": {"3": NaN}}]}', "body", "NaN"),
    ("/decide", b'{"rows": [{"state_features": {"3": 1.0, "3": 2.0}}]}', "body", "the key '3' twice"),
    ("/decide", b'{"rows": [{"state_features": {"3": 1e39}}]}', "body.rows.0.state_features.3", ""),
    ("/decide", {"rows": []}, "body.rows", ""),
    ("/decide", {"rows": [ROW | {"state_features": {"4": 1.0}}]}, "states[0]", ""),
    ("/decide", {"rows": [ROW | {"state_features": {"3": "1.0"}}]}, "states[0], feature 3", ""),
    ("/decide", {"rows": [ROW | {"state_features": {"3": True}}]}, "body.rows.0.state_features.3", ""),
    ("/decide", {"rows": [{}]}, "body.rows.0.state_features", ""),
    ("/decide", {"rows": [{"state_features": {}}]}, "body.rows.0.state_features", ""),
    ("/decide", {"rows": [ROW | {"state_features": {"3": None}}]}, "body.rows.0.state_features", ""),
    ("/decide", {"rows": [ROW, ROW | {"possible_actions": ["mail", "fax"]}]}, "rows.1.possible_actions", ""),
    ("/decide", {"rows": [ROW | {"possible_actions": ["mail", "mail"]}]}, "rows.0.possible_actions", ""),
    ("/decide", {"rows": [ROW | {"possible_actions": []}]}, "body.rows.0.possible_actions", ""),
    ("/decide", {"rows": [ROW | {"mdp_id": 7}]}, "body.rows.0.mdp_id", ""),
    ("/decide", {"rows": [ROW | {"sequence_number": 2**53 + 1}]}, "body.rows.0.sequence_number", ""),
    ("/decide", {"row": [ROW]}, "body", "Did you mean 'rows'?"),
    ("/decide", {"rows": [ROW | {"mdp": "7"}]}, "body", "Did you mean 'mdp_id'?"),
    ("/decide", {"rows": [ROW | {"rows": 7}]}, "body", "Known keys: state_features"),
    ("/reward", ID | {"terminate": True}, "body", "Did you mean 'terminal'?"),
    ("/reward", b'{"reward": 1, "decision_id": "1", "reward": 2}', "body", "the key 'reward' twice"),
    ("/reward", b"[" * 101, "body", "more than 100 nested"),
]


@pytest.mark.parametrize(("path", "body", "where", "word"), REFUSED, ids=[str(body)[:60] for _, body, _, _ in REFUSED])
def test_wrong_rows_are_refused_and_none_is_logged(
    named: Path, opened: Open, path: str, body: Any, where: str, word: str
) -> None:
    worker = opened(named)
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    answer = worker.client.post(path, **given, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    problems = answer.json()["problems"]
    assert any(problem["where"].startswith(where) and word in str(problem) for problem in problems), problems
    assert worker.log.waiting == 0


def test_equal_candidates_are_one_as_a_log_cannot_tell_them_apart(candidates: Path, opened: Open) -> None:
    worker = opened(candidates)
    items = [{"7": 0.0}, {"7": -0.0, "8": None}, {"8": 2.0}, {"8": 2.0}, {"8": 1e-50}]
    rows = [{"state_features": {"3": 1.0, "age": 0.0}, "possible_actions": items}] * 50  # all values are 0
    decided = worker.post("/decide", rows=rows)["decisions"]
    assert {decision["index"] for decision in decided} == {0, 2, 4}
    assert all(decision["action"] == items[decision["index"]] for decision in decided)
    assert [decision["propensity"] for decision in decided] == [pytest.approx(1 / 3)] * 50
    logged = worker.waiting_rows()
    assert all(row["possible_actions"] == [items[0], items[2], items[4]] for row in logged)
    twin = ROW | {"possible_actions": [{"7": 1.0}, {"7": 1.0}]}
    assert [decision["propensity"] for decision in worker.post("/decide", rows=[twin])["decisions"]] == [1.0]
    assert len(worker.post("/rank", rows=[twin])["rankings"][0]) == 2


def test_every_refusal_has_one_form(named: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, json = opened(named), {"content-type": "application/json"}

    def problem(status: int, method: str, path: str, **given: Any) -> dict[str, str]:
        answer = worker.client.request(method, path, **given)
        assert (answer.status_code, list(answer.json())) == (status, ["problems"])
        first: dict[str, str] = answer.json()["problems"][0]
        assert first.keys() == {"where", "expected", "got", "todo"}
        return first

    assert problem(404, "GET", "/decisions")["where"] == "GET /decisions"
    assert problem(405, "GET", "/decide")["expected"] == "a path and method of /docs"
    assert problem(400, "POST", "/decide", content=b'{"\xff": 1}', headers=json)["expected"] == "a body in UTF-8"
    plain = problem(422, "POST", "/decide", content=b'{"rows": []}', headers={"content-type": "text/plain"})
    assert "content-type: application/json" in plain["todo"]
    monkeypatch.setattr(worker.model.bundle, "predict", lambda *_: 1 / 0)
    assert problem(500, "POST", "/decide", json={"rows": [ROW]})["got"] == "ZeroDivisionError"


def test_bodies_that_are_too_large(named: Path, opened: Open) -> None:
    worker = opened(named, max_body_kb=1.0)
    for content in (b" " * 1001, iter([b" " * 600] * 2)):  # with its length, and in pieces
        answer = worker.client.post("/decide", content=content)
        assert answer.status_code == 413
        assert answer.json()["problems"][0]["expected"] == "at most 1000 bytes"
    page = worker.client.get("/metrics").text
    assert 'reagent_requests_total{path="/decide",status="413"} 2.0' in page


def test_a_body_that_does_not_arrive_in_time_is_answered(named: Path, opened: Open) -> None:
    worker, sent = opened(named, request_seconds=0.05), []

    async def slowly() -> dict[str, Any]:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b" ", "more_body": True}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/decide", "headers": [], "query_string": b""}
    asyncio.run(worker.app(scope, slowly, send))
    assert [message.get("status") for message in sent] == [408, None]


def test_a_reward_comes_once_and_is_counted(named: Path, opened: Open) -> None:
    worker = opened(named)
    decision = worker.post("/decide", rows=[ROW | {"possible_actions": ["call"]}])["decisions"][0]["decision_id"]
    given = {"decision_id": decision, "reward": 2.5, "metrics": {"clicks": 1.0}}
    assert [worker.client.post("/reward", json=given).status_code for _ in range(2)] == [204, 409]
    assert worker.client.post("/reward", json={"decision_id": "0-1", "reward": 1.0}).status_code == 404
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
        transport = httpx.ASGITransport(worker.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await asyncio.gather(*(client.post("/decide", json=body) for body in bodies))

    return asyncio.run(answers())


def test_more_requests_than_a_worker_handles_at_once_are_told_to_come_later(
    named: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reagent_lite.serving.limits._MOST_AT_ONCE", 2)
    worker = opened(named)
    for _ in range(2):
        answers = together(worker, [{"rows": [ROW]}] * 5)
        assert [answer.status_code for answer in answers] == [200, 200, 503, 503, 503]
        assert answers[4].json()["problems"][0]["todo"] == "Try again later"
    assert worker.client.get("/healthz").json()["waiting"] == worker.log.waiting == 4


def test_a_row_without_a_value_is_refused_beside_others(candidates: Path, opened: Open) -> None:
    worker, items = opened(candidates), [{"7": 1.0, "8": 1e38}]
    bodies = [{"rows": [{"state_features": {"age": age}, "possible_actions": items}]} for age in (0.5, 1e38, 0.25)]
    answers = together(worker, bodies)  # 1e38 * 1e38 is no float32
    assert [answer.status_code for answer in answers] == [200, 422, 200]
    ranked = worker.client.post("/rank", json=bodies[1])
    assert ranked.status_code == 422
    for answer in (answers[1], ranked):
        assert answer.json()["problems"][0]["where"] == "rows.0.possible_actions"
    assert worker.log.waiting == 2


@pytest.mark.parametrize("kind", ["named", "candidates"])
def test_requests_that_wait_together_are_decided_together_and_answered_apart(
    kind: str, opened: Open, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, bundle = opened(request.getfixturevalue(kind)), load_bundle(request.getfixturevalue(kind))
    sizes, lists = [3, 1, 2, 1, 200], [[{"7": float(n), "8": 1.0} for n in range(1 + k % 3)] for k in range(207)]
    bodies = []
    for size in sizes:
        begin = sum(len(body["rows"]) for body in bodies)
        states = [{"3": float(n), "age": 0.5} for n in range(begin, begin + size)]
        bodies.append({"rows": [{"state_features": state, "mdp_id": f"{begin + n}"} for n, state in enumerate(states)]})
        for row, candidates in zip(bodies[-1]["rows"], lists[begin:], strict=False):
            row |= {"possible_actions": candidates} if kind == "candidates" else {}
    unknown = {"rows": [{**bodies[0]["rows"][0], "state_features": {"4": 1.0}}]}
    predicted, predict = [], worker.model.bundle.predict

    def counting(values: Any, *given: Any) -> Any:
        predicted.append(len(values))
        return predict(values, *given)

    monkeypatch.setattr(worker.model.bundle, "predict", counting)
    monkeypatch.setattr("reagent_lite.serving.deciding.MOST_CHOICES", 300)

    first, *answers = together(worker, [unknown, *bodies])
    assert first.status_code == 422
    assert predicted == [100, 100, 7]  # of 3 choices each
    rng, rows = np.random.default_rng([5, 0]), [row for body in bodies for row in body["rows"]]
    decisions = [decision for answer in answers for decision in answer.json()["decisions"]]
    for part in (slice(0, 100), slice(100, 200), slice(200, 207)):
        choices = {}
        if kind == "candidates":
            choices = {"candidates": bundle.candidates([row["possible_actions"] for row in rows[part]])}
        assert drawn({"decisions": decisions[part]}) == acted(bundle, rows[part], rng, **choices)
    assert [len(answer.json()["decisions"]) for answer in answers] == sizes
    logged = worker.waiting_rows()
    assert [row["mdp_id"] for row in logged] == [f"{n}" for n in range(207)]
    assert [row["decision_id"] for row in logged] == [decision["decision_id"] for decision in decisions]


@pytest.mark.parametrize("kind", ["named actions", "candidates", "items"])
def test_the_openapi_holds(kind: str, opened: Open, tmp_path: Path) -> None:
    # of one feature, which is clamped, so that no value is too large
    bundle = tmp_path / "model"
    if kind != "named actions":
        bilinear_bundle(bundle, np.eye(1), (3,), (7,), ITEMS if kind == "items" else None)
    else:
        linear_bundle(bundle, np.array([[1.0], [0], [-1]]), NAMES, (3,))
    # schemathesis starts the application and does not stop it
    worker = opened(bundle, poll_seconds=3600)
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
