"""Folders that a stage leaves: when they stand, and what is refused in a planted manifest."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from reagent_lite.data.formats.files import sha256_of
from reagent_lite.data.formats.reading import read_blocks
from reagent_lite.data.stage import StageManifest, data_files, left_out, states_of
from reagent_lite.errors import DataError
from reagent_lite.manifest import STAGE, read_document, sealed

SETTINGS = {"seed": 1, "names": ("a", "b")}


def made(tmp_path: Path) -> tuple[Path, StageManifest]:
    """Returns a stage's folder of one file, and its manifest."""
    (tmp_path / "in.jsonl").write_text('{"x": 1}\n')
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "part.jsonl").write_text('{"x": 2}\n')
    files = data_files(str(tmp_path / "in.jsonl"))
    manifest = StageManifest(
        kind="timeline",
        rows=1,
        columns={"x": "int64"},
        settings=SETTINGS,
        inputs=states_of(files, [sha256_of(file) for file in files]),
        report={"left_out": ["1 row"]},
        files={"part.jsonl": {"rows": 1}},
    )
    return folder, manifest.write(folder)


def stands(folder: Path, kind: str = "timeline", settings: dict[str, Any] = SETTINGS) -> bool:
    return StageManifest.standing(folder, kind, settings, data_files(str(folder.parent / "in.jsonl"))) is not None


def test_a_folder_stands_while_inputs_settings_and_files_are_the_same(tmp_path: Path) -> None:
    folder, manifest = made(tmp_path)
    read = StageManifest.read(str(folder))
    assert read is not None
    assert (read.files, read.digest) == (manifest.files, manifest.digest)
    assert (data_files(str(folder))[0].sha256, left_out(str(folder))) == (
        manifest.files["part.jsonl"]["sha256"],
        ("1 row",),
    )
    assert stands(folder)
    assert not stands(folder, kind="shards")
    assert not stands(folder, settings={**SETTINGS, "seed": 2})
    os.utime(tmp_path / "in.jsonl", (1, 1))
    assert stands(folder)
    touched = StageManifest.read(str(folder))
    assert touched is not None
    assert (touched.inputs[0].modified_ns, touched.digest) == (10**9, manifest.digest)
    (tmp_path / "in.jsonl").write_text('{"x": 3}\n')
    assert not stands(folder)
    (tmp_path / "in.jsonl").write_text('{"x": 1}\n')
    (folder / "part.jsonl").write_text("{}")
    assert not stands(folder)
    assert not stands(tmp_path / "nothing")


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
def test_a_planted_manifest_is_a_data_error(tmp_path: Path, field: str, value: Any) -> None:
    folder, _ = made(tmp_path)
    (folder / "manifest.json").write_bytes(sealed({**read_document(folder, STAGE), field: value}))
    with pytest.raises(DataError, match=rf"{folder}/manifest\.json"):
        StageManifest.read(str(folder))
    assert not stands(folder)


def test_what_was_left_out_is_sentences(tmp_path: Path) -> None:
    folder, _ = made(tmp_path)
    document = read_document(folder, STAGE)
    for report in ({"left_out": 5}, {"left_out": [1, "2 rows"]}):
        (folder / "manifest.json").write_bytes(sealed({**document, "report": report}))
        assert set(left_out(str(folder))) <= {"2 rows"}


def test_an_altered_file_is_refused_while_it_is_read(tmp_path: Path) -> None:
    folder, _ = made(tmp_path)
    (folder / "part.jsonl").write_text('{"x": 9}\n')
    with pytest.raises(DataError, match=r"part.jsonl: expected bytes with sha256"):
        list(read_blocks(data_files(str(folder)), lambda block: block))
