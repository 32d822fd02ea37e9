"""Measures one scale for auto-scaling: python -m reagent_lite.run.scaling.probe FILE.

The process learns in simulation for a few seconds like a run, and writes its rate to the folder of FILE. It reports
errors like a worker of a run.
"""

import json
import math
import sys
import time
from pathlib import Path

import torch

from reagent_lite.cli import message_of
from reagent_lite.config import DqnConfig, ParametricDqnConfig, WorkflowConfig, check
from reagent_lite.distributed.group import Group, ProcessRanks, join_group
from reagent_lite.distributed.launcher import choose_processes
from reagent_lite.distributed.worker import end_with_parent, report_failure
from reagent_lite.run.learner import update_capture
from reagent_lite.run.resolved import resolve
from reagent_lite.run.runner import Run
from reagent_lite.sim.cuda import on_stream
from reagent_lite.training.loop import fit
from reagent_lite.training.stop import StopSignal

_WINDOWS = 5
_WINDOW_SECONDS = 0.4
_WARM_ROUNDS = {"cpu": 2, "cuda": 6}  # CUDA graphs are recorded in the fourth


class _Watch:
    """Measures the time of rounds, each a rollout and its updates, in windows of equal numbers of rounds on all ranks.

    warm-up │ one round, which determines the rounds per window │ window │ window │ … until there are _WINDOWS
    """

    def __init__(self, run: Run) -> None:
        self._group = run.group
        self._settings = run.config.environments
        self._steps = 0
        self._next = _WARM_ROUNDS[run.group.device.type]
        self._rounds = 0
        self._since = math.nan
        self._seconds: list[float] = []

    def after_step(self) -> None:
        """Called after each step, until the rate is measured."""
        self._steps += 1
        if self._steps < self._next * self._settings.updates_per_rollout:
            return
        group = self._group
        if group.device.type == "cuda":
            torch.cuda.synchronize(group.device)
        group.barrier()
        elapsed = time.perf_counter() - self._since
        if math.isnan(self._since):  # the warm-up is over
            self._rounds = 1
        elif not self._seconds and self._rounds == 1:
            self._rounds = int(group.all_reduce_max(torch.tensor([math.ceil(_WINDOW_SECONDS / elapsed)])))
            self._seconds = [elapsed] if self._rounds == 1 else []
        else:
            self._seconds.append(elapsed)
        self._next += self._rounds
        self._since = time.perf_counter()

    @property
    def done(self) -> bool:
        """Whether the rate is measured."""
        return len(self._seconds) == _WINDOWS

    @property
    def rate(self) -> float:
        """Environment steps per second of all ranks in the fastest window, which other programs slowed least."""
        steps = self._rounds * self._settings.steps_per_rollout * self._settings.num_envs
        return steps / min(self._seconds)


def measure(config: WorkflowConfig, group: Group) -> float:
    """Returns the environment steps per second of all ranks in a run of the config; every rank calls it."""
    with on_stream(group.device):
        run = Run(resolve(config, group), StopSignal())
        watch = _Watch(run)
        capture = update_capture(run.config, group)
        for _ in fit(run.running, run.stream.plan, group, collect=run.stream.before_step, capture=capture):
            watch.after_step()
            if watch.done:  # the configured run is longer than any measurement
                break
    return watch.rate


def probe_scale(file: Path) -> int:
    """Measures the rate of the config in a file and returns the exit code."""
    end_with_parent()
    try:
        task = json.loads(file.read_text())
        config = check(ParametricDqnConfig if task["parametric"] else DqnConfig, task["config"])
        ranks = ProcessRanks.read()
        assert ranks is not None
        processes = choose_processes(config)
        with join_group(ranks, processes.device(ranks.local_rank), gpus=processes.gpus) as group:
            rate = measure(config, group)
    except Exception as error:
        report_failure(error, message_of(error))
        return 1
    if ranks.rank == 0:
        (file.parent / "rate.json").write_text(json.dumps(rate))
    return 0


if __name__ == "__main__":
    sys.exit(probe_scale(Path(sys.argv[1])))
