"""Shards for all machines: made once, awaited by the others, fetched by each.

1 check    shards.json fits the config, and the input is unchanged
2 make     machine 0, or whoever gives no node_index: shards ─► a new generation ─► shards.json
3 wait     the other machines, until shards.json fits, or names the generation that machine 0 made
4 fetch    one shard ─► local_path, every byte verified
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from reagent_lite.config.shard import ShardConfig
from reagent_lite.console import machine_logger, progress
from reagent_lite.data.formats.files import POINTER, InputFile
from reagent_lite.data.shards.dealing import make_shards, settings
from reagent_lite.data.shards.fetch import fetch_shard
from reagent_lite.data.shards.store import NO_PLACE, Pointer, Store, is_whole, publish, read_pointer
from reagent_lite.data.stage import data_files, left_out, unchanged
from reagent_lite.errors import ConfigError, DataError, NoRowsError, Problem, counted
from reagent_lite.files import disk_errors

_POLL_SECONDS = 0.5
_MESSAGE_SECONDS = 10.0
_SEEN_WITHIN_SECONDS = 120.0  # NFS shows a replaced file a minute late by default (acdirmax)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """The shards at shards_path; printed as the last line of standard output.

    Attributes:
        shards: where they lie.
        generation: name of their folder there.
        rows: number of rows of each shard.
        made: whether this run made them.
        local: the fetched shard; None where none was asked for.
        fetched: number of its files that this run fetched.
        seconds: total wall-clock time of the run.
    """

    shards: str
    generation: str
    rows: list[int]
    made: bool
    local: str | None
    fetched: int
    seconds: float


def shard(config: ShardConfig) -> Sharded:
    """Makes missing shards or waits for them, and fetches one if `node_index` is given.

    Raises:
        ConfigError: paths that overlap.
        DataError: what is wrong with the input or with one of the paths.
    """
    if problems := list(config.problems()):
        raise ConfigError(problems)
    start = time.monotonic()
    store = Store(config.shards_path)
    pointer, made = (_wait(config, store), False) if config.node_index else _make(config, store)
    fetched = None
    while config.node_index is not None and fetched is None:
        try:
            fetched = _fetch_own(config, store, pointer)
        except DataError:  # which is no error if the shards were made again meanwhile
            latest = read_pointer(store)
            if latest is None or latest == pointer or _misfit(latest, config, None):
                raise
            pointer = latest
    return _outcome(config, store, pointer, start, made=made, fetched=fetched)


def fetch(config: ShardConfig, generation: str) -> Sharded:
    """Fetches the shard of node_index of a generation that another process has made, without a look at the input.

    Raises:
        DataError: shards.json names another generation; what is wrong with the shard or with one of the paths.
    """
    start = time.monotonic()
    store = Store(config.shards_path)
    end = start + min(config.wait_seconds, _SEEN_WITHIN_SECONDS)
    while (pointer := read_pointer(store)) is None or pointer.generation != generation:
        if time.monotonic() >= end:
            there = f"no {POINTER}" if pointer is None else f"generation {pointer.generation}"
            todo = "Does every machine see the same place? Runs at the same time need a shards_path each"
            raise DataError(Problem(store.where, f"generation {generation}, as machine 0 has it", there, todo))
        time.sleep(_POLL_SECONDS)
    return _outcome(config, store, pointer, start, made=False, fetched=_fetch_own(config, store, pointer))


def _outcome(
    config: ShardConfig, store: Store, pointer: Pointer, start: float, *, made: bool, fetched: tuple[str, ...] | None
) -> Sharded:
    return Sharded(
        shards=store.where,
        generation=pointer.generation,
        rows=[one.rows for one in pointer.shards],
        made=made,
        local=None if fetched is None else str(_local(config)),
        fetched=0 if fetched is None else len(fetched),
        seconds=round(time.monotonic() - start, 3),
    )


def _local(config: ShardConfig) -> Path:
    return Path(config.local_path).expanduser().absolute()


def _make(config: ShardConfig, store: Store) -> tuple[Pointer, bool]:
    """Returns shards that fit the config and the input, and whether they had to be made."""
    pointer = read_pointer(store)
    files = _input(config, pointer)
    for note in () if files is None else left_out(config.training_data_path):
        machine_logger.warning(note)
    why = _misfit(pointer, config, files)
    if pointer is not None:
        if not why and not is_whole(store, pointer):
            why = "files of the shards are missing or have other sizes"
        if not why:
            machine_logger.info(f"{store.where}: {_described(pointer)}, nothing to make")
            return pointer, False
        machine_logger.info(f"{store.where}: made again: {why}")
    with disk_errors(store.where, "a place for the shards that can be written", NO_PLACE), store.building() as folder:
        with progress("sharding", "bytes") as show:
            manifests = make_shards(config, folder, show)
        pointer = publish(store, folder, manifests, settings(config))
    whole = counted(manifests[0].report["whole_files"], "whole file")
    machine_logger.info(f"{store.where}: {_described(pointer)}, {whole} among them")
    return pointer, True


def _described(pointer: Pointer) -> str:
    rows = ", ".join(f"{one.rows:,}" for one in pointer.shards[:8]) + (", ..." if len(pointer.shards) > 8 else "")
    return f"{counted(len(pointer.shards), pointer.settings['layout'].removesuffix('s'))} of {rows} rows"


def _input(config: ShardConfig, pointer: Pointer | None) -> tuple[InputFile, ...] | None:
    """Returns the input's files, or None on a machine that does not see them but finds shards or waits for them."""
    try:
        return data_files(config.training_data_path, config.columns)
    except NoRowsError:
        raise
    except DataError:
        if pointer is None and not config.node_index:
            raise
        return None


def _misfit(pointer: Pointer | None, config: ShardConfig, files: tuple[InputFile, ...] | None) -> str:
    """Returns why shards do not fit the config and the input, or "" where they do."""
    if pointer is None:
        return f"there is no {POINTER} yet"
    wanted = settings(config)
    if pointer.settings != wanted:
        there, here = (", ".join(f"{key} {one[key]}" for key in sorted(one)) for one in (pointer.settings, wanted))
        return f"the shards there are for {there}, and this config says {here}"
    if files is not None and not unchanged(pointer.inputs, files):
        inputs = (pointer.inputs, files)
        before, now = (", ".join(f"{one.name} ({one.size} bytes)" for one in some[:3]) for some in inputs)
        return f"the shards there were made from {before}, and training_data_path holds {now}, with other content"
    return ""


def _wait(config: ShardConfig, store: Store) -> Pointer:
    """Returns the shards as soon as they fit.

    Raises:
        DataError: they do not within wait_seconds, with what is there instead.
    """
    begin = logged = time.monotonic()
    while True:
        pointer = read_pointer(store)
        why = _misfit(pointer, config, _input(config, pointer))
        if pointer is not None and not why:
            return pointer
        now = time.monotonic()
        if now - begin >= config.wait_seconds:
            todo = "Run the same command with --node_index 0 on machine 0, or without it anywhere"
            raise DataError(
                Problem(store.where, f"shards within {config.wait_seconds:g} s", f"none that fit: {why}", todo)
            )
        if now - logged >= _MESSAGE_SECONDS or logged == begin:
            waited = f"{now - begin:.0f} s of {config.wait_seconds:g} s"
            machine_logger.info(f"{store.where}: waiting for machine 0 to make the shards, {waited}; {why}")
            logged = now
        time.sleep(min(_POLL_SECONDS, config.wait_seconds))


def _fetch_own(config: ShardConfig, store: Store, pointer: Pointer) -> tuple[str, ...]:
    """Fetches the shard of node_index, and returns the names of the files that were fetched."""
    target, number = _local(config), config.node_index or 0
    with progress("fetching", "bytes") as show:
        fetched = fetch_shard(store, pointer.shards[number], target, show)
    rows = counted(pointer.shards[number].rows, "row")
    machine_logger.info(f"{target}: shard {number}, {rows}, {counted(len(fetched), 'file')} fetched")
    return fetched
