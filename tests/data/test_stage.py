"""Folders that a stage leaves: when they stand, and what is refused in a planted manifest."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reagent_lite.data.formats.format_table import read_blocks
from reagent_lite.data.formats.input_files import sha256_of
from reagent_lite.data.logs import Log
from reagent_lite.data.stage_folder import StageManifest, states_of
from reagent_lite.errors import DataError
from reagent_lite.manifest import STAGE, read_document, seal

SETTINGS = {"seed": 1, "names": ("a", "b")}


@pytest.fixture
def made(tmp_path: Path) -> StageManifest:
    """The manifest of a stage's folder, out, of one file made from in.jsonl."""
    (tmp_path / "in.jsonl").write_text('{"x": 1}\n')
    (tmp_path / "out").mkdir()
    (tmp_path / "out/part.jsonl").write_text('{"x": 2}\n')
    files = Log(str(tmp_path / "in.jsonl")).files
    return StageManifest(
        kind="timeline",
        rows=1,
        columns={"x": "int64"},
        settings=SETTINGS,
        inputs=states_of(files, [sha256_of(file) for file in files]),
        report={"left_out": ["1 row"]},
        files={"part.jsonl": {"rows": 1}},
    ).write(tmp_path / "out")


def stands(folder: Path, kind: str = "timeline", settings: dict[str, Any] = SETTINGS) -> bool:
    return StageManifest.up_to_date(folder, kind, settings, Log(str(folder.parent / "in.jsonl")).files) is not None


def test_a_folder_says_what_it_was_made_of(tmp_path: Path, made: StageManifest) -> None:
    folder = str(tmp_path / "out")
    assert StageManifest.read(folder) == replace(made, settings={"seed": 1, "names": ["a", "b"]})
    assert (Log(folder).files[0].sha256, Log(folder).notes()) == (made.files["part.jsonl"]["sha256"], ("1 row",))
    os.utime(tmp_path / "in.jsonl", (1, 1))
    assert stands(tmp_path / "out")
    touched = StageManifest.read(folder)
    assert (touched.inputs[0].modified_ns, touched.digest) == (10**9, made.digest)
    (tmp_path / "out/part.jsonl").write_text('{"x": 9}\n')
    with pytest.raises(DataError, match=r"part.jsonl: expected bytes with sha256"):
        list(read_blocks(Log(folder).files, lambda block: block))


@pytest.mark.parametrize(
    ("file", "text", "asked", "expected"),
    [
        ("in.jsonl", '{"x": 1}\n', {}, True),
        ("in.jsonl", '{"x": 3}\n', {}, False),
        ("out/part.jsonl", "{}", {}, False),
        ("new", "", {"kind": "shards"}, False),
        ("new", "", {"settings": {**SETTINGS, "seed": 2}}, False),
    ],
)
def test_a_folder_stands_while_inputs_settings_and_files_are_the_same(
    tmp_path: Path, made: StageManifest, file: str, text: str, asked: Any, expected: bool
) -> None:
    (tmp_path / file).write_text(text)
    assert (stands(tmp_path / "out", **asked), stands(tmp_path / "nothing")) == (expected, False)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", "1"),
        ("rows", 1.5),
        ("state_ids", ["0"]),
        ("inputs", [{}]),
        ("inputs", 1),
        ("settings", []),
        ("columns", {"x": 1}),
        ("report", None),
        ("unknown", 1),
        ("files", {"../x": {"size": 1, "sha256": ""}}),
    ],
)
def test_a_planted_manifest_is_a_data_error(tmp_path: Path, made: StageManifest, field: str, value: Any) -> None:
    folder = tmp_path / "out"
    (folder / "manifest.json").write_bytes(seal({**read_document(folder, STAGE), field: value}))
    with pytest.raises(DataError, match=rf"{folder}/manifest\.json"):
        StageManifest.read(str(folder))
    assert not stands(folder)


@pytest.mark.parametrize("report", [{"left_out": 5}, {"left_out": [1, "2 rows"]}])
def test_what_was_left_out_is_sentences(tmp_path: Path, made: StageManifest, report: Any) -> None:
    (tmp_path / "out/manifest.json").write_bytes(seal({**read_document(tmp_path / "out", STAGE), "report": report}))
    assert set(Log(str(tmp_path / "out")).notes()) <= {"2 rows"}
