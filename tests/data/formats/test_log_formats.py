"""The same rows in every format give the same training copy, and the copy has what the rows say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest
from helpers.event_files import FORMATS, data_of, small_blocks
from helpers.logs import Row, candidate_rows, random_rows, written
from helpers.transitions import check_copy, check_same

from reagent_lite.data.copy.first_look import first_rows
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log

NAMES = ("a", "b")
NUM = 200


def logged(rows: list[Row]) -> list[Row]:
    """The rows in disorder, with names that CSV has to quote, numbers that are hard to print, and metrics."""
    for number, row in enumerate(rows):
        row |= {
            "mdp_id": f'é"{row["mdp_id"]},\n{row["mdp_id"]}', "terminal": number % 10 == 9, "truncated": False,
            "state_features": row["state_features"] | {"7": -0.0 if number % 3 else 1e-20},
            "action_probability": 0.25 + number % 2 / 2, "metrics": {"clicks": number / 2},
        }  # fmt: skip
        if row["action"] in NAMES:
            row |= {"possible_actions": list(NAMES), "possible_next_actions": [] if row["terminal"] else list(NAMES),
                    "next_action": row["next_action"] or None}  # fmt: skip
    return [rows[number] for number in np.random.default_rng(0).permutation(len(rows))]


@pytest.mark.parametrize(("made", "actions"), [(random_rows, NAMES), (candidate_rows, None)])
def test_every_format_gives_the_same_copy(
    tmp_path: Path, made: Callable[[int], list[Row]], actions: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = logged(made(NUM))
    copies = {}
    for form in (*FORMATS, "csv.gz", "csv.bz2", "csv.zst", "dense.csv", "stream.arrow", "feather", "text.parquet"):
        log = written(tmp_path / (f"x.{form}" if form != "jsonl.gz" else "X.JSON.GZ"), data_of(rows, form))
        copies[form] = prepare_training_copy(Log(log, actions=actions, directory=str(tmp_path / "copies")))
        small_blocks(monkeypatch, 2000, 4500)  # but for the first
    check_copy(copies["jsonl"], rows, actions)
    for copy in copies.values():
        assert (len(copy), copy.notes) == (NUM, ())
        check_same(copies["jsonl"], copy)
    # a CSV record that spans three lines begins in the first of them; the header is line 1
    np.testing.assert_array_equal(copies["csv"].origin_line, 2 * copies["jsonl"].origin_line)


def test_urls_and_formats_that_mix_in_a_folder(tmp_path: Path) -> None:
    """A folder's shards may be of several formats: rows 0 to 99 of one, 100 to 199 of the other."""
    rows = logged(random_rows(NUM))
    fsspec.filesystem("memory").pipe({
        "/formats/json/x.jsonl": data_of(rows, "jsonl"),
        "/formats/mixed/a.csv": data_of(rows[:100], "dense.csv"),
        "/formats/mixed/b.arrow": data_of(rows[100:], "stream.arrow"),
        "/formats/packed/x.csv.gz": data_of(rows, "csv.gz"),
    })  # fmt: skip
    urls = [f"memory://formats/{name}" for name in ("json", "mixed", "packed")]
    seen = first_rows(Log(urls[2], actions=NAMES))
    assert (seen.state_ids, 0 < seen.rows <= NUM) == ((0, 1, 2, 7), True)
    first, *others = (prepare_training_copy(Log(url, actions=NAMES, directory=str(tmp_path))) for url in urls)
    for other in others:
        check_same(first, other)
