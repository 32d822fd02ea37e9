"""Whole episodes against a plain loop over the same environments."""

from typing import Any

import numpy as np
import pytest
import torch

from reagent_lite.errors import SimulationError
from reagent_lite.sim import episodes
from reagent_lite.sim.backend import open_backend
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.episodes import Amount, EpisodeRecorder, PlayedEpisodes, whole_episodes
from reagent_lite.sim.rollout import Actor

COLUMNS = ("state", "action", "reward", "propensity", "mask", "features")
ENDS = ("env", "number", "lengths", "terminal", "last_state", "last_mask", "last_features")
RANDOM = Actor(policy=None, epsilon=torch.ones(1))
Row = dict[str, Any]


def opened(name: str, count: int, first_env: int = 0) -> VectorEnv:
    cpu = torch.device("cpu")
    backend = open_backend(name, backend="cpu", device=cpu, parameters={}, math="exact")
    return VectorEnv(
        backend, num_envs=count, first_env=first_env, seed=3, time_limit=40, parametric=backend.spec.candidates
    )


def taken(env: VectorEnv, amount: Amount) -> tuple[dict[str, Any], list[PlayedEpisodes]]:
    """All blocks joined, column by column."""
    blocks = list(whole_episodes(env, [RANDOM], amount))
    joined = {name: [getattr(block, name) for block in blocks] for name in (*COLUMNS, *ENDS)}
    return {name: None if parts[0] is None else np.concatenate(parts) for name, parts in joined.items()}, blocks


def looped(env: VectorEnv, rounds: int) -> list[tuple[tuple[int, int], list[Row]]]:
    """((start, environment), rows) of every episode that is over after so many rounds, one environment at a time."""
    epsilon = torch.zeros(1)
    env.reset()
    running: list[list[Row]] = [[] for _ in range(env.num_envs)]
    finished = []
    for step in range(rounds):
        here = {"state": env.observation, "mask": env.mask, "features": env.features}
        seen = {name: None if tensor is None else tensor.clone() for name, tensor in here.items()}
        env.act(None, epsilon=epsilon)
        env.step()
        after = {"action": env.action, "reward": env.reward, "propensity": env.propensity,
                 "last_state": env.next_observation, "last_mask": env.next_mask,
                 "last_features": env.next_features}  # fmt: skip
        seen |= {name: None if tensor is None else tensor.clone() for name, tensor in after.items()}
        for i, rows in enumerate(running):
            rows.append({name: None if tensor is None else tensor[i].numpy() for name, tensor in seen.items()})
            if env.ended[i]:
                rows[-1]["terminal"] = bool(env.terminated[i])
                finished.append(((step + 1 - len(rows), i), rows))
                running[i] = []
    return sorted(finished, key=lambda one: one[0])


@pytest.mark.parametrize(("block_rows", "most_rounds"), [(1 << 15, 256), (50, 7), (1, 1), (1000, 64)])
@pytest.mark.parametrize("name", ["cartpole_v0", "gridworld", "recommend"])
def test_blocks_hold_what_a_plain_loop_sees(
    monkeypatch: pytest.MonkeyPatch, name: str, block_rows: int, most_rounds: int
) -> None:
    monkeypatch.setattr(episodes, "BLOCK_ROWS", block_rows)
    monkeypatch.setattr(episodes, "_MOST_ROUNDS", most_rounds)
    truth = looped(opened(name, 5), 300)[:30]
    got, blocks = taken(opened(name, 5), Amount(30, "episodes"))
    every = [row for _, rows in truth for row in rows]
    for column in COLUMNS:
        if got[column] is None:
            assert every[0][column] is None
        else:
            np.testing.assert_array_equal(got[column], np.array([row[column] for row in every]), err_msg=column)
    last = [rows[-1] for _, rows in truth]
    for column in ("last_state", "last_mask", "last_features", "terminal"):
        if got[column] is not None:
            np.testing.assert_array_equal(got[column], np.array([row[column] for row in last]), err_msg=column)
    assert got["env"].tolist() == [env for (_, env), _ in truth]
    assert got["lengths"].tolist() == [len(rows) for _, rows in truth]
    counted = [[e for (_, e), _ in truth[:i]].count(env) for i, ((_, env), _) in enumerate(truth)]
    assert got["number"].tolist() == counted
    for block in blocks:
        assert len(block.state) == block.lengths.sum()
        assert len(block.state) <= block_rows or len(block.lengths) == 1
    returns = np.concatenate([block.returns for block in blocks])
    np.testing.assert_allclose(returns, [sum(float(row["reward"]) for row in rows) for _, rows in truth])


@pytest.mark.parametrize("rows", [1, 100, 999])
def test_rows_are_covered_by_as_few_as_are_needed(rows: int) -> None:
    every, _ = taken(opened("cartpole_v0", 5), Amount(80, "episodes"))
    got, _ = taken(opened("cartpole_v0", 5), Amount(rows, "rows"))
    lengths = got["lengths"]
    assert lengths.sum() >= rows > lengths[:-1].sum()
    assert lengths.tolist() == every["lengths"].tolist()[: len(lengths)]


def test_environments_keep_their_global_numbers() -> None:
    late, _ = taken(opened("cartpole_v0", 4, first_env=6), Amount(4, "episodes"))
    both, _ = taken(opened("cartpole_v0", 10), Amount(10, "episodes"))
    assert late["env"].tolist() == [6, 7, 8, 9]
    rows = late["lengths"].sum()
    np.testing.assert_array_equal(late["state"], both["state"][-rows:])


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    env = opened("cartpole_v0", 4)
    monkeypatch.setattr(episodes, "free_bytes", lambda device: 100)
    with pytest.raises(SimulationError, match="num_envs: expected episodes that fit"):
        taken(env, Amount(3, "episodes"))


def test_every_episode_is_taken_once_when_it_is_over_also_before_those_that_started_earlier() -> None:
    env = opened("cartpole_v0", 5)
    recorder, found = EpisodeRecorder(env, rounds=7), []
    early = 0
    for _ in range(20):
        recorder.play([RANDOM])
        over = recorder.over
        early += len(over) > len(recorder.lengths)
        if len(over):
            block = recorder.episodes(over)
            assert recorder.steps_over == len(block.state)
            recorder.drop(over)
            parts = np.split(block.state, block.lengths.cumsum()[:-1])
            found += list(
                zip(block.env.tolist(), block.number.tolist(), [part.tolist() for part in parts], strict=True)
            )
    numbers = dict.fromkeys(range(5), 0)
    for (_, e), rows in looped(opened("cartpole_v0", 5), 140):
        expected = (e, numbers[e], [row["state"].tolist() for row in rows])
        numbers[e] += 1
        assert found.count(expected) == 1
    assert len(found) == sum(numbers.values())
    assert early
