"""A real Slurm over two hosts: the step says who is which, and deploy/slurm/train.sbatch goes on after a signal."""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from cluster.hosts import Hosts
from cluster.slurm_lab import Slurm
from cluster.training import ENVIRONMENT, SECONDS, Make, learned, newest, undisturbed
from helpers.runs import ROOT
from helpers.waiting import wait_until
from torch.testing import assert_close


@pytest.fixture(scope="module")
def slurm(need_slurm: None, two_hosts: Hosts) -> Slurm:
    return Slurm(two_hosts)


@pytest.fixture(autouse=True)
def _ended(slurm: Slurm) -> Iterator[None]:
    yield
    slurm.output("scancel", "--user=root")


@pytest.mark.slow  # distributed/test_nodes.py has Slurm's variables
def test_a_step_of_two_tasks_trains_one_model(slurm: Slurm, two_hosts: Hosts, job: Make, lines: list[str]) -> None:
    work = job(num_nodes=1)  # the default: Slurm's variables count
    step = slurm.start("srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, "-m", "workflows.dqn",
                       *work.config, env=ENVIRONMENT)  # fmt: skip
    assert step.wait(90) == 0, step.said
    # one line: of the two tasks, node 0's alone speaks
    assert json.loads(step.communicate()[0])["rows"] == 6 * len(lines)  # epochs, over both parts
    assert "rendezvous: 2 machines met" in step.said
    assert (work.out(0) / "model/manifest.json").exists()
    assert not work.out(1).exists()
    assert list(two_hosts[0].seen_from_here(two_hosts.share).iterdir()) == []


@pytest.mark.slow
def test_a_batch_job_gets_a_signal_and_continues(slurm: Slurm, two_hosts: Hosts, job: Make) -> None:
    """What the time limit's warning brings about: saved, 75, requeued, resumed, and the same model in the end."""
    changes: dict[str, Any] = {"checkpoint": {"every_steps": 5}, "epochs": 12}
    expected = undisturbed(job(num_nodes=2, **changes))
    work = job(num_nodes=1, **changes)
    number = slurm.output(
        "sbatch", "--parsable", "--cpus-per-task=1", f"--output={two_hosts[0].data}/batch.log",
        ROOT / "deploy/slurm/train.sbatch",
        env={**ENVIRONMENT, "CONFIG": str(work.hosts[0].data / "job/x.json"), "PYTHON": sys.executable,
             "HOME": str(two_hosts.share),
             "REAGENT_LITE_FAULT": "fail:rank=0,step=0,kind=slow,seconds=0.05,attempt=any"},
    ).strip()  # fmt: skip
    wait_until(lambda: newest(work.out()) >= 10, work.logs, SECONDS)
    slurm.output("scancel", "--signal=USR2", number)

    def batch() -> str:
        return slurm.output("scontrol", "show", "job", "--oneliner", number)

    wait_until(lambda: "JobState=COMPLETED" in batch(), lambda: two_hosts[0].read("batch.log").decode(), 180)
    assert " Restarts=1 " in batch()
    text = two_hosts[0].read("batch.log").decode()
    assert re.search(r"(?s)stopped by a signal \(75\): requeued.*resuming from checkpoints/step_", text)
    assert_close(learned(work.out()), expected, rtol=0, atol=0)
