"""Minari datasets, against Minari's own reading of them and Gymnasium's own flattening."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import h5py
import minari
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from helpers.event_files import EXTENSIONS, problems_of, rows_of
from minari.data_collector import EpisodeBuffer

from reagent_lite.config import check
from reagent_lite.config.normalize_config import NormalizeConfig
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.formats.input_files import list_input
from reagent_lite.data.formats.minari import flatten_observations
from reagent_lite.data.logs import Log
from reagent_lite.errors import DataError
from reagent_lite.tasks.normalize import normalize
from reagent_lite.types import Image


def cartpole(episodes: int) -> list[EpisodeBuffer]:
    """Episodes in CartPole's spaces, of growing length; every second one is cut by a limit."""
    rng = np.random.default_rng(0)
    return [
        EpisodeBuffer(
            observations=rng.normal(size=(steps + 1, 4)).astype(np.float32), actions=rng.integers(2, size=steps),
            rewards=rng.normal(size=steps), terminations=np.arange(steps) == (steps - 1 if steps % 2 else -1),
            truncations=np.arange(steps) == (-1 if steps % 2 else steps - 1),
        ) for steps in range(5, 5 + episodes)
    ]  # fmt: skip


def made(root: Path, monkeypatch: pytest.MonkeyPatch, buffers: list[EpisodeBuffer], **options: Any) -> Path:
    """Writes a dataset by Minari's own function and returns its folder."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(root))
    usual = {
        "env": "CartPole-v1",
        "eval_env": "CartPole-v1",
        **dict.fromkeys(("algorithm_name", "author", "author_email", "code_permalink", "description"), "test"),
    }
    minari.create_dataset_from_buffers("test/cartpole-v0", buffers, **usual | options)
    return root / "test" / "cartpole-v0"


def without_env(monkeypatch: pytest.MonkeyPatch, root: Path, observation: Any, action: Any, **data: Any) -> Path:
    goes_on = [False] * len(data["rewards"])
    buffer = EpisodeBuffer(terminations=goes_on, truncations=goes_on, **data)
    with pytest.warns(UserWarning, match="env"):
        return made(root, monkeypatch, [buffer], env=None, eval_env=None, observation_space=observation,
                    action_space=action)  # fmt: skip


def features_of(observation: Any) -> dict[str, float]:
    return {str(number): value for number, value in enumerate(observation.tolist())}


@pytest.mark.parametrize("data_format", ["hdf5", "arrow", "parquet"])
def test_cartpole_as_minari_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_format: str) -> None:
    folder = made(tmp_path, monkeypatch, cartpole(12), data_format=data_format)
    rows = rows_of(folder)
    expected = [
        {"mdp_id": str(episode.id), "sequence_number": i, "state_features": features_of(episode.observations[i]),
         "action": str(episode.actions[i]), "reward": episode.rewards[i], "terminal": episode.terminations[i],
         "truncated": episode.truncations[i],
         "next_state_features": features_of(episode.observations[-1]) if episode.truncations[i] else None}
        for episode in minari.MinariDataset(folder / "data") for i in range(len(episode.rewards))
    ]  # fmt: skip
    assert [{name: row[name] for name in expected[0]} for row in rows] == expected
    assert rows == rows_of(folder / "data")
    norm = {"training_data_path": str(folder), "norm_params": {"output_dir": str(tmp_path / "norm")}}
    assert normalize(check(NormalizeConfig, norm)).rows == len(rows)


def test_the_files_of_a_dataset_are_one_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path, monkeypatch, cartpole(2))
    files = Log(str(folder)).files
    assert [(file.name, file.extension) for file in files] == [
        ("metadata.json", ".minari"), ("main_data.hdf5", ".minari")
    ]  # fmt: skip
    assert files == list_input(str(folder / "data"), EXTENSIONS)
    with patch.dict(sys.modules, minari=None), pytest.raises(DataError, match=r"pip install 'reagent-lite\[minari\]'"):
        rows_of(folder)
    (folder / "data" / "metadata.json").write_text("{}")  # no dataset any more: a folder without data
    with pytest.raises(DataError, match="expected a folder with data files"):
        list_input(str(folder), EXTENSIONS)


@pytest.mark.parametrize(
    ("space", "width"),
    [
        (spaces.Box(-1, 1, (2, 3)), 6),
        (spaces.MultiBinary(3), 3),
        (spaces.Dict({"b": spaces.Box(-1, 1, (2,)), "a": spaces.Discrete(3, start=1)}), 5),
        (spaces.Tuple([spaces.Discrete(2), spaces.Dict({"x": spaces.MultiBinary((2, 2))}), spaces.Box(0, 9, ())]), 7),
    ],
)
def test_observations_flatten_as_gymnasium_flattens_them(space: spaces.Space[Any], width: int) -> None:
    space.seed(0)
    samples = [space.sample() for _ in range(5)]
    flat = flatten_observations(space, concatenate(space, samples, create_empty_array(space, 5)))
    assert flat.shape == (5, width)
    np.testing.assert_array_equal(flat, [spaces.flatten(space, sample) for sample in samples])


def test_other_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Discrete observation is one feature, a Box action a feature map: 0.5 and -1 at the first step."""
    folder = without_env(monkeypatch, tmp_path, spaces.Discrete(9), spaces.Box(-1, 1, (2,)), observations=[3, 4, 8],
                         actions=np.array([[0.5, -1], [0, 1]], np.float32), rewards=[1.0, 2.0])  # fmt: skip
    assert [(row["state_features"], row["action"]) for row in rows_of(folder)] == [
        ({"0": 3}, {"0": 0.5, "1": -1.0}), ({"0": 4}, {"0": 0.0, "1": 1.0}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("observation", "action", "actions", "words"),
    [
        (spaces.Box(-1, 1, (1,)), spaces.MultiDiscrete([2, 2]), [[0, 0]], "actions of Discrete (named actions) or Box"),
        (spaces.MultiDiscrete([2]), spaces.Discrete(2), [0], "observations of Box, Discrete, MultiBinary, or Dict"),
    ],
)
def test_spaces_that_are_none_of_ours_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, observation: Any, action: Any, actions: Any, words: str
) -> None:
    folder = without_env(monkeypatch, tmp_path, observation, action, observations=np.zeros((2, 1)),
                         actions=np.array(actions), rewards=[1.0])  # fmt: skip
    assert words in problems_of(folder)[0].expected


OF_VERSION = "expected a complete Minari dataset that the installed version reads"


def test_damaged_datasets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path, monkeypatch, cartpole(3))
    main, description = folder / "data" / "main_data.hdf5", folder / "data" / "metadata.json"
    data, metadata = main.read_bytes(), json.loads(description.read_text())
    for name, rows, words in (
        ("episode_1/rewards", None, f"episode 1: {OF_VERSION}"),
        ("episode_2/rewards", 3, "episode 2: expected .*got 3 rewards"),
        ("episode_0/observations", 4, "actions, 4 observations"),
    ):
        main.write_bytes(data)
        with h5py.File(main, "a") as file:
            file.pop(name) if rows is None else file[name].resize(rows, axis=0)
        with pytest.raises(DataError, match=words):
            rows_of(folder)
    main.write_bytes(data[: len(data) // 2])
    assert "expected a complete Minari dataset" in str(problems_of(folder)[0])
    main.write_bytes(data)
    for changed, message in (
        (metadata | {"total_episodes": 4}, f"episode 3: {OF_VERSION}"),
        ({name: metadata[name] for name in metadata if name != "action_space"},
         "expected a description with spaces, got none of action_space"),
        (metadata | {"minari_version": "99.0"}, OF_VERSION),
    ):  # fmt: skip
        description.write_text(json.dumps(changed))
        assert message in str(problems_of(folder)[0])


def test_a_dataset_is_a_log_to_train_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made(tmp_path, monkeypatch, cartpole(2))
    copy = prepare_training_copy(Log(str(folder), actions=("0", "1")))
    assert (len(copy), copy.state_ids) == (11, (0, 1, 2, 3))


@pytest.mark.parametrize("size", [31, 32])
def test_images_that_minari_stores_as_jpeg_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    image = spaces.Box(0, 255, (size, 32), np.uint8)
    space = spaces.Dict({"seen": image})
    observations = {"seen": np.full((3, size, 32), 200, np.uint8)}
    folder = without_env(monkeypatch, tmp_path, space, spaces.Discrete(2), observations=observations,
                         actions=np.array([0, 1]), rewards=[1.0, 1.0])  # fmt: skip
    if size == 32:
        assert "jpeg_encoding=False" in str(problems_of(folder)[0])
    else:
        assert rows_of(folder)[0]["state_features"]["7"] == 200


@pytest.mark.parametrize("data_format", ["hdf5", "arrow"])
@pytest.mark.parametrize("shape", [(5, 4, 1), (2, 33, 40)])
def test_images_are_bytes_as_they_were_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], data_format: str
) -> None:
    """Two episodes in Minari's own writing: one ends, a limit cuts the other, whose last image is a further state."""
    seen = np.random.default_rng(0).integers(0, 256, (2, 4, *shape)).astype(np.uint8)
    ends = np.array([False, False, True])
    never = np.zeros(3, bool)
    buffers = [
        EpisodeBuffer(
            observations=images, actions=np.array([0, 1, 0]), rewards=np.ones(3),
            terminations=never if cut else ends, truncations=ends if cut else never,
        ) for cut, images in enumerate(seen)
    ]  # fmt: skip
    options = {"jpeg_encoding": False, "data_format": data_format}
    with pytest.warns(UserWarning, match="env"):
        folder = made(tmp_path, monkeypatch, buffers, env=None, eval_env=None, action_space=spaces.Discrete(2),
                      observation_space=spaces.Box(0, 255, shape, np.uint8), **options)  # fmt: skip
    copy = prepare_training_copy(Log(str(folder), actions=("0", "1"), image=Image(shape=shape)))
    flat = seen.reshape(2, 4, -1)
    assert copy.state.dtype == np.uint8
    assert np.array_equal(copy.state, np.concatenate((flat[0, :3], flat[1])))
    assert np.asarray(copy.next_index).tolist() == [1, 2, 2, 4, 5, 6]
    assert np.asarray(copy.bootstrap).tolist() == [1, 1, 0, 1, 1, 1]
    with pytest.raises(DataError, match=r"expected observations of uint8 and shape 9x9, as data\.image says"):
        prepare_training_copy(Log(str(folder), actions=("0", "1"), image=Image(shape=(9, 9))))
