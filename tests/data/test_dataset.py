"""A folder of episodes that many processes share: the order of its files, what they say, and what is removed."""

import errno
import os
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest

from reagent_lite.data.episode_folder import EpisodeFolder, stamp_origin
from reagent_lite.data.writing.episode_rows import EpisodeBlock, LogSchema, episode_rows
from reagent_lite.data.writing.table_writers import table_writer
from reagent_lite.errors import DataError

ORIGIN = {"environment": "line", "actions": ["left", "right"], "release": "1"}
ONE, OTHER = "a" * 12, "b" * 12


def table(rows: int = 3) -> pa.Table:
    """One episode of some rows, whose states are 0, 1, 2 and so on."""
    state = np.arange(rows, dtype=np.float32)[:, None]
    block = EpisodeBlock(
        mdp_ids=["one"], lengths=np.array([rows]), terminal=np.array([True]), state=state,
        action=np.arange(rows) % 2, reward=state[:, 0], propensity=np.full(rows, 0.5, np.float32), mask=None,
        features=None, last_state=state[-1:] + 1, last_mask=None, last_features=None,
    )  # fmt: skip
    return episode_rows(block, LogSchema(transitions=True, action_names=("left", "right")))


@pytest.fixture
def folder(tmp_path: Path) -> EpisodeFolder:
    """A folder as a run makes it."""
    (tmp_path / "fifo").mkdir()
    return EpisodeFolder(tmp_path)


def names(folder: EpisodeFolder) -> list[str]:
    return [file.name.rpartition("/")[2] for file in folder.files()]


def test_files_are_in_order_of_what_their_writers_knew_whatever_clocks_say(folder: EpisodeFolder) -> None:
    assert folder.files() == []
    other = EpisodeFolder(folder.path)
    written = []
    for rows, by, writer in ((2, folder, ONE), (3, other, OTHER), (4, other, OTHER), (5, folder, ONE)):
        written.append(by.add(table(rows), ORIGIN, writer))
        os.utime(folder.fifo / written[-1], (time.time() + (3600 if writer == ONE else -3600),) * 2)
    assert (
        names(EpisodeFolder(folder.path))
        == written
        == [
            f"000000000{number}-000000{1 + number}-{writer}.parquet"
            for number, writer in enumerate((ONE, OTHER, OTHER, ONE), 1)
        ]
    )
    assert [(file.number, file.steps) for file in folder.files()] == [(1, 2), (2, 3), (3, 4), (4, 5)]
    assert [folder.unread(through) for through in (0, 2, 4)] == [14, 9, 0]
    for path in folder.fifo.glob("*.parquet"):
        path.unlink()
    assert folder.add(table(), ORIGIN, ONE).startswith("0000000005-")  # a writer's own numbers never go back


def test_rows_and_origin_are_read_back_and_other_names_are_no_files(folder: EpisodeFolder) -> None:
    name = folder.add(table(), ORIGIN, ONE)
    (folder.path / "protected").mkdir()
    with table_writer(folder.path / "protected" / "expert.parquet") as writer:
        writer.write(stamp_origin(table(4), ORIGIN))
    for other in (".lock", ".x.parquet.7-1.tmp", "notes.txt", "1-2-3.parquet", f"{name}.tmp"):
        (folder.fifo / other).write_bytes(b"?")
    assert (names(folder), folder.origin(f"fifo/{name}"), folder.origin("protected/expert.parquet")) == (
        ["expert.parquet", name], (ORIGIN, 3), (ORIGIN, 4),
    )  # fmt: skip
    (rows,) = folder.rows(f"fifo/{name}", ("left", "right"))
    assert [each.tolist() for each in (rows.state.values, rows.next_state.values, rows.action, rows.bootstrap)] == [
        [[0], [1], [2]], [[1], [2], [3]], [0, 1, 0], [1, 1, 0],
    ]  # fmt: skip


def test_files_that_are_damaged_foreign_or_gone_are_refused(folder: EpisodeFolder) -> None:
    damaged = folder.fifo / folder.add(table(), ORIGIN, ONE)
    damaged.write_bytes(damaged.read_bytes()[:-100])
    with table_writer(folder.fifo / "bare.parquet") as writer:
        writer.write(table())
    for name, words in (
        (damaged.name, "damaged"),
        ("gone.parquet", "nothing at this path"),
        ("bare.parquet", "metadata that names its environment"),
    ):
        with pytest.raises(DataError, match=words):
            folder.origin(f"fifo/{name}")
    with pytest.raises(DataError, match="action"):
        list(folder.rows("fifo/bare.parquet", ("up", "down")))


def test_the_oldest_files_of_fifo_are_removed_and_never_the_newest_or_protected_ones(
    folder: EpisodeFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = [folder.add(table(), ORIGIN, (ONE, OTHER)[i % 2]) for i in range(5)]
    (folder.path / "protected").mkdir()
    (folder.path / "protected" / "large.parquet").write_bytes(bytes(1 << 20))
    left, recent = (folder.fifo / f".{name}.parquet.7-1.tmp" for name in ("old", "new"))
    for file in (left, recent):
        file.touch()
    os.utime(left, (time.time() - 90_000,) * 2)
    size = (folder.fifo / written[0]).stat().st_size
    for most, first in ((5 * size, 0), (3 * size + 1, 2)):
        folder.keep_below(most)
        assert names(folder) == ["large.parquet", *written[first:]]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", Mock(side_effect=OSError(errno.EROFS, "Read-only file system")))
        for _ in range(2):
            folder.keep_below(1)
    assert caplog.messages == [
        f"{folder.fifo} has {3 * size:,} bytes, max_bytes is 1: files stay there: Read-only file system"
    ]
    folder.keep_below(1)
    assert (names(folder), left.exists(), recent.exists()) == (["large.parquet", written[4]], False, True)
