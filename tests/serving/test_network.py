"""A server on a network: who may call it, and clients that send too much, too slowly or nothing at all."""

import asyncio
import json
import re
import socket
import sqlite3
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from helpers.bundles import bilinear_bundle, linear_bundle
from helpers.waiting import wait_until
from serving.conftest import IDS, NAMES, Open, Worker
from serving.test_server import ROW, Server, workers

from reagent_lite.config.loader import load_config
from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.errors import ConfigError
from reagent_lite.item_table import ItemTable
from reagent_lite.serving.access import Access, require_certificate

DECIDE, REWARD = "d" * 16, "r" * 16
HEAD = b"POST /decide HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "decide").write_text(f"{'o' * 20}\n{DECIDE}\n")  # an older one is still valid
    (tmp_path / "reward").write_text(REWARD)
    return {"decide_token_file": str(tmp_path / "decide"), "reward_token_file": str(tmp_path / "reward")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server among 1000 items, with short times and few connections of a client."""
    folder = tmp_path_factory.mktemp("network")
    rng = np.random.default_rng(0)
    ids = tuple(f"item{k}" for k in range(1000))
    items = ItemTable(ids=ids, feature_ids=(7, 8), values=rng.normal(size=(1000, 2)).astype(np.float32))
    model = bilinear_bundle(folder / "model", np.eye(2), IDS, (7, 8), items)
    settings = ("request_seconds=1.5", "max_client_connections=300")
    with closing(Server(model, folder / "log", *settings)) as running:
        running.log = folder / "log"  # type: ignore[attr-defined]
        yield running


def connect(server: Server) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    connection.settimeout(20)
    return connection


def everything(connection: socket.socket) -> bytes:
    """Returns all bytes until the server closes the connection."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def seconds(call: Callable[[], httpx.Response]) -> tuple[int, float]:
    begun = time.monotonic()
    return call().status_code, time.monotonic() - begun


def test_tokens(worker: Worker, named: Path, opened: Open, tokens: dict[str, str]) -> None:
    guarded = opened(named, **tokens, log=str(named.parent / "guarded")).client
    statuses = {
        (path, token): guarded.request(
            "POST" if path in ("/decide", "/reward", "/rollout") else "GET",
            path,
            json={"rows": [ROW]} if path == "/decide" else {"decision_id": "1", "reward": 1},
            headers={"authorization": token} if token else {},
        ).status_code
        for path in ("/decide", "/reward", "/rollout", "/metrics", "/openapi.json", "/docs", "/healthz", "/other")
        for token in (f"Bearer {DECIDE}", f"bearer {REWARD}", f"Bearer {DECIDE}x", f"Basic {DECIDE}", "Bearer ", "")
    }
    allowed = {key for key, status in statuses.items() if status != 401}
    of_reward = ("/reward", "/rollout", "/metrics", "/openapi.json", "/docs", "/other")
    assert allowed == {
        ("/decide", f"Bearer {DECIDE}"),
        *((path, f"bearer {REWARD}") for path in of_reward),
        *(key for key in statuses if key[0] == "/healthz"),
    }
    answer = guarded.post("/decide", content=b"{")
    assert (answer.headers["www-authenticate"], answer.headers["connection"]) == ("Bearer", "close")
    assert answer.json()["problems"][0]["todo"] == "Send the header authorization: Bearer TOKEN"
    for tokens_sent in ((DECIDE, "wrong"), ("wrong", DECIDE), (DECIDE, DECIDE)):
        headers = [("authorization", f"Bearer {token}") for token in tokens_sent]
        assert guarded.post("/decide", json={"rows": [ROW]}, headers=headers).status_code == 401
    assert guarded.post("/decide", headers={"authorization": b"Bearer " + "ä".encode() * 16}).status_code == 401
    assert worker.client.post("/decide", json={"rows": [ROW]}).status_code == 200  # of this machine: none is needed


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "server.example"])
def test_a_server_for_other_machines_needs_tokens_or_says_that_it_has_none(host: str, tokens: dict[str, str]) -> None:
    def settings(**keys: Any) -> list[str]:
        return [f"{key}={json.dumps(value)}" for key, value in {"model": "m", "log": "l", "host": host, **keys}.items()]

    with pytest.raises(ConfigError, match=r"decide_token_file: .* --no_token(.|\n)*reward_token_file"):
        load_config(ServeConfig, None, settings())
    load_config(ServeConfig, None, settings(**tokens))
    load_config(ServeConfig, None, settings(no_token=True))
    for local in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        load_config(ServeConfig, None, settings(host=local))


def test_tokens_of_files_with_other_line_ends(tmp_path: Path) -> None:
    for ends in (b"", b"\n", b"\r\n", b" \r\n\r\n"):
        (tmp_path / "token").write_bytes(b"a" * 16 + (ends + b"b" * 16 + ends if ends else b""))
        access = Access.of(ServeConfig(decide_token_file=str(tmp_path / "token")))
        assert access.decide == (b"a" * 16, b"b" * 16)[: 2 if ends else 1]


@pytest.mark.parametrize("content", ["", "\n\n", "short", "x" * 16 + " y", "ä" * 20, None])
def test_files_that_have_no_tokens_are_refused(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"decide_token_file: expected a file with tokens") as error:
        Access.of(ServeConfig(decide_token_file=str(file)))
    assert not content or len(content) < 5 or content not in str(error.value)


@pytest.mark.parametrize(
    ("host", "hosts", "accepted", "refused"),
    [
        ("127.0.0.1", (), ["localhost", "LOCALHOST:80", "127.0.0.1:8000", "[::1]:8000"],
         ["evil.example", "localhost.evil.example", "", "127.0.0.1:x", "localhost@evil"]),
        ("0.0.0.0", (), ["evil.example", "10.0.0.7:8000"], []),
        ("0.0.0.0", ("shop.example",), ["Shop.example:443", "localhost"], ["evil.example", "shop.example.evil"]),
    ],
)  # fmt: skip
def test_names_of_the_server(
    host: str, hosts: tuple[str, ...], accepted: list[str], refused: list[str], named: Path, opened: Open
) -> None:
    client = opened(named, host=host, hosts=hosts, no_token=True).client
    answers = {name: client.get("/healthz", headers={"host": name}).status_code for name in accepted + refused}
    assert answers == dict.fromkeys(accepted, 200) | dict.fromkeys(refused, 400)


def certificate(folder: Path) -> dict[str, str]:
    """Writes a certificate of localhost with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
    (folder / "tls.crt").write_bytes(builder.sign(key, SHA256()).public_bytes(Encoding.PEM))
    (folder / "tls.key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return {"tls_certificate": str(folder / "tls.crt"), "tls_key": str(folder / "tls.key")}


def test_a_server_on_a_network_with_tls_tokens_and_messages_in_json(
    named: Path, tmp_path: Path, tokens: dict[str, str]
) -> None:
    files = certificate(tmp_path)
    keys = {**files, **tokens, "host": "0.0.0.0", "log_format": "json"}
    with closing(Server(named, tmp_path / "log", *(f'{key}="{value}"' for key, value in keys.items()))) as running:
        url = running.url.replace("0.0.0.0", "localhost")
        assert url.startswith("https://localhost:")
        context = ssl.create_default_context(cafile=files["tls_certificate"])
        with httpx.Client(base_url=url, verify=context, timeout=60) as client:
            assert client.post("/decide", json={"rows": [ROW]}).status_code == 401
            client.headers["authorization"] = f"Bearer {DECIDE}"
            assert client.post("/decide", json={"rows": [ROW]}).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https", "http") + "/healthz")
        running.stop()
        messages = [json.loads(line) for line in running.process.said.splitlines()]
    assert {tuple(message) for message in messages} == {("time", "level", "message", "process")}
    assert "serving model" in messages[0]["message"]
    for wrong in ({"tls_key": files["tls_certificate"]}, {"tls_certificate": str(tmp_path / "none")}):
        with pytest.raises(ConfigError, match="tls_certificate: expected a PEM certificate"):
            require_certificate(ServeConfig(**(files | wrong)))


def test_unfinished_handshakes_are_connections(named: Path, tmp_path: Path) -> None:
    """Of one client: the oldest makes room, each ends in time, and others are answered meanwhile."""
    files = certificate(tmp_path)
    settings = (*(f'{key}="{value}"' for key, value in files.items()), "request_seconds=4", "max_client_connections=40")
    with closing(Server(named, tmp_path / "log", *settings)) as running, ExitStack() as closing_all:
        url = running.url.replace("127.0.0.1", "localhost")
        context = ssl.create_default_context(cafile=files["tls_certificate"])
        client = closing_all.enter_context(httpx.Client(base_url=url, verify=context, timeout=60))
        assert client.get("/healthz", headers={"connection": "close"}).status_code == 200
        (worker,) = workers(running)
        before = worker.num_fds()
        opened = []
        for number in range(300):
            opened.append(closing_all.enter_context(closing(connect(running))))
            opened[-1].sendall(b"\x16\x03\x01\x02\x00\x01" * (number % 2))  # a part of a ClientHello
        status, took = seconds(lambda: client.get("/healthz"))
        assert (status, took < 3) == (200, True)
        wait_until(lambda: worker.num_fds() <= before + 41)
        assert {everything(connection) for connection in opened} == {b""}
        wait_until(lambda: worker.num_fds() < before + 10)
        page = client.get("/metrics").text
        reasons = dict(re.findall(r'reagent_connections_closed_total{reason="(\w+)"} (\S+)', page))
        counts = {name: float(count) for name, count in reasons.items()}
        assert sum(counts.values()) == 300
        assert 0 < counts["late"] <= 40 < counts["replaced"]
        assert "Traceback" not in running.process.said


def test_numbers_of_rows_candidates_and_logged_bytes(named: Path, items: Path, opened: Open) -> None:
    worker = opened(named, max_rows=3, max_logged_kb=0.5)
    status, problem = worker.refusal("/decide", rows=[ROW] * 4)
    assert (status, problem["where"], problem["expected"]) == (413, "body.rows", "at most 3 rows")
    size = len(worker.log._db.execute("SELECT event FROM decisions").fetchall()) or 0
    assert (size, worker.post("/decide", rows=[ROW])["decisions"][0]["index"] in (0, 1, 2)) == (0, True)
    (event,) = worker.log._db.execute("SELECT event FROM decisions").fetchone()
    fitting = 500 // len(event)
    assert 0 < fitting < 3
    worker.post("/decide", rows=[ROW] * fitting)
    status, problem = worker.refusal("/decide", rows=[ROW] * (fitting + 1))
    assert (status, problem["expected"]) == (413, "decisions of at most 500 bytes in the log")
    assert worker.log.waiting == 1 + fitting
    worker = opened(items, max_candidates=2, log=str(items.parent / "of items"))
    for path in ("/decide", "/rank"):
        status, problem = worker.refusal(path, rows=[ROW, ROW | {"possible_actions": ["tea", "milk", "12"]}])
        assert (status, problem["where"]) == (413, "body.rows.1.possible_actions")
        assert worker.post(path, rows=[ROW | {"possible_actions": ["tea", "milk"]}, ROW])  # all of the table's


@pytest.mark.parametrize("kind", ["named", "items"])
def test_large_requests_are_answered_as_small_ones(
    kind: str, opened: Open, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """The same rows, with a seed, in one part, in parts of two choices, and with bodies parsed in the thread."""
    worker = opened(request.getfixturevalue(kind))
    rows = [{"state_features": {"3": 0.5 * n, "age": 1.0}, "mdp_id": f"{n}", "sequence_number": n} for n in range(20)]
    rows[3]["possible_actions"] = ["mail"] if kind == "named" else ["milk", "tea", "tea too"]
    lists = [{key: row[key] for key in row.keys() - {"mdp_id", "sequence_number"}} for row in rows]
    bodies = {"/decide": rows} | ({"/rank": lists} if kind == "items" else {})
    small = {path: worker.post(path, rows=body) for path, body in bodies.items()}
    logged = worker.waiting_rows()[3]["possible_actions"]
    monkeypatch.setattr("reagent_lite.serving.parsing.LARGE_BYTES", 1)
    for module in ("app", "deciding"):
        monkeypatch.setattr(f"reagent_lite.serving.{module}.LARGE_CHOICES", 2)
    assert {path: worker.post(path, rows=body) for path, body in bodies.items()} == small  # the first decisions again
    again = [row | {"sequence_number": 1000} for row in rows]
    decisions = worker.post("/decide", rows=again)["decisions"]
    assert [decision["index"] for decision in decisions][3] in ((0,) if kind == "named" else (0, 1))
    assert worker.waiting_rows()[23]["possible_actions"] == logged
    for problem, body in (("states[7]", {"4": 1.0}), ("rows.7.possible_actions", None)):
        changed = [dict(row) for row in again]
        changed[7] |= {"state_features": body} if body else {"possible_actions": ["fax"]}
        status, found = worker.refusal("/decide", rows=changed)
        assert (status, found["where"].split(",")[0]) == (422, problem if kind == "named" or body else "candidates[7]")


def test_large_requests_do_not_hold_up_others(server: Server) -> None:
    status, _ = seconds(lambda: server.post("/rank", {"rows": [ROW] * 8000}))
    assert status == 413
    large: list[httpx.Response] = []

    def send() -> None:
        large.append(server.post("/rank", {"rows": [ROW] * 250}))
        large.append(server.post("/decide", {"rows": [ROW] * 200}))
        large.append(server.post("/decide", {"rows": [ROW] * 1000}))  # whose lists of items would be 11 MB in the log

    sender = threading.Thread(target=send)
    took: list[float] = []
    with closing(HTTPConnection(server.url.removeprefix("http://"), timeout=30)) as connection:
        sender.start()
        while sender.is_alive():
            begun = time.monotonic()
            body = json.dumps({"rows": [ROW | {"possible_actions": ["item1", "item2"]}]})
            connection.request("POST", "/decide", body, {"content-type": "application/json"})
            assert json.loads(connection.getresponse().read())["decisions"]
            took.append(time.monotonic() - begun)
            time.sleep(0.01)
    sender.join()
    assert [answer.status_code for answer in large] == [200, 200, 413]
    rankings = large[0].json()["rankings"]
    assert (len(rankings), {len(ranking) for ranking in rankings}) == (250, {1000})
    assert len(took) > 5
    assert np.median(took) < 0.5


def test_a_message_with_a_length_and_chunks_is_refused_and_the_connection_closed(server: Server) -> None:
    smuggled = b"0\r\n\r\nGET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"
    length, chunks = b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n"
    for head in (length + chunks, chunks + length):
        with closing(connect(server)) as connection:
            connection.sendall(HEAD + head + b"\r\n" + smuggled)
            answer = everything(connection)
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"reagent_requests" not in answer


def test_connections_without_a_request_are_closed_in_time_and_make_room_for_others(server: Server) -> None:
    with ExitStack() as closing_all:
        opened = [closing_all.enter_context(closing(connect(server))) for _ in range(700)]
        for connection in opened[1::2]:
            connection.sendall(HEAD)
        assert seconds(lambda: httpx.get(server.url + "/healthz", timeout=30))[0] == 200
        answers = [everything(connection) for connection in opened]
    assert {answer[:12] for answer in answers} == {b"", b"HTTP/1.1 408"}
    page = httpx.get(server.url + "/metrics", timeout=30).text
    for reason in ("late", "replaced"):
        assert f'reagent_connections_closed_total{{reason="{reason}"}}' in page
    assert "Traceback" not in server.process.said


def test_slow_bodies_do_not_hold_up_others(server: Server) -> None:
    with ExitStack() as closing_all:
        slow = [closing_all.enter_context(closing(connect(server))) for _ in range(280)]
        for connection in slow:
            connection.sendall(HEAD + b"content-length: 900000\r\n\r\n{" + b" " * 1000)
        assert [server.post("/decide", {"rows": [ROW]}).status_code for _ in range(3)] == [200] * 3
        answers = [everything(connection) for connection in slow]
    assert {answer[:12] for answer in answers} <= {b"", b"HTTP/1.1 408"}
    assert b'"a whole body within 1.5 s"' in max(answers)


def test_unfinished_bodies_have_a_bound_in_memory(named: Path, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of two bodies of 60 bytes each, neither of which ends, is refused when the second makes it too much."""
    monkeypatch.setattr("reagent_lite.serving.limits._MOST_BODY_BYTES", 100)
    worker = opened(named, request_seconds=0.3)

    async def statuses() -> list[float]:
        async def answered() -> float:
            parts = [b" " * 60]

            async def receive() -> dict[str, Any]:
                if not parts:
                    await asyncio.sleep(60)
                return {"type": "http.request", "body": parts.pop(), "more_body": True}

            scope = {"type": "http", "method": "POST", "path": "/decide", "headers": [], "query_string": b""}
            send, begun = AsyncMock(), time.monotonic()
            await worker.app(scope, receive, send)
            assert send.await_args_list[0].args[0]["status"] == 408
            return time.monotonic() - begun

        return await asyncio.gather(answered(), answered())

    first, second = asyncio.run(statuses())
    assert first < 0.3 <= second


def test_a_database_that_another_process_has_is_answered_soon(server: Server) -> None:
    decision = server.decide()
    with closing(sqlite3.connect(server.log / ".decisions" / "decisions.sqlite", isolation_level=None)) as database:  # type: ignore[attr-defined]
        database.execute("BEGIN IMMEDIATE")
        waiting: list[tuple[int, float]] = []
        threads = [
            threading.Thread(target=lambda: waiting.append(seconds(lambda: server.post("/decide", {"rows": [ROW]}))))
            for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        wait_until(lambda: any(thread.is_alive() for thread in threads))
        status, took = seconds(lambda: httpx.get(server.url + "/healthz", timeout=30))
        assert (status, took < 0.7) == (200, True)
        assert server.reward(decision) == 503
        for thread in threads:
            thread.join()
        assert {status for status, _ in waiting} == {503}
        assert all(0.6 < took < 2 for _, took in waiting)  # 0.7 s, and what opening connections takes here
        database.execute("ROLLBACK")
    assert server.reward(decision) == 204


def test_the_page_of_the_interface_loads_nothing_from_other_servers(worker: Worker) -> None:
    page = worker.client.get("/docs").text
    assert "POST /decide" in page
    assert "//" not in page.replace("<!doctype", "")
    documents = [worker.client.get("/openapi.json").json() for _ in range(2)]
    assert documents[0] == documents[1]
    assert documents[0]["components"]["schemas"]["ActionName"]["enum"] == [*NAMES]
    assert worker.client.get("/docs").text == page


def test_a_refused_model_is_said_by_the_health_check(named: Path, worker: Worker) -> None:
    linear_bundle(named, np.ones((3, 2)), ("fax", *NAMES[1:]), IDS)
    worker.poll()
    health = worker.client.get("/healthz")
    assert (health.status_code, "got mail missing, fax new" in health.json()["refused_model"]) == (200, True)
    linear_bundle(named, np.ones((3, 2)), NAMES, IDS)
    worker.poll()
    assert "refused_model" not in worker.client.get("/healthz").json()
