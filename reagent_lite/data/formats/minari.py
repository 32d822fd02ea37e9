"""Minari datasets as events: a format for episodes of offline reinforcement learning (https://minari.farama.org).

    <dataset>/data/metadata.json    spaces, environment, format
                   main_data.hdf5   episodes, T + 1 observations and T actions each (format hdf5)
                   <episode>/...    the same (formats arrow and parquet)

A row is a step: mdp_id is the episode's number, sequence_number the step, and features 0, 1, ... the observation. If a
limit cut an episode, its last row has the final observation as next_state_features, so that training bootstraps from
it. Minari has no propensities and no possible actions.

The package minari is needed; the environments are not, since the description has their spaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from reagent_lite.data.formats.blocks import Block, InputFile, Position
from reagent_lite.data.formats.input_files import MINARI_DESCRIPTION, sha256_of
from reagent_lite.errors import DataError, Problem, first_line, install, needing
from reagent_lite.strict_json import parse_json
from reagent_lite.types import Image

if TYPE_CHECKING:
    from gymnasium.spaces import Space
    from minari import MinariDataset

_BLOCK_BYTES = 1 << 23
_SMALLEST_IMAGE = 32
"""Fewest rows and columns of values that Minari takes for an image, if its values are from 0 to 255."""
# Errors of h5py, pyarrow and minari for files that are damaged or differ from the description.
_DAMAGED = (OSError, KeyError, ValueError, TypeError, IndexError, RuntimeError, AssertionError, pa.ArrowException)


def read_minari(file: InputFile, number: int, position: Position) -> Iterator[Callable[[], Block]]:
    """Reads one of a Minari dataset's files in blocks of whole episodes; see `blocks.Reader`.

    All steps are read with one of the files, main_data.hdf5 or the description; the others are only hashed. The "line"
    of a row is the number of its step in the dataset, from 1.

    Raises:
        DataError: a package is missing, files are damaged, or the observations or actions have other spaces.
    """
    data = Path(file.path.removesuffix(file.name))
    description = _description(data)
    read_with = "main_data.hdf5" if description["data_format"] == "hdf5" else MINARI_DESCRIPTION
    if file.name == read_with:
        first = 1
        pending = list[pa.Table]()
        size = 0
        dataset = _open_dataset(data, description)
        if file.image is not None:
            _require_images(dataset.observation_space, file.image, data)
        for index in range(dataset.total_episodes):
            pending.append(_episode(dataset, index, data, images=file.image is not None))
            size += pending[-1].nbytes
            if size >= _BLOCK_BYTES or index + 1 == dataset.total_episodes:
                table = pa.concat_tables(pending, promote_options="permissive")
                lines = np.arange(first, first + len(table))
                position.bytes_read = file.size * (index + 1) // dataset.total_episodes
                yield partial(Block, file=replace(file, path=str(data)), file_number=number, table=table, lines=lines)
                first = first + len(table)
                pending = []
                size = 0
    position.sha256 = sha256_of(file)


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


def _open_dataset(data: Path, description: dict[str, Any]) -> MinariDataset:
    with needing("minari", "Minari datasets", error=DataError):
        import minari
        from gymnasium import spaces
    try:
        dataset: MinariDataset = minari.MinariDataset(data)
    except ImportError as error:
        todo = f"Run: {install('minari')}"
        raise DataError(Problem(str(data), f"a package for {description['data_format']}", str(error), todo)) from error
    except _DAMAGED as error:
        raise DataError(_describe_damage(data, error)) from error
    # versions that store images as JPEG in any case lack the attribute
    if getattr(dataset.storage, "jpeg_encoding", True):
        images = [name for name in ("observation", "action") if _has_image(getattr(dataset, f"{name}_space"))]
        if images:
            todo = "JPEG changes values. Write the dataset again with jpeg_encoding=False, in DataCollector too"
            raise DataError(Problem(str(data), f"{images[0]}s as they were seen", "images stored as JPEG", todo))
    if not _is_vector(dataset.observation_space):
        expected = "observations of Box, Discrete, MultiBinary, or Dict and Tuple of them"
        raise DataError(Problem(str(data), expected, str(dataset.observation_space)))
    if not isinstance(dataset.action_space, spaces.Discrete | spaces.Box):
        expected = "actions of Discrete (named actions) or Box (feature maps)"
        todo = "Number its combinations, and write the dataset again with Discrete"
        raise DataError(Problem(str(data), expected, str(dataset.action_space), todo))
    return dataset


def _describe_damage(where: object, error: Exception) -> Problem:
    got = f"{type(error).__name__}: {first_line(error)}"
    return Problem(str(where), "a complete Minari dataset that the installed version reads", got, "Copy it again")


def _require_images(space: Space[Any], image: Image, data: Path) -> None:
    shape = "x".join(map(str, image.shape))
    if space.dtype != np.uint8 or space.shape != image.shape:
        expected = f"observations of uint8 and shape {shape}, as data.image says"
        raise DataError(Problem(str(data), expected, str(space), "Correct data.image, or leave it out for numbers"))


def _episode(dataset: MinariDataset, index: int, data: Path, *, images: bool = False) -> pa.Table:
    """Returns the steps of an episode.

    Args:
        dataset: the dataset.
        index: number of the episode.
        data: the dataset's folder.
        images: whether observations are images, which become values of as many bytes as they have.
    """
    where = f"{data}, episode {index}"
    try:
        episode = dataset[index]
        [described] = dataset.storage.get_episode_metadata([index])
        steps = int(described["total_steps"])
        rewards = np.asarray(episode.rewards, np.float64)
        terminal = np.asarray(episode.terminations, bool)
        truncated = np.asarray(episode.truncations, bool)
        observed = flatten_observations(dataset.observation_space, episode.observations)
        action = _actions(dataset.action_space, np.asarray(episode.actions))
    except _DAMAGED as error:
        raise DataError(_describe_damage(where, error)) from error
    lengths = [len(rewards), len(terminal), len(truncated), len(action), len(observed)]
    if lengths != [steps, steps, steps, steps, steps + 1] or not steps:
        expected = f"{steps} steps, as its description says, at least one, and {steps + 1} observations"
        got = "{} rewards, {} terminations, {} truncations, {} actions, {} observations".format(*lengths)
        raise DataError(Problem(where, expected, got, "Copy it again"))
    observations = _images(observed) if images else _features(observed)
    cut = truncated[-1] and not terminal[-1]
    return pa.table(
        {
            "mdp_id": pa.repeat(str(index), steps),
            "sequence_number": pa.array(np.arange(steps)),
            "state_features": observations[:-1],
            "action": action,
            "reward": pa.array(rewards),
            "next_state_features": observations.take(
                pa.array([None] * (steps - 1) + [steps if cut else None], pa.int64())
            ),
            "terminal": pa.array(terminal),
            "truncated": pa.array(truncated),
        }
    )


def _is_vector(space: Space[Any]) -> bool:
    from gymnasium import spaces

    if isinstance(space, spaces.Dict | spaces.Tuple):
        return all(_is_vector(part) for part in (space.values() if isinstance(space, spaces.Dict) else space))
    return isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiBinary)


def _has_image(space: Space[Any]) -> bool:
    """Whether Minari stores a part of the space as images."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict | spaces.Tuple):
        return any(map(_has_image, space.values() if isinstance(space, spaces.Dict) else space))
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) not in (2, 3):
        return False
    return min(space.shape[:2]) >= _SMALLEST_IMAGE and bool((space.low == 0).all() and (space.high == 255).all())


def flatten_observations(space: Space[Any], values: Any, *, inside: bool = False) -> NDArray[Any]:
    """Returns n observations as [n, width], in the order of gymnasium.spaces.flatten; a Discrete alone is one number.

    Args:
        space: the space of one observation.
        values: n observations as Minari returns them: an array, or a dict or tuple of arrays.
        inside: whether the space is part of a Dict or Tuple, where a Discrete is one column per value.
    """
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return np.concatenate(
            [flatten_observations(part, values[name], inside=True) for name, part in space.items()], axis=1
        )
    if isinstance(space, spaces.Tuple):
        parts = zip(space, values, strict=True)
        return np.concatenate(
            [flatten_observations(part_space, part, inside=True) for part_space, part in parts], axis=1
        )
    array = np.asarray(values)
    array = array.reshape(len(array), -1)
    if inside and isinstance(space, spaces.Discrete):
        return np.asarray(array == np.arange(space.start, space.start + space.n), np.int64)
    return array


def _actions(space: Space[Any], actions: NDArray[Any]) -> pa.Array:
    from gymnasium import spaces

    if isinstance(space, spaces.Box):
        return _features(actions.reshape(len(actions), -1))
    return pa.array(map(str, actions.reshape(-1).tolist()), pa.string())


def _images(values: NDArray[np.uint8]) -> pa.FixedSizeBinaryArray:
    rows, size = values.shape
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(size), rows, [None, pa.py_buffer(values.tobytes())])


def _features(values: NDArray[Any]) -> pa.StructArray:
    columns = [pa.array(np.ascontiguousarray(column)) for column in values.T]
    return pa.StructArray.from_arrays(columns, [str(number) for number in range(len(columns))])
