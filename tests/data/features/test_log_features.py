"""Statistics of all rows against DuckDB's aggregate, scipy and hand arithmetic; types that hold for every row."""

import itertools
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from helpers.logs import candidate_rows, episode_code, split_mix, write_lines
from helpers.shards import write as write_table
from scipy import stats

from reagent_lite.config.norm_params import NormParams
from reagent_lite.data.features.column_fits import Fitted, fit_columns
from reagent_lite.data.features.log_features import LogSummary, summarize_log
from reagent_lite.data.features.summary import ACTION, STATE
from reagent_lite.data.logs import Log
from reagent_lite.data.rows.matrices import FeatureMatrix
from reagent_lite.errors import DataError

NUM = 20_000
RNG = np.random.default_rng(3)
COLUMNS = {name: np.float32(values) for name, values in {
    "0": RNG.integers(0, 2, NUM), "1": np.where(RNG.random(NUM) < 0.25, nan, RNG.random(NUM)),
    "2": RNG.integers(0, 7, NUM), "3": RNG.normal(1e4, 1, NUM),
    "4": np.where(RNG.random(NUM) < 0.25, nan, RNG.lognormal(0, 1, NUM)), "5": RNG.standard_t(1.5, NUM),
}.items()}  # fmt: skip
TABLE = pa.table({
    "mdp_id": [f"e{row // 50}" for row in range(NUM)], "sequence_number": [row % 50 * 3 for row in range(NUM)],
    STATE: pa.StructArray.from_arrays(
        [pa.array(values, mask=np.isnan(values)) for values in COLUMNS.values()], list(COLUMNS)
    ),
    "action": ["left", "right"] * (NUM // 2),
    "reward": np.ones(NUM),
})  # fmt: skip


def summary(path: Path, num_samples: int = 2000, columns: tuple[str, ...] = (STATE, ACTION), **more: Any) -> LogSummary:
    return summarize_log(Log(str(path)).files, NormParams(num_samples=num_samples, cols_to_norm=columns), **more)


def fitted(path: Path, num_samples: int = 2000, **settings: Any) -> Fitted:
    return fit_columns({STATE: summary(path, num_samples).columns[STATE]}, NormParams(**settings), where="data")[STATE]


@pytest.fixture(scope="module")
def parquet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(tmp_path_factory.mktemp("log") / "log.parquet", TABLE, group=7000)


def test_all_rows_against_duckdb(parquet: Path) -> None:
    log = summary(parquet)
    state = log.columns[STATE]
    assert (log.rows, log.parametric, state.rows, tuple(state.features)) == (NUM, False, NUM, (0, 1, 2, 3, 4, 5))
    for feature_id, mine in state.features.items():
        x = f'{STATE}."{feature_id}"::DOUBLE'
        query = f"SELECT count({x}), min({x}), max({x}), bool_and({x} = floor({x})), avg({x}), stddev_samp({x}), " \
                f"count(DISTINCT {x}) FROM '{parquet}'"  # fmt: skip
        *exact, mean, stddev, distinct = duckdb.sql(query).fetchall()[0]
        assert [mine.moments.count, mine.low, mine.high, mine.whole, mine.moments.mean, mine.moments.stddev] == [
            *exact, pytest.approx(mean, rel=1e-9), pytest.approx(stddev, rel=1e-9),
        ]  # fmt: skip
        assert (mine.distinct is None) if distinct > 100 else len(mine.distinct) == distinct


@pytest.mark.parametrize("starts", [[0, NUM], [0, 1, 9000, 15_000, NUM]])
def test_the_same_numbers_whatever_the_order(parquet: Path, tmp_path: Path, starts: list[int]) -> None:
    """The sample has the same rows in the same order, so all that is of the sample is the same to the last bit."""
    shuffled = TABLE.take(np.random.default_rng(0).permutation(NUM))
    for part, (start, stop) in enumerate(itertools.pairwise(starts)):
        write_table(tmp_path / f"{9 - part}.parquet", shuffled.slice(start, stop - start), group=NUM)
    first, other = fitted(parquet, skip_quantiles=False), fitted(tmp_path, skip_quantiles=False)
    assert [str(feature.feature_type) for feature in first.spec.features] == [
        "BINARY", "PROBABILITY", "CONTINUOUS", "BOXCOX", "ENUM", "QUANTILE"
    ]  # fmt: skip
    for mine, theirs in zip(first.spec.features, other.spec.features, strict=True):
        mean, stddev = pytest.approx(mine.mean, rel=1e-12), pytest.approx(mine.stddev, rel=1e-10)
        assert theirs == (replace(mine, mean=mean, stddev=stddev) if mine.feature_type == "CONTINUOUS" else mine)


def test_the_sample_is_the_rows_of_least_hash(parquet: Path) -> None:
    """The hash by other means: SplitMix64 of sequence_number + 8 bytes of BLAKE2b + 7 steps."""

    def hash_of(row: dict[str, Any]) -> int:
        return split_mix(episode_code(row["mdp_id"]) + row["sequence_number"] + 7 * 0xD1342543DE82EF95)

    expected = sorted(TABLE.to_pylist(), key=hash_of)[:2000]
    sampled, other = (summary(parquet, seed=seed).columns[STATE].sample_values(3) for seed in (7, 8))
    np.testing.assert_array_equal(sampled, np.sort([row[STATE]["3"] for row in expected]))
    assert not np.array_equal(sampled, other)


def test_the_report_of_the_sample(parquet: Path) -> None:
    values = COLUMNS["4"][~np.isnan(COLUMNS["4"])].astype(np.float64)
    reports = fitted(parquet, num_samples=NUM).statistics["features"]
    report = reports["4"]
    transformed, _ = stats.boxcox(np.maximum(values - values.min(), 1e-4))
    assert report["boxcox_k_squared"] == pytest.approx(stats.normaltest(transformed).statistic, rel=1e-2)
    assert (report["share_present"], report["sampled"], report["quantiles"]["0.5"]) == (
        len(values) / NUM, len(values), np.median(values),
    )  # fmt: skip
    assert (report["parameters_from"], reports["3"]["parameters_from"]) == ("the sample", "all rows")


def row(number: float, **changes: Any) -> dict[str, Any]:
    return {"mdp_id": "e", "sequence_number": number, STATE: {"0": number / 3}, "action": "a", **changes}


def test_candidates_count_as_often_as_rows_list_them(tmp_path: Path) -> None:
    """20 rows list {1: 0.5}, {1: 3}; 10 rows list nothing and take {1: 9.5}: mean (20 · 3.5 + 10 · 9.5) / 50 = 3.3."""
    listed = {"action": {"1": 0.5}, "possible_actions": [{"1": 0.5}, {"1": 3.0}]}
    log = summary(
        write_lines(tmp_path / "log.jsonl", [row(i, action={"1": 9.5}) | (listed if i % 3 else {}) for i in range(30)])
    )
    action = log.columns[ACTION]
    moments = action.features[1].moments
    assert (log.parametric, log.columns[STATE].rows, action.rows, moments.count) == (True, 30, 50, 50)
    assert moments.mean == pytest.approx(3.3, rel=1e-12)
    assert sorted(action.sample_values(1).tolist()) == [0.5] * 20 + [3.0] * 20 + [9.5] * 10


def values_of(sample: tuple[FeatureMatrix, ...]) -> np.ndarray:
    return np.concatenate([matrix.align((0, 1, 2)) for matrix in sample])


def test_candidates_sampled_are_those_of_the_sampled_rows(tmp_path: Path) -> None:
    rows = candidate_rows(3000)
    log = summary(write_lines(tmp_path / "log.jsonl", rows), num_samples=50)
    state, action = log.columns[STATE], log.columns[ACTION]
    row_of = {str(np.float32([row[STATE].get(str(number), nan) for number in range(3)])): row for row in rows}
    sampled = [row_of[str(values)] for values in values_of(state.sample)[np.argsort(state.hashes)]]
    expected = [np.float32(candidate["0"]) for row in sampled for candidate in row["possible_actions"]]
    assert action.sample_values(0).tolist() == sorted(expected[:50])
    assert action.rows == sum(len(row["possible_actions"]) for row in rows)


def test_rows_without_a_name_are_known_by_position(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "log.jsonl", [row(7), *[{STATE: {"0": i / 3}, "action": "a"} for i in range(499)]])
    first, again = summary(file, num_samples=100), summary(file, num_samples=100)
    assert first.rows_by_position == 499
    np.testing.assert_array_equal(first.columns[STATE].sample_values(0), again.columns[STATE].sample_values(0))


@pytest.mark.parametrize(
    ("logged", "words"),
    [
        ({"state_feature": {"0": 1}, "action": "a"}, "Nearest column: 'state_feature'"),
        ({"stress": 1.0, "action": {"0": 1}}, "give them as `columns`: docs/data.md"),
        (row(0), r"an object \{id: number\} in action"),
    ],
)
def test_other_bad_input(tmp_path: Path, logged: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        summary(write_lines(tmp_path / "log.jsonl", [logged]), parametric=True)


def test_actions_of_two_kinds_are_refused(tmp_path: Path) -> None:
    for name, action in (("a.jsonl", "a"), ("b.jsonl", {"1": 2.0})):
        write_lines(tmp_path / name, [row(i, action=action) for i in range(30)])
    with pytest.raises(DataError, match=r"b.jsonl:1: .*names.*objects"):
        summary(tmp_path)
    states = summary(tmp_path, columns=(STATE,), parametric=False)
    assert (states.rows, tuple(states.columns)) == (60, (STATE,))
