"""Replay against a naive model, over generated sequences of writes, draws and updates."""

from dataclasses import dataclass, field
from itertools import compress
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.replay.rings import TERMINATED, TRUNCATED, ring_of

from reagent_lite.sim.replay.ring import ReplayRing
from reagent_lite.types import EnvStep


class Row(NamedTuple):
    state: int  # unique, counted over times and environments; an end leads to its negative
    end: int
    action: int


def reward_in(state: Any) -> Any:
    return state % 7 - 2.5


@dataclass
class Episodes:
    """All rows ever written, [time][environment], looked up by Python loops."""

    envs: int
    slots: int
    n: int
    sarsa: bool
    rows: list[list[Row]] = field(default_factory=list)

    def window(self, time: int, env: int) -> list[Row]:
        rows = [rows[env] for rows in self.rows[time : time + self.n]]
        rows = rows[: next((k for k, row in enumerate(rows, 1) if row.end), self.n)]
        return rows[:-1] if self.sarsa and rows[-1].end & TRUNCATED and len(rows) > 1 else rows

    def complete(self) -> set[tuple[int, int]]:
        """Windows whose n rows are all kept; with SARSA the row after them too."""
        times = range(max(0, len(self.rows) - self.slots), len(self.rows) - self.n - self.sarsa + 1)
        return {(time, env) for time in times for env in range(self.envs)}

    def is_learnable(self, index: tuple[int, int]) -> bool:
        """Whether the first row is not at a time limit, with SARSA."""
        return not (self.sarsa and self.window(*index)[-1].end & TRUNCATED)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_equal_a_naive_list_of_episodes(data: st.DataObject) -> None:
    envs, n, sarsa, prioritized = data.draw(
        st.tuples(st.integers(1, 3), st.integers(1, 5), st.booleans(), st.booleans())
    )
    slots = data.draw(st.integers(n + sarsa, 12))
    ring = ring_of(num_envs=envs, slots=slots, gamma=0.9, n_step=n, prioritized=prioritized, needs_next_action=sarsa)
    model = Episodes(envs, slots, n, sarsa)
    moves = st.tuples(st.sampled_from([0, 0, 0, TERMINATED, TRUNCATED, TERMINATED | TRUNCATED]), st.integers(0, 3))
    for time in range(data.draw(st.integers(1, 30))):
        drawn = data.draw(st.lists(moves, min_size=envs, max_size=envs))
        rows = [Row(1 + time * envs + env, *move) for env, move in enumerate(drawn)]
        model.rows.append(rows)
        state, end, action = torch.tensor(rows).T
        observation = state[:, None].float()
        ring.write(EnvStep(
            observation=observation, action=action, reward=reward_in(state),
            next_observation=torch.where(end[:, None] > 0, -observation, observation + len(rows)),
            propensity=1 / state, terminated=end & TERMINATED > 0, truncated=end & TRUNCATED > 0,
        ))  # fmt: skip
        agrees(ring, model, prioritized)


def agrees(ring: ReplayRing, model: Episodes, prioritized: bool) -> None:
    """Draws, compares every row, and sets priorities to something uneven."""
    sample = ring.sample(40)
    batch, complete = sample.batch, model.complete()
    if not any(map(model.is_learnable, complete)):
        assert batch.weight.tolist() == [0] * 40
        return
    windows = [divmod(int(state) - 1, model.envs) for state in batch.state]
    learnable = [*map(model.is_learnable, windows)]
    assert complete.issuperset(windows)
    assert batch.weight.bool().tolist() == learnable
    assert all(learnable) or not prioritized  # priorities leave such rows out, a uniform draw weighs them 0
    for i, (time, env) in compress(enumerate(windows), learnable):
        rows = model.window(time, env)
        last = rows[-1]
        expected = {
            "next_state": -last.state if last.end else last.state + model.envs,
            "steps": len(rows),
            "bootstrap": not last.end & TERMINATED,
            "action": rows[0].action,
            "next_action": model.rows[time + len(rows)][env].action if model.sarsa and not last.end else 0,
            "propensity": pytest.approx(1 / rows[0].state),
            "reward": pytest.approx(
                sum(0.9**k * reward_in(row.state) for k, row in enumerate(rows)), rel=1e-5, abs=1e-5
            ),
        }
        assert {name: getattr(batch, name)[i].item() for name in expected} == expected
        assert sample.index[i] == time % model.slots * model.envs + env
    assert float(batch.weight.sum()) == pytest.approx(float(any(learnable)))
    ring.update_priorities(sample.index, (sample.index % 5).float())
