"""Loop, meter, clipping, schedule, metrics files: by hand arithmetic and round trips."""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.disks import small_disk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.distributed.group import Group, Place
from reagent_lite.models.q_networks import NetworkSettings, build_q_network
from reagent_lite.training.loop import Hooks, Optimization, Position, Report, Running, fit
from reagent_lite.training.metrics import Meter, MetricsWriter
from reagent_lite.types import SourceSpec

ALONE = Group(Place(), torch.device("cpu"))


class Line(nn.Module):
    """loss = w * sum of the batch: its gradient is that sum."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.0))
        self.updates = 0

    def forward(self, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = self.w * batch.sum()
        self.row_errors = batch.detach() ** 2
        return loss, {"td_loss": batch.sum()}

    def after_step(self) -> None:
        self.updates += 1


class Numbers:
    def __init__(self, *batches: list[float]) -> None:
        self._batches = iter(batches)
        self.told: list[list[float]] = []

    def learned(self, row_errors: Tensor) -> None:
        self.told.append(row_errors.tolist())

    def __next__(self) -> Tensor:
        return torch.tensor(next(self._batches))


class Recorded(Hooks):
    """What was asked of the hooks; `satisfied` answers what it is given in turn, then no."""

    def __init__(self, position: Position, *satisfied: bool) -> None:
        self.position, self._satisfied = position, iter(satisfied)
        self.before: list[int] = []
        self.reports: list[Report] = []
        self.after: list[tuple[int, int]] = []

    def before_step(self, step: int) -> None:
        self.before.append(step)

    def report(self, report: Report) -> None:
        self.reports.append(report)

    def after_step(self) -> None:
        self.after.append((self.position.step, self.position.rows))

    def satisfied(self) -> bool:
        return next(self._satisfied, False)


def run_line(
    plan: ReadPlan,
    source: Numbers,
    *satisfied: bool,
    clip: float | None = None,
    at: tuple[int, int] = (0, 0),
    **other: object,
) -> tuple[Line, Recorded]:
    line, position = Line(), Position(step=at[0], rows=at[1])
    optimizer = torch.optim.SGD(line.parameters(), lr=1.0)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimization = Optimization(optimizer=optimizer, schedule=decay, clip_norm=clip)
    running = Running(learner=line, optimization=optimization, source=source, evaluators=source, position=position)  # type: ignore[arg-type]
    hooks = Recorded(position, *satisfied)
    fit(running, plan, ALONE, hooks, **other)  # type: ignore[arg-type]
    return line, hooks


def test_two_minibatches_make_one_step_and_the_rate_decays_by_epoch() -> None:
    plan = ReadPlan(shards=(4,), minibatch=2, minibatches_per_step=2, epochs=2)
    line, hooks = run_line(plan, Numbers([1.0, 2.0], [3.0], [4.0], [5.0]))
    reports = hooks.reports
    assert line.w.item() == -(1 + 2 + 3) - 0.5 * (4 + 5)
    assert line.updates == 2
    assert [(r.step, r.epoch, r.end_of_epoch, r.rows) for r in reports] == [(1, 1, True, 4), (2, 2, True, 8)]
    assert [r.metrics["td_loss"] for r in reports] == [6.0, 9.0]
    assert [r.metrics["learning_rate"] for r in reports] == [0.5, 0.25]
    assert {"time/gather", "time/learn", "time/step"} <= reports[0].metrics.keys()


def test_sources_are_told_the_losses_of_their_rows() -> None:
    source = Numbers([1.0, 2.0], [3.0])
    run_line(ReadPlan(shards=(3,), minibatch=2, epochs=1), source)
    assert source.told == [[1.0, 4.0], [9.0]]


def test_a_run_may_prepare_steps_and_end_early() -> None:
    plan = ReadPlan(shards=(2,), minibatch=1, epochs=9)
    line, hooks = run_line(plan, Numbers(*[[1.0]] * 18), False, True, every_steps=1)
    assert hooks.before == [0, 1, 2, 3]  # asked after each epoch of two steps, not between
    assert line.updates == 4
    assert [r.step for r in hooks.reports] == [1, 2, 3, 4]


def test_every_update_goes_through_what_captures_it() -> None:
    calls: list[str] = []

    def capture(update: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            calls.append("replay")
            update()

        return replay

    run_line(ReadPlan(shards=(3,), minibatch=1, epochs=1), Numbers([1.0], [1.0], [1.0]), capture=capture)
    assert calls == ["replay"] * 3


def test_clipping_and_reports_between_epochs() -> None:
    plan = ReadPlan(shards=(6,), minibatch=2, epochs=1)
    line, hooks = run_line(plan, Numbers([3.0], [-4.0], [0.25]), clip=1.0, every_steps=2)
    assert line.w.item() == pytest.approx(-1 + 1 - 0.25, abs=1e-5)
    assert [(r.step, r.end_of_epoch) for r in hooks.reports] == [(2, False), (3, True)]
    assert [r.metrics["td_loss"] for r in hooks.reports] == [-0.5, 0.25]
    assert hooks.after == [(1, 2), (2, 4), (3, 6)]


def test_meter_means_over_steps_not_minibatches() -> None:
    meter = Meter()
    for value, last in ((1.0, False), (2.0, True), (5.0, True)):
        meter.add({"x": torch.tensor(value)})
        if last:
            meter.step()
    assert meter.means(ALONE) == {"x": 4.0}
    assert meter.means(ALONE) == {}


def test_metrics_are_written_twice_and_nan_is_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, enabled=True) as writer:
        writer.write(1, {"td_loss/mean": 2.5, "bad": float("nan")})
        writer.write(7, {"td_loss/mean": 1.5})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "td_loss/mean": 2.5, "bad": None}, {"step": 7, "td_loss/mean": 1.5}]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("td_loss/mean")] == [(1, 2.5), (7, 1.5)]
    assert events.Tags()["scalars"] == ["td_loss/mean"]


def test_figures_wait_while_a_disk_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size="64k", files=20) as disk:
        with MetricsWriter(disk, enabled=True) as writer:
            writer.write(1, {"x": 1.0})
            filler = disk / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as stream:
                while stream.write(b"0" * 512):
                    pass
            for step in range(2, 400):
                writer.write(step, {"x": float(step)})
            with pytest.raises(OSError, match="No space left"):
                writer.reported()
            filler.unlink()
            assert writer.reported()["lines"] == 399
        lines = [json.loads(line) for line in (disk / "metrics.jsonl").read_text().splitlines()]
        assert lines == [{"step": step, "x": step} for step in range(1, 400)]
        events = EventAccumulator(str(disk / "tensorboard"), size_guidance={"scalars": 0})
        events.Reload()
        assert [(e.step, e.value) for e in events.Scalars("x")] == [(step, step) for step in range(1, 400)]


def test_figures_continue_where_a_checkpoint_counted_them(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, enabled=True) as writer:
        writer.write(1, {"x": 1.0})
        writer.write(2, {"x": 2.0})
        assert writer.reported()["lines"] == 2
        writer.write(3, {"x": -3.0})  # after the checkpoint: to be done again
    time.sleep(1.1)  # readers take files in the order of their names, which begin with the second
    with MetricsWriter(tmp_path, enabled=True, lines=2) as writer:
        writer.forget_after(2)
        writer.write(3, {"x": 3.0})
        assert writer.reported()["lines"] == 3
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "x": 1.0}, {"step": 2, "x": 2.0}, {"step": 3, "x": 3.0}]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("x")] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_a_meter_goes_on_from_its_state() -> None:
    meter, other = Meter(), Meter()
    for value in (1.0, 2.0):
        meter.add({"x": torch.tensor(value)})
        meter.step()
    other.load_state_dict(meter.state_dict())
    assert other.state_dict() == {"steps": 2, "sums": {"x": torch.tensor(3.0)}}
    other.add({"x": torch.tensor(6.0)})
    other.step()
    assert other.means(ALONE) == {"x": 3.0}  # (1 + 2 + 6) / 3


def test_a_loop_begins_at_its_position() -> None:
    plan = ReadPlan(shards=(6,), minibatch=2, epochs=2)
    line, hooks = run_line(plan, Numbers([3.0], [5.0]), at=(4, 8))
    assert line.updates == 2
    assert hooks.after == [(5, 10), (6, 12)]
    assert [(r.step, r.epoch, r.end_of_epoch, r.rows) for r in hooks.reports] == [(6, 2, True, 12)]
    assert hooks.reports[0].metrics["td_loss"] == 4.0
    at_end, _ = run_line(plan, Numbers(), at=(6, 12))
    assert at_end.updates == 0
    satisfied, _ = run_line(plan, Numbers(), True, at=(3, 6))
    assert satisfied.updates == 0  # the epoch before was good enough, and the run was ended between it and the model


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, enabled=False) as writer:
        writer.write(1, {"x": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_initial_weights_have_the_stated_spread() -> None:
    torch.manual_seed(0)
    spec = SourceSpec(num_state_features=400, action_names=("a", "b"))
    network = build_q_network(spec, NetworkSettings(hidden=(300,), activations=("relu",)))
    network.requires_grad_(False)
    first, last = network.layers[0], network.layers[-1]
    assert float(first.weight.std()) == pytest.approx((2 / 400) ** 0.5, rel=0.02)  # gain sqrt(2) of relu
    assert float(last.weight.std()) == pytest.approx((1 / 300) ** 0.5, rel=0.1)
    assert float(first.bias.abs().sum()) == 0
    floor = build_q_network(spec, NetworkSettings(hidden=(300,), activations=("relu",), min_std=0.5))
    assert float(floor.layers[0].weight.detach().std()) == pytest.approx(0.5, rel=0.02)
    assert np.isfinite(float(floor.layers[0].weight.detach().sum()))
