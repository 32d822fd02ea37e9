"""Two models behind one server: propensities, shares, stop and promotion; what workers and restarts must not lose."""

import errno
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import numpy as np
import pyarrow.parquet as pq
import pytest
from helpers.bundles import bilinear_bundle, linear_bundle
from helpers.clocks import MovedClock
from helpers.waiting import wait_until
from serving.conftest import IDS, ITEMS, NAMES, TestClient, pass_time, rows_of
from serving.test_server import Server as Process
from serving.test_server import workers

import reagent_lite
from reagent_lite.config.loader import check
from reagent_lite.config.rollout_config import ServedRolloutConfig
from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.errors import BundleError, ConfigError, DataError
from reagent_lite.evaluation.policy_comparison import RolloutComparison
from reagent_lite.export import load_bundle
from reagent_lite.serving import rollout_watch
from reagent_lite.serving.app import create_app
from reagent_lite.serving.decision_log import DecisionLog, open_log
from reagent_lite.serving.rollout_store import RolloutStore
from reagent_lite.serving.rollout_watch import RolloutWatch
from reagent_lite.serving.served_model import ServedModel
from reagent_lite.serving.worker_rollout import WorkerRollout
from reagent_lite.serving.workers import _begun_rollout, _poll

SECTION = {"shares": [0.5], "reward_range": [0, 5], "units_per_share": 10_000}


@dataclass
class Server:
    """A parent and its workers in this process."""

    config: ServeConfig
    log: DecisionLog
    watch: RolloutWatch
    store: RolloutStore
    clients: list[Any]
    folder: Path

    def decide(self, *rows: dict[str, Any], worker: int = 0) -> dict[str, Any]:
        rows = tuple({"state_features": {"3": 1.0, "age": 0.5}} | row for row in rows or ({},))
        answer = self.clients[worker].post("/decide", json={"rows": list(rows)})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def reward(self, answer: dict[str, Any], value: float, **more: Any) -> None:
        for decision in answer["decisions"]:
            assert self.log.join(decision["decision_id"], {"reward": value, **more}) == "joined"

    def wait(self, seconds: float) -> None:
        for log in (self.log, *(client.app.state.worker.log for client in self.clients)):
            pass_time(log, seconds)

    def compare(self) -> dict[str, Any]:
        """Writes all decisions into files, after their time, and compares them."""
        self.wait(3600)
        self.log.rotate()
        self.watch.poll()
        return dict(self.store.figures["comparison"])

    def change(self, **body: Any) -> int:
        return int(self.clients[0].post("/rollout", json=body).status_code)


Serve = Callable[..., Server]


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Softmax policies: the current one prefers mail, the new one call."""
    current = linear_bundle(tmp_path / "current", np.array([[2.0, 0], [0, 0], [0, 0]]), NAMES, IDS)
    new = linear_bundle(tmp_path / "new", np.array([[0.0, 0], [2, 0], [0, 0]]), NAMES, IDS)
    return current, new


@pytest.fixture
def serve(tmp_path: Path, models: tuple[Path, Path]) -> Iterator[Serve]:
    """Starts a server with workers in this process; a second call is a restart."""
    resources = ExitStack()

    def start(*, workers: int = 1, current: Path = models[0], new: Path = models[1], **keys: Any) -> Server:
        resources.close()
        config = ServeConfig(model=str(current), log=str(tmp_path / "log"), seed=5,
                             rollout={**SECTION, "model": str(new), **keys.pop("rollout", {})}, **keys)  # fmt: skip
        model = ServedModel(config.model, config.items)
        log = resources.enter_context(open_log(config, choices=model.bundle.choices))
        shared = tmp_path / f"shared{len(list(tmp_path.glob('shared*')))}"
        shared.mkdir()
        watch = _begun_rollout(config, config.rollout, model, log, shared)
        clients = []
        for number in range(workers):
            of_worker = DecisionLog(config, choices=log.choices, epoch=log.epoch, failure=log.shared_failure)
            resources.callback(of_worker.close)
            served, other = (ServedModel(str(shared / name), config.items) for name in ("current", "new"))
            rollout = WorkerRollout(RolloutStore(of_worker, watch.number), served, other, (str(current), str(new)))
            rollout.present()
            app = create_app(config, number, served, of_worker, rollout=rollout)
            clients.append(resources.enter_context(TestClient(app, "http://localhost")))
        return Server(config, log, watch, RolloutStore(log, watch.number), clients, Path(config.log))

    with resources:
        yield start


def play(server: Server, units: int, *, reward: Callable[[str], float], steps: int = 2, workers: int = 1) -> None:
    """Plays episodes whose reward depends on the action, half of them in each of two requests."""
    rng = np.random.default_rng(0)
    for step in range(steps):
        for part in np.array_split(np.arange(units), 2):
            rows = [{"mdp_id": f"u{unit}", "sequence_number": step} for unit in part]
            for decision in server.decide(*rows, worker=int(rng.integers(workers)))["decisions"]:
                earned = float(rng.random() < reward(decision["action"]))
                server.reward({"decisions": [decision]}, earned, terminal=step == steps - 1)


def test_the_log_has_the_density_of_the_mixture(serve: Serve, models: tuple[Path, Path]) -> None:
    server = serve(workers=2)
    play(server, 60, reward=lambda action: 0.5, workers=2)
    compared = server.compare()
    rows = rows_of(server.folder)
    bundles = [load_bundle(model) for model in models]
    p_current, p_new = (b.predict(b.states([{"3": 1.0, "age": 0.5}])).propensities[0].astype(float) for b in bundles)
    for unit in range(60):
        first, second = (row for row in rows if row["mdp_id"] == f"u{unit}")
        actions = [NAMES.index(row["action"]) for row in (first, second)]
        density = 0.5 * np.prod(p_new[actions]) + 0.5 * np.prod(p_current[actions])
        assert first["action_probability"] * second["action_probability"] == pytest.approx(density, rel=1e-6)
        assert first["policy"] == second["policy"]
        assert first["probability_new"] == pytest.approx(p_new[actions[0]], rel=1e-6)
    versions = {row["policy"]: row["model"] for row in rows}
    assert versions == {"current": server.store._log.read("SELECT current FROM rollouts")[0][0],
                        "new": server.store._log.read("SELECT new FROM rollouts")[0][0]}  # fmt: skip
    assert 15 < sum(row["policy"] == "new" for row in rows) / 2 < 45
    audited = reagent_lite.rollout(server.folder)
    assert audited.comparison.figures() == {name: value for name, value in compared.items() if name != "history"}
    assert (audited.wrong_propensities, audited.different_events, audited.comparison.units) == (0, 0, 60)
    assert reagent_lite.read_log(server.folder).num_rows == 120  # other readers ignore the columns


def test_rows_of_an_episode_in_one_request_follow_each_other(serve: Serve) -> None:
    server = serve()
    server.decide(*({"mdp_id": "a", "sequence_number": n} for n in range(5)), {"mdp_id": "b"}, {})
    server.decide({"mdp_id": "a", "sequence_number": 9}, {"mdp_id": "b"})
    server.compare()
    rows = rows_of(server.folder)
    assert len({row["policy"] for row in rows if row["mdp_id"] == "a"}) == 1
    assert [row["unit_step"] for row in rows] == [0, 1, 2, 3, 4, 0, 0, 5, 1]
    audited = reagent_lite.rollout(server.folder)
    assert (audited.rows, audited.wrong_propensities) == (9, 0)


def test_a_harmful_model_is_stopped_for_good(serve: Serve) -> None:
    server = serve()
    open_episode = server.decide(*({"mdp_id": f"open{n}"} for n in range(20)))
    server.reward(open_episode, 0.0)
    play(server, 250, reward=lambda action: {"mail": 1.0, "call": 0.0}.get(action, 0.5), steps=1)
    assert server.compare()["units"] == 0  # later units wait for the open ones
    server.wait(100_000)
    server.reward(server.decide({}), 0.0)
    compared = server.compare()
    assert (compared["decision"], compared["units"]) == ("worse", 271)
    assert server.store.state.state == "stopped"
    current = server.decide({})["model"]
    server.decide(*({"mdp_id": f"open{n}"} for n in range(20)))
    server.compare()
    after = rows_of(server.folder)[-21:]
    assert {(row.get("policy"), row["model"]) for row in after} == {(None, current)}
    restarted = serve(rollout={"level": 0.1})
    assert restarted.store.state.state == "stopped"
    assert restarted.decide({})["model"] == current
    assert restarted.change(share=0.3) == restarted.change(promote=True) == 409
    events = [json.loads(line) for line in (server.folder / ".rollout.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["begin", "stop"]
    audited = reagent_lite.rollout(server.folder)
    assert (audited.events, audited.different_events, audited.comparison.decision) == (2, 0, "worse")


def test_a_stop_survives_the_loss_of_the_database(serve: Serve, tmp_path: Path, models: tuple[Path, Path]) -> None:
    server = serve()
    server.decide({"mdp_id": "a"})
    server.change(stop=True)
    server.compare()
    third = linear_bundle(tmp_path / "third", np.array([[0.0, 0], [0, 0], [2, 0]]), NAMES, IDS)
    running = serve(new=third)
    running.decide({"mdp_id": "a"})
    running.compare()
    lost = running.store.state.id
    shutil.rmtree(running.folder / ".decisions")
    again = serve(new=third)
    assert again.store.state.id != lost
    assert again.decide({"mdp_id": "a"})["decisions"]
    again.compare()
    assert [json.loads(event)["event"] for event in again.store.events] == [
        "begin", "stop", "begin", "superseded", "begin"
    ]  # fmt: skip
    (again.folder / ".decisions").rename(tmp_path / "lost")
    stopped = serve()
    assert (stopped.store.state.state, stopped.store.state.id) == ("stopped", server.watch._id)
    shutil.rmtree(stopped.folder / ".decisions")
    (stopped.folder / ".rollout.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"rollout\.jsonl: expected events of a server"):
        serve()


def test_a_better_model_is_promoted_and_stays_so(serve: Serve, models: tuple[Path, Path]) -> None:
    server = serve(rollout={"on_better": "promote"})
    play(server, 250, reward=lambda action: {"mail": 0.0, "call": 1.0}.get(action, 0.5), steps=1)
    assert server.compare()["decision"] == "better"
    new = server.decide({})["model"]
    assert new == server.store._log.read("SELECT new FROM rollouts")[0][0]
    assert server.clients[0].get("/healthz").json()["model"] == new
    restarted = serve(rollout={"on_better": "promote"})
    assert (restarted.decide({})["model"], restarted.store.state.state) == (new, "promoted")


def test_without_orders_a_better_model_is_reported_once(serve: Serve) -> None:
    server = serve()
    play(server, 250, reward=lambda action: {"mail": 0.0, "call": 1.0}.get(action, 0.5), steps=1)
    server.compare()
    server.watch.poll()
    assert server.store.state.state == "running"
    assert [json.loads(event)["event"] for event in server.store.events] == ["begin", "report"]


def test_shares_grow_and_units_keep_theirs(serve: Serve) -> None:
    server = serve(rollout={"shares": [0.25, 0.75], "units_per_share": 30})
    old = server.decide({"mdp_id": "old", "sequence_number": 0})
    server.reward(old, 1.0)
    server.reward(server.decide(*[{}] * 30), 1.0)
    server.wait(100_000)
    server.decide({})
    server.compare()
    assert server.store.state.share == 0.75
    server.decide({"mdp_id": "old", "sequence_number": 1}, {"mdp_id": "young"})
    server.compare()
    shares = {(row["mdp_id"], row["share"]) for row in rows_of(server.folder) if row["mdp_id"] in ("old", "young")}
    assert shares == {("old", 0.25), ("young", 0.75)}
    server.compare()
    assert server.store.state.share == 0.75  # the last one


def test_a_share_of_the_operator_begins_with_its_own_units(serve: Serve) -> None:
    server = serve(rollout={"shares": [0.25, 0.75], "units_per_share": 30})
    shares = []
    for share in (0.1, None, None, 0.5, None, None):
        server.decide(*[{}] * 20)
        server.compare()
        if share is not None:
            assert server.change(share=share) == 204
        shares.append(server.store.state.share)
    assert shares == [0.1, 0.1, 0.25, 0.5, 0.5, 0.75]  # 20, 40 and 20, 40 units after the operator's
    restarted = serve(rollout={"shares": [0.2, 0.9], "units_per_share": 30})
    assert restarted.store.state.share == 0.75
    restarted.decide(*[{}] * 30)
    restarted.compare()
    assert restarted.store.state.share == 0.9
    with pytest.raises(ConfigError, match="shares: expected shares that grow"):
        check(ServedRolloutConfig, {"model": "new", "shares": [0.5, 0.1]})


def test_a_repeated_request_gets_its_first_decision(serve: Serve) -> None:
    server = serve()
    row = {"mdp_id": "a", "sequence_number": 1}
    first = server.decide(row)
    assert server.decide(row) == first
    assert server.decide({"mdp_id": "a", "sequence_number": 2}, row | {"sequence_number": 3})["decisions"]
    server.compare()
    audited = reagent_lite.rollout(server.folder)
    assert (audited.rows, audited.wrong_propensities) == (3, 0)


def test_a_unit_that_another_worker_changed_is_decided_again(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(workers=2)
    server.decide(*({"mdp_id": f"u{number}"} for number in range(20)), worker=0)
    units = RolloutStore.units
    stale = iter([True, True])

    def once_stale(self: RolloutStore, episodes: Any) -> Iterator[Any]:
        return iter(()) if next(stale, False) else units(self, episodes)

    monkeypatch.setattr(RolloutStore, "units", once_stale)
    server.decide(*({"mdp_id": f"u{number}"} for number in range(20)), worker=1)
    assert next(stale, None) is None
    server.compare()
    rows = rows_of(server.folder)
    assert len(rows) == 40
    for number in range(20):
        assert len({row["policy"] for row in rows if row["mdp_id"] == f"u{number}"}) == 1
    assert reagent_lite.rollout(server.folder).wrong_propensities == 0


def test_other_models_or_settings_begin_another_rollout(
    serve: Serve, models: tuple[Path, Path], tmp_path: Path
) -> None:
    server = serve()
    first = server.store.state.id
    server.decide({"mdp_id": "a"})
    assert serve(rollout={"units_per_share": 5}).store.state.id == first
    changed = serve(rollout={"level": 0.01})
    assert changed.store.state.id != first
    changed.decide({"mdp_id": "a"})
    third = linear_bundle(tmp_path / "third", np.array([[0.0, 0], [0, 0], [2, 0]]), NAMES, IDS)
    last = serve(new=third)
    events = [(json.loads(event)["event"], json.loads(event)["rollout"]) for event in last.store.events]
    second = changed.store._log and events[2][1]
    assert [event for event, _ in events] == ["begin", "superseded", "begin", "superseded", "begin"]
    last.compare()
    assert reagent_lite.rollout(last.folder, config={"rollout": second}).rows == 1
    assert {row["rollout"] for row in rows_of(last.folder)} == {first, second}


def test_models_that_cannot_share_a_server_are_refused(serve: Serve, models: tuple[Path, Path], tmp_path: Path) -> None:
    candidates = bilinear_bundle(tmp_path / "candidates", np.eye(2), IDS, (7, 8))
    with pytest.raises(BundleError, match="choices: expected those of the served model"):
        serve(new=candidates)
    with pytest.raises(ConfigError, match="another model than model"):
        serve(new=models[0])


def test_a_newer_item_table_serves_both_models(serve: Serve, tmp_path: Path) -> None:
    current = bilinear_bundle(tmp_path / "items", np.eye(2), IDS, (7, 8), ITEMS)
    new = bilinear_bundle(tmp_path / "other", -np.eye(2), IDS, (7, 8), ITEMS)
    table = tmp_path / "table.jsonl"
    rows = [{"item_id": name, "7": float(n), "8": 1.0} for n, name in enumerate(("tea", "milk", "figs"))]
    table.write_text("\n".join(map(json.dumps, rows)))
    server = serve(current=current, new=new, items=str(table))
    play_items = server.decide({}, {"mdp_id": "a"})
    assert {decision["action"] for decision in play_items["decisions"]} <= {"tea", "milk", "figs"}
    worker = server.clients[0].app.state.worker
    worker.model._serve(worker.model.bundle.with_items(load_bundle(current).items, "items"))
    answer = server.decide({"mdp_id": "a", "possible_actions": ["12", "tea too"]})
    assert answer["decisions"][0]["action"] in ("12", "tea too")
    server.compare()
    assert reagent_lite.rollout(server.folder).wrong_propensities == 0


def test_the_operator_changes_share_and_stops(serve: Serve) -> None:
    server = serve()
    assert server.change(share=0.9) == 204
    server.decide({})
    assert [server.change(**body) for body in ({"share": 1.0}, {}, {"stop": True, "promote": True})] == [422] * 3
    assert server.change(stop=True) == 204
    assert server.change(promote=True) == 409
    server.compare()
    rows = rows_of(server.folder)
    assert [row["share"] for row in rows] == [0.9]
    document = server.clients[0].get("/rollout.json").json()
    assert (document["state"], document["share"]) == ("stopped", 0.0)
    assert [event["event"] for event in document["events"]] == ["begin", "share", "stop"]


def test_a_clock_that_is_set_back_changes_no_order(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    server.decide({"mdp_id": "a", "sequence_number": 0}, {"mdp_id": "b"})
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() - 10**15)
    server = serve()
    server.decide({"mdp_id": "a", "sequence_number": 1}, {"mdp_id": "c"})
    server.compare()
    decided = [row["decided"] for row in rows_of(server.folder)]
    assert decided == sorted(decided)
    assert (decided[-1] - decided[0]).total_seconds() < 3600
    assert reagent_lite.rollout(server.folder).waiting_units == 3


def test_a_full_disk_delays_an_event(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve()
    events = server.folder / ".rollout.jsonl"
    with monkeypatch.context() as full:
        full.setattr(rollout_watch, "write_whole", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        _poll(server.config, server.log, server.watch)
        assert not events.exists()
    assert "log: [Errno 28] No space left on device" in caplog.text
    assert "Traceback" not in caplog.text
    _poll(server.config, server.log, server.watch)
    assert json.loads(events.read_text())["event"] == "begin"


def test_page_and_metrics(serve: Serve) -> None:
    server = serve(rollout={"guardrails": {"complaints": {"at_most_worse_by": 0.1, "range": [0, 1]}}})
    assert "No unit has been compared yet" in server.clients[0].get("/rollout").text
    server.reward(server.decide(*[{}] * 15, *[{"mdp_id": f"u{number}"} for number in range(15)]), 1.0, terminal=True)
    server.compare()
    page = server.clients[0].get("/rollout").text
    assert "No decision has the metric complaints yet" in page
    assert "Decisions of ended episodes" not in page
    server.reward(server.decide({"mdp_id": "u0"}), 1.0, metrics={"complaints": 0.0})
    server.compare()
    page = server.clients[0].get("/rollout").text
    assert "Too early to say whether the new policy is better or worse, after 30 units" in page
    assert "Complaints per unit" in page
    assert "No decision has the metric" not in page
    assert "Decisions of ended episodes, not compared" in page
    assert 'http-equiv="refresh"' in page
    assert 'http-equiv="refresh"' not in server.clients[0].get("/rollout?refresh=no").text
    worker = server.clients[0].app.state.worker
    worker.figures.copy_rollout(worker.rollout.document())
    figures = server.clients[0].get("/metrics").text
    assert 'reagent_rollout{figure="units"} 30.0' in figures
    assert 'reagent_rollout_difference{figure="low",outcome="reward"}' in figures


class Kills:
    """A server that is killed, by kill -9, during some of the requests: one of its workers, or all processes.

    Args:
        start: starts it.
        at: numbers of requests during which there is a kill.
        rng: draws who is killed and when, and by how much the clock is moved.
        clock: the clock of its processes, which each kill moves by up to ten days either way.
    """

    def __init__(
        self, start: Callable[[], Process], at: set[int], rng: np.random.Generator, clock: MovedClock | None
    ) -> None:
        self._start = start
        self._at = at
        self._rng = rng
        self._clock = clock
        self._requests = 0
        self.process = start()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Sends a request until it is answered."""
        self._requests += 1
        if self._requests in self._at:
            if self._clock is not None:
                self._clock.move(int(self._rng.integers(-864_000, 864_000)))
            with ThreadPoolExecutor(1) as pool:
                sent = pool.submit(self.process.post, path, body)
                time.sleep(self._rng.random() * 0.01)
                if self._rng.random() < 0.5 and len(self._at) > 1:
                    workers(self.process)[0].kill()
                else:
                    self.process.close()
                    self.process = self._start()
                with suppress(httpx.HTTPError):
                    sent.result()
        for _ in range(50):
            with suppress(httpx.HTTPError):
                answer = self.process.post(path, body)
                if answer.status_code in (200, 204, 409):  # 409: a reward that was joined before the kill
                    return answer.json() if answer.status_code == 200 else {}
            time.sleep(0.2)
        raise AssertionError("the server does not answer")


def recount(rows: list[dict[str, Any]], episode_seconds: float) -> tuple[int, int, float]:
    """Returns units that count, those of the new model and the mean of Z, by loops over the rows of a rollout."""
    units: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        units.setdefault(row["mdp_id"], []).append(row)
    last = rows[-1]["decided"].timestamp()
    total = earned = 0.0
    count = new = 0
    for unit in units.values():
        begun = unit[0]["decided"].timestamp()
        if not any(row["terminal"] for row in unit) and last - begun < episode_seconds:
            break
        counted_rows = [row for row in unit if row["decided"].timestamp() - begun < episode_seconds]
        ratio = math.prod(row["probability_new"] / row["probability_current"] for row in counted_rows)
        outcome = sum(row["reward"] for row in counted_rows)
        center = earned / count if count else 0.0
        share = unit[0]["share"]
        total += (ratio - 1) / (share * ratio + 1 - share) * (outcome - center)
        earned += outcome
        count += 1
        new += unit[0]["policy"] == "new"
    return count, new, total / count


@pytest.mark.parametrize(
    ("kills", "episodes", "steps"),
    [(1, 20, 3), pytest.param(20, 5000, 10, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_killed_servers_lose_and_repeat_nothing(
    models: tuple[Path, Path], tmp_path: Path, kills: int, episodes: int, steps: int
) -> None:
    """Two workers; requests during which a process was killed are repeated. Fifty episodes at a time, and rewards.

    The slow case moves the clock with each kill, and exports another new model half way.
    """
    log = tmp_path / "log"
    section = SECTION | {"model": str(models[1]), "reward_range": [0, steps], "episode_seconds": 2.0,
                         "shares": [0.2, 0.5], "units_per_share": episodes // 3}  # fmt: skip
    is_long = kills > 1
    settings = ("workers=2", f"reward_seconds={20 if is_long else 2}", "rotate_seconds=0.5",
                f"rollout={json.dumps(section)}")  # fmt: skip
    rng = np.random.default_rng(0)
    clock = MovedClock(tmp_path / "clock") if is_long else None
    names = [f"u{number}" for number in range(episodes)]
    parts = [names[start : start + 50] for start in range(0, episodes, 50)]
    requests = len(parts) * steps * 6
    kills_at = set(rng.choice(requests, kills) + 1)
    server = Kills(lambda: Process(models[0], log, *settings, clock=clock), kills_at, rng, clock)
    for number, part in enumerate(parts):
        if is_long and number == len(parts) // 2:
            export_another_model(models, tmp_path, server.process)
        for step in range(steps):
            rows = [{"mdp_id": name, "sequence_number": step, "state_features": {"3": 1.0}} for name in part]
            decisions = server.post("/decide", {"rows": rows})["decisions"]
            assert len(decisions) == len(part)
            for decision in decisions[:5]:  # the others have no reward, and most episodes no end
                body = {"decision_id": decision["decision_id"], "reward": float(rng.random() < 0.3)}
                server.post("/reward", body | {"terminal": step == steps - 1})
    time.sleep(3)
    server.post("/decide", {"rows": [{"state_features": {"3": 1.0}}]})

    def has_all() -> bool:
        return sum(pq.read_metadata(file).num_rows for file in log.glob("*.parquet")) > episodes * steps

    wait_until(has_all, seconds=120)
    server.process.stop()
    compared = require_the_same_figures(log, names, steps)
    assert len(compared) == 1 + is_long
    assert is_long or compared[-1].units == episodes + 1
    if is_long:
        assert clock is not None
        end_and_restart(models, tmp_path, log, settings, clock, compared[-1])


def require_the_same_figures(log: Path, names: list[str], steps: int) -> list[RolloutComparison]:
    """Returns the comparisons of the log's rollouts; each decision is there once, figures are those of loops."""
    rows = [row for row in rows_of(log) if row.get("policy")]
    assert len(rows) == len(names) * steps + 1
    assert {(row["mdp_id"], row["sequence_number"]) for row in rows[:-1]} == {
        (name, step) for name in names for step in range(steps)
    }
    assert [row["decided"] for row in rows] == sorted(row["decided"] for row in rows)
    events = [json.loads(line) for line in (log / ".rollout.jsonl").read_text().splitlines()]
    comparisons = []
    for rollout in dict.fromkeys(row["rollout"] for row in rows):
        part = [row for row in rows if row["rollout"] == rollout]
        audited = reagent_lite.rollout(log, config={"rollout": rollout})
        comparison = audited.comparison
        count, new, mean = recount(part, 2.0)
        assert (comparison.units, comparison.units_new, audited.rows) == (count, new, len(part))
        assert comparison.differences[0].value == pytest.approx(mean, rel=1e-9)
        assert (audited.wrong_propensities, audited.different_events) == (0, 0)
        shares = [event["share"] for event in events if event["rollout"] == rollout and event["event"] != "superseded"]
        assert shares == [0.2, 0.5][: len(shares)]
        assert {row["share"] for row in part} <= set(shares)
        comparisons.append(comparison)
    assert {event["rollout"] for event in events} == {row["rollout"] for row in rows}
    return comparisons


def export_another_model(models: tuple[Path, Path], folder: Path, process: Process) -> None:
    """Replaces the new model in its folder: the rollout goes on with the old one until the server is started again."""
    before = httpx.get(process.url + "/rollout.json", timeout=60).json()
    shutil.copytree(models[1], folder / "before")
    linear_bundle(models[1], np.array([[0.0, 0], [0, 0], [2, 0]]), NAMES, IDS)
    time.sleep(1)
    after = httpx.get(process.url + "/rollout.json", timeout=60).json()
    assert {name: after[name] for name in ("rollout", "new", "state")} == {
        name: before[name] for name in ("rollout", "new", "state")
    }


def end_and_restart(
    models: tuple[Path, Path], folder: Path, log: Path, settings: Sequence[str], clock: MovedClock,
    comparison: RolloutComparison,
) -> None:  # fmt: skip
    """The server has the figures of the files; a stop stays whatever the clock, and after a rollout of other models."""

    def document(process: Process) -> dict[str, Any]:
        return dict(httpx.get(process.url + "/rollout.json", timeout=60).json())

    with closing(Process(models[0], log, *settings, clock=clock)) as process:
        served = wait_for_figures(process, comparison.units)
        assert served["comparison"] | {"history": None} == comparison.figures() | {"history": None}
        assert process.post("/rollout", {"stop": True}).status_code == 204
        process.close()
    for days in (0, -20, 20):
        clock.move(86_400 * days)
        with closing(Process(models[0], log, *settings, clock=clock)) as process:
            assert (document(process)["state"], document(process)["share"]) == ("stopped", 0.0)
            clock.move(-86_400 * days)
            current = document(process)["current"]
            assert {process.post("/decide", {"rows": [{"state_features": {"3": 1.0}}]}).json()["model"]
                    for _ in range(20)} == {current}  # fmt: skip
            process.close()
    shutil.move(models[1], folder / "stopped")
    shutil.move(folder / "before", models[1])
    with closing(Process(models[0], log, *settings, clock=clock)) as process:
        assert document(process)["state"] == "running"
        process.close()
    shutil.rmtree(models[1])
    shutil.move(folder / "stopped", models[1])
    with closing(Process(models[0], log, *settings, clock=clock)) as process:
        assert document(process)["state"] == "stopped"
        process.stop()


def wait_for_figures(process: Process, units: int) -> dict[str, Any]:
    """Returns the figures once so many units have been compared."""

    def document() -> dict[str, Any]:
        return dict(httpx.get(process.url + "/rollout.json", timeout=60).json())

    wait_until(lambda: document().get("comparison", {}).get("units") == units, seconds=60)
    return document()


def test_models_of_different_histories_share_a_server(serve: Serve, tmp_path: Path) -> None:
    """The current model reads one step and the new one two: age one step ago is the value of "call"."""
    current = linear_bundle(tmp_path / "one", np.array([[2.0, 0], [0, 0], [0, 0]]), NAMES, IDS)
    weight = np.array([[0.0] * 6, [0, 0, 1, 0, 0, 0], [0.0] * 6])
    server = serve(current=current, new=linear_bundle(tmp_path / "two", weight, NAMES, IDS, history=2))
    ages = (0.5, 2.0, -1.0)
    for step, age in enumerate(ages):
        rows = [{"mdp_id": f"u{unit}", "sequence_number": step, "state_features": {"3": 1.0, "age": age}}
                for unit in range(20)]  # fmt: skip
        server.decide(*rows)
    server.wait(3600)
    server.log.rotate()
    before = dict(zip(range(3), (0.0, *ages), strict=False))
    for row in rows_of(server.folder):
        q = np.array([0.0, before[row["sequence_number"]], 0.0])
        of_new = np.exp(q) / np.exp(q).sum()
        assert row["probability_new"] == pytest.approx(of_new[NAMES.index(row["action"])], rel=1e-5)
        of_current = np.exp([2.0, 0, 0]) / np.exp([2.0, 0, 0]).sum()
        assert row["probability_current"] == pytest.approx(of_current[NAMES.index(row["action"])], rel=1e-5)
