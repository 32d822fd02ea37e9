"""Shards for all machines: made once, awaited by the others, fetched by each.

1 check    shards.json fits the config, and the input is unchanged
2 make     machine 0, or a command without node_index: shards and shards.json, in place of older ones
3 wait     the other machines, until shards.json fits, or is of the generation that machine 0 made
4 fetch    one shard ─► local_path, every byte verified
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.console import Waiting, machine_logger, progress
from reagent_lite.data.formats.input_files import POINTER
from reagent_lite.data.shards.fetch import fetch_shard
from reagent_lite.data.shards.partition import make_shards, settings
from reagent_lite.data.shards.store import TODO_PLACE, Pointer, Store, describe
from reagent_lite.data.stage_folder import are_unchanged, data_files, notes_of_input
from reagent_lite.disk_room import disk_errors
from reagent_lite.errors import ConfigError, DataError, NoRowsError, Problem, pluralize, raise_any

_SEEN_WITHIN_SECONDS = 120.0  # NFS shows a replaced file a minute late by default (acdirmax)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharded:
    """The shards at shards_path; printed as the last line of standard output.

    Attributes:
        shards: path or URL of the store.
        generation: hash of the shards' content.
        rows: number of rows of each shard.
        made: whether this run made the shards.
        local: folder of the fetched shard; None without node_index.
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


def share_shards(config: ShardConfig) -> Sharded:
    """Makes missing shards or waits for them, and fetches one if `node_index` is given.

    Raises:
        ConfigError: paths that overlap.
        DataError: the input or one of the paths cannot be used.
    """
    raise_any(list(config.problems()), ConfigError)
    start = time.monotonic()
    store = Store(config.shards_path)
    if config.node_index:
        todo = "Run the same command with --node_index 0 on machine 0, or without it anywhere"
        pointer = _await_shards(store, lambda shards: _misfit(shards, config), config.wait_seconds, todo)
        made = False
    else:
        pointer, made = _make(config, store)
    while True:
        try:
            return _outcome(config, store, pointer, start, made=made)
        except DataError:  # not an error if the shards have been made again in the meantime
            latest = store.pointer()
            if latest is None or latest == pointer or _misfit(latest, config):
                raise
            pointer = latest


def fetch(config: ShardConfig, generation: str) -> Sharded:
    """Fetches the shard of node_index, of a generation that another process has made; does not look at the input.

    Raises:
        DataError: shards.json is of another generation; the shard or one of the paths cannot be used.
    """
    start = time.monotonic()
    store = Store(config.shards_path)
    seconds = min(config.wait_seconds, _SEEN_WITHIN_SECONDS)
    todo = "Does every machine see the same place? Runs at the same time need a shards_path each"

    def misfit(shards: Pointer) -> str:
        if shards.generation == generation:
            return ""
        return f"generation {shards.generation} is there, and machine 0 has {generation}"

    return _outcome(config, store, _await_shards(store, misfit, seconds, todo), start, made=False)


def _outcome(config: ShardConfig, store: Store, pointer: Pointer, start: float, *, made: bool) -> Sharded:
    """Fetches the shard of node_index, if there is one, and returns the result."""
    local = None
    fetched: tuple[str, ...] = ()
    if config.node_index is not None:
        local = Path(config.local_path).expanduser().absolute()
        entry = pointer.shards[config.node_index]
        with progress("fetching", "bytes") as show:
            fetched = fetch_shard(store, entry, local, show)
        files = pluralize(len(fetched), "file")
        machine_logger.info(f"{local}: shard {entry.number}, {pluralize(entry.rows, 'row')}, {files} fetched")
    return Sharded(
        shards=store.where,
        generation=pointer.generation,
        rows=[entry.rows for entry in pointer.shards],
        made=made,
        local=None if local is None else str(local),
        fetched=len(fetched),
        seconds=round(time.monotonic() - start, 3),
    )


def _make(config: ShardConfig, store: Store) -> tuple[Pointer, bool]:
    """Returns shards that fit the config and the input, and whether they had to be made."""
    pointer = store.pointer()
    if pointer is not None:
        incomplete = "files of the shards are missing or have other sizes"
        why = _misfit(pointer, config) or ("" if store.is_whole(pointer) else incomplete)
        if not why:
            machine_logger.info(f"{store.where}: {_describe(pointer)}, nothing to make")
            return pointer, False
        machine_logger.info(f"{store.where}: made again: {why}")
    for note in notes_of_input(config.training_data_path):
        machine_logger.warning(note)
    with (
        disk_errors(store.where, "a place for the shards that can be written", TODO_PLACE),
        store.replacing() as folder,
    ):
        with progress("sharding", "bytes") as show:
            manifests = make_shards(config, folder, show)
        pointer = describe(folder, manifests, settings(config))
    whole = pluralize(manifests[0].report["whole_files"], "whole file")
    machine_logger.info(f"{store.where}: {_describe(pointer)}, {whole} among them")
    return pointer, True


def _describe(pointer: Pointer) -> str:
    rows = ", ".join(f"{entry.rows:,}" for entry in pointer.shards[:8]) + (", ..." if len(pointer.shards) > 8 else "")
    return f"{pluralize(len(pointer.shards), pointer.settings['layout'].removesuffix('s'))} of {rows} rows"


def _misfit(pointer: Pointer, config: ShardConfig) -> str:
    """Returns the reason why shards do not fit the config and the input; "" if they do.

    A machine that does not see the input compares the config only.
    """
    wanted = settings(config)
    if pointer.settings != wanted:
        made, asked = (", ".join(f"{key} {some[key]}" for key in sorted(some)) for some in (pointer.settings, wanted))
        return f"the shards there are for {made}, and this config says {asked}"
    try:
        files = data_files(config.training_data_path, config.columns)
    except NoRowsError:
        raise
    except DataError:
        return ""
    if are_unchanged(pointer.inputs, files):
        return ""
    before, now = (
        ", ".join(f"{state.name} ({state.size} bytes)" for state in some[:3]) for some in (pointer.inputs, files)
    )
    return f"the shards there were made from {before}, and training_data_path holds {now}, with other content"


def _await_shards(store: Store, misfit: Callable[[Pointer], str], seconds: float, todo: str) -> Pointer:
    """Returns the shards as soon as they fit.

    Args:
        store: the store of the shards.
        misfit: returns the reason why shards do not fit; "" if they do.
        seconds: longest time to wait.
        todo: advice if none fit in time.

    Raises:
        DataError: none fit in time; describes the shards that are there.
    """
    waiting = Waiting(quiet_seconds=0)
    while True:
        pointer = store.pointer()
        why = f"there is no {POINTER} yet" if pointer is None else misfit(pointer)
        if pointer is not None and not why:
            return pointer
        if waiting.seconds >= seconds:
            raise DataError(Problem(store.where, f"shards within {seconds:g} s", f"none that fit: {why}", todo))
        waiting.sleep(f"{store.where}: machine 0 has to make the shards: {why}")
