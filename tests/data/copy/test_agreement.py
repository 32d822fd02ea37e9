"""What machines hold, compared and merged: a pure function of their summaries."""

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.logs import random_rows, write_lines

from reagent_lite.data.copy.copy_summaries import COPY_SUMMARY, Agreement, CopySummary, agree, content_of
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.copy.training_copy import empty_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.errors import DataError
from reagent_lite.feature_ids import id_of
from reagent_lite.types import FeatureSpec, FeatureType, NormalizationSpec

ACTIONS = ("a", "b")
FIRST = CopySummary(
    node=0, rows=3, action_names=ACTIONS, state_ids=(1, 4), action_ids=(), metric_names=("views",), content="c0",
    listing="l", inputs="i", counts={"rows": 3, "episodes": 1}, notes=("something",), normalization={"state": "n"},
    texts={"state": (), "action": ()}, without_value={"state": (), "action": ()},
)  # fmt: skip
SECOND = replace(FIRST, node=1, rows=2, state_ids=(2, 4), metric_names=("clicks",), content="c1",
                 counts={"rows": 2, "terminal_rows": 1}, notes=())  # fmt: skip
ALONE = Agreement(
    rows=(3,), state_ids=(1, 4), action_ids=(), metric_names=("views",), content="c0",
    counts={"rows": 3, "episodes": 1}, notes=("something",),
)  # fmt: skip


@pytest.mark.parametrize(("summaries", "layout", "agreed"), [
    # one machine is what it holds, replicas are one shard, shards are added
    ([FIRST], "shards", ALONE),
    ([FIRST, replace(FIRST, node=1)], "replicas", replace(ALONE, notes=("node 0: something",))),
    ([FIRST, SECOND], "shards", Agreement(
        rows=(3, 2), state_ids=(1, 2, 4), action_ids=(), metric_names=("clicks", "views"),
        content=hashlib.sha256(b"c0\nc1").hexdigest(),
        counts={"rows": 5, "episodes": 1, "terminal_rows": 1},
        notes=("node 0: something",
               "node 0: none of its 3 rows has feature 2, which other nodes have; it counts as missing there",
               "node 1: none of its 2 rows has feature 1, which other nodes have; it counts as missing there",
               "node 0: none of its 3 rows has metric clicks, which other nodes have; it counts as 0 there",
               "node 1: none of its 2 rows has metric views, which other nodes have; it counts as 0 there"),
    )),
])  # fmt: skip
def test_what_machines_hold_is_merged(summaries: list[CopySummary], layout: str, agreed: Agreement) -> None:
    assert agree(summaries, path="p", layout=layout) == agreed


CANDIDATES = replace(SECOND, action_names=())
NONE = replace(FIRST, rows=0)
TEXTS = replace(FIRST, texts={"state": (4,), "action": ()})
NORM = "state_norm_data_path on node 1"


@pytest.mark.parametrize(("summaries", "layout", "places", "words"), [
    ([FIRST, CANDIDATES], "shards", ["p on node 1"], "the actions a, b, as on node 0, got candidates with feat"),
    ([FIRST, replace(SECOND, action_names=("b", "a"))], "shards", ["p on node 1"],
     "expected the actions a, b, as on node 0, got the actions b, a"),
    ([FIRST, replace(SECOND, normalization={"state": "other"})], "shards", [NORM],
     "expected the parameters of node 0 (sha256 n), got others (other)"),
    ([FIRST, replace(SECOND, normalization={})], "shards", [NORM], "expected the parameters of node 0"),
    ([FIRST, SECOND], "replicas", ["p on node 1"],
     "expected the 3 rows of node 0, as data.layout is replicas, got 2 rows. Copy the same"),
    ([FIRST, replace(FIRST, node=1, content="c1")], "replicas", ["p on node 1"], "got 3 rows, others. Copy the same"),
    # every difference is named
    ([FIRST, CANDIDATES, replace(SECOND, node=2, normalization={})], "replicas",
     ["p on node 1", "p on node 1", "state_norm_data_path on node 2", "p on node 2"], "candidates with feat"),
    ([NONE, replace(NONE, node=1)], "shards", ["p"], "got none on any of 2"),
    ([FIRST, SECOND, replace(FIRST, node=2)], "shards", ["p on node 2"],
     "rows of its own, as data.layout is shards, got the 3 rows of node 0. Set data.layout to split"),
    ([FIRST, replace(SECOND, listing="m")], "split", ["p on node 1"], "the files of node 0, as data.layout is split"),
    ([replace(NONE, listing="m", inputs=""), replace(FIRST, node=1)], "split", ["p on node 0"], "files of node 1"),
    ([FIRST, replace(SECOND, inputs="j")], "split", ["p on node 1"], "none, or files with other names or content"),
    ([SECOND, replace(TEXTS, node=2)], "shards", ["p on node 1: feature 4"],
     "strings, as on node 2, got numbers"),
])  # fmt: skip
def test_what_cannot_be_merged_is_refused_with_its_machine(
    summaries: list[CopySummary], layout: str, places: list[str], words: str
) -> None:
    with pytest.raises(DataError, match=re.escape(words)) as caught:
        agree(summaries, path="p", layout=layout)
    assert [problem.where for problem in caught.value.problems] == places


def test_a_machine_may_have_no_rows_or_no_value_of_a_text() -> None:
    assert agree([NONE, SECOND], path="p", layout="shards").rows == (0, 2)
    assert agree(
        [replace(SECOND, without_value={"state": (4,), "action": ()}), TEXTS], path="p", layout="shards"
    ).state_ids == (1, 2, 4)


def test_equal_rows_of_two_machines_as_eval_data_and_by_chance_none() -> None:
    assert agree([FIRST, replace(FIRST, node=1)], path="p", layout="shards", repeats=True).rows == (3, 3)
    assert agree([NONE, replace(NONE, node=1), SECOND], path="p", layout="shards").rows == (0, 0, 2)
    assert agree([replace(NONE, inputs=""), replace(SECOND, node=1)], path="p", layout="split").rows == (0, 2)


def test_facts_of_a_copy_come_back_from_their_text(tmp_path: Path) -> None:
    rows = [{**row, "metrics": {"m": 1}} for row in random_rows(20)]
    copy = prepare_training_copy(Log(write_lines(tmp_path / "log.jsonl", rows), actions=ACTIONS))
    summary, other = (
        CopySummary.of(
            copy, 3, {"state": NormalizationSpec.from_features({1: FeatureSpec(feature_id=1, feature_type=k)})}
        )
        for k in (FeatureType.BINARY, FeatureType.PROBABILITY)
    )
    assert summary.normalization != other.normalization
    assert (summary.node, summary.rows, summary.state_ids, summary.metric_names) == (3, 20, (0, 1, 2), ("m",))
    assert summary.content == other.content == content_of(copy)
    nothing = CopySummary.of(empty_training_copy(ACTIONS), 1, {})
    assert (nothing.rows, nothing.content, sum(nothing.counts.values())) == (0, "", 0)
    named = replace(summary, state_ids=(id_of("age"), 3))
    returned = [COPY_SUMMARY.validate_json(COPY_SUMMARY.dump_json(sent)) for sent in (summary, nothing, named)]
    assert (returned, [*map(str, returned[2].state_ids)]) == ([summary, nothing, named], ["age", "3"])


def test_the_same_rows_in_another_order_have_the_same_content(tmp_path: Path) -> None:
    """Each machine may have a shuffled copy: episodes are sorted, so that row numbers mean the same everywhere."""
    rows = random_rows(20)
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(20)]
    first, second, third = (
        content_of(prepare_training_copy(Log(write_lines(tmp_path / f"{number}.jsonl", logged), actions=ACTIONS)))
        for number, logged in enumerate((rows, shuffled, [*rows[:-1], {**rows[-1], "reward": 7.0}]))
    )
    assert first == second != third


def test_a_copy_of_nothing_has_what_a_copy_has(tmp_path: Path) -> None:
    shapes, shapes_of_nothing = (
        {name: (value.dtype, value.ndim) for name, value in vars(copy).items() if isinstance(value, np.ndarray)}
        for copy in (
            prepare_training_copy(Log(write_lines(tmp_path / "log.jsonl", random_rows(10)), actions=ACTIONS)),
            empty_training_copy(ACTIONS),
        )
    )
    assert shapes_of_nothing == shapes
    assert (len(empty_training_copy(ACTIONS)), empty_training_copy(ACTIONS).list_offsets.tolist()) == (0, [0])
    assert empty_training_copy(None).parametric
