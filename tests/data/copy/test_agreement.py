"""What machines hold, compared and merged: a pure function of their summaries."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from oracles.logs import random_rows, write_lines

from reagent_lite.data.copy.agreement import COPY_SUMMARY, Agreement, CopySummary, agree
from reagent_lite.data.copy.training_copy import empty_training_copy, prepare_training_copy
from reagent_lite.errors import DataError
from reagent_lite.feature_ids import id_of
from reagent_lite.types import FeatureSpec, FeatureType, NormalizationSpec

ACTIONS = ("a", "b")
FIRST = CopySummary(
    node=0, rows=3, action_names=ACTIONS, state_ids=(1, 4), action_ids=(), metric_names=("views",), content="c0",
    counts={"rows": 3, "episodes": 1}, notes=("something",), normalization={"state": "n"},
    texts={"state": (), "action": ()}, without_value={"state": (), "action": ()},
)  # fmt: skip
SECOND = replace(FIRST, node=1, rows=2, state_ids=(2, 4), metric_names=("clicks",), content="c1",
                 counts={"rows": 2, "terminal_rows": 1}, notes=())  # fmt: skip


def test_one_machine_is_what_it_holds() -> None:
    assert agree([FIRST], path="p", replicas=False) == Agreement(
        rows=(3,), state_ids=(1, 4), action_ids=(), metric_names=("views",), content="c0",
        counts={"rows": 3, "episodes": 1}, notes=("something",),
    )  # fmt: skip


def test_shards_are_added() -> None:
    assert agree([FIRST, SECOND], path="p", replicas=False) == Agreement(
        rows=(3, 2), state_ids=(1, 2, 4), action_ids=(), metric_names=("clicks", "views"),
        content=hashlib.sha256(b"c0\nc1").hexdigest(),
        counts={"rows": 5, "episodes": 1, "terminal_rows": 1},
        notes=("node 0: something",
               "node 0: none of its 3 rows has feature 2, which other nodes have; it counts as missing there",
               "node 1: none of its 2 rows has feature 1, which other nodes have; it counts as missing there",
               "node 0: none of its 3 rows has metric clicks, which other nodes have; it counts as 0 there",
               "node 1: none of its 2 rows has metric views, which other nodes have; it counts as 0 there"),
    )  # fmt: skip


def test_replicas_are_one_shard() -> None:
    both = agree([FIRST, replace(FIRST, node=1)], path="p", replicas=True)
    assert (both.rows, both.counts, both.content) == ((3,), FIRST.counts, "c0")


CANDIDATES, ORDER = replace(SECOND, action_names=()), replace(SECOND, action_names=("b", "a"))
WHERE = "state_norm_data_path on node 1: expected the parameters of node 0"


@pytest.mark.parametrize(
    ("other", "replicas", "message"),
    [
        (CANDIDATES, False, "data.json on node 1: expected the actions a, b, as on node 0, got candidates with feat"),
        (ORDER, False, "expected the actions a, b, as on node 0, got the actions b, a"),
        (replace(SECOND, normalization={"state": "other"}), False, f"{WHERE} (sha256 n), got others (other)"),
        (replace(SECOND, normalization={}), False, WHERE),
        (SECOND, True, "expected the 3 rows of node 0, as data.layout is replicas, got 2 rows. Copy the same"),
        (replace(FIRST, node=1, content="c1"), True, "got 3 rows, others. Copy the same"),
    ],
)
def test_what_cannot_be_merged_is_refused_with_its_machine(other: CopySummary, replicas: bool, message: str) -> None:
    with pytest.raises(DataError) as caught:
        agree([FIRST, other], path="data.json", replicas=replicas)
    assert message in str(caught.value)


def test_every_difference_is_named() -> None:
    others = replace(SECOND, action_names=()), replace(SECOND, node=2, normalization={})
    with pytest.raises(DataError) as caught:
        agree([FIRST, *others], path="p", replicas=True)
    places = ["p on node 1", "p on node 1", "state_norm_data_path on node 2", "p on node 2"]
    assert [problem.where for problem in caught.value.problems] == places


def test_rows_are_needed_somewhere() -> None:
    none = replace(FIRST, rows=0)
    with pytest.raises(DataError, match=r"p: .*got none on any of 2"):
        agree([none, replace(none, node=1)], path="p", replicas=False)
    assert agree([none, SECOND], path="p", replicas=False).rows == (0, 2)


def test_facts_of_a_copy_come_back_from_their_text(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "log.jsonl", [{**row, "metrics": {"m": 1}} for row in random_rows(20)])
    copy = prepare_training_copy(str(file), actions=ACTIONS)
    spec = NormalizationSpec.ordered({1: FeatureSpec(feature_id=1, feature_type=FeatureType.BINARY)})
    summary = CopySummary.of(copy, 3, {"state": spec})
    assert COPY_SUMMARY.validate_json(COPY_SUMMARY.dump_json(summary)) == summary
    assert (summary.node, summary.rows, summary.state_ids, summary.metric_names) == (3, 20, (0, 1, 2), ("m",))
    other = NormalizationSpec.ordered({1: FeatureSpec(feature_id=1, feature_type=FeatureType.PROBABILITY)})
    assert summary.normalization != CopySummary.of(copy, 3, {"state": other}).normalization
    named = COPY_SUMMARY.validate_json(COPY_SUMMARY.dump_json(replace(summary, state_ids=(id_of("age"), 3))))
    assert [str(feature_id) for feature_id in named.state_ids] == ["age", "3"]
    nothing = CopySummary.of(empty_training_copy(ACTIONS), 1, {})
    assert (nothing.rows, nothing.content, sum(nothing.counts.values())) == (0, "", 0)
    assert COPY_SUMMARY.validate_json(COPY_SUMMARY.dump_json(nothing)) == nothing


def test_the_same_rows_in_another_order_have_the_same_content(tmp_path: Path) -> None:
    """Each machine may have a shuffled copy: episodes are sorted, so that row numbers mean the same everywhere."""
    rows = random_rows(20)
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(20)]
    altered = [*rows[:-1], {**rows[-1], "reward": 7.0}]
    summaries = []
    for name, logged in (("one", rows), ("two", shuffled), ("three", altered)):
        file = write_lines(tmp_path / name / "log.jsonl", logged)
        summaries.append(CopySummary.of(prepare_training_copy(str(file), actions=ACTIONS), len(summaries), {}))
    first, second, third = summaries
    assert first.content == second.content != third.content
    assert agree([first, second], path="p", replicas=True).rows == (20,)


def test_a_copy_of_nothing_has_what_a_copy_has(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "log.jsonl", random_rows(10))
    copy, nothing = prepare_training_copy(str(file), actions=ACTIONS), empty_training_copy(ACTIONS)
    assert len(nothing) == 0
    for name, value in vars(copy).items():
        if isinstance(value, np.ndarray):
            empty = getattr(nothing, name)
            assert (empty.dtype, empty.ndim) == (value.dtype, value.ndim), name
    assert nothing.list_offsets.tolist() == [0]
    assert empty_training_copy(None).parametric


def test_a_feature_is_a_text_on_all_machines_or_on_none() -> None:
    texts = replace(FIRST, texts={"state": (4,), "action": ()})
    with pytest.raises(DataError) as error:
        agree([SECOND, replace(texts, node=2)], path="p", replicas=False)
    (problem,) = error.value.problems
    assert (problem.where, problem.expected, problem.got) == (
        "p on node 1: feature 4",
        "texts, as on node 2",
        "numbers",
    )
    absent = replace(SECOND, without_value={"state": (4,), "action": ()})
    assert agree([absent, texts], path="p", replicas=False).state_ids == (1, 2, 4)
