"""CSV: cells as Python's csv module reads them, types that hold for the whole file, and every fault with its line."""

from __future__ import annotations

import csv
import gzip
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.event_files import blocks_of, lines_of, rows_of, small_blocks, values_of
from helpers.logs import written
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.data.tables import read_log
from reagent_lite.errors import DataError, NoRowsError

HEADER = "mdp_id,sequence_number,state_features,action,reward,terminal\n"
GOOD = 'a,1,"{""0"": 0.5}",left,1.5,false\n'


@pytest.mark.parametrize(("text", "rows"), [
    # types are the columns' own
    (HEADER + GOOD + '007,2,{},1,-2,True\n"",3.0,,,1e3,0\nb,4,{},1,TRUE,f\n', [
        {"mdp_id": "a", "sequence_number": 1, "state_features": {"0": 0.5}, "action": "left", "reward": 1.5,
         "terminal": False},
        {"mdp_id": "007", "sequence_number": 2, "state_features": {"0": None}, "action": "1", "reward": -2.0,
         "terminal": True},
        {"mdp_id": None, "sequence_number": 3, "state_features": None, "action": None, "reward": 1000.0,
         "terminal": False},
        {"mdp_id": "b", "sequence_number": 4, "state_features": {"0": None}, "action": "1", "reward": 1.0,
         "terminal": False},
    ]),
    # columns of single features, and row labels of pandas
    (",state_features.3,state_features.10,next_state_features.3,action.0,action.1,metrics.a b,reward\n"
     "0,0.5,,1,1,0,7,1\n1,,,,,,,2\n", [
        {"reward": 1.0, "state_features": {"3": 0.5, "10": None}, "next_state_features": {"3": 1.0},
         "action": {"0": 1.0, "1": 0.0}, "metrics": {"a b": 7.0}, "Unnamed: 0": None},
        {"reward": 2.0, "state_features": {"3": None, "10": None}, "next_state_features": None, "action": None,
         "metrics": None, "Unnamed: 0": None},
    ]),
    # rows of several steps
    ("reward,step\n1,2\n1,3.0\n1,\n", [{"reward": 1.0, "step": step} for step in (2, 3, None)]),
    # columns that no log has are named
    ("ds,reward,price\n2026-01-01,1,007\n", [{"ds": None, "reward": 1.0, "price": None}]),
])  # fmt: skip
def test_rows_are_read(tmp_path: Path, text: str, rows: list[dict[str, Any]]) -> None:
    assert rows_of(written(tmp_path / "x.csv", text)) == rows


def test_lines_marks_blank_lines_and_columns_that_no_log_has(tmp_path: Path) -> None:
    text = (
        b"\xef\xbb\xbf\r\n" + HEADER.replace("reward", "price").replace("\n", "\r\n").encode()
        + b'\r\n"a\n\nb",1,{},x,007,1\r\n\n\nc,2,{},x,2,1\r'
    )  # fmt: skip
    blocks = blocks_of(written(tmp_path / "x.csv", text))
    assert (values_of(blocks, "mdp_id"), values_of(blocks, "price"), lines_of(blocks)) == (
        ["a\n\nb", "c"], ["007", "2"], [4, 9],
    )  # fmt: skip


texts = st.text(st.sampled_from('ab,"\n\r{é '), max_size=6)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(texts, texts, st.integers(-9, 9)), min_size=1, max_size=8), crlf=st.booleans())
def test_cells_are_those_of_pythons_csv(tmp_path: Path, rows: list[tuple[str, str, int]], crlf: bool) -> None:
    stream = io.StringIO(newline="")
    # Python's writer quotes a carriage return only where it ends lines
    quoting = csv.QUOTE_ALL if any("\r" in cell for row in rows for cell in row[:2]) else csv.QUOTE_MINIMAL
    writer = csv.writer(stream, lineterminator="\r\n" if crlf else "\n", quoting=quoting)
    writer.writerow(["mdp_id", "note", "reward"])
    writer.writerows(rows)
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, 16, 32)
        blocks = blocks_of(written(tmp_path / "x.csv", stream.getvalue()))
    assert [(r["mdp_id"] or "", r["note"] or "", int(r["reward"])) for b in blocks for r in b.table.to_pylist()] == rows
    assert lines_of(blocks) == np.cumsum([2, *[1 + "".join(row[:2]).count("\n") for row in rows]])[:-1].tolist()


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (GOOD + "a,1,{},left,1\n", "3: expected 6 cells, as the header has, got 5"),
        ('"x\ny",1,{},left,1,0\na,b,{},left,1,0\n', "4: expected an integer or a time such as 2026-01-31T10:00:00 "
         "in sequence_number, got \"b\""),
        (GOOD + "a,1.5,{},left,1,0\n", "3: expected an integer or a time such as"),
        (GOOD + "a,2026-13-01 00:00:00,{},left,1,0\n", "3: expected an integer or a time such as"),
        (GOOD + "a,99999999999999999999,{},left,1,0\n", "3: expected an integer within ±2^62 in sequence_number"),
        (GOOD + 'a,1,{},left,"1,5",0\n', "3: expected a number in reward, got \"1,5\". Write numbers as 1234.5, and "),
        (GOOD + "a,1,{},left,1,maybe\n", "3: expected true or false in terminal, got \"maybe\""),
        (GOOD + "a,1,{'0': 1},left,1,0\n", "3: expected an object {id: number} in state_features, got "
         "\"{'0': 1}\". Write {\"0\": 0.5} as json.dumps does; Python's own"),
        (GOOD + 'a,1,"{""0"": NaN}",left,1,0\n', "3: expected an object {id: number} in state_features"),
        (GOOD + 'a,1,"{""x\ny"": 1.5}",left,1,0\n', "3: expected an object {id: number} in state_features"),
        # cells that would close the object they are put into, and open another
        (GOOD + 'a,1,"{""0"": 1}, ""reward"": 5",left,1,0\n', "3: expected an object {id: number} in state_features"),
        (GOOD + 'a,1,"{}} {""state_features"": {}",left,1,0\n', "3: expected an object {id: number} in state_features"),
        (GOOD + 'a,1,{},le"ft,1,0\n', "3: expected quotation marks around whole cells, doubled inside "
         "them, and lines that end by a newline, got a cell that begins 'le\"ft,1,0\\n'"),
        (GOOD + 'a,1,{},"left"x,1,0\n', "3: expected quotation marks around whole cells"),
        (GOOD + 'a,1,{},"left,1,0\na,1,{},"x",1,0\n', "3: expected quotation marks around whole cells"),
        (GOOD + 'a,1,{},"left,1,0\n' + GOOD.replace('"', ""), "3: expected quotation marks around whole cells"),
        (GOOD + "a\rb,1,{},left,1,0\n", "3: expected quotation marks around whole cells"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("later", [False, True])
def test_faults_have_their_line(
    tmp_path: Path, rows: str, words: str, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first block, and in one that is parsed in a thread."""
    small_blocks(monkeypatch, 400, 4000)
    shift = 200 * later
    line, _, rest = words.partition(":")
    with pytest.raises(DataError, match=re.escape(f"x.csv:{int(line) + shift}:{rest}")):
        read_log(written(tmp_path / "x.csv", HEADER + GOOD * shift + rows))


@pytest.mark.parametrize(("text", "words", "kind"), [
    *((text, words, DataError) for text, words in [
        (GOOD, "1: expected a header with the names of the columns, got a value, '1'. Write the header as the "
         "first line"),
        ("state_features,state_features.0,reward\n{},1,2\n", "1: expected state_features once, got a column "
         "'state_features' and a column 'state_features.0'. Keep one"),
        ((HEADER + GOOD).encode("utf-16"), "expected text in UTF-8, got UTF-16. Write the file as UTF-8"),
        (gzip.compress(b"reward\n", mtime=0), "csv, as its name says, got gzip. Unpack it, or give it the extension"),
        ("é,reward\n1,1\n".encode("latin-1"), "1: expected a header in UTF-8"),
        ("state_features.,reward\n1,1\n", "1: expected a feature's id or name after 'state_features.', got none"),
        ("reward,mdp_id\n1,é\n".encode("latin-1"), "2: expected text in UTF-8"),
        ("reward,mdp_id\n1,2\n1,2,é\n".encode("latin-1"), "3: expected text in UTF-8"),
    ]),
    *((text, "expected rows of data, got none", NoRowsError) for text in ("", "\n\n", HEADER, HEADER.strip())),
])  # fmt: skip
def test_headers_and_encodings_that_are_refused(
    tmp_path: Path, text: str | bytes, words: str, kind: type[DataError]
) -> None:
    with pytest.raises(kind, match=re.escape(words)):
        read_log(written(tmp_path / "x.csv", text))


def test_actions_are_maps_where_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch, 300, 1000)
    some = 'a,1,{},"{""0"": 2}",1,1\n'
    rows = rows_of(written(tmp_path / "x.csv", HEADER + "a,1,{},,1,1\n" * 200 + some * 3))
    assert [row["action"] for row in rows] == [None] * 200 + [{"0": 2.0}] * 3
    file = written(tmp_path / "x.csv", HEADER + "a,1,{},left,1,1\n" * 200 + some)
    with pytest.raises(DataError, match=r'x\.csv:202: .*actions left.*{"0": 2'):
        prepare_training_copy(Log(str(file), actions=("left",), directory=str(tmp_path)))


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_other_delimiters_have_decimal_commas(tmp_path: Path, delimiter: str) -> None:
    lines = [["state_features.age", "state_features.land", "action", "reward", "action_probability"],
             ["59,5", "a,b", '"x' + delimiter + '1"', "-0,25", "0.5"],
             ["60", "DE", "y", "1", r"\N"]]  # fmt: skip
    file = written(tmp_path / "x.csv", "\n".join(map(delimiter.join, lines)) + "\n")
    assert rows_of(file) == [
        {"state_features": {"age": 59.5, "land": "a,b"}, "action": f"x{delimiter}1", "reward": -0.25,
         "action_probability": 0.5},
        {"state_features": {"age": 60.0, "land": "DE"}, "action": "y", "reward": 1.0, "action_probability": None},
    ]  # fmt: skip
    with pytest.raises(DataError, match=r"x\.csv:2: expected 2 cells, as the header has, got 3"):
        rows_of(written(tmp_path / "x.csv", f"action{delimiter}reward\n1{delimiter}2{delimiter}3\n"))


def test_a_comma_separates_if_several_signs_could(tmp_path: Path) -> None:
    file = written(tmp_path / "x.csv", 'action,reward,state_features.a;b\n"1,5",2,3\n')
    assert rows_of(file) == [{"action": "1,5", "reward": 2.0, "state_features": {"a;b": 3.0}}]


def test_words_for_absent_numbers(tmp_path: Path) -> None:
    """Among texts they are texts: NA is Namibia."""
    cells = ["NA", "N/A", "null", "NULL", "None", r"\N", ""]
    text = "state_features.age,state_features.land,reward\n" + "".join(f"{cell},{cell},1\n" for cell in cells)
    rows = [row["state_features"] for row in rows_of(written(tmp_path / "x.csv", text + "41,DE,1\n"))]
    ages = [row["age"] for row in rows]
    assert [age is None or age != age for age in ages] == [True] * 7 + [False]
    assert [row["land"] for row in rows] == [*cells[:5], None, None, "DE"]


@pytest.mark.parametrize("number", ["１２", "٣", "1_000"])
def test_digits_of_other_scripts_are_no_numbers(tmp_path: Path, number: str) -> None:
    file = written(tmp_path / "log.csv", f"state_features.a,action,reward\n1,left,{number}\n2,left,1\n")
    with pytest.raises(DataError, match=r"log\.csv:2: expected a number in reward, got "):
        prepare_training_copy(Log(str(file), actions=("left", "right"), directory=str(tmp_path / "copies")))
