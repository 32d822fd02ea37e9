"""Replay: every drawn row is what its episode says, worked out by hand; properties are in test_replay_properties.py."""

import copy
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from sim.replay.rings import GOES_ON, TERMINATED, TRUNCATED, plain_columns, plain_step, ring_of
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from reagent_lite.errors import SimulationError
from reagent_lite.sim.replay import ring as ring_module
from reagent_lite.sim.replay.ring import ReplayRing, Sample
from reagent_lite.types import EnvStep


def write_line(ring: ReplayRing, rewards: list[float], ends: list[int], first: int = 0) -> None:
    """One environment; row t has state t, action t mod 4, propensity 1 / (t + 1), and leads to t + 1, or t + 1.5."""
    for t, (reward, end) in enumerate(zip(rewards, ends, strict=True), first):
        ring.write(
            EnvStep(
                observation=torch.tensor([[float(t)]]),
                next_observation=torch.tensor([[t + (1.5 if end else 1.0)]]),
                action=torch.tensor([t % 4]),
                reward=torch.tensor([float(reward)]),
                terminated=torch.tensor([bool(end & TERMINATED)]),
                truncated=torch.tensor([bool(end & TRUNCATED)]),
                propensity=torch.tensor([1 / (t + 1)]),
            )
        )


def table(sample: Sample) -> dict[float, tuple[float, ...]]:
    """State -> reward, steps, bootstrap, next state; rows drawn twice must agree."""
    batch = sample.batch
    columns = (batch.state[:, 0], batch.reward, batch.steps, batch.bootstrap, batch.next_state[:, 0])
    rows = {tuple(row) for row in torch.stack(columns, 1).tolist()}
    assert len(rows) == len({row[0] for row in rows})
    return {row[0]: row[1:] for row in rows}


DOUBLING = [1.0, 2, 4, 8, 16, 32, 64]  # with γ 0.5 every term γ^k r_{t+k} is 2^t, so a sum of m terms is m 2^t


@pytest.mark.parametrize(
    ("settings", "rewards", "ends", "expected"),
    [
        ({}, DOUBLING, {0: TERMINATED, 5: TRUNCATED, 6: TERMINATED},
         {0: (1, 1, 0, 1.5), 1: (2, 1, 1, 2), 2: (4, 1, 1, 3), 3: (8, 1, 1, 4), 4: (16, 1, 1, 5), 5: (32, 1, 1, 6.5),
          6: (64, 1, 0, 7.5)}),
        ({"n_step": 5}, DOUBLING, {}, {0: (5, 5, 1, 5), 1: (10, 5, 1, 6), 2: (20, 5, 1, 7)}),
        # row 2 ends: windows of 0, 1, 2 are cut there, that of 3 starts anew
        ({"n_step": 3}, DOUBLING, {2: TERMINATED},
         {0: (3, 3, 0, 3.5), 1: (4, 2, 0, 3.5), 2: (4, 1, 0, 3.5), 3: (24, 3, 1, 6), 4: (48, 3, 1, 7)}),
        # two ends in one window: the first one counts
        ({"n_step": 5}, DOUBLING, {0: TRUNCATED, 1: TERMINATED, 6: TERMINATED},
         {0: (1, 1, 1, 1.5), 1: (2, 1, 0, 2.5), 2: (20, 5, 0, 7.5)}),
        # what lies behind an end is not summed even where it is not finite
        ({"n_step": 2}, [3, inf, 1], {0: TERMINATED}, {0: (3, 1, 0, 1.5), 1: (inf, 2, 1, 3)}),
        # the boost of later actions is in the sum, as for logged rows: 1 + 0.5 (2 + 10) + 0.25 (4 + 20); the 100 of the
        # first action is the learner's
        ({"n_step": 3, "boost": torch.tensor([100.0, 10, 20, 0])}, [1, 2, 4], {}, {0: (13, 3, 1, 3)}),
    ],
)  # fmt: skip
def test_windows_by_hand(
    settings: dict[str, Any], rewards: list[float], ends: dict[int, int], expected: dict[float, tuple[float, ...]]
) -> None:
    ring = ring_of(**settings)
    write_line(ring, rewards, [ends.get(t, GOES_ON) for t in range(len(rewards))])
    sample = ring.sample(512)
    assert table(sample) == expected
    batch = sample.batch
    state = batch.state[:, 0]
    assert sample.index.tolist() == state.tolist()  # row number = slot * 1 + 0
    assert (batch.action.dtype, batch.action.tolist()) == (torch.int64, (state % 4).tolist())
    torch.testing.assert_close(batch.propensity, 1 / (state + 1))
    for choices in (batch.actions, batch.next_actions):
        assert (choices.mask.tolist(), choices.features) == ([[True] * 4] * 512, None)
    assert (batch.weight.unique().tolist(), batch.metrics.shape) == ([1 / 512], (512, 0))
    assert (ring.rows, ring.capacity) == (len(rewards), 8)


def test_masks_and_candidates_belong_to_the_first_and_the_last_row_of_a_window() -> None:
    ring = ring_of(num_envs=2, num_actions=3, candidates=True, action_feature_size=2, n_step=2)
    for t in range(5):
        ring.write(
            plain_step(
                2,
                observation=torch.full((2, 1), float(t)),
                mask=torch.tensor([[True, t % 2 == 0, False]]).expand(2, 3),
                next_mask=torch.tensor([[True, t % 2 == 1, False]]).expand(2, 3),
                features=torch.full((3, 2), float(t)).expand(2, 3, 2),
                next_features=torch.full((3, 2), t + 1.0).expand(2, 3, 2),
            )
        )
    batch = ring.sample(64).batch
    mask = torch.cat((batch.state >= 0, batch.state % 2 == 0, batch.state < 0), 1)
    for choices, shown in ((batch.actions, batch.state), (batch.next_actions, batch.state + 2)):
        # the mask of the last row's next choices is that of s + 1, which leads to s + 2
        assert torch.equal(choices.mask, mask)
        assert torch.equal(choices.features, shown.view(64, 1, 1).expand(64, 3, 2))


def test_candidates_that_only_close_and_candidates_that_never_change() -> None:
    ring = ring_of(num_actions=2, candidates=True)
    ring.write(plain_step(mask=torch.tensor([[True, False]]), next_mask=torch.tensor([[False, True]])))
    batch = ring.sample(1).batch
    assert (batch.actions.mask.tolist(), batch.next_actions.mask.tolist()) == ([[True, False]], [[False, True]])
    assert batch.actions.features is None
    features = torch.arange(12.0).view(4, 3)
    ring = ring_of(action_features=features)
    write_line(ring, [1], [GOES_ON])
    batch = ring.sample(5).batch
    assert torch.equal(torch.stack((batch.actions.features, batch.next_actions.features)), features.expand(2, 5, 4, 3))


def test_actions_beyond_a_byte() -> None:
    ring = ring_of(num_actions=70_000)
    ring.write(plain_step(action=torch.tensor([65_537])))
    assert ring.sample(2).batch.action.tolist() == [65_537] * 2


def test_every_row_of_the_window_is_drawn_equally_often() -> None:
    ring = ring_of(num_envs=3, slots=20, n_step=3)
    for _ in range(27):
        ring.write(plain_step(3))
    counts = torch.bincount(ring.sample(54_000).index, minlength=60)
    # 27 writes into 20 slots: slot 6 is the newest, 5 and 6 wait
    assert counts.nonzero().flatten().tolist() == [row for row in range(60) if row // 3 not in (5, 6)]
    assert chisquare(counts[counts > 0].numpy()).pvalue > 1e-3


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("writes", [2, 5, 21])
def test_a_saved_ring_goes_on_with_the_same_rows_and_draws(prioritized: bool, writes: int) -> None:
    first, second = (ring_of(prioritized=prioritized, n_step=2, seed=seed) for seed in (3, 4))
    write_line(first, [float(t) for t in range(writes)], [TRUNCATED * (t % 5 == 4) for t in range(writes)])
    write_line(second, [7.0] * 11, [TERMINATED] * 11)
    drawn = first.sample(32)
    first.update_priorities(drawn.index, drawn.batch.reward)
    state = copy.deepcopy(first.state_dict())
    second.load_state_dict(state)
    assert_close(second.state_dict(), state, rtol=0, atol=0)
    for t in range(writes, writes + 12):
        a, b = first.sample(32, beta=0.5), second.sample(32, beta=0.5)
        assert table(a) == table(b)
        assert_close((b.index, b.batch.weight), (a.index, a.batch.weight), rtol=0, atol=0)
        for ring in (first, second):
            ring.update_priorities(a.index, a.batch.reward.abs())
            write_line(ring, [1.0], [GOES_ON], first=t)


@pytest.mark.parametrize(
    ("settings", "more", "words"),
    [
        ({"slots": 9}, {}, r"8 slots of 1.*9 slots of 1"),
        ({"observation_size": 5}, {}, r"observation \[1\].*observation \[5\]"),
        ({}, {"follows": torch.zeros(16, dtype=torch.int32)}, "in the layout of an earlier release"),
    ],
)
def test_a_saved_ring_of_another_size_or_layout_is_refused(
    settings: dict[str, int], more: dict[str, torch.Tensor], words: str
) -> None:
    with pytest.raises(SimulationError, match=words):
        ring_of().load_state_dict(ring_of(**settings).state_dict() | more)


# A row: 2 observations of 4 bytes, reward and propensity 8, action and end 2: 18 bytes; 55 rows in 1000 bytes.
# A priority is 4 bytes more, and a 32nd of a sum of 8, rounded up: 23.
@pytest.mark.parametrize(
    ("settings", "slots", "step", "words"),
    [
        ({}, 55, 1, r"capacity: .*55 rows.*56 rows of 18 bytes"),
        ({"prioritized": True}, 43, 1, "44 rows of 23 bytes"),
        ({"num_envs": 2, "n_step": 5}, 5, -1, r"at least 10, .* got 8"),
    ],
)
def test_a_ring_that_does_not_fit_or_is_shorter_than_a_window_is_refused(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], slots: int, step: int, words: str
) -> None:
    monkeypatch.setattr(ring_module, "free_bytes", lambda device: 1000)
    assert ring_of(slots=slots, **settings).capacity == slots * settings.get("num_envs", 1)
    with pytest.raises(SimulationError, match=words):
        ring_of(slots=slots + step, **settings)


class NothingWaits(TorchDispatchMode):
    """Refuses what would make the host wait for the device, or whose shape depends on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in {
            "_local_scalar_dense",
            "nonzero",
            "masked_select",
            "_unique2",
            "bincount",
            "equal",
        }, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("prioritized", [False, True])
def test_writing_drawing_and_updating_never_wait_for_the_device(prioritized: bool) -> None:
    ring = ring_of(prioritized=prioritized, n_step=2, needs_next_action=True, boost=torch.ones(4))
    with NothingWaits():
        write_line(ring, [1.0] * 5, [GOES_ON] * 5)
        sample = ring.sample(16, beta=torch.ones(1))
        ring.update_priorities(sample.index, sample.batch.reward)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NothingWaits():
        _ = ring.rows


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("prioritized", [False, True])
def test_a_captured_graph_writes_and_draws(prioritized: bool) -> None:
    given = {"num_envs": 64, "slots": 20, "gamma": 1.0, "n_step": 3, "prioritized": prioritized}
    ring = ring_of(**given, seed=None, device="cuda")  # a graph captures the device's default generator by itself
    with torch.device("cuda"):
        time = torch.zeros(64, 1)
        step = plain_step(64, observation=time, action=torch.zeros(64, dtype=torch.uint8), reward=torch.ones(64))

    def iteration() -> Sample:
        ring.write(replace(step, next_observation=time + 1))
        sample = ring.sample(256, beta=0.5)
        ring.update_priorities(sample.index, sample.batch.reward)
        time.add_(1)
        return sample

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            iteration()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample = iteration()
    seen = set()
    for written in range(4, 60):
        graph.replay()
        batch = sample.batch
        # rows 0 … written − 1, of which the newest 20 are kept and the newest 2 wait
        assert max(0, written - 20) <= float(batch.state.min()) <= float(batch.state.max()) <= written - 3
        assert torch.equal(batch.next_state, batch.state + 3)
        assert batch.reward.unique().tolist() == [3]
        seen.add(tuple(sample.index.tolist()))
    assert len(seen) == 56  # every replay draws anew
    assert ring.rows == 20 * 64


@pytest.mark.parametrize("needs_next_action", [False, True])
@pytest.mark.parametrize("prioritized", [False, True])
def test_several_slots_at_once_are_the_same_as_one_after_the_other(prioritized: bool, needs_next_action: bool) -> None:
    given = {"num_envs": 2, "slots": 9, "n_step": 2, "prioritized": prioritized, "needs_next_action": needs_next_action}
    single, several = ring_of(**given), ring_of(**given)
    for rounds in (1, 4, single.most_rounds, 2, single.most_rounds):
        steps = [plain_step(2, reward=torch.rand(2), action=torch.tensor([t % 4, 3]),
                            terminated=torch.tensor([t % 3 == 2, False]), truncated=torch.tensor([False, t % 4 == 1]))
                 for t in range(rounds)]  # fmt: skip
        for step in steps:
            single.write(step)
        several.write(
            EnvStep(**{name: torch.cat([getattr(step, name) for step in steps]) for name in plain_columns(2)}), rounds
        )
        drawn = single.sample(16)
        for ring in (single, several):
            ring.update_priorities(drawn.index, drawn.batch.reward + 0.1)
        several.sample(16)  # the generators go on alike
        assert_close(several.state_dict(), single.state_dict(), rtol=0, atol=0)
