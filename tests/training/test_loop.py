"""Loop, meter, clipping, schedule, metrics files: by hand arithmetic and round trips."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from oracles.disks import small_disk
from oracles.runs import ALONE
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import Tensor, nn

from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.training.loop import Optimization, Running, RunPosition, StepReport, fit
from reagent_lite.training.metrics import Conclusion, JsonLines, Meter, MetricsWriter, TensorBoard


class Line(nn.Module):
    """loss = w * sum of the batch: its gradient is that sum."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.0))
        self.updates = 0

    def forward(self, batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        self.row_errors = batch.detach() ** 2
        return self.w * batch.sum(), {"td_loss": batch.sum()}

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


@dataclass
class Recorded:
    """Steps before which experience was collected, reports, and step and rows after each step."""

    before: list[int] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    after: list[tuple[int, int]] = field(default_factory=list)


def run_line(
    plan: ReadPlan, source: Numbers, *satisfied: bool, clip: float | None = None, at: tuple[int, int] = (0, 0),
    **other: object,
) -> tuple[Line, Recorded]:  # fmt: skip
    """Trains a line; `satisfied` are the answers to whether the run may end, in turn, then no."""
    line, position = Line(), RunPosition(step=at[0], rows=at[1])
    optimizer = torch.optim.SGD(line.parameters(), lr=1.0)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimization = Optimization(optimizer=optimizer, schedule=decay, clip_norm=clip,
                                clipped=[list(line.parameters())])  # fmt: skip
    running = Running(learner=line, optimization=optimization, source=source, evaluators=source, position=position)  # type: ignore[arg-type]
    recorded, answers = Recorded(), iter(satisfied)
    satisfied_in_turn = partial(next, answers, False)
    for report in fit(running, plan, ALONE, collect=recorded.before.append, satisfied=satisfied_in_turn, **other):  # type: ignore[arg-type]
        recorded.reports += [report] if report is not None else []
        recorded.after.append((position.step, position.rows))
    return line, recorded


def test_two_minibatches_make_one_step_and_the_rate_decays_by_epoch() -> None:
    plan = ReadPlan(shards=(4,), minibatch=2, minibatches_per_step=2, epochs=2)
    source = Numbers([1.0, 2.0], [3.0], [4.0], [5.0])
    line, recorded = run_line(plan, source)
    assert line.w.item() == -(1 + 2 + 3) - 0.5 * (4 + 5)
    assert line.updates == 2
    assert source.told == [[1.0, 4.0], [9.0], [16.0], [25.0]]
    reports = recorded.reports
    assert [(r.step, r.epoch, r.end_of_epoch, r.rows) for r in reports] == [(1, 1, True, 4), (2, 2, True, 8)]
    assert [r.metrics["td_loss"] for r in reports] == [6.0, 9.0]
    assert [r.metrics["learning_rate"] for r in reports] == [0.5, 0.25]
    assert {"time/gather", "time/learn", "time/step"} <= reports[0].metrics.keys()


def test_clipping_captured_updates_and_reports_between_epochs() -> None:
    calls: list[str] = []

    def capture(update: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            calls.append("replay")
            update()

        return replay

    plan = ReadPlan(shards=(6,), minibatch=2, epochs=1)
    line, recorded = run_line(plan, Numbers([3.0], [-4.0], [0.25]), clip=1.0, every_steps=2, capture=capture)
    assert line.w.item() == pytest.approx(-1 + 1 - 0.25, abs=1e-5)
    assert [(r.step, r.end_of_epoch) for r in recorded.reports] == [(2, False), (3, True)]
    assert [r.metrics["td_loss"] for r in recorded.reports] == [-0.5, 0.25]
    assert recorded.after == [(1, 2), (2, 4), (3, 6)]
    assert calls == ["replay"] * 3


def test_a_run_may_prepare_steps_and_end_early() -> None:
    plan = ReadPlan(shards=(2,), minibatch=1, epochs=9)
    line, recorded = run_line(plan, Numbers(*[[1.0]] * 18), False, True, every_steps=1)
    assert recorded.before == [0, 1, 2, 3]  # asked after each epoch of two steps, not between
    assert line.updates == 4
    assert [r.step for r in recorded.reports] == [1, 2, 3, 4]


def test_a_loop_begins_at_its_position() -> None:
    plan = ReadPlan(shards=(6,), minibatch=2, epochs=2)
    line, recorded = run_line(plan, Numbers([3.0], [5.0]), at=(4, 8))
    assert line.updates == 2
    assert recorded.after == [(5, 10), (6, 12)]
    assert [(r.step, r.epoch, r.end_of_epoch, r.rows) for r in recorded.reports] == [(6, 2, True, 12)]
    assert recorded.reports[0].metrics["td_loss"] == 4.0
    at_end, _ = run_line(plan, Numbers(), at=(6, 12))
    assert at_end.updates == 0
    satisfied, _ = run_line(plan, Numbers(), True, at=(3, 6))
    assert satisfied.updates == 0  # the epoch before was good enough, and the run was ended between it and the model


def test_a_meter_has_means_over_steps_and_goes_on_from_its_state() -> None:
    meter, other = Meter(), Meter()
    for value, last in ((1.0, False), (2.0, True)):
        meter.add({"x": torch.tensor(value)})
        if last:
            meter.step()
    other.load_state_dict(meter.state_dict())
    assert other.state_dict() == {"steps": 1, "sums": {"x": torch.tensor(3.0)}}
    other.add({"x": torch.tensor(5.0)})
    other.step()
    assert other.means(ALONE) == {"x": 4.0}  # (1 + 2 + 5) / 2
    assert other.means(ALONE) == {}


def lines(folder: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def written(folder: Path, lines: int = 0) -> Iterator[MetricsWriter]:
    """Yields a writer of both files, as a run that continues after as many steps as lines opens it."""
    with MetricsWriter(lines=lines) as writer:
        parameters = {"rl.gamma": 0.9, "actions": '["a", "b"]'}
        writer.add([JsonLines(folder, lines=lines), TensorBoard(folder, "run 1", parameters, step=lines)])
        yield writer


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    assert events.Tags()["scalars"] == [tag]
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_figures_are_written_twice_nan_is_null_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    with written(tmp_path) as writer:
        writer.write(1, {"x": 1.0, "bad": float("nan")})
        writer.write(2, {"x": 2.0})
        assert writer.reported()["lines"] == 2
        writer.write(3, {"x": -3.0})  # after the checkpoint: to be done again
    time.sleep(1.1)  # readers take files in the order of their names, which begin with the second
    with written(tmp_path, lines=2) as writer:
        writer.write(3, {"x": 3.0})
        assert writer.reported()["lines"] == 3
        writer.conclude(Conclusion(step=3, decision="ship", text="Ship: it pays.", files=()))
    with MetricsWriter() as writer:  # of another rank
        writer.write(1, {"x": 1.0})
        assert writer.reported() == {"lines": 1, "figures": {}}
    assert lines(tmp_path) == [{"step": 1, "x": 1.0, "bad": None}, {"step": 2, "x": 2.0}, {"step": 3, "x": 3.0}]
    assert scalars(tmp_path, "x") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.tensor_proto.string_val[:] for event in events.Tensors("decision")] == [[b"Ship: it pays."]]
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = HParamsPluginData.FromString(content).session_start_info
    assert start.group_name == "run 1"
    assert (start.hparams["rl.gamma"].number_value, start.hparams["actions"].string_value) == (0.9, '["a", "b"]')


def test_figures_are_written_to_the_files_of_a_share_that_is_mounted_again(tmp_path: Path) -> None:
    """What was open when the share went away leads nowhere; a folder below its mount point stays empty."""
    share, unmounted = tmp_path / "share", tmp_path / "unmounted"
    share.mkdir()
    with written(share) as writer:
        writer.write(1, {"x": 1.0})
        share.rename(unmounted)
        share.mkdir()
        nowhere = os.open("/dev/full", os.O_WRONLY)
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{name}").startswith(str(unmounted)):
                    os.dup2(nowhere, int(name))
        os.close(nowhere)
        writer.write(2, {"x": 2.0})
        with pytest.raises(OSError, match="No such file"):
            writer.keep()
        share.rmdir()  # it is empty
        unmounted.rename(share)
        writer.write(3, {"x": 3.0})
        writer.keep()
    assert lines(share) == [{"step": step, "x": step} for step in (1, 2, 3)]
    assert scalars(share, "x") == [(step, step) for step in (1, 2, 3)]


def test_figures_wait_while_a_disk_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size="64k", files=20) as disk:
        with written(disk) as writer:
            writer.write(1, {"x": 1.0})
            filler = disk / "filler"
            with suppress(OSError), filler.open("wb", buffering=0) as stream:
                while stream.write(b"0" * 512):
                    pass
            for step in range(2, 400):
                writer.write(step, {"x": float(step)})
            with pytest.raises(OSError, match="No space left"):
                writer.reported()
            whole = lines(disk)  # none ends in the middle, whenever the run is killed
            assert whole == [{"step": step, "x": step} for step in range(1, len(whole) + 1)]
            assert 1 < len(whole) < 399
            assert scalars(disk, "x") == [(step, step) for step in range(1, len(scalars(disk, "x")) + 1)]
            filler.unlink()
            assert writer.reported()["lines"] == 399
        assert lines(disk) == [{"step": step, "x": step} for step in range(1, 400)]
        assert scalars(disk, "x") == [(step, step) for step in range(1, 400)]
