"""Minari datasets as events: what offline reinforcement learning shares its episodes in (https://minari.farama.org).

    <dataset>/data/metadata.json    spaces, environment, format
                   main_data.hdf5   episodes, T + 1 observations and T actions each (format hdf5)
                   <episode>/...    likewise (formats arrow and parquet)

A row is a step: mdp_id the episode's number, sequence_number the step, features 0, 1, ... the observation. The last row
of an episode that was cut carries next_state_features, the observation behind it, so that its value can be counted on;
that of an episode that came to its end leads nowhere. Minari knows no propensities and no choices.

The package is needed, environments are not: spaces stand in the description.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reagent_lite.data.formats.arrow import BLOCK_VALUES
from reagent_lite.data.formats.blocks import Block, Position
from reagent_lite.data.formats.files import MINARI_DESCRIPTION, InputFile, sha256_of
from reagent_lite.data.formats.schema import from_indices
from reagent_lite.errors import DataError, Problem
from reagent_lite.strict_json import parse_json

if TYPE_CHECKING:
    from gymnasium.spaces import Space
    from minari import EpisodeData, MinariDataset

OURS = "reagent_lite"
"""Key of the description under which our writer says which features and actions the columns stand for."""
MDP_ID = "mdp_id"
"""Key of an episode's own description."""
_EPISODES_AT_ONCE = 256
# What h5py, pyarrow and minari raise for files that are damaged or not as the description says.
_DAMAGED = (OSError, KeyError, ValueError, TypeError, IndexError, RuntimeError, AssertionError, pa.ArrowException)


def require_minari() -> Any:
    """Returns the package minari, which is an extra.

    Raises:
        DataError: it is not installed.
    """
    try:
        import minari
    except ImportError as error:
        todo = "pip install 'reagent-lite[minari]'"
        raise DataError(Problem("Minari datasets", "the package minari", str(error), todo)) from error
    return minari


@dataclass(frozen=True, slots=True)
class _Names:
    """What observation columns and actions are called; None where they are numbered."""

    state_ids: list[int] | None = None
    action_ids: list[int] | None = None
    action_names: list[str] | None = None


def read_minari(file: InputFile, number: int, position: Position) -> Iterator[Callable[[], Block]]:
    """Yields the steps of a Minari dataset in blocks of whole episodes; "lines" are steps of the dataset, from 1.

    Args:
        file: one of the dataset's; the steps come with the first that holds any, the others are only hashed.
        number: the file's place in the input.
        position: kept up to date with what has been read.

    Raises:
        DataError: no package, damaged files, or spaces that are no feature maps and no actions of ours.
    """
    data = Path(file.path.removesuffix(file.name))
    description = _description(data)
    holds_steps = "main_data.hdf5" if description["data_format"] == "hdf5" else MINARI_DESCRIPTION
    if file.name == holds_steps:
        dataset = _opened(data, description)
        names = _Names(**description.get(OURS, {}))
        first = 1
        for steps, share in _blocks(dataset, str(data)):
            position.bytes_read = int(file.size * share)
            yield partial(_block, replace(file, path=str(data)), number, first, names, steps, dataset)
            first += sum(len(one.rewards) for one in steps)
    position.sha256 = sha256_of(file)
    position.bytes_read = file.size


def _description(data: Path) -> dict[str, Any]:
    where = data / MINARI_DESCRIPTION
    try:
        description: dict[str, Any] = parse_json(where.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(Problem(str(where), "the description of a Minari dataset", str(error))) from error
    missing = [name for name in ("observation_space", "action_space", "total_episodes") if name not in description]
    if missing:
        todo = "Write the dataset again with a newer Minari: without spaces its environment would have to be installed"
        raise DataError(Problem(str(where), "a description with spaces", f"none of {', '.join(missing)}", todo))
    return description


def _opened(data: Path, description: dict[str, Any]) -> MinariDataset:
    minari = require_minari()
    try:
        dataset: MinariDataset = minari.MinariDataset(data)
    except ImportError as error:
        todo = "pip install 'reagent-lite[minari]'"
        raise DataError(Problem(str(data), f"a package for {description['data_format']}", str(error), todo)) from error
    except _DAMAGED as error:
        raise DataError(_damaged(data, error)) from error
    _width(dataset.observation_space, str(data))
    _require_action(dataset.action_space, str(data))
    return dataset


def _damaged(where: object, error: BaseException) -> Problem:
    got = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Problem(str(where), "a complete Minari dataset that the installed version reads", got, "Copy it again")


def _blocks(dataset: MinariDataset, where: str) -> Iterator[tuple[list[EpisodeData], float]]:
    """Yields (whole episodes of some BLOCK_VALUES numbers, share of the episodes read)."""
    width, num = _width(dataset.observation_space, where) + 8, dataset.total_episodes
    pending: list[EpisodeData] = []
    values = 0
    for index, episode in enumerate(_episodes(dataset, num, where)):
        pending.append(episode)
        values += len(episode.rewards) * width
        if values >= BLOCK_VALUES:
            yield pending, (index + 1) / num
            pending, values = [], 0
    if pending:
        yield pending, 1.0


def _episodes(dataset: MinariDataset, num: int, where: str) -> Iterator[EpisodeData]:
    # An HDF5 file that stays open takes more memory with each episode; formats of many files would, asked for several
    # episodes, be taken for one batch an episode.
    at_once = _EPISODES_AT_ONCE if dataset.storage.FORMAT == "hdf5" else 1
    for first in range(0, num, at_once):
        numbers = range(first, min(first + at_once, num))
        with closing(_pairs(dataset, numbers)) as pairs:
            for index in numbers:
                place = f"{where}, episode {index}"
                try:
                    pair = next(pairs)
                except _DAMAGED as error:
                    raise DataError(_damaged(place, error)) from error
                yield _checked(*pair, index, place)


def _pairs(dataset: MinariDataset, numbers: range) -> Generator[tuple[EpisodeData, dict[str, Any]], None, None]:
    """Yields (episode, its own description), and closes the file after the last or when it is closed."""
    minari = require_minari()
    episodes, own = dataset.storage.get_episodes(numbers), dataset.storage.get_episode_metadata(numbers)
    try:
        for episode, description in zip(episodes, own, strict=True):
            yield minari.EpisodeData(**episode), description
    finally:
        for one in (episodes, own):
            if isinstance(one, Generator):
                one.close()


def _checked(episode: EpisodeData, own: dict[str, Any], index: int, where: str) -> EpisodeData:
    steps = int(own["total_steps"])
    lengths = [len(one) for one in (episode.rewards, episode.terminations, episode.truncations)]
    if lengths != [steps] * 3 or not steps:
        got = "{} rewards, {} terminations, {} truncations".format(*lengths)
        raise DataError(Problem(where, f"{steps} steps, as its description says, and at least one", got))
    return replace(episode, id=str(own.get(MDP_ID, index)))


def _width(space: Space[Any], where: str) -> int:
    """Returns how many features an observation has.

    Raises:
        DataError: a space that is no vector of numbers.
    """
    from gymnasium import spaces

    parts = space.spaces.values() if isinstance(space, spaces.Dict) else getattr(space, "spaces", None)
    if isinstance(space, spaces.Dict | spaces.Tuple) and parts is not None:
        return sum(int(one.n) if isinstance(one, spaces.Discrete) else _width(one, where) for one in parts)
    if isinstance(space, spaces.Discrete):
        return 1
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return int(np.prod(space.shape))
    raise DataError(Problem(where, "observations of Box, Discrete, MultiBinary, or Dict and Tuple of them", str(space)))


def _require_action(space: Space[Any], where: str) -> None:
    from gymnasium import spaces

    if not isinstance(space, spaces.Discrete | spaces.Box):
        raise DataError(Problem(where, "actions of Discrete (named actions) or Box (feature maps)", str(space),
                                "Number its combinations, and write the dataset again with Discrete"))  # fmt: skip


def flattened(space: Space[Any], values: Any) -> NDArray[Any]:
    """Returns [n, width] of n observations in the order of gymnasium.spaces.flatten; a Discrete alone is one number.

    Args:
        space: of one observation.
        values: n of them as Minari has them: an array, or a dict or tuple of such.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return np.asarray(values).reshape(-1, 1)
    if isinstance(space, spaces.Dict):
        return np.concatenate([_inside(one, values[name]) for name, one in space.spaces.items()], axis=1)
    if isinstance(space, spaces.Tuple):
        return np.concatenate([_inside(one, part) for one, part in zip(space.spaces, values, strict=True)], axis=1)
    array = np.asarray(values)
    return array.reshape(len(array), -1)


def _inside(space: Space[Any], values: Any) -> NDArray[Any]:
    """Likewise of a part of a Dict or Tuple, where a Discrete is one column a value."""
    from gymnasium import spaces

    if not isinstance(space, spaces.Discrete):
        return flattened(space, values)
    return np.asarray(np.asarray(values).reshape(-1, 1) == np.arange(space.start, space.start + space.n), np.int64)


def _block(
    file: InputFile, number: int, first: int, names: _Names, episodes: list[EpisodeData], dataset: MinariDataset
) -> Block:
    lengths = np.array([len(one.rewards) for one in episodes])
    rows, last = int(lengths.sum()), lengths.cumsum() - 1
    try:
        seen = [flattened(dataset.observation_space, one.observations) for one in episodes]
        for one, episode in zip(seen, episodes, strict=True):
            if len(one) != len(episode.rewards) + 1:
                raise ValueError(f"{len(one)} observations of {len(episode.rewards)} steps in episode {episode.id}")
        taken = np.concatenate([np.asarray(one.actions) for one in episodes])
        action = _actions(dataset.action_space, taken, names)
    except _DAMAGED as error:
        raise DataError(_damaged(file.path, error)) from error
    terminal = np.concatenate([np.asarray(one.terminations, bool) for one in episodes])
    truncated = np.concatenate([np.asarray(one.truncations, bool) for one in episodes])
    # a null index takes a null
    episode = np.zeros(rows, np.int64)
    episode[last] = np.arange(len(episodes))
    leads_on = np.zeros(rows, bool)
    leads_on[last] = (truncated & ~terminal)[last]
    after = _features(np.stack([one[-1] for one in seen]), names.state_ids).take(pa.array(episode, mask=~leads_on))
    table = pa.table({
        "mdp_id": pa.array([one.id for one in episodes], pa.string()).take(
            from_indices(np.repeat(np.arange(len(episodes)), lengths))),
        "sequence_number": from_indices(np.arange(rows) - np.repeat(last + 1 - lengths, lengths)),
        "state_features": _features(np.concatenate([one[:-1] for one in seen]), names.state_ids),
        "action": action,
        "reward": pa.array(np.concatenate([np.asarray(one.rewards) for one in episodes])),
        "next_state_features": after,
        "terminal": pa.array(terminal),
        "truncated": pa.array(truncated),
    })  # fmt: skip
    return Block(file=file, file_number=number, table=table, lines=np.arange(first, first + rows))


def _actions(space: Space[Any], actions: NDArray[Any], names: _Names) -> pa.Array:
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        return _features(actions.reshape(len(actions), -1), names.action_ids)
    distinct, codes = np.unique(actions.reshape(-1), return_inverse=True)
    called = [str(one) if names.action_names is None else names.action_names[int(one)] for one in distinct]
    return pa.array(called, pa.string()).take(from_indices(codes.astype(np.int64)))


def _features(values: NDArray[Any], ids: list[int] | None) -> pa.StructArray:
    called = [str(one) for one in (range(values.shape[1]) if ids is None else ids)]
    return pa.StructArray.from_arrays([pa.array(np.ascontiguousarray(column)) for column in values.T], called)
