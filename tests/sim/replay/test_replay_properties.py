"""Replay against a naive model, over generated sequences of writes, draws and updates."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.replay.rings import ring_of

from reagent_lite.sim.replay.ring import ReplayRing
from reagent_lite.types import EnvStep

TERMINATED, TRUNCATED = 1, 2


@dataclass(frozen=True, slots=True)
class Row:
    state: int  # unique, counted over times and environments; an end leads to its negative
    episode: int
    end: int
    action: int

    @property
    def reward(self) -> float:
        return self.state % 7 - 2.5


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
    episode = [0] * envs
    moves = st.tuples(st.sampled_from([0, 0, 0, TERMINATED, TRUNCATED, TERMINATED | TRUNCATED]), st.integers(0, 3))
    for time in range(data.draw(st.integers(1, 30))):
        drawn = data.draw(st.lists(moves, min_size=envs, max_size=envs))
        rows = [Row(1 + time * envs + env, episode[env], *move) for env, move in enumerate(drawn)]
        episode = [row.episode + bool(row.end) for row in rows]
        model.rows.append(rows)
        write(ring, rows)
        agrees(ring, model, prioritized)


def write(ring: ReplayRing, rows: list[Row]) -> None:
    state, end, action = torch.tensor([(row.state, row.end, row.action) for row in rows]).T
    observation = state[:, None].float()
    ring.write(EnvStep(
        observation=observation, action=action, reward=torch.tensor([row.reward for row in rows]),
        next_observation=torch.where(end[:, None] > 0, -observation, observation + len(rows)),
        propensity=1 / state, terminated=end & TERMINATED > 0, truncated=end & TRUNCATED > 0,
    ))  # fmt: skip


def agrees(ring: ReplayRing, model: Episodes, prioritized: bool) -> None:
    """Draws, compares every row, and sets priorities to something uneven."""
    sample = ring.sample(40)
    batch, complete = sample.batch, model.complete()
    if not any(map(model.is_learnable, complete)):
        assert batch.weight.tolist() == [0] * 40
        return
    learnable = 0
    for i in range(len(batch)):
        time, env = index = divmod(int(batch.state[i]) - 1, model.envs)
        assert index in complete
        assert bool(batch.weight[i]) == model.is_learnable(index)
        if not model.is_learnable(index):
            assert not prioritized  # priorities leave such rows out, a uniform draw weighs them 0
            continue
        learnable += 1
        rows = model.window(*index)
        assert len({row.episode for row in rows}) == 1
        last = rows[-1]
        follows = model.sarsa and not last.end
        assert {
            "index": sample.index[i],
            **{name: getattr(batch, name)[i] for name in ("next_state", "steps", "bootstrap", "action", "next_action")},
        } == {
            "index": time % model.slots * model.envs + env,
            "next_state": -last.state if last.end else last.state + model.envs,
            "steps": len(rows),
            "bootstrap": not last.end & TERMINATED,
            "action": rows[0].action,
            "next_action": model.rows[time + len(rows)][env].action if follows else 0,
        }
        assert float(batch.propensity[i]) == pytest.approx(1 / rows[0].state)
        assert float(batch.reward[i]) == pytest.approx(
            sum(0.9**k * row.reward for k, row in enumerate(rows)), rel=1e-5, abs=1e-5
        )
    assert float(batch.weight.sum()) == pytest.approx(1 if learnable else 0)
    ring.update_priorities(sample.index, (sample.index % 5).float())
