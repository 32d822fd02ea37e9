"""simulation.auto_scale: searches on a simulated device, real probes on the CPU, and what does not run."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.interpreters import Interpreter
from helpers.ranks import run_ranks
from helpers.runs import ALONE, ROOT, Tree, checked, merged, trained, with_config

from reagent_lite.config import WorkflowConfig
from reagent_lite.distributed.group import Group, ProcessRanks
from reagent_lite.errors import ConfigError
from reagent_lite.run.environments import compile_environment
from reagent_lite.run.scaling import auto_scale
from reagent_lite.run.scaling.auto_scale import Limit, Probes, Scale, auto_scaled, find_scale, largest
from reagent_lite.run.scaling.search import search, smallest
from reagent_lite.run.simulated import simulated_plan

pytestmark = pytest.mark.usefixtures("caches")


@pytest.fixture
def forked_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes are forks of an interpreter with the libraries imported."""
    monkeypatch.setattr(
        auto_scale, "subprocess", Mock(Popen=lambda command, env, **_: Interpreter(command[1:], env=env))
    )


def tree(tmp_path: Path, **simulation: Any) -> Tree:
    """8 environments and 16 rows; 500 rounds of 16 environments are the whole run."""
    return {
        "model_output_path": str(tmp_path / "out"), "use_gpu": False, "rainbow": {"dueling_architecture": False},
        "training": {"layers": [-1, 8, -1], "activations": ["relu", "linear"], "minibatch_size": 16},
        "simulation": {"env": "cartpole_v1", "auto_scale": True, "num_envs": 8, "total_steps": 8000,
                       "warmup_steps": 100, "num_evaluations": 1, "evaluation_episodes": 2, **simulation},
    }  # fmt: skip


def device(start: float, memory: int = 2**40) -> Callable[[int], float]:
    """Returns rates of n environments: a round takes start + n microseconds; more than `memory` do not fit."""
    return lambda size: 0.0 if size > memory else 1e6 * size / (start + size)


class Modeled(Probes):
    """A round takes `start` µs and 1 µs for each environment; an update 100 µs and 1 µs for each row.

    Rows beyond `cache` cost 3 µs; a first reading of 1024 environments may be three times as fast as they are.
    """

    world = 2
    hardware = "a model"

    def __init__(
        self, *, start: float = 1000.0, memory: int = 2**40, cache: int = 2**40, lucky: bool = False, probes: int = 1000
    ) -> None:
        self.start, self.memory, self.cache, self.lucky = start, memory, cache, lucky
        self.probes = probes
        self.asked: list[Scale] = []

    @property
    def out_of_time(self) -> bool:
        return len(self.asked) >= self.probes

    def choice(self, config: WorkflowConfig, most: int = 2**20) -> Scale:
        return find_scale(config, Limit(num_envs=most, reason="memory"), self).choice

    def speed(self, scale: Scale) -> float:
        n, b = scale.num_envs, scale.minibatch_size
        return 1e6 * n / (self.start + n + scale.updates * (100 + b + 2 * max(b - self.cache, 0)))

    def rate(self, scale: Scale) -> tuple[float, str]:
        if self.out_of_time:
            return 0.0, "the search has taken too long"
        self.asked.append(scale)
        first = self.lucky and scale.num_envs == 1024 and [n for n, *_ in self.asked].count(1024) == 1
        return (
            (0.0, "killed by signal 9") if scale.num_envs > self.memory else (self.speed(scale) * (1 + 2 * first), "")
        )


def best_of_grid(device: Modeled, doublings: Iterable[int], steps: int) -> float:
    """Returns the best speed of every pair of environments and minibatches on a grid."""
    first = Scale(num_envs=4, minibatch_size=16, updates=1)
    return max(device.speed(first.with_minibatch(4 * 2**i, 16 * 2**k)) for i in doublings for k in range(steps))


@pytest.fixture
def long(tmp_path: Path) -> WorkflowConfig:
    """Environment steps enough for any scale."""
    return checked(tree(tmp_path, total_steps=10**12))


def test_environments_first_then_the_minibatch(long: WorkflowConfig) -> None:
    """Of a process: 4 environments, 16 rows.

    A round of n takes 1100 + 5 n µs with one minibatch: 8192 are the first within 3 % of the rate of 32 768, two
    doublings on. There minibatches of 2048 rows are within 3 % of those of 8192.
    """
    device = Modeled()
    choice = device.choice(long)
    assert choice == Scale(num_envs=8192, minibatch_size=32768, updates=1)
    assert device.speed(choice) > 0.95 * best_of_grid(device, [*range(14), 14, 18], 18)
    applied = choice.apply_to(long, 2)
    assert (applied.environments.num_envs, applied.training.minibatch_size) == (16384, 32768)


def test_large_minibatches_that_leave_a_cache_hide_no_gain_of_environments(long: WorkflowConfig) -> None:
    """With one minibatch a round the environments' search ends too early."""
    device = Modeled(start=5000, cache=2048)
    choice = device.choice(long, 2**16)
    assert device.speed(choice) > 0.95 * best_of_grid(device, range(15), 15)
    assert choice.minibatch_size in (1024, 2048)


@pytest.mark.parametrize("probes", [1, 5, 12, 40])
def test_a_search_that_runs_out_of_time_keeps_its_best(long: WorkflowConfig, probes: int) -> None:
    device = Modeled(probes=probes)
    choice = device.choice(long)
    assert choice in device.asked
    assert device.speed(choice) >= 0.97 * max(map(device.speed, device.asked))


def test_memory_bounds_the_search(long: WorkflowConfig) -> None:
    """More than 1250 environments die; 1296 are so near to 1152 that the search with a small minibatch ends there."""
    assert Modeled(start=1e6, memory=1250).choice(long).num_envs == 1152


@pytest.mark.parametrize(("total_steps", "fewest"), [(160_000, 10_000), (16_000, 1987)])
def test_a_run_keeps_optimizer_steps(tmp_path: Path, total_steps: int, fewest: int) -> None:
    """8 environments and 100 steps before learning: 13 rounds of these, and (total_steps - 104) / 8 optimizer steps.

    The first run has 19 987, the second 1987, which are fewer than 10 000 already.
    """
    device, config = Modeled(), checked(tree(tmp_path, total_steps=total_steps))
    assert device.choice(config, total_steps // 1000).num_envs > 4
    assert min(simulated_plan(scale.apply_to(config, 2), 1).num_steps for scale in device.asked) >= fewest


def test_the_choice_is_measured_twice(long: WorkflowConfig) -> None:
    """The second reading of 1024 environments tells."""
    device = Modeled(lucky=True)
    choice = device.choice(long)
    assert choice.num_envs > 1024
    assert device.asked.count(choice) == device.asked.count(Scale(1024, 4096, 1)) == 2


@pytest.mark.parametrize("num_envs", [4, 52, 1000])
@pytest.mark.parametrize("rows", [1, 100, 10**6])
@pytest.mark.parametrize(("minibatch", "updates"), [(16, 1), (7, 3), (1000, 1), (1, 5)])
def test_the_ratio_of_rows_to_steps_stays(minibatch: int, updates: int, rows: int, num_envs: int) -> None:
    scale = Scale(num_envs=4, minibatch_size=minibatch, updates=updates).with_minibatch(num_envs, rows)
    assert 0 <= scale.minibatch_size * scale.updates - minibatch * updates * num_envs / 4 < scale.updates
    assert scale.minibatch_size <= rows


def test_the_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 processes, 2 of them here; capacity holds 3 steps of every environment, total_steps 500 of them."""

    def largest_here(free: float = 2**40, **simulation: Any) -> Limit:
        config = checked(tree(tmp_path, **simulation))
        monkeypatch.setattr(auto_scale, "free_bytes", lambda device: free)
        group = Group(ProcessRanks(0, 4, 0, 2), torch.device("cpu"))
        return largest(config, group, compile_environment(config.environments, ALONE))

    assert largest_here(total_steps=10**6).num_envs == 500
    run: Tree = {"total_steps": 10**9, "replay": {"capacity": 60_000}}
    assert largest_here(**run) == Limit(num_envs=5000, reason="simulation.replay.capacity holds 3 steps")
    # 15 000 rows of 42 bytes; an environment of 78 bytes, what it shows again (16), a forward pass of 10 numbers twice
    # (80), and 8 rows: 4 x 42 and 6 x 40 bytes each. 3438 in all, 29 of them fit into 100 000
    tight = largest_here(2 * (15_000 * 42 + 100_001) / 0.9, **run)
    assert tight == Limit(num_envs=29, reason="97.7 KiB of memory besides replay, 3.4 KiB each")
    assert largest_here(1000, **run).num_envs == 2  # the search begins there, and its probe says what happens


@pytest.mark.usefixtures("forked_probes")
def test_a_run_is_scaled_and_the_next_one_reads_the_choice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = trained(tree(tmp_path, total_steps=4000))  # as few rounds as leave one size to measure
    (chosen,) = (message for message in caplog.messages if "auto-scaling chose" in message)
    num_envs, minibatch = (int(chosen.split(f"{key}=")[1].split(",")[0]) for key in ("num_envs", "minibatch_size"))
    assert (num_envs, outcome.rows) == (8, outcome.steps * minibatch)
    assert "8 environments on cpu" in caplog.text
    caplog.clear()
    monkeypatch.setattr(auto_scale, "find_scale", None)  # nothing is measured again
    trained(tree(tmp_path, total_steps=4000) | {"model_output_path": str(tmp_path / "again")})
    assert chosen in caplog.text


CRASHING = """
#include "port.cuh"
#define NUM_ACTIONS 2
#define OBSERVATION_SIZE 1
#define TIME_LIMIT 50
#define STATE(FIELD, ARRAY) FIELD(int, cell)
DECLARE_ENVIRONMENT
DEVICE void reset(State &s, Random &random) { s.cell = 0; }
DEVICE void observe(const State &s, float *observation) { observation[0] = float(s.cell); }
DEVICE float step(State &s, int action, Random &random, bool &terminated) {
  __builtin_trap();
  return 0.0f;
}
"""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # what a trap is depends on the processor
        pytest.param({}, r"(?s)simulation\.auto_scale: .*\n *8 +16 +1 .*killed by signal [45]\n.*Lower simulation",
                     id="the first step kills the process"),
        # pendulum pays less than 0
        pytest.param({"simulation": {"env": "pendulum"}, "rl": {"q_network_loss": "bce_with_logits", "gamma": 0}},
                     "Use mse or huber", id="a probe that raises"),
        pytest.param({"simulation": {"env": "cartpole_v1"}, "rendezvous": {"startup_timeout_seconds": 0.4}},
                     "not done in 0 s|has taken too long", id="a search that takes too long"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("forked_probes")
def test_a_probe_that_raises_says_why(tmp_path: Path, change: Tree, words: str) -> None:
    (tmp_path / "crashing.cuh").write_text(CRASHING)
    with pytest.raises(ConfigError, match=words):
        trained(merged(tree(tmp_path, env=str(tmp_path / "crashing.cuh")), change))
    assert not (tmp_path / "out").exists()


def test_an_unfinished_run_keeps_its_scale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: Tree = {"simulation": {"num_envs": 12, "updates_per_rollout": 3}, "training": {"minibatch_size": 5}}
    monkeypatch.setattr(auto_scale, "find_unfinished", lambda *args: {"config": saved})
    given = checked(tree(tmp_path))
    config: WorkflowConfig = auto_scaled(given, ALONE, tmp_path)
    assert (config.environments.num_envs, config.training.minibatch_size) == (12, 5)
    assert config.environments.updates_per_rollout == 3
    saved["simulation"] = None  # a run on a log alone, which this one must not continue
    assert auto_scaled(given, ALONE, tmp_path) is given


@pytest.mark.slow
@pytest.mark.parametrize(("machines", "processes"), [(1, 2), (2, 1)])
def test_one_machine_searches_for_all(tmp_path: Path, machines: int, processes: int) -> None:
    """Two processes: probes are of both where they share a machine, else of rank 0's alone."""
    folders = [tmp_path / f"machine{i}" for i in range(machines)]
    first, second = run_ranks(
        ["-m", "workflows.dqn", *with_config(tmp_path, tree(tmp_path))], folders, [processes] * machines
    )
    assert ("2 processes of this machine at once" in first.ok.err) is (processes == 2)
    assert (first.err + second.ok.err).count("auto-scaling chose") == 1
    assert re.search(r"auto-scaling chose simulation.num_envs=(8|16),(?s:.*)\b\1 environments on cpu", first.err)


@pytest.mark.slow
def test_a_scaled_run_learns_as_well(tmp_path: Path) -> None:
    """configs/cartpole/online.json ends at a return of 490 of at most 500 with 16 environments: test_sample_configs."""
    given = json.loads((ROOT / "configs/cartpole/online.json").read_text())
    changes: Tree = {"simulation": {"num_evaluations": 10, "auto_scale": True}, "use_gpu": False}
    outcome = trained(merged(given, changes | {"model_output_path": str(tmp_path / "out")}))
    assert (outcome.scores["simulation/return/mean"] or 0) > 0.9 * 490


@pytest.mark.parametrize("start", [0, 10, 1000, 37_000, 10**6])
@pytest.mark.parametrize("memory", [64, 100, 5000, 123_456, 2**30])
def test_the_choice_is_within_5_percent_of_the_best_that_fits(start: float, memory: int) -> None:
    best = smallest(search(device(start, memory), 64, 2**22))
    # bisection leaves an eighth of the size open, which is less of the rate
    assert device(start)(best) > 0.95 * device(start)(2**22 if memory >= 2**22 else memory * 8 // 9)


@pytest.mark.parametrize(
    ("rate", "smallest_size", "largest_size", "measured", "choice"),
    [
        pytest.param(device(40, memory=1500), 1000, 2**20, [1000, 2000, 1500], 1000, id="bisection that gains nothing"),
        pytest.param(device(1e6), 64, 300, [64, 128, 256, 300], 300, id="a limit is tried and not passed"),
        pytest.param(device(1e6), 64, 64, [64], 64, id="one size"),
        pytest.param({1: 10.0, 2: 9.0, 4: 20.0, 8: 20.1, 16: 20.2}.__getitem__, 1, 16, [1, 2, 4, 8, 16], 4, id="a dip"),
        pytest.param(device(1, memory=10), 64, 2**20, [64], None, id="nothing fits"),
    ],
)
def test_bisection_ends_where_it_gains_nothing(
    rate: Callable[[int], float], smallest_size: int, largest_size: int, measured: list[int], choice: int | None
) -> None:
    rates = search(rate, smallest_size, largest_size)
    assert (list(rates), smallest(rates)) == (measured, choice)
