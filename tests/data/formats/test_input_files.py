"""Which files an input has, packed or not, and what is refused."""

from __future__ import annotations

import gzip
import json
import os
import re
import socket
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

import fsspec
import pytest
from helpers.event_files import EXTENSIONS, PACKINGS, problems_of, rows_of
from helpers.logs import written

from reagent_lite.data.formats.format_table import READERS, first_block
from reagent_lite.data.formats.input_files import list_input, local_path, not_read
from reagent_lite.data.logs import Log
from reagent_lite.errors import DataError, NoRowsError

ROWS = [{"mdp_id": str(number), "reward": number + 0.5, "state_features": {"0": float(number)}} for number in range(50)]
TEXT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_members_are_read_on_and_what_ends_early_is_refused(tmp_path: Path, packing: str) -> None:
    file, pack = tmp_path / f"a.json.{packing}", PACKINGS[packing]
    half = TEXT.index(b"\n", 700) + 1
    assert rows_of(written(file, pack(TEXT[:half]) + pack(TEXT[half:]))) == ROWS
    for data in (pack(TEXT)[:-9], TEXT):
        with pytest.raises(DataError, match=rf"a\.json\.{packing}: expected (a complete \.)?{packing}"):
            rows_of(written(file, data))


def test_a_folder_is_its_shards_in_order(tmp_path: Path) -> None:
    for name in ("b.json", "a.jsonl", "_success.json", ".hidden.json", "notes.txt"):
        (tmp_path / name).write_text(json.dumps({"name": name}) + "\n")
    (tmp_path / "c.json").touch()
    (tmp_path / "deeper.json").mkdir()
    os.mkfifo(tmp_path / "manifest.json")  # nobody's manifest
    assert [file.name for file in Log(str(tmp_path)).files] == ["a.jsonl", "b.json", "c.json"]
    assert rows_of(tmp_path) == [{"name": "a.jsonl"}, {"name": "b.json"}]


def test_home_and_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.json").write_bytes(TEXT)
    fsspec.filesystem("memory").pipe("/readers/b.json.gz", gzip.compress(TEXT))
    for path in ("~/a.json", f"file://{tmp_path}/a.json", "memory://readers/b.json.gz", "memory://readers"):
        assert rows_of(path) == ROWS
    assert local_path("~/a.json") == str(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("http://h/a.json", "http://h/a.json: expected .*s3://.*, got protocol 'http'"),
        ("simplecache::s3://b/a.json", "simplecache::s3://b/a.json: expected .*s3://.*, got a URL chained with '::'"),
        ("memory://nowhere.json", "nothing at this URL"),
        ("{folder}/b.json", "{folder}/b.json: .* Nearest there: {folder}/a.json"),
        ("{folder}/zzz/a.json", "Nearest folder that exists: {folder}"),
        ("{folder}/a.tsv", r"a\.tsv: .*got extension '\.tsv'"),
        ("{folder}/ds=1", r"none among 2 entries: a.tsv, ds=2/\."),
        ("{folder}/a\0.json", "embedded null byte"),
    ],
)
def test_what_is_no_data_is_refused(tmp_path: Path, path: str, words: str) -> None:
    (tmp_path / "ds=1/ds=2").mkdir(parents=True)
    for name, data in (("a.json", TEXT), ("a.tsv", b"a\tb\n"), ("ds=1/a.tsv", b"")):
        (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=words.format(folder=tmp_path)):
        rows_of(path.format(folder=tmp_path))


@pytest.mark.parametrize("mode", [0, 0o555])
def test_data_that_this_user_may_not_read_is_refused(mode: int) -> None:
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, ExitStack() as stack:
        Path(folder).chmod(0o755)  # tmp_path lies below a folder of one user
        data = Path(folder, "data")
        data.mkdir()
        (data / "log.jsonl").touch(0)
        data.chmod(mode)
        stack.callback(os.seteuid, os.geteuid())
        os.seteuid(os.geteuid() or 65534)
        with pytest.raises(DataError, match=r"readable file.*Permission denied"):
            list_input(str(data), EXTENSIONS)[0].open()


def test_what_lies_beside_data_unread_is_named(tmp_path: Path) -> None:
    for name in ("part-00001", "c.json.lz4", "d.tsv", "a.jsonl", "_SUCCESS", ".a.jsonl.crc", "manifest.json"):
        (tmp_path / name).touch()
    for name in ("ds=2", ".reagent-lite"):
        (tmp_path / name).mkdir()
    fsspec.filesystem("memory").pipe({f"/unread/{name}": TEXT for name in ("a.jsonl", "d.tsv", "ds=2/b.jsonl")})
    for path, notes in (
        (str(tmp_path), (f"{tmp_path}: not read: 4 entries: c.json.lz4, d.tsv, ds=2/, part-00001",)),
        (str(tmp_path / "a.jsonl"), ()),
        ("memory://unread", ("memory://unread: not read: 2 entries: d.tsv, ds=2/",)),
    ):
        assert not_read(path, EXTENSIONS) == notes


@pytest.mark.parametrize(("kind", "got"), [
    ("fifo", "a FIFO"), ("socket", "a socket"), ("/dev/zero", "a device"),
    ("gone", "a link to gone, which is not there"),
])  # fmt: skip
def test_what_is_no_file_is_refused_by_name(tmp_path: Path, kind: str, got: str) -> None:
    (tmp_path / "a.json").write_bytes(TEXT)
    odd = tmp_path / "b.json"
    with closing(socket.socket(socket.AF_UNIX)) as bound:
        make = {"fifo": os.mkfifo, "socket": lambda path: bound.bind(str(path))}
        make.get(kind, lambda path: path.symlink_to(kind))(odd)
        for path in (odd, tmp_path):
            assert [(problem.where, problem.got) for problem in problems_of(path)] == [(str(odd), got)]


def test_links_to_files_are_read_and_names_that_no_manifest_can_hold_are_refused(tmp_path: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.json"))
    odd.write_bytes(TEXT)
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/a.json").symlink_to(odd)
    assert rows_of(tmp_path / "linked") == ROWS
    for path in (odd, tmp_path):
        assert [str(problem) for problem in problems_of(path)] == [
            rf"{tmp_path}/\udcff.json: expected a name in UTF-8, got one that is not. Rename it"
        ]


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf", gzip.compress(b"", mtime=0)])
def test_an_empty_file_and_an_empty_folder_are_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(NoRowsError, match="got an empty folder"):
        rows_of(tmp_path)
    file = tmp_path / ("a.json.gz" if content[:2] == b"\x1f\x8b" else "a.json")
    with pytest.raises(NoRowsError, match=r"a\.json.*: expected rows of data"):
        rows_of(written(file, content))


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.json", b"PAR1" + bytes(40), "json, as its name says, got Parquet. Give it the extension .parquet"),
        ("a.csv", b"PAR1" + bytes(40), "csv, as its name says, got Parquet"),
        ("a.csv", b"ARROW1\0\0" + bytes(40), "got Arrow IPC. Give it the extension .arrow"),
        ("a.csv", b'{"reward": 1}\n', "got JSON. Give it the extension .jsonl"),
        ("a.csv.gz", b"action,reward\n0,1\n2,3\n", "got text that is not packed. Remove .gz from its name"),
        ("a.csv.gz", b"\x28\xb5\x2f\xfd" + bytes(40), "got Zstandard. Unpack it, or give it the extension .zst"),
        ("a.csv.gz", gzip.compress(b"PAR1" + bytes(40), mtime=0), "text in UTF-8, got Parquet"),
        ("a.jsonl", gzip.compress(TEXT, mtime=0), "got gzip. Unpack it, or give it the extension .gz"),
        ("a.json", b"SQLite format 3\0" + bytes(40), "got a database of SQLite. Export the table as CSV or Parquet"),
        ("a.csv", b"\x80\x04\x95" + bytes(40), "got a pickle. Read it in Python and give the frame"),
        ("a.npz", b"PK\x03\x04" + bytes(40), "got extension '.npz'. Read it in Python and give the frame or the dict"),
        ("a.csv", b"\xd0\xcf\x11\xe0" + bytes(40), "got an Excel workbook. Save it as CSV"),
        ("a.csv", b"7z\xbc\xaf\x27\x1c" + bytes(40), "got a 7z archive. Unpack it"),
        ("a.csv", b"<!DOCTYPE html>\n<html></html>\n", "got HTML or XML. It may be the page of a login"),
        ("a.csv", b"%PDF-1.7\n1 0 obj\n", "got PDF"),
        ("a.csv", "action,reward\n0,1\n".encode("utf-16-le"), "got zeros among its bytes, as UTF-16"),
        ("a.csv", b"sep=;\naction;reward\n0;1\n", "got 'sep=;'. Remove the line"),
        ("a.jsonl", b'[\n {"reward": 1},\n', "got a JSON array. Write a row a line"),
        ("a.parquet", b"\x93NUMPY" + bytes(40), "Parquet, as its name says, got an array of NumPy. Read it in Python"),
        ("a.parquet", b"ORC" + bytes(40), "Parquet, as its name says, got ORC. Write it as Parquet"),
        ("a.parquet", b"\xff\xff\xff\xff" + bytes(40), "got Arrow IPC. Give it the extension .arrow"),
        ("a.csv", b"Rar!\x1a\x07\x01\0" + bytes(40), "got a RAR archive. Unpack it"),
        ("a.csv", b"version https://git-lfs.github.com/spec/v1\n", "got a pointer of Git LFS. Fetch the data"),
        (
            "a.json",
            b"action,reward\nmail,1\n",
            "got a table with the header 'action,reward'. Give it the extension .csv",
        ),
        ("a.json", b'{\n "reward": 1\n}\n', "got the first line of an object over several lines"),
        ("a.tsv", b"action\treward\n", "got extension '.tsv'. Give a table of text the extension .csv"),
        # tables of pandas in one line: to_json() by columns, split and index
        ("a.json", b'{"reward": {"0": 1, "1": 2}, "age": {"0": 3, "1": 4}}', "lines=True"),
        ("a.json", b'{"columns": ["a"], "index": [0], "data": [[1]]}', "lines=True"),
        ("a.json", b'{"0": {"reward": 1}, "1": {"reward": 1}}', "lines=True"),
        # several steps in a row
        ("a.json", b'{"type": "SampleBatch", "obs": [[1.5]], "rewards": [0.5]}\n' * 2, "Write a row for each step"),
        ("a.json", b'{"mdp_id": "1", "reward": [1, 1], "time_diff": 1}\n', "Write a row for each step"),
        ("a.json", b'{"episode": 1, "steps": [{"action": 0, "reward": 0.5}]}\n', "several steps in steps"),
    ],
)
def test_files_whose_name_or_shape_misleads_are_named(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=re.escape(words)):
        first_block(list_input(str(tmp_path / name), tuple(READERS)))


def test_a_header_may_begin_as_another_format_does(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"ORCHARD_age,action,reward\n1,0,1\n")
    assert rows_of(tmp_path / "a.csv")[0]["reward"] == 1
