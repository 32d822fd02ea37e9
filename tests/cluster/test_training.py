"""Two hosts, one shared folder, one trained model: the user's steps as written, and what may happen on the way."""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster.hosts import Hosts
from cluster.training import Job, alone, kill, learned, parts, rows_of_a_log, same

from reagent_lite.export import load_bundle

SLOW = pytest.mark.slow
JOBS: list[Job] = []


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return rows_of_a_log(tmp_path_factory.mktemp("log"), 700)


@pytest.fixture(autouse=True)
def _ended(two_hosts: Hosts) -> Iterator[None]:
    yield
    while JOBS:
        JOBS.pop().end()
    for host in two_hosts:
        host.heal()


def job(hosts: Hosts, shards: list[list[str]], **changes: Any) -> Job:
    JOBS.append(Job(hosts, shards, **changes))
    return JOBS[-1]


def done(started: list[Any], work: Job, code: int = 0, within: float = 90) -> None:
    deadline = time.monotonic() + within
    while any(one.running for one in started):
        assert time.monotonic() < deadline, f"still running after {within} s:\n{work.logs()}"
        time.sleep(0.05)
    codes = [one.wait(1) for one in started]
    assert codes == [code] * len(codes), work.logs()


def test_the_seven_steps(two_hosts: Hosts, lines: list[str], tmp_path: Path) -> None:
    """Shared folder, private disks, an empty file, parts at one path, the config, the command, node 0's model.

    With all rows in each minibatch the order of rows does not matter: one process learns the same from the union.
    """
    (two_hosts[0].seen_from_here(two_hosts.share) / "run.rdzv").write_bytes(b"")
    whole = {"data": {"global_minibatch_size": len(lines)}, "epochs": 30}
    work = job(two_hosts, parts(lines, 2), **whole)
    started = work.start_all()
    done(started, work)
    outcome = json.loads(started[0].stdout.splitlines()[-1])
    assert (outcome["steps"], outcome["rows"]) == (30, 30 * len(lines))
    assert started[1].stdout == ""
    assert not work.out(1).exists()
    bundle = load_bundle(str(work.out(0) / "model"))
    assert bundle.action_names == ("0", "1")
    assert list(two_hosts[0].seen_from_here(two_hosts.share).iterdir()) == []
    same(learned(work.out()), alone(tmp_path / "alone", lines, **whole), 1e-5)


@SLOW
def test_replicas_read_what_one_process_reads(two_hosts: Hosts, lines: list[str], tmp_path: Path) -> None:
    work = job(two_hosts, [lines, lines], data={"layout": "replicas"})
    done(work.start_all(), work)
    same(learned(work.out()), alone(tmp_path / "alone", lines), 1e-5)


@SLOW
def test_three_processes_on_two_hosts_and_uneven_shards(two_hosts: Hosts, lines: list[str], tmp_path: Path) -> None:
    """One process beside two, one third of the rows beside two thirds."""
    thirds = parts(lines, 3)
    shards = [thirds[0], thirds[1] + thirds[2]]
    whole = {"data": {"global_minibatch_size": len(lines)}, "epochs": 10}
    work = job(two_hosts, shards, **whole)
    started = [work.start(two_hosts[0]), work.start(two_hosts[1], "--set", "num_processes_per_node=2")]
    done(started, work)
    same(learned(work.out()), alone(tmp_path / "alone", lines, **whole), 1e-5)


@SLOW
@pytest.mark.parametrize("small", [0, 1])
def test_a_shard_of_few_rows(two_hosts: Hosts, lines: list[str], tmp_path: Path, small: int) -> None:
    whole = {"data": {"global_minibatch_size": len(lines) + 1}, "epochs": 5}
    cut = len(lines) - small
    work = job(two_hosts, [lines[:cut], lines[cut:]], **whole)
    done(work.start_all(), work)
    same(learned(work.out()), alone(tmp_path / "alone", lines, **whole), 1e-5)


STEPS = {"checkpoint": {"every_steps": 5}, "rendezvous": {"lost_after_seconds": 4.0, "heartbeat_seconds": 0.5}}


def undisturbed(hosts: Hosts, lines: list[str], **changes: Any) -> dict[str, torch.Tensor]:
    work = job(hosts, parts(lines, 2), **{**STEPS, **changes})
    done(work.start_all(), work)
    return learned(work.out())


@pytest.mark.parametrize("kind", ["kill", pytest.param("exception", marks=SLOW), pytest.param("stop", marks=SLOW)])
def test_a_fault_on_purpose_is_survived_bit_for_bit(two_hosts: Hosts, lines: list[str], kind: str) -> None:
    expected = undisturbed(two_hosts, lines)
    work = job(two_hosts, parts(lines, 2), **STEPS)
    started = work.start_all(env={"REAGENT_LITE_FAULT": f"fail:rank=1,step=23,kind={kind}"})
    done(started, work)
    for one in started:
        assert "beginning again from the last checkpoint: restart 1 of at most 3" in one.stderr
    assert "resuming from checkpoints/step_000020" in started[0].stderr
    same(learned(work.out()), expected, 0)


def test_a_wrong_row_on_one_host_ends_both_with_file_and_line(two_hosts: Hosts, lines: list[str]) -> None:
    first, second = parts(lines, 2)
    second[3] = second[3].replace('"reward": 1.0', '"reward": NaN')
    work = job(two_hosts, [first, second], **STEPS)
    start = time.monotonic()
    started = work.start_all()
    done(started, work, code=2, within=30)
    assert time.monotonic() - start < 30
    for one in started:
        assert "job/train.jsonl:4" in one.stderr
    assert not (work.out() / "model").exists()


def test_configs_that_differ(two_hosts: Hosts, lines: list[str]) -> None:
    work = job(two_hosts, parts(lines, 2))
    started = [work.start(two_hosts[0]), work.start(two_hosts[1], "--set", "training.learning_rate=0.01")]
    done(started, work, code=3, within=30)
    for one in started:
        assert "config key training.learning_rate: expected 0.001 as on node 0 (host node0" in one.stderr


def test_missing_data_on_one_host_is_said_by_both_before_training(two_hosts: Hosts, lines: list[str]) -> None:
    work = job(two_hosts, parts(lines, 2))
    two_hosts[1].run("rm", two_hosts[1].data / "job/train.jsonl")
    started = work.start_all()
    done(started, work, code=2, within=30)
    for one in started:
        assert "node 1 (host node1" in one.stderr
        assert "train.jsonl" in one.stderr


@SLOW
@pytest.mark.parametrize("victim", [0, 1])
def test_told_to_end_and_started_again(two_hosts: Hosts, lines: list[str], victim: int) -> None:
    expected = undisturbed(two_hosts, lines, epochs=12)
    work = job(two_hosts, parts(lines, 2), **STEPS, epochs=12)
    slow = {"REAGENT_LITE_FAULT": "fail:rank=0,step=0,kind=slow,seconds=0.02,attempt=any"}
    started = work.start_all(env=slow)
    work.reached(10)
    kill(started[victim].pid, 15)
    done(started, work, code=75, within=30)
    again = work.start_all()
    done(again, work)
    assert "resuming from checkpoints/step_" in again[0].stderr
    same(learned(work.out()), expected, 0)


def strike(work: Job, rng: random.Random) -> str:
    """Kills something: a worker, a launcher, or all of a host, which is then started again by the same command."""
    index = rng.randrange(2)
    host, launcher = work.hosts[index], work.started[index][-1]
    children = launcher.tree()
    what = rng.choice(["worker", "launcher", "host"] if children else ["launcher", "host"])
    if what == "worker":
        kill(rng.choice(children))
    elif what == "launcher":
        kill(launcher.pid)
    else:
        host.kill_all(silent=rng.random() < 0.5)
    if what != "worker":
        time.sleep(rng.random())
        work.start(host)
    return f"{what} of node {index}"


def killed_at_random(hosts: Hosts, lines: list[str], expected: dict[str, torch.Tensor], seed: int) -> None:
    rng = random.Random(seed)
    work = job(hosts, parts(lines, 2), **STEPS, epochs=12)
    started = time.monotonic()
    work.start_all()
    time.sleep(rng.uniform(0, 9))
    what = f"{strike(work, rng)} after {time.monotonic() - started:.1f} s"
    last = [all_[-1] for all_ in work.started]
    while any(one.running for one in last) and time.monotonic() < started + 130:
        time.sleep(0.05)
    stands = "The model had been saved before: it stands, and nothing begins again" in work.logs()
    codes = {one.wait(1) for one in last}
    assert codes <= ({0, 4} if stands else {0}), work.logs()  # who had ended before the kill ended well
    print(f"seed {seed}: {what} killed, done after {time.monotonic() - started:.1f} s", flush=True)
    same(learned(work.out()), expected, 0)
    assert (work.out() / "model/manifest.json").exists()
    work.end()


@SLOW
@pytest.mark.parametrize("seed", [0])
def test_killed_at_a_random_moment(two_hosts: Hosts, lines: list[str], seed: int) -> None:
    killed_at_random(two_hosts, lines, undisturbed(two_hosts, lines, epochs=12), seed)


@SLOW
@pytest.mark.timeout(3000)
def test_killed_at_20_random_moments(two_hosts: Hosts, lines: list[str]) -> None:
    expected = undisturbed(two_hosts, lines, epochs=12)
    for seed in range(1, 21):
        killed_at_random(two_hosts, lines, expected, seed)


@SLOW
@pytest.mark.timeout(3000)
def test_50_runs_in_a_row(two_hosts: Hosts, lines: list[str]) -> None:
    """The same file, the same command, 50 times: no run hangs, and all learn the same."""
    shards = parts(lines, 2)
    first: dict[str, torch.Tensor] = {}
    for number in range(50):
        work = job(two_hosts, shards, epochs=2)
        order = work.hosts if number % 2 else list(work.hosts)[::-1]
        start = time.monotonic()
        done([work.start(host) for host in order], work, within=60)
        print(f"run {number}: {time.monotonic() - start:.1f} s", flush=True)
        first = first or learned(work.out())
        same(learned(work.out()), first, 0)
