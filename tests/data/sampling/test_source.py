"""Batches of logged rows: what was written comes out, every row once, with shares that sum to the world size."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from helpers.logs import candidate_rows, random_rows, write_lines

from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.data.sampling.normalized import Reordered, open_columns, open_raw_columns, prepare_columns
from reagent_lite.data.sampling.plan import ReadPlan
from reagent_lite.data.sampling.source import FeatureColumns, LoggedRows, LoggedSource, build_rows, padding_rows
from reagent_lite.data.sampling.spans import learnable_rows, single_steps
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.types import FeatureSpec, FeatureType, NormalizationSpec, SourceSpec, TransitionBatch

CPU = torch.device("cpu")


def spec_of(kind: FeatureType, ids: Iterable[int], **parameters: Any) -> NormalizationSpec:
    return NormalizationSpec.from_features({i: FeatureSpec(feature_id=i, feature_type=kind, **parameters) for i in ids})


PLAIN = partial(spec_of, FeatureType.DO_NOT_PREPROCESS)


def columns_of(matrix: Any, ids: tuple[int, ...], spec: NormalizationSpec, file: Path) -> FeatureColumns:
    transform = Reordered(ids, spec, Preprocessor(spec))
    prepare_columns(matrix, transform, spec.width, file)
    return open_columns(matrix, transform, spec.width, file, CPU)


def shard(
    folder: Path,
    logged: list[dict[str, Any]],
    state: NormalizationSpec | None = None,
    metrics: tuple[str, ...] | None = None,
) -> LoggedRows:
    """Rows of a log over features 0 to 2 as they are, unless a normalization is given; candidates where it has some."""
    copy = prepare_training_copy(
        Log(
            write_lines(folder / "log.jsonl", logged),
            actions=None if isinstance(logged[0]["action"], dict) else ("a", "b"),
        )
    )
    columns = [columns_of(copy.state, copy.state_ids, state or PLAIN((0, 1, 2)), folder / "state.npy")]
    if copy.parametric:
        columns.append(columns_of(copy.candidates, copy.action_ids, PLAIN(copy.action_ids), folder / "action.npy"))
    spans = single_steps(copy)
    usable, _ = learnable_rows(copy, spans, maxq=True, unit_reward=False)
    return build_rows(copy, spans, usable, *columns, metric_names=metrics)


LOGGED = random_rows(57)


@pytest.fixture(scope="module")
def discrete(tmp_path_factory: pytest.TempPathFactory) -> LoggedRows:
    return shard(tmp_path_factory.mktemp("discrete"), LOGGED)


def read(rows: LoggedRows, plan: ReadPlan, rank: int = 0) -> list[TransitionBatch]:
    source = LoggedSource(rows, plan, rank, CPU)
    return [next(source) for _ in range(plan.num_steps * plan.minibatches_per_step)]


def dense(features: dict[str, float]) -> list[float]:
    return [float(np.float32(features.get(str(i), 0.0))) for i in range(3)]


def test_every_row_comes_once_an_epoch_as_it_was_logged(discrete: LoggedRows) -> None:
    batches = read(discrete, ReadPlan(shards=(57,), minibatch=8, epochs=2))
    assert [len(batch) for batch in batches] == [8] * 7 + [1] + [8] * 7 + [1]
    expected = [
        (dense(r["state_features"]), "ab".index(r["action"]), float(np.float32(r["reward"])),
         dense(r["next_state_features"]) if any(r["possible_next_actions"]) else None)
        for r in LOGGED
    ]  # fmt: skip
    for epoch in (batches[:8], batches[8:]):
        seen = [
            (b.state[i].tolist(), int(b.action[i]), float(b.reward[i]),
             b.next_state[i].tolist() if b.bootstrap[i] else None)
            for b in epoch for i in range(len(b))
        ]  # fmt: skip
        assert sorted(map(str, seen)) == sorted(map(str, expected))


def test_columns_of_rows_on_a_cpu_are_the_mapped_ones_of_the_copy(tmp_path: Path) -> None:
    """They take no memory of the process, however many rows there are."""
    copy = prepare_training_copy(Log(write_lines(tmp_path / "log.jsonl", LOGGED), actions=("a", "b")))
    rows = build_rows(copy, single_steps(copy), None, open_raw_columns(copy.state))
    names = ("next_index", "reward", "bootstrap", "propensity", "action", "next_action")
    for name in names:
        assert getattr(rows, name).data_ptr() == getattr(copy, name).ctypes.data, name
    assert rows.steps.data_ptr() == copy.step.ctypes.data


def test_wide_rows_are_gathered_in_small_blocks(discrete: LoggedRows) -> None:
    """Rows of 10 000 features, 838 at once: 32 MiB for states and as much for next states."""
    wide = replace(discrete, state=FeatureColumns(values=torch.zeros(57, 10_000), width=10_000))
    assert (discrete.block_rows, wide.block_rows) == (2**15, 838)


def test_rows_continue_if_one_that_may_be_learned_from_has_a_next_state(discrete: LoggedRows) -> None:
    ends, others = (np.flatnonzero(discrete.bootstrap == bootstrap) for bootstrap in (0, 1))
    parts = (
        discrete.only(ends),
        discrete.only(np.append(ends, others[0])),
        replace(discrete, usable=None),
        replace(discrete, usable=None, bootstrap=discrete.bootstrap[ends]),
    )
    assert [rows.continues for rows in parts] == [False, True, True, False]


@pytest.mark.parametrize(("world", "per_step"), [(1, 1), (2, 1), (3, 3)])
def test_shares_sum_to_the_world_size_in_every_step(discrete: LoggedRows, world: int, per_step: int) -> None:
    plan = ReadPlan(shards=(57,), minibatch=8, epochs=1, reads=(0,) * world, minibatches_per_step=per_step)
    weights = [[float(b.weight.sum()) for b in read(discrete, plan, rank)] for rank in range(world)]
    np.testing.assert_allclose(np.reshape(weights, (world, -1, per_step)).sum((0, 2)), world, rtol=1e-6)


def test_position_is_a_step_number(discrete: LoggedRows) -> None:
    plan = ReadPlan(shards=(57,), minibatch=8, epochs=3, minibatches_per_step=2)
    source, other = (LoggedSource(discrete, plan, 0, CPU) for _ in range(2))
    rewards = [next(source).reward.tolist() for _ in range(10)]
    assert source.state_dict() == {"step": 5}
    other.load_state_dict(source.state_dict())
    rewards += [next(other).reward.tolist() for _ in range(2 * plan.num_steps - 10)]
    assert rewards == [batch.reward.tolist() for batch in read(discrete, plan)]


def test_one_hot_columns_may_be_normalized_at_each_gather(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged = random_rows(40, missing=0.1)
    values = tuple(sorted({value for row in logged for value in row["state_features"].values()}))
    spec = spec_of(FeatureType.ENUM, range(3), possible_values=values)
    once = shard(tmp_path / "once", logged, spec)
    monkeypatch.setattr("reagent_lite.data.sampling.normalized._SMALL_BYTES", 0)
    each = shard(tmp_path / "each", logged, spec)
    assert (once.state.transform is None, each.state.transform is None) == (True, False)
    plan = ReadPlan(shards=(40,), minibatch=16, epochs=1)
    for a, b in zip(read(once, plan), read(each, plan), strict=True):
        assert torch.equal(torch.cat((a.state, a.next_state)), torch.cat((b.state, b.next_state)))


def test_candidates_are_padded_and_matched(tmp_path: Path) -> None:
    logged = candidate_rows(60)
    (batch,) = read(shard(tmp_path, logged), ReadPlan(shards=(60,), minibatch=60, epochs=1))
    rows_read = sorted(
        (round(float(batch.reward[i]), 4), int(batch.actions.mask[i].sum()), int(batch.next_actions.mask[i].sum()),
         [round(x, 4) for x in batch.actions.features[i, batch.action[i]].tolist()])
        for i in range(60)
    )  # fmt: skip
    assert rows_read == sorted(
        (r["reward"], len(r["possible_actions"]), len(r["possible_next_actions"]), [r["action"]["0"], r["action"]["5"]])
        for r in logged
    )
    assert float(batch.actions.features[~batch.actions.mask].abs().sum()) == 0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system has no /proc/self/smaps")
@pytest.mark.parametrize("small_bytes", [0, 1 << 28])
def test_released_pages_are_not_resident_and_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_bytes: int
) -> None:
    monkeypatch.setattr("reagent_lite.data.sampling.normalized._SMALL_BYTES", small_bytes)
    raw, normalized = tmp_path / "raw.npy", tmp_path / "normalized.npy"
    np.save(raw, np.arange(300_000, dtype=np.float32).reshape(-1, 3))
    columns = columns_of(
        np.load(raw, mmap_mode="r"),
        (0, 1, 2),
        spec_of(FeatureType.ENUM, [0], possible_values=(0.0, 1.0, 2.0, 3.0)),
        normalized,
    )
    mapped = raw if small_bytes == 0 else normalized
    before = columns.take(torch.arange(0, 100_000, 7))
    for most, least in ((10**9, 10**6), (0, 0)):
        assert least <= sum(part.rss for part in psutil.Process().memory_maps() if part.path == str(mapped)) <= most
        columns.release()
    assert torch.equal(columns.take(torch.arange(0, 100_000, 7)), before)


def test_a_shard_without_rows_gives_rows_of_weight_zero(tmp_path: Path) -> None:
    named = SourceSpec(num_state_features=3, action_names=("a", "b"), metric_names=("clicks",))
    listed = SourceSpec(num_state_features=3, num_action_features=2)
    none = shard(tmp_path, [{**row, "action": None} for row in random_rows(3)])  # no row to learn from
    plan = ReadPlan(shards=(4, 0), minibatch=4, epochs=2, reads=(0, 1))
    names, lists, unusable = (
        next(LoggedSource(rows, plan, 1, CPU)) for rows in (padding_rows(named, CPU), padding_rows(listed, CPU), none)
    )
    assert [batch.weight.tolist() for batch in (names, lists, unusable)] == [[0]] * 3
    assert (names.state.shape, names.metrics.shape, names.actions.mask.tolist()) == ((1, 3), (1, 1), [[True, True]])
    assert (lists.actions.features.tolist(), lists.actions.mask.tolist(), none.count) == ([[[0, 0]]], [[True]], 0)


def test_features_and_metrics_that_a_shard_lacks_are_absent_and_zero(tmp_path: Path) -> None:
    """The other machine has feature 7 and the metric "clicks"; here they are missing (DO_NOT_PREPROCESS: 0) and 0."""
    rows = shard(
        tmp_path,
        [{**row, "metrics": {"views": 2.0}} for row in random_rows(4)],
        PLAIN((0, 1, 2, 7)),
        ("clicks", "views"),
    )
    batch = next(LoggedSource(rows, ReadPlan(shards=(4, 0), minibatch=4, epochs=1, reads=(0, 1)), 0, CPU))
    assert (batch.state[:, 3].tolist(), batch.metrics.tolist(), batch.weight.tolist()) == (
        [0] * 4, [[0, 2]] * 4, [0.5] * 4,  # two ranks, four rows
    )  # fmt: skip
