"""Whole episodes against a plain loop over the same environments, of one agent and of several."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sim.conftest import environments, play_at_random

from reagent_lite.errors import SimulationError
from reagent_lite.sim import played_episodes
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.experience import Actor
from reagent_lite.sim.played_episodes import Amount, EpisodeRecorder, PlayedEpisodes, play_episodes

SEEN = {"state": "observation", "mask": "mask", "features": "features"}
AFTER = {
    "action": "action",
    "reward": "reward",
    "propensity": "propensity",
    "last_state": "next_observation",
    "last_mask": "next_mask",
    "last_features": "next_features",
    "terminal": "row_terminated",
}
ENDS = ("last_state", "last_mask", "last_features", "terminal")
RANDOM = Actor(policy=None, epsilon=torch.ones(1))
Row = dict[str, Any]


def opened(name: str | Path, count: int, first_env: int = 0) -> VectorEnv:
    """Environments of one agent that are cut after 40 steps, or of three after 3, some of which leave before."""
    more = {"parameters": {"size": 3.0}, "time_limit": 3} if isinstance(name, Path) else {"time_limit": 40}
    return environments(name, count, parametric=name == "recommend", seed=3, first_env=first_env, **more)


def joined(env: VectorEnv, amount: Amount) -> tuple[dict[str, Any], list[PlayedEpisodes]]:
    """All blocks joined, column by column."""
    blocks = list(play_episodes(env, [RANDOM], amount))
    parts = {name: [getattr(block, name) for block in blocks] for name in PlayedEpisodes.__slots__}
    return {name: None if part[0] is None else np.concatenate(part) for name, part in parts.items()}, blocks


def buffers(env: VectorEnv, names: dict[str, str]) -> dict[str, Any]:
    present = {name: getattr(env, buffer) for name, buffer in names.items()}
    return {name: None if tensor is None else tensor.numpy().copy() for name, tensor in present.items()}


def looped(env: VectorEnv, rounds: int) -> list[tuple[tuple[int, int, int, int], list[Row]]]:
    """((start, environment, agent, number), rows) of every episode that is over after so many rounds."""
    episodes: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for step in range(rounds):
        playing = range(env.num_rows) if env.in_game is None else env.in_game.nonzero().flatten().tolist()
        number = env.episode.tolist()
        seen = buffers(env, SEEN)
        play_at_random(env)
        seen |= buffers(env, AFTER)
        for i in playing:
            episodes[i, number[i // env.spec.agents]].append(
                {name: None if value is None else value[i] for name, value in seen.items()} | {"round": step}
            )
    over = [
        ((rows[0]["round"], *divmod(i, env.spec.agents), number), rows)
        for (i, number), rows in episodes.items()
        if number < env.episode[i // env.spec.agents]
    ]
    return sorted(over, key=lambda episode: episode[0])


@pytest.mark.parametrize(("block_rows", "most_rounds"), [(1 << 15, 256), (50, 7), (1, 1)])
@pytest.mark.parametrize("name", ["cartpole_v0", "gridworld", "recommend", "team"])
def test_blocks_hold_what_a_plain_loop_sees(
    monkeypatch: pytest.MonkeyPatch, team: Path, name: str, block_rows: int, most_rounds: int
) -> None:
    monkeypatch.setattr(played_episodes, "BLOCK_ROWS", block_rows)
    monkeypatch.setattr(played_episodes, "_MOST_ROUNDS", most_rounds)
    env = team if name == "team" else name
    agents = 3 if name == "team" else 1
    truth = looped(opened(env, 5, first_env=10), 300)[: 30 * agents]
    result, blocks = joined(opened(env, 5, first_env=10), Amount(30, "episodes"))
    assert list(zip(result["env"] - 10, result["agent"], result["number"], strict=True)) == [
        key[1:] for key, _ in truth
    ]
    assert result["lengths"].tolist() == [len(rows) for _, rows in truth]
    for column in SEEN | AFTER:
        np.testing.assert_array_equal(
            result[column],
            np.array([row[column] for _, rows in truth for row in (rows[-1:] if column in ENDS else rows)]),
            err_msg=column,
        )
    assert name != "team" or (set(result["lengths"]), set(result["terminal"])) == ({2, 3}, {True, False})
    for block in blocks:
        assert len(block.state) == block.lengths.sum()
        assert len(block.state) <= block_rows or len(block.lengths) <= agents
    np.testing.assert_allclose(
        np.concatenate([block.returns for block in blocks]),
        [sum(float(row["reward"]) for row in rows) for _, rows in truth],
    )


@pytest.mark.parametrize(("name", "rows"), [("cartpole_v0", 1), ("cartpole_v0", 100), ("team", 60)])
def test_rows_are_covered_by_as_few_as_are_needed(team: Path, name: str, rows: int) -> None:
    env, agents = (team, 3) if name == "team" else (name, 1)
    every = joined(opened(env, 5), Amount(80, "episodes"))[0]["lengths"]
    lengths = joined(opened(env, 5), Amount(rows, "rows"))[0]["lengths"]
    assert lengths.sum() >= rows > lengths[:-agents].sum()
    assert lengths.tolist() == every.tolist()[: len(lengths)]


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(played_episodes, "free_bytes", lambda device: 100)
    with pytest.raises(SimulationError, match="num_envs: expected episodes that fit"):
        joined(opened("cartpole_v0", 4), Amount(3, "episodes"))


def test_every_episode_is_taken_once_when_it_is_over_also_before_those_that_started_earlier() -> None:
    recorder = EpisodeRecorder(opened("cartpole_v0", 5), rounds=7)
    recorded, early = list[Any](), 0
    for _ in range(20):
        recorder.play([RANDOM])
        over = recorder.over
        early += len(over) > len(recorder.lengths)
        if len(over):
            block = recorder.episodes(over)
            assert recorder.steps_over == len(block.state)
            recorder.drop(over)
            recorded += zip(
                block.env,
                block.number,
                [part.tolist() for part in np.split(block.state, block.lengths.cumsum()[:-1])],
                strict=True,
            )
    expected = [
        (env, number, [row["state"].tolist() for row in rows])
        for (_, env, _, number), rows in looped(opened("cartpole_v0", 5), 140)
    ]
    assert sorted(recorded) == sorted(expected)
    assert early
