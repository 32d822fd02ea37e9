"""The files that a data path stands for, and how they are opened."""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from reagent_lite.data.formats.blocks import InputFile
from reagent_lite.errors import DataError, NoRowsError, Problem, first_line, join_names, pluralize
from reagent_lite.strict_json import parse_json

ALLOWED_PROTOCOLS = ("file", "s3", "gs", "abfs", "memory")
NOT_DATA = ("manifest.json", ".truth.json")
"""Ends of names next to data files: their hashes, and the true return of the policy that wrote them."""
_RUN_FILES = ("config.json", "metrics.jsonl", "not_published.json", "state_features_norm.json", "action_norm.json")
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
"""Extensions of compressed files, and Arrow's names of the compressions."""
MINARI = ".minari"
"""Extension under which the files of a Minari dataset, a folder, are listed."""
MINARI_DESCRIPTION = "metadata.json"
_RENAME = "Give it the extension {}"
_UNPACK = "Unpack it, or give it the extension {}"
_FRAME = "Read it in Python and give the frame or the dict of arrays, or write it as Parquet"
_NO_PAGE = "It may be the page of a login or an error: download the data again"
_LFS = b"version https://"
_FIRST_BYTES = {
    b"PAR1": ("Parquet", ".parquet", _RENAME),
    b"ARROW1": ("Arrow IPC", ".arrow", _RENAME),
    b"\x1f\x8b": ("gzip", ".gz", _UNPACK),
    b"BZh": ("bzip2", ".bz2", _UNPACK),
    b"\x28\xb5\x2f\xfd": ("Zstandard", ".zst", _UNPACK),
    b"PK\x03\x04": ("a ZIP archive, a NumPy .npz or an Excel workbook", "", f"Unpack it, or save it as CSV. {_FRAME}"),
    b"\x93NUMPY": ("an array of NumPy", "", _FRAME),
    b"\x89HDF\r\n\x1a\n": ("HDF5", "", _FRAME),
    b"SQLite format 3": ("a database of SQLite", "", "Export the table as CSV or Parquet"),
    b"ORC": ("ORC", "", "Write it as Parquet"),
    b"Obj\x01": ("Avro", "", "Write it as Parquet"),
    b"\x80\x04\x95": ("a pickle", "", _FRAME),
    b"\x80\x05\x95": ("a pickle", "", _FRAME),
    b"\xd0\xcf\x11\xe0": ("an Excel workbook", "", f"Save it as CSV. {_FRAME}"),
    b"\xfd7zXZ": ("xz", "", "Unpack it"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "", "Unpack it"),
    b"\x04\x22\x4d\x18": ("lz4", "", "Unpack it"),
    b"Rar!\x1a\x07": ("a RAR archive", "", "Unpack it"),
    b"\x89PNG": ("a picture", "", "Give a table"),
    b"\xff\xff\xff\xff": ("Arrow IPC", ".arrow", _RENAME),
    _LFS: ("a pointer of Git LFS", "", "Fetch the data: git lfs pull"),
    b"RDX": ("data of R", "", "Write it as CSV or Parquet"),
    b"%PDF": ("PDF", "", "Export the table as CSV"),
    **dict.fromkeys((b"<!DOCTYPE", b"<!doctype", b"<html", b"<HTML", b"<?xml"), ("HTML or XML", "", _NO_PAGE)),
}
"""First bytes of files, the name of their format, its extension if it is read, and advice."""
_OF_PYTHON = (".npz", ".npy", ".pkl", ".pickle", ".h5", ".hdf5", ".hdf", ".xlsx", ".xls", ".orc", ".avro", ".pt")
_OF_TEXT = ("", ".txt", ".tsv", ".tab", ".dat", ".data", ".psv", ".log")
_TABLE = "Give a table of text the extension .csv; its delimiter is found"
OTHER_ENCODING = ', or name its encoding in columns: {{"csv": {{"encoding": "{}"}}}}'
_TEXT = frozenset((*range(32, 127), *b"\t\r\n"))
_FEW = 64
_HEADER = re.compile(rb"[A-Za-z][\w ]*([,;\t|][\w .]+)+\r?\n")
_ARRAY = re.compile(rb"\s*\[\s*\{")
ONE_A_LINE = "Write a row a line, as pandas does with to_json(path, orient='records', lines=True)"
_NO_UTF_8 = (b"\xff\xfe", b"\xfe\xff")
_BINARY = {".parquet": "Parquet", ".arrow": "Arrow IPC", ".feather": "Arrow IPC", ".ipc": "Arrow IPC"}
_NO_FILES = {stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device"}


def read_bytes(path: str) -> bytes:
    """Returns the bytes of a local file or a URL.

    Raises:
        FileNotFoundError: there is nothing, or no regular file: reading anything else might never end.
        OSError, ImportError, ValueError: it cannot be read.
    """
    if "://" in path:
        import fsspec  # only remote paths pay for its import

        with fsspec.open(path, "rb") as stream:
            data: bytes = stream.read()
        return data
    if os.path.exists(path) and not os.path.isfile(path):
        raise FileNotFoundError("not a regular file")
    return Path(path).read_bytes()


def sha256_of(file: InputFile) -> str:
    """Returns the sha256 of a file's stored bytes."""
    with file.open() as stream:
        return digest_of(stream)


def digest_of(stream: IO[bytes]) -> str:
    """Returns the sha256 of all bytes of an open file, even if another file has its name by now."""
    stream.seek(0)
    return hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]


def require_format(file: InputFile, stream: IO[bytes]) -> None:
    """Checks that a stream does not begin as another format than that of the file's name does, and rewinds it.

    Raises:
        DataError: the name lies; says what the file is.
    """
    start = stream.read(16)
    stream.seek(0)
    ending = file.compression or file.extension
    named = _BINARY.get(ending, ending.removeprefix("."))
    for first, (kind, extension, todo) in _FIRST_BYTES.items():
        if _begins(start, first) and kind != named and (not extension or extension != file.compression):
            raise DataError(Problem(file.path, f"{named}, as its name says", kind, todo.format(extension)))
    text = bool(start.strip()) and all(sign in _TEXT for sign in start)
    if text and file.compression:
        todo = f"Remove {file.compression} from its name"
        raise DataError(Problem(file.path, f"{named}, as its name says", "text that is not packed", todo))
    if text and len(start) == 16 and ending in _BINARY and file.size > len(start):
        todo = "Give it the extension .csv or .jsonl"
        raise DataError(Problem(file.path, f"{named}, as its name says", "text", todo))
    if file.extension == ".csv" and start.startswith((b'{"', b'[{"')):
        raise DataError(Problem(file.path, "csv, as its name says", "JSON", _RENAME.format(".jsonl")))


def _begins(start: bytes, first: bytes) -> bool:
    """Whether bytes begin as a format does; a header of CSV may begin with ORC, too."""
    is_text = first[:1] in b"<%" or first == _LFS
    return start.startswith(first) and (is_text or not all(sign in _TEXT for sign in start[:16]))


def require_text(file: InputFile, start: bytes) -> None:
    """Raises DataError if unpacked bytes begin as UTF-16, as a JSON array or as another format does."""
    if file.extension != ".csv" and _ARRAY.match(start):
        raise DataError(Problem(f"{file.path}:1", "one JSON object in the line", "a JSON array", ONE_A_LINE))
    if file.extension != ".csv" and _HEADER.match(start):
        got = f"a table with the header {start.split(maxsplit=1)[0][:40].decode()!r}"
        raise DataError(Problem(f"{file.path}:1", "one JSON object in the line", got, _RENAME.format(".csv")))
    if file.extension == ".csv" and start[:4].lower() == b"sep=":
        expected = "a header as the first record"
        raise DataError(
            Problem(f"{file.path}:1", expected, repr(start[:5].decode(errors="replace")), "Remove the line")
        )
    if start.startswith(_NO_UTF_8):
        todo = f"Write the file as UTF-8{OTHER_ENCODING.format('utf-16') if file.extension == '.csv' else ''}"
        raise DataError(Problem(file.path, "text in UTF-8", "UTF-16", todo))
    for first, (kind, _, todo) in _FIRST_BYTES.items():
        if _begins(start, first):
            raise DataError(Problem(file.path, "text in UTF-8", kind, todo.format(file.extension)))
    if start[:_FEW].count(0) > len(start[:_FEW]) // 4:
        todo = "Write the file as UTF-8, or unpack it"
        raise DataError(Problem(file.path, "text in UTF-8", "zeros among its bytes, as UTF-16 and archives have", todo))


@contextmanager
def damage_reported(file: InputFile, kind: str) -> Iterator[None]:
    """Turns the errors that libraries raise for damaged files into DataError.

    Args:
        file: the file that is read.
        kind: the kind of the file, such as "Parquet".
    """
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, EOFError, MemoryError) as error:
        # MemoryError: a damaged length may ask for any amount of memory.
        got = f"one that ends early or is damaged: {first_line(error)}"
        raise DataError(Problem(file.path, f"a complete {kind} file", got, "Copy the file again")) from error


def local_path(path: str) -> str:
    """Returns `path` as an absolute local path with `~` expanded, or an allow-listed URL unchanged.

    Raises:
        DataError: a chained URL, or a protocol that is not allowed.
    """
    protocol, mark, rest = path.partition("://")
    if not mark:
        return os.path.abspath(os.path.expanduser(path))
    protocol = protocol.lower()
    if "::" in path or protocol not in ALLOWED_PROTOCOLS:
        allowed = ", ".join(f"{allowed_protocol}://" for allowed_protocol in ALLOWED_PROTOCOLS)
        got = "a URL chained with '::'" if "::" in path else f"protocol {protocol!r}"
        todo = "Copy the data to one of these first"
        raise DataError(Problem(path, f"a local path or a URL with one of {allowed}", got, todo))
    return os.path.abspath(rest) if protocol == "file" else path


def list_input(path: str, extensions: tuple[str, ...]) -> tuple[InputFile, ...]:
    """Lists the data files that `path` stands for: the file itself, or those of a folder in the order of their names.

    Of a Minari dataset (a folder with data/metadata.json) all files are listed. In any other folder, names that start
    with "." or "_" and `manifest.json` are left out; so are files of other formats and subfolders, which
    `not_read` names.

    Args:
        path: local file or folder (`~` is expanded) or URL of an allowed protocol.
        extensions: extensions of the formats that can be read, such as ".json".

    Raises:
        DataError: nothing there (the nearest name is given), an unknown format, a folder without data files, or
            something that is not a file: a FIFO, a socket, a device, a link that leads nowhere.
        NoRowsError: an empty folder.
    """
    resolved = local_path(path)
    if MINARI in extensions and "://" not in resolved and (dataset := _minari_files(resolved)):
        return dataset
    listed_files, folders = _listing(resolved)
    formats = ", ".join(extension for extension in extensions if extension != MINARI)
    if folders is None:
        extension = listed_files[0].extension
        if extension not in extensions or extension == MINARI:
            expected = f"a data file ({formats}; .gz, .bz2, .zst of JSON and CSV)"
            todo = _FRAME if extension in _OF_PYTHON else _TABLE if extension in _OF_TEXT else ""
            raise DataError(Problem(resolved, expected, f"extension {extension!r}", todo))
        return tuple(listed_files)
    files = [file for file in listed_files if _is_data(file.name) and file.extension in extensions]
    if not files:
        entries = [*(file.name for file in listed_files if not file.name.startswith(".")), *filter(_is_data, folders)]
        got = f"none among {_counted_names(entries)}" if entries else "an empty folder"
        error = DataError if entries else NoRowsError
        todo = "Give one of the folders inside: they are not read" if any(map(_is_data, folders)) else ""
        raise error(Problem(resolved, f"a folder with data files ({formats}), or of a Minari dataset", got, todo))
    return tuple(sorted(files, key=lambda file: file.name))


def not_read(path: str, extensions: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a sentence that names the entries of an input folder that are not read; none if all are.

    Raises:
        DataError: see `list_input`.
    """
    resolved = local_path(path)
    listed_files, folders = _listing(resolved)
    if folders is None or MINARI in {file.extension for file in list_input(path, extensions)}:
        return ()
    other_files = [file.name for file in listed_files if file.extension not in extensions]
    names = [name for name in (*other_files, *folders) if _is_data(name)]
    return (f"{resolved}: not read: {_counted_names(names)}",) if names else ()


def _counted_names(names: list[str]) -> str:
    return f"{pluralize(len(names), 'entry', 'entries')}: {join_names(sorted(names))}"


def _minari_files(folder: str) -> tuple[InputFile, ...]:
    """Returns the files of a Minari dataset, its description first; none if the folder is not one."""
    try:
        folders = (Path(folder, "data"), Path(folder))
        data = next((described for described in folders if (described / MINARI_DESCRIPTION).is_file()), None)
        description = None if data is None else parse_json((data / MINARI_DESCRIPTION).read_bytes())
    except (OSError, ValueError):
        return ()
    if data is None or not isinstance(description, dict) or "data_format" not in description:
        return ()
    files = [file for file in data.rglob("*") if file.is_file()]
    return tuple(
        replace(_regular(str(file)), name=str(file.relative_to(data)), extension=MINARI, compression="")
        for file in sorted(files, key=lambda file: (file != data / MINARI_DESCRIPTION, file.name, file.parent))
    )


def _is_data(name: str) -> bool:
    return not name.startswith((".", "_")) and not name.endswith(NOT_DATA)


def _input_file(path: str, size: int, modified_ns: int) -> InputFile:
    name = path.rstrip("/").rsplit("/", 1)[-1]
    stem, extension = os.path.splitext(name.lower())
    compression = ""
    if extension in COMPRESSIONS:
        compression = extension
        extension = os.path.splitext(stem)[1]
    return InputFile(
        path=path, name=name, extension=extension, compression=compression, size=size, modified_ns=modified_ns
    )


def _listing(path: str) -> tuple[list[InputFile], list[str] | None]:
    """Returns ([the file], None), or (the files of a folder, the names of its subfolders)."""
    if "://" in path:
        return _list_remote(path)
    try:
        _require_utf_8(path)
        if not os.path.isdir(path):
            return [_regular(path)], None
        with os.scandir(path) as entries:
            names = {entry.name: entry.is_dir() for entry in entries}
        for name in filter(_is_data, names):
            _require_utf_8(os.path.join(path, name))
        paths = {name: os.path.join(path, name) for name, is_dir in names.items() if not is_dir}
        files = [
            _regular(path_of_file) if _is_data(name) else _input_file(path_of_file, 0, 0)
            for name, path_of_file in paths.items()
        ]
    except FileNotFoundError:
        raise DataError(_missing(path)) from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        got = getattr(error, "strerror", None) or str(error)
        raise DataError(Problem(path, "a readable file or folder", got)) from error
    return files, [f"{name}/" for name, is_dir in names.items() if is_dir]


def _require_utf_8(path: str) -> None:
    """Checks that a name can be written into manifests, which are JSON."""
    try:
        path.encode()
    except UnicodeEncodeError:
        shown = path.encode(errors="backslashreplace").decode()
        raise DataError(Problem(shown, "a name in UTF-8", "one that is not", "Rename it")) from None


def _regular(path: str) -> InputFile:
    """Returns the description of a regular file, or raises: reading anything else might wait forever or never end."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        if not os.path.islink(path):
            raise
        got = f"a link to {os.readlink(path)}, which is not there"
        raise DataError(Problem(path, "a data file", got, "Remove the link, or put back what it leads to")) from None
    if not stat.S_ISREG(status.st_mode):
        got = next((name for test, name in _NO_FILES.items() if test(status.st_mode)), "something else")
        raise DataError(Problem(path, "a data file", got, "Write its data to a file, or remove it"))
    return _input_file(path, status.st_size, status.st_mtime_ns)


def _missing(path: str) -> Problem:
    folder = Path(path).parent
    while not folder.is_dir():
        folder = folder.parent
    wanted = Path(path).relative_to(folder).parts[0]
    names = sorted(entry.name for entry in folder.iterdir()) if os.access(folder, os.R_OK) else []
    names = [name for name in names if name not in _RUN_FILES]
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    advice = f"Nearest there: {folder / near[0]}" if near else f"Nearest folder that exists: {folder}"
    return Problem(path, "a data file or a folder of shards", "nothing at this path", advice)


def _list_remote(url: str) -> tuple[list[InputFile], list[str] | None]:
    import fsspec  # only remote paths pay for its import

    protocol = url.split("://", 1)[0]
    try:
        filesystem, inside = fsspec.core.url_to_fs(url)
        is_folder = filesystem.isdir(inside)
        entries = filesystem.ls(inside, detail=True) if is_folder else [filesystem.info(inside)]
    except FileNotFoundError:
        raise DataError(Problem(url, "a data file or a folder of shards", "nothing at this URL")) from None
    except (OSError, ImportError, ValueError) as error:
        raise DataError(Problem(url, "a reachable URL", f"{type(error).__name__}: {error}")) from error
    files = [
        _input_file(
            f"{protocol}://{str(entry['name']).removeprefix(protocol + '://').lstrip('/')}", int(entry["size"] or 0), 0
        )
        for entry in entries
        if entry["type"] == "file"
    ]
    paths = [str(entry["name"]).rstrip("/") for entry in entries if entry["type"] == "directory"]
    folders = [f"{path.rsplit('/', 1)[-1]}/" for path in paths if path != str(inside).rstrip("/")]
    return files, folders if is_folder else None
