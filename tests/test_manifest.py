"""The one manifest: a seal over canonical JSON, files held to size and sha256, errors that name the right thing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from reagent_lite.errors import DataError
from reagent_lite.manifest import (
    BUNDLE,
    CHECKPOINT,
    STAGE,
    TRAINING_COPY,
    FolderKind,
    canonical,
    open_sealed,
    read_document,
    seal,
    seal_folder,
    verify_folder,
)

KINDS = pytest.mark.parametrize("kind", [BUNDLE, CHECKPOINT, STAGE, TRAINING_COPY], ids=lambda kind: kind.name)
DOCUMENT = {"schema_version": 1, "b": [1, 2.5], "a": "ä"}


@KINDS
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (json.dumps(json.loads(seal(DOCUMENT)), sort_keys=True).encode(), "canonical form"),
        (seal(DOCUMENT).replace(b"2.5", b"3.5"), "own SHA-256"),
        (canonical(DOCUMENT), "own SHA-256 None"),
        (seal(DOCUMENT)[:-3], "expected JSON"),
        (b"[" * 100_000, "expected JSON"),
        (seal({"schema_version": 2}), "expected schema version 1, got 2"),
    ],
)
def test_altered_bytes_and_another_schema_version_are_refused(kind: FolderKind, data: bytes, message: str) -> None:
    assert open_sealed(seal(DOCUMENT), "m", kind) == DOCUMENT
    with pytest.raises(kind.error, match=f"^m.*{message}") as caught:
        open_sealed(data, "m", kind)
    assert caught.value.problems[0].todo == (kind.outdated if "schema" in message else kind.damaged)


def test_numbers_that_json_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical({"a": float("nan")})


@KINDS
def test_every_file_is_held_to_the_manifest(tmp_path: Path, kind: FolderKind) -> None:
    for name in ("kept", "altered", "removed"):
        (tmp_path / name).write_text(name)
    entries = seal_folder(tmp_path, {"kind": "test"})
    assert entries["kept"] == {"size": 4, "sha256": "79f076abdd19a752db7267bfff2f9022161d120dea919fdaca2ffdfc24ca8c96"}
    manifest, kept = verify_folder(tmp_path, kind, keep=("kept",))
    assert (manifest["kind"], manifest["files"], kept) == ("test", entries, {"kept": b"kept"})
    (tmp_path / "altered").write_text("ALTERED")
    (tmp_path / "removed").rename(tmp_path / "unlisted")
    with pytest.raises(kind.error) as caught:
        verify_folder(tmp_path, kind)
    problems = {(Path(problem.where).name, problem.todo) for problem in caught.value.problems}
    assert problems == {(name, kind.damaged) for name in ("altered", "removed", "unlisted")}
    for folder, words in (("nothing", f"expected {kind.name}, got "), ("..", f"Name the folder .*{tmp_path.name}")):
        with pytest.raises(kind.error, match=words):
            verify_folder((tmp_path / folder).resolve(), kind)


@pytest.mark.parametrize(
    "files",
    [
        None,
        ["a"],
        {"a": 1},
        {"a": {"size": "1", "sha256": ""}},
        {"a": {"size": True, "sha256": ""}},
        *({name: {"size": 1, "sha256": ""}} for name in ("../a", "/tmp/a", "..", "a/b", ".hidden", "")),
        {"a": {"size": 1, "sha256": "", "rows": "1"}},
    ],
)
def test_entries_of_other_types_and_places_are_refused(tmp_path: Path, files: Any) -> None:
    (tmp_path / "manifest.json").write_bytes(seal({"schema_version": 1, "files": files}))
    with pytest.raises(DataError, match=r"manifest\.json(, files: expected \{name|: expected names of files)"):
        read_document(tmp_path, STAGE)


def test_entries_that_a_writer_hashed_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    known = {"one": {"rows": 1}, "two": {"rows": 2, "size": 7, "sha256": "f"}}
    entries = seal_folder(tmp_path, {}, known)
    hashed = {"rows": 1, "size": 1, "sha256": "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b"}
    assert entries == {"one": hashed, "two": known["two"]}
    assert read_document(tmp_path, STAGE)["files"] == entries
