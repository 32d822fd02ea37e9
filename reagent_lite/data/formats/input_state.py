"""What something was made from: names, sizes, times and hashes of input files, and whether they are still the same."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from reagent_lite.data.formats.files import InputFile, sha256_of


@dataclass(frozen=True, slots=True)
class InputState:
    """One input file's name, size in bytes, modification time and sha256."""

    name: str
    size: int
    modified_ns: int
    sha256: str


def states_of(files: Sequence[InputFile], hashes: Sequence[str]) -> tuple[InputState, ...]:
    """Returns the states of files whose sha256 are known."""
    return tuple(
        InputState(file.name, file.size, file.modified_ns, sha256) for file, sha256 in zip(files, hashes, strict=True)
    )


def unchanged(known: Sequence[InputState], files: Sequence[InputFile]) -> bool:
    """Whether files are those that are known: by names, sizes and times, else by sha256."""
    if [(one.name, one.size) for one in known] != [(file.name, file.size) for file in files]:
        return False
    if all(file.modified_ns and one.modified_ns == file.modified_ns for one, file in zip(known, files, strict=True)):
        return True
    return hashes_of(files) == [one.sha256 for one in known]


def hashes_of(files: Sequence[InputFile]) -> list[str]:
    """Returns the sha256 of each file's stored bytes."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(sha256_of, files))


def with_times(known: Sequence[InputState], files: Sequence[InputFile]) -> tuple[InputState, ...]:
    """Returns states with the modification times of unchanged files, so that they need not be hashed every time."""
    return tuple(replace(one, modified_ns=file.modified_ns) for one, file in zip(known, files, strict=True))
