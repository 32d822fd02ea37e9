"""Two hosts, one shared folder, one trained model: the user's steps as written, and what may happen on the way."""

import json
import random
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from cluster.hosts import Hosts, Names, cluster_of
from cluster.training import SECONDS, Job, Make, alone, learned, parts, undisturbed
from helpers.interpreters import FORKED_WORKERS
from torch.testing import assert_close

from reagent_lite.export import load_bundle

STEPS = {"checkpoint": {"every_steps": 5}, "rendezvous": {"lost_after_seconds": 4.0, "heartbeat_seconds": 0.5}}


def test_the_seven_steps_and_a_killed_worker(two_hosts: Hosts, job: Make, lines: list[str], tmp_path: Path) -> None:
    """Shared folder, private disks, an empty file, parts at one path, the config, the command, node 0's model.

    With all rows in each minibatch the order of rows does not matter: one process learns the same from the union. Where
    a worker is killed, the model is the same bit for bit.
    """
    (two_hosts[0].seen_from_here(two_hosts.share) / "run.rdzv").write_bytes(b"")
    whole = {"data": {"global_minibatch_size": len(lines)}, "epochs": 10}
    work = job(**whole)
    started = work.start_all(env={FORKED_WORKERS: "1"})
    work.done()
    outcome = json.loads(started[0].communicate()[0].splitlines()[-1])
    assert (outcome["steps"], outcome["rows"]) == (10, 10 * len(lines))
    assert (started[1].communicate()[0], work.out(1).exists()) == ("", False)
    assert load_bundle(str(work.out(0) / "model")).action_names == ("0", "1")
    assert not list(two_hosts[0].seen_from_here(two_hosts.share).iterdir())
    expected = learned(work.out())
    assert_close(expected, alone(tmp_path / "alone", lines, **whole), rtol=1e-5, atol=1e-5)
    survived(job(**STEPS, **whole), "kill", 8, expected)


@pytest.mark.slow
@pytest.mark.parametrize("names", ["unknown", "loopback"])
def test_torchrun_where_names_lead_nowhere(need_hosts: None, lines: list[str], names: Names) -> None:
    """gloo asks for the address of a machine's own name, and takes 127.0.0.1 where it finds nothing or that."""
    with cluster_of(2, kind="bind", names=names) as hosts:
        work = Job(hosts, parts(lines, 2), epochs=1)
        for host in hosts:
            work.torchrun(host)
        work.done()
        assert (work.out() / "model").exists()


def survived(work: Job, kind: str, step: int, expected: dict[str, torch.Tensor]) -> None:
    """Runs a job with a fault before a step, and asserts that it goes on and learns the same, bit for bit."""
    started = work.start_all(env={FORKED_WORKERS: "1", "REAGENT_LITE_FAULT": f"fail:rank=1,step={step},kind={kind}"})
    work.done()
    assert all("restart 1 of at most 3" in launcher.said for launcher in started), work.logs()
    assert f"resuming from checkpoints/step_{step // 5 * 5:06d}" in started[0].said
    assert_close(learned(work.out()), expected, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exception", "stop"])
def test_a_fault_on_purpose_is_survived_bit_for_bit(job: Make, kind: str) -> None:
    survived(job(**STEPS, epochs=3), kind, 23, undisturbed(job(**STEPS, epochs=3)))


def strike(work: Job, rng: random.Random) -> str:
    """Kills something: a worker, a launcher, or all of a host, which is then started again by the same command."""
    index = rng.randrange(2)
    host, launcher = work.hosts[index], work.started[index][-1]
    children = launcher.children()
    what = rng.choice(["worker", "launcher", "host"][not children :])
    if what == "worker":
        with suppress(psutil.NoSuchProcess):
            rng.choice(children).kill()
    elif what == "launcher":
        launcher.kill()
    else:
        host.kill_all(silent=rng.random() < 0.5)
    if what != "worker":
        time.sleep(rng.random())
        work.start(host)
    return f"{what} of node {index}"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("count", [1, 20])
def test_killed_at_random_moments(job: Make, count: int) -> None:
    expected = undisturbed(job(**STEPS, epochs=12))
    for seed in range(count - 1, 2 * count - 1):
        rng = random.Random(seed)
        work = job(**STEPS, epochs=12)
        work.start_all()
        time.sleep(rng.uniform(0, 9))
        print(f"seed {seed}: {strike(work, rng)} killed", flush=True)
        codes = {launchers[-1].wait(SECONDS) for launchers in work.started}
        # who had ended before the kill ended well
        assert codes <= ({0, 4} if "The model was already saved and is kept" in work.logs() else {0}), work.logs()
        assert_close(learned(work.out()), expected, rtol=0, atol=0)
        assert (work.out() / "model/manifest.json").exists()
        work.close()
