"""Replay against a naive model, over generated sequences of writes, draws and updates."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reagent_lite.sim.replay.ring import ReplayRing, ReplaySettings
from reagent_lite.types import EnvStep

TERMINATED, TRUNCATED = 1, 2


@dataclass(frozen=True)
class Row:
    state: int  # unique, counted over times and environments; an end leads to its negative
    episode: int
    end: int
    action: int
    reward: float


@dataclass
class Episodes:
    """All rows ever written, [time][environment], looked up by Python loops."""

    envs: int
    slots: int
    n: int
    sarsa: bool
    rows: list[list[Row]] = field(default_factory=list)

    def window(self, time: int, env: int) -> list[Row]:
        rows = []
        for t in range(time, time + self.n):
            rows.append(self.rows[t][env])
            if rows[-1].end:
                break
        return rows

    def complete(self) -> set[tuple[int, int]]:
        """Windows whose n rows are all kept; with SARSA the row after them too."""
        newest = len(self.rows) - self.n - self.sarsa
        oldest = max(0, len(self.rows) - self.slots)
        return {(t, env) for t in range(oldest, newest + 1) for env in range(self.envs)}

    def learnable(self) -> set[tuple[int, int]]:
        """The complete ones, with SARSA without those that a time limit cuts."""
        return {p for p in self.complete() if not self.sarsa or self.window(*p)[-1].end != TRUNCATED}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rows_equal_a_naive_list_of_episodes(data: st.DataObject) -> None:
    envs, n, sarsa = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5)), data.draw(st.booleans())
    slots, prioritized = data.draw(st.integers(n + sarsa, 12)), data.draw(st.booleans())
    replay = ReplaySettings(num_envs=envs, observation_size=1, num_actions=4, slots=slots, gamma=0.9, n_step=n, seed=3,
                            prioritized=prioritized, needs_next_action=sarsa)  # fmt: skip
    ring = ReplayRing(replay, torch.device("cpu"))
    model = Episodes(envs, slots, n, sarsa)
    episode = [0] * envs
    for time in range(data.draw(st.integers(1, 30))):
        ends = data.draw(st.lists(st.sampled_from([0, 0, 0, TERMINATED, TRUNCATED]), min_size=envs, max_size=envs))
        actions = data.draw(st.lists(st.integers(0, 3), min_size=envs, max_size=envs))
        rows = []
        for env, (end, action) in enumerate(zip(ends, actions, strict=True)):
            state = 1 + time * envs + env
            rows.append(Row(state=state, episode=episode[env], end=end, action=action, reward=state % 7 - 2.5))
            episode[env] += bool(end)
        model.rows.append(rows)
        write(ring, rows)
        agrees(ring, model, prioritized)


def write(ring: ReplayRing, rows: list[Row]) -> None:
    state = torch.tensor([[float(row.state)] for row in rows])
    end = torch.tensor([row.end for row in rows])
    after = torch.where(end[:, None] > 0, -state, state + len(rows))
    ring.write(EnvStep(
        observation=state, next_observation=after, action=torch.tensor([row.action for row in rows]),
        reward=torch.tensor([row.reward for row in rows]), propensity=1 / state[:, 0],
        terminated=end == TERMINATED, truncated=end == TRUNCATED,
    ))  # fmt: skip


def agrees(ring: ReplayRing, model: Episodes, prioritized: bool) -> None:
    """Draws, compares every row, and sets priorities to something uneven."""
    sample = ring.sample(40)
    batch, complete, learnable = sample.batch, model.complete(), model.learnable()
    if not learnable:
        assert batch.weight.tolist() == [0] * 40
        return
    counted = 0
    for i in range(len(batch)):
        place = divmod(int(batch.state[i]) - 1, model.envs)
        assert place in complete
        assert bool(batch.weight[i]) == (place in learnable)
        assert place in learnable or not prioritized  # priorities leave such rows out, a uniform draw weighs them 0
        if place not in learnable:
            continue
        counted += 1
        rows = model.window(*place)
        assert len({row.episode for row in rows}) == 1
        assert sample.index[i] == place[0] % model.slots * model.envs + place[1]
        assert batch.next_state[i] == (-rows[-1].state if rows[-1].end else rows[-1].state + model.envs)
        assert batch.steps[i] == len(rows)
        assert batch.bootstrap[i] == (rows[-1].end != TERMINATED)
        assert batch.action[i] == rows[0].action
        assert float(batch.propensity[i]) == pytest.approx(1 / rows[0].state)
        total = sum(0.9**k * row.reward for k, row in enumerate(rows))
        assert float(batch.reward[i]) == pytest.approx(total, rel=1e-5, abs=1e-5)
        follows = model.sarsa and not rows[-1].end
        assert batch.next_action[i] == (model.rows[place[0] + len(rows)][place[1]].action if follows else 0)
    assert float(batch.weight.sum()) == pytest.approx(1 if counted else 0)
    ring.update_priorities(sample.index, (sample.index % 5).float())
