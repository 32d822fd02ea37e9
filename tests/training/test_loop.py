"""Loop, meter, clipping, schedule, metrics files: by hand arithmetic and round trips."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import psutil
import pytest
import torch
from helpers.disks import small_disk, unmount
from helpers.runs import ALONE
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from torch import Tensor, nn

from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.training.loop import Optimization, Running, RunPosition, StepReport, fit
from reagent_lite.training.metrics import JsonLines, Meter, MetricsWriter, RunSummary, TensorBoard


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


def run_line(
    plan: ReadPlan, source: MagicMock, *, clip: float | None = None, at: tuple[int, int] = (0, 0),
    satisfied: tuple[bool, ...] = (), **other: object,
) -> tuple[Line, list[StepReport], list[tuple[int, int]]]:  # fmt: skip
    """Trains a line; returns it, its reports, and step and rows after each step.

    `satisfied` are the answers to whether the run may end, in turn, then no.
    """
    line, position = Line(), RunPosition(step=at[0], rows=at[1])
    optimizer = torch.optim.SGD(line.parameters(), lr=1.0)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimization = Optimization(optimizer=optimizer, schedule=decay, clip_norm=clip,
                                clipped=[list(line.parameters())])  # fmt: skip
    running = Running(learner=line, optimization=optimization, source=source, evaluators=source, position=position)
    answers = partial(next, iter(satisfied), False)
    steps = [
        (report, (position.step, position.rows)) for report in fit(running, plan, ALONE, satisfied=answers, **other)
    ]
    return line, [report for report, _ in steps if report is not None], [after for _, after in steps]


@pytest.mark.parametrize(
    ("plan", "batches", "options", "w", "reports", "after"),
    [
        # two minibatches make one step, and the rate decays by epoch
        (ReadPlan(shards=(4,), minibatch=2, minibatches_per_step=2, epochs=2), [[1.0, 2.0], [3.0], [4.0], [5.0]], {},
         -(1 + 2 + 3) - 0.5 * (4 + 5), [(1, 1, True, 4, 6.0, 0.5), (2, 2, True, 8, 9.0, 0.25)], [(1, 4), (2, 8)]),
        # gradients are clipped, and reports come between epochs
        (ReadPlan(shards=(6,), minibatch=2, epochs=1), [[3.0], [-4.0], [0.25]], {"clip": 1.0, "every_steps": 2},
         -1 + 1 - 0.25, [(2, 0, False, 4, -0.5, 1.0), (3, 1, True, 6, 0.25, 0.5)], [(1, 2), (2, 4), (3, 6)]),
        # a loop begins at its position
        (ReadPlan(shards=(6,), minibatch=2, epochs=2), [[3.0], [5.0]], {"at": (4, 8)},
         -(3 + 5), [(6, 2, True, 12, 4.0, 0.5)], [(5, 10), (6, 12)]),
        (ReadPlan(shards=(6,), minibatch=2, epochs=2), [], {"at": (6, 12)}, 0, [], []),
        # the epoch before was good enough, and the run was ended between it and the model
        (ReadPlan(shards=(6,), minibatch=2, epochs=2), [], {"at": (3, 6), "satisfied": (True,)}, 0, [], []),
    ],
)  # fmt: skip
def test_steps_and_reports_by_hand(
    plan: ReadPlan, batches: list[list[float]], options: Any, w: float, reports: list[Any], after: list[Any]
) -> None:
    line, reported, steps = run_line(plan, numbers(*batches), **options)
    assert (line.w.item(), line.updates, steps) == (pytest.approx(w, abs=1e-5), len(after), after)
    assert reports == [
        (r.step, r.epoch, r.end_of_epoch, r.rows, r.metrics["td_loss"], r.metrics["learning_rate"]) for r in reported
    ]


def test_a_run_may_prepare_steps_capture_updates_and_end_early() -> None:
    source, collect = numbers(*[[1.0, 2.0]] * 18), Mock()
    replayed: list[Mock] = []

    def capture(update: Callable[[], None]) -> Mock:
        replayed.append(Mock(side_effect=update))
        return replayed[0]

    plan = ReadPlan(shards=(2,), minibatch=1, epochs=9)
    line, reports, _ = run_line(plan, source, satisfied=(False, True), every_steps=1, collect=collect, capture=capture)
    # asked after each epoch of two steps, not between
    assert [call.args for call in collect.call_args_list] == [(0,), (1,), (2,), (3,)]
    assert [update.call_count for update in replayed] == [line.updates] == [4]
    assert [call.args[0].tolist() for call in source.record_errors.call_args_list] == [[1.0, 4.0]] * 4
    assert {"time/gather", "time/learn", "time/step"} <= reports[0].metrics.keys()


def test_a_meter_has_means_over_steps_and_goes_on_from_its_state() -> None:
    meter, other = Meter(), Meter()
    meter.add({"x": torch.tensor(1.0)})
    meter.add({"x": torch.tensor(2.0)})
    meter.step()
    other.load_state_dict(meter.state_dict())
    assert other.state_dict() == {"steps": 1, "sums": {"x": torch.tensor(3.0)}}
    other.add({"x": torch.tensor(5.0)})
    other.step()
    assert [other.means(ALONE), other.means(ALONE)] == [{"x": 4.0}, {}]  # (1 + 2 + 5) / 2


def lines(folder: Path) -> list[dict[str, float | None]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@contextmanager
def written(folder: Path, lines: int = 0) -> Iterator[MetricsWriter]:
    """Yields a writer of both files, as a run that continues after as many steps as lines opens it."""
    parameters = {"rl.gamma": 0.9, "actions": '["a", "b"]'}
    with MetricsWriter(lines=lines) as writer:
        writer.add([JsonLines(folder, lines=lines), TensorBoard(folder, "run 1", parameters, step=lines)])
        yield writer


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()


def scalars(folder: Path) -> list[dict[str, float | None]]:
    """What TensorBoard shows of x, as `lines` has it."""
    return [{"step": event.step, "x": event.value} for event in events(folder).Scalars("x")]


def test_figures_are_written_twice_nan_is_null_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    with written(tmp_path) as writer:
        writer.write(1, {"x": 1.0, "bad": float("nan")})
        writer.write(2, {"x": 2.0})
        assert writer.keep_and_report()["lines"] == 2
        writer.write(3, {"x": -3.0})  # after the checkpoint: to be done again
    time.sleep(1.1)  # readers take files in the order of their names, which begin with the second
    with written(tmp_path, lines=2) as writer:
        writer.write(3, {"x": 3.0})
        assert writer.keep_and_report()["lines"] == 3
        writer.conclude(RunSummary(step=3, decision="ship", text="Ship: it pays.", files=()))
    with MetricsWriter() as writer:  # of another rank
        writer.write(1, {"x": 1.0})
        assert writer.keep_and_report() == {"lines": 1, "figures": {}}
    assert lines(tmp_path) == [{"step": 1, "x": 1.0, "bad": None}, {"step": 2, "x": 2.0}, {"step": 3, "x": 3.0}]
    assert scalars(tmp_path) == [{"step": step, "x": step} for step in (1, 2, 3)]
    shown = events(tmp_path)
    assert shown.Tags()["scalars"] == ["x"]
    assert [event.tensor_proto.string_val[:] for event in shown.Tensors("decision")] == [[b"Ship: it pays."]]
    content = shown.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = HParamsPluginData.FromString(content).session_start_info
    assert (start.group_name, start.hparams["rl.gamma"].number_value, start.hparams["actions"].string_value) == (
        "run 1", 0.9, '["a", "b"]',
    )  # fmt: skip


def test_figures_are_written_to_the_files_of_a_share_that_is_mounted_again(tmp_path: Path) -> None:
    """What was open when the share went away leads nowhere; a folder below its mount point stays empty."""
    share, unmounted = tmp_path / "share", tmp_path / "unmounted"
    share.mkdir()
    with written(share) as writer:
        writer.write(1, {"x": 1.0})
        unmount(share)
        with open("/dev/full", "wb") as nowhere:
            for fd in [file.fd for file in psutil.Process().open_files() if file.path.startswith(str(unmounted))]:
                os.dup2(nowhere.fileno(), fd)
        writer.write(2, {"x": 2.0})
        with pytest.raises(OSError, match="No such file"):
            writer.keep()
        share.rmdir()  # it is empty
        unmounted.rename(share)
        writer.write(3, {"x": 3.0})
        writer.keep()
    assert lines(share) == scalars(share) == [{"step": step, "x": step} for step in (1, 2, 3)]


def test_figures_wait_while_a_disk_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size="64k", files=20) as disk:
        figures = [{"step": step, "x": step} for step in range(1, 400)]
        with written(disk) as writer:
            writer.write(1, {"x": 1.0})
            with suppress(OSError):
                (disk / "filler").write_bytes(bytes(64 << 10))
            for step in range(2, 400):
                writer.write(step, {"x": float(step)})
            with pytest.raises(OSError, match="No space left"):
                writer.keep_and_report()
            whole, shown = lines(disk), scalars(disk)  # none ends in the middle, whenever the run is killed
            assert (whole, shown) == (figures[: len(whole)], figures[: len(shown)])
            assert 1 < len(whole) < 399
            (disk / "filler").unlink()
            assert writer.keep_and_report()["lines"] == 399
        assert lines(disk) == scalars(disk) == figures


def numbers(*batches: list[float]) -> MagicMock:
    """A source of these batches."""
    return MagicMock(**{"__next__.side_effect": map(torch.tensor, batches)})
