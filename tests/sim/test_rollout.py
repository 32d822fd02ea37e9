"""Rollouts: what a policy saw, did and got reaches the ring; when environments step and how exploration falls."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import cartpole
from sim.conftest import environments
from torch import Tensor

from reagent_lite.errors import SimulationError
from reagent_lite.sim.env import ObservationPolicy, VectorEnv
from reagent_lite.sim.replay.ring import ReplayRing, ReplaySettings
from reagent_lite.sim.rollout import ONLY, Actor, Exploration, Rollout, RolloutSource, UpdateSchedule, regrouped
from reagent_lite.types import TransitionBatch

CPU = torch.device("cpu")
NUM = 16


def cartpoles(limit: int = 30, first: int = 0, stop: int = NUM) -> VectorEnv:
    return environments("cartpole_v1", stop - first, first_env=first, seed=3, time_limit=limit)


def ring(num: int = NUM, slots: int = 64, *, prioritized: bool = False) -> ReplayRing:
    settings = ReplaySettings(
        num_envs=num, observation_size=4, num_actions=2, slots=slots, gamma=0.9, prioritized=prioritized,
        seed=1,
    )  # fmt: skip
    return ReplayRing(settings, CPU)


def lean(observation: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
    """Pushes towards where the pole leans."""
    return torch.stack((-observation[:, 2], observation[:, 2]), 1)


def scaled(batch: TransitionBatch, scale: float) -> TransitionBatch:
    return replace(batch, weight=batch.weight * scale)


SCHEDULE = UpdateSchedule(num_envs=NUM, warmup=10, steps=2, updates=4, num_updates=80, beta=0.4)


def rollouts(env: VectorEnv, policy: ObservationPolicy, kept: ReplayRing) -> Rollout:
    return Rollout(env, {ONLY: Actor(policy=policy, epsilon=torch.ones(1), ring=kept)}, device=CPU)


def source(*, prioritized: bool = False, first: int = 0, stop: int = NUM, slots: int = 64) -> RolloutSource:
    kept = ring(stop - first, slots, prioritized=prioritized)
    exploration = Exploration(start=1.0, end=0.2, decay_steps=320)
    return RolloutSource(
        rollouts(cartpoles(first=first, stop=stop), lean, kept), exploration, SCHEDULE,
        rows=32, scale=0.5, transform=scaled,
    )  # fmt: skip


def test_stored_transitions_are_the_environments() -> None:
    kept = ring()
    rollout = rollouts(cartpoles(), lean, kept)
    rollout.explore(0.5)
    rollout.run(60)
    batch = kept.sample(2000).batch
    after, fell = cartpole.step(batch.state.double().numpy(), batch.action.numpy())
    torch.testing.assert_close(batch.next_state, torch.from_numpy(after).float(), atol=1e-5, rtol=1e-5)
    # the limit of 30 steps truncates: such rows bootstrap, those that fell do not
    assert torch.equal(batch.bootstrap == 0, torch.from_numpy(fell))
    assert 0 < fell.sum() < 2000
    greedy = batch.action == (batch.state[:, 2] > 0)
    assert torch.equal(batch.propensity, torch.where(greedy, 0.75, 0.25))  # 1 - 0.5 + 0.5 / 2
    assert greedy.double().mean() == pytest.approx(0.75, abs=0.06)  # 960 draws: 4 standard errors


def test_the_warm_up_draws_uniformly() -> None:
    kept = ring()
    rollout = rollouts(cartpoles(), lean, kept)
    rollout.explore(0.0)
    rollout.run(20, informed=False)
    assert torch.equal(kept.sample(500).batch.propensity, torch.full((500,), 0.5))


def test_finished_episodes_are_counted_once() -> None:
    rollout = rollouts(cartpoles(limit=7), lean, ring())
    rollout.explore(0.0)
    rollout.run(21)  # leaning never falls within 7 steps, so every environment ends three episodes of 7
    assert rollout.finished().tolist() == [3 * NUM, 21 * NUM, 21 * NUM]
    assert rollout.finished().tolist() == [0, 0, 0]


def test_an_infinite_reward_of_an_earlier_episode_is_named(counter: Callable[..., VectorEnv]) -> None:
    env = counter(num_envs=2, parameters={"goal": 1, "worth": 3e38})  # every step ends an episode, and pays 3e38
    player = Actor(policy=lambda *seen: torch.tensor([[1.0, 0, 0]] * 2), epsilon=torch.zeros(1))
    rollout = Rollout(env, {ONLY: player}, device=CPU)
    env.field("count")[0] = 2  # its first step pays 9e38
    rollout.run(2)
    rollout.check()  # the present returns are finite
    with pytest.raises(SimulationError, match="rewards of counter: expected finite"):
        rollout.finished()


def test_epsilon_falls_linearly_and_stays() -> None:
    exploration = Exploration(start=1.0, end=0.2, decay_steps=100)
    assert [exploration.epsilon(steps) for steps in (0, 50, 100, 1000)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_environments_step_as_the_schedule_says_and_weights_are_scaled() -> None:
    batches = source()
    steps = []
    for step in range(9):
        batches.collect(step)
        batch = next(batches)
        assert (len(batch), float(batch.weight.sum())) == (32, pytest.approx(0.5))
        steps.append(batches.env_steps)
    # 10 warm-up steps of 16, then 2 more of each before updates 0, 4 and 8
    assert steps == [192] * 4 + [224] * 4 + [256]


def test_priorities_follow_the_losses() -> None:
    batches = source(prioritized=True)
    batches.collect(0)
    for _ in range(40):  # until every row has been drawn
        batch = next(batches)
        # a large loss where the pole leans right
        batches.learned(torch.where(batch.state[:, 2] > 0, 100.0, 1e-8))
    assert float((next(batches).state[:, 2] > 0).double().mean()) > 0.9


def test_a_priority_is_the_error_to_the_power_alpha() -> None:
    batches = source(prioritized=True)
    batches.collect(0)
    next(batches)
    batches.learned(torch.full((32,), 9.0))
    assert float(batches.state_dict()["ring"]["priority"].max()) == pytest.approx(9**0.6)


def test_a_saved_source_goes_on_as_it_would_have() -> None:
    saved, loaded = source(), source()
    for step in range(5):
        saved.collect(step)
        next(saved)
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    for step in range(5, 15):
        saved.collect(step)
        loaded.collect(step)
        expected, batch = next(saved), next(loaded)
        assert torch.equal(expected.state, batch.state)
        assert torch.equal(expected.action, batch.action)


def test_masks_and_features_of_the_state_acted_in_are_stored() -> None:
    env = environments("recommend", NUM, seed=3, time_limit=50, parametric=True)
    spec = env.spec
    kept = ReplayRing(
        ReplaySettings(num_envs=NUM, observation_size=spec.observation_size, num_actions=spec.num_actions, slots=40,
                       gamma=0.9, candidates=True, action_feature_size=spec.action_feature_size, seed=1), CPU,
    )  # fmt: skip
    shown: dict[bytes, tuple[Tensor, Tensor]] = {}

    def policy(observation: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
        assert mask is not None
        assert features is not None
        for i in range(NUM):
            shown[observation[i].numpy().tobytes()] = (mask[i].clone(), features[i].clone())
        return features.sum(2)

    rollout = rollouts(env, policy, kept)
    rollout.explore(0.3)
    rollout.run(30)
    batch = kept.sample(200).batch
    assert batch.actions.features is not None
    for i in range(200):
        mask, features = shown[batch.state[i].numpy().tobytes()]
        assert torch.equal(batch.actions.mask[i], mask)
        assert torch.equal(batch.actions.features[i][mask], features[mask])
        assert mask[batch.action[i]]


def test_playing_without_where_transitions_led_is_the_same_play() -> None:
    whole, advanced, bare = cartpoles(), cartpoles(), cartpoles()
    for _ in range(40):
        for env in (whole, advanced, bare):
            env.act(None, epsilon=torch.ones(1))
        whole.step()
        advanced.advance()
        bare.advance(observe=False)
        for env in (advanced, bare):
            assert torch.equal(env.ended, whole.ended)
            assert torch.equal(env.field("x"), whole.field("x"))
        assert torch.equal(advanced.observation, whole.observation)
    assert [bool(env.next_observation.any()) for env in (whole, advanced, bare)] == [True, False, False]


# -- Several types of agents ------------------------------------------------------------------------------------------


def rollout_of(team: Path, first: int = 0, stop: int = 4) -> tuple[Rollout, dict[str, ReplayRing]]:
    """A leader that takes the largest step, and two followers that draw; see the oracle for the rewards."""
    env = environments(team, stop - first, parameters={"size": 3.0}, first_env=first, seed=3)
    numbers = torch.arange(env.num_rows).view(-1, 3)
    rows = {"leader": numbers[:, :1].flatten(), "follower": numbers[:, 1:].flatten()}
    rings = {
        name: ReplayRing(ReplaySettings(num_envs=len(own), observation_size=3, num_actions=3, slots=40, gamma=0.9,
                                        absences=True, prioritized=True, seed=1), CPU) for name, own in rows.items()
    }  # fmt: skip

    def far(observation: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
        assert len(observation) == stop - first
        return torch.tensor([0.0, 1.0, 2.0]).expand(len(observation), 3)

    policies: dict[str, ObservationPolicy | None] = {"leader": far, "follower": None}
    players = {
        name: Actor(policy=policies[name], epsilon=torch.zeros(1), rows=own, ring=rings[name])
        for name, own in rows.items()
    }
    return Rollout(env, players, device=CPU), rings


def test_each_type_acts_by_its_policy_and_fills_its_ring(team: Path) -> None:
    rollout, rings = rollout_of(team)
    rollout.run(30)
    leaders, followers = (rings[name].sample(400).batch for name in ("leader", "follower"))
    # the leader takes two steps of 3 and is at 6; what it is shown afterwards has no weight
    assert (leaders.action == 2).all()
    assert set(map(tuple, torch.stack((leaders.state[:, 0], leaders.reward, leaders.bootstrap), 1).tolist())) == {
        (0, 33, 1), (3, 66, 0)
    }  # fmt: skip
    assert leaders.weight.sum() == pytest.approx(1)
    # a follower's reward is its own count and ten times the leader's, 3 after the first step, then 6
    assert torch.equal(followers.propensity, torch.full((400,), 1 / 3))
    count = followers.next_state[:, 0]
    assert torch.equal(count, followers.state[:, 0] + 1 + followers.action)
    assert set((followers.reward - count).tolist()) == {30, 60}
    assert torch.equal(followers.bootstrap == 0, count >= 4)
    episodes, lengths, leader, follower = rollout.finished().tolist()
    assert leader == 99 * episodes  # 33 + 66
    assert episodes * 2 <= lengths <= episodes * 4
    assert follower > 93 * episodes  # two steps at least: 1 + 30 and 2 + 60


def test_rows_of_agents_that_have_left_have_no_weight_where_draws_are_uniform(team: Path) -> None:
    rollout, rings = rollout_of(team)
    ring = rings["leader"] = ReplayRing(
        ReplaySettings(num_envs=4, observation_size=3, num_actions=3, slots=40, gamma=0.9, absences=True, seed=1), CPU
    )
    rollout.rings["leader"] = ring
    rollout.run(30)
    batch = ring.sample(400).batch
    left = batch.state[:, 0] == 6
    assert 0 < left.sum() < 400
    assert not batch.weight[left].any()
    assert batch.weight[~left].tolist() == pytest.approx([1 / int((~left).sum())] * int((~left).sum()))


def test_environments_of_several_agents_are_dealt_out_anew(team: Path) -> None:
    def state(first: int, stop: int) -> dict[str, Any]:
        rollout, _ = rollout_of(team, first, stop)
        source = RolloutSource(rollout, Exploration(start=1.0, end=0.2, decay_steps=320), SCHEDULE, rows=8, scale=0.5,
                               transform=scaled)  # fmt: skip
        source.collect(0)
        assert {name: len(batch) for name, batch in next(source).items()} == {"leader": 8, "follower": 8}
        return source.state_dict()

    whole, parts = state(0, 4), [state(0, 1), state(1, 4)]
    for rank, (first, stop) in enumerate(((0, 3), (3, 4))):
        truth, got = (regrouped(states, rank, first, stop) for states in ([whole], parts))
        for name in ("ring.leader", "ring.follower"):
            for column, value in truth[name].items():
                assert column == "generator" or torch.equal(got[name][column], value), column
        for name, value in truth["rollout"]["env"].items():
            assert torch.equal(got["rollout"]["env"][name], value), name


# -- Dealt out to another number of processes -------------------------------------------------------------------------


def part(rank: int, world: int) -> tuple[int, int]:
    return NUM * rank // world, NUM * (rank + 1) // world


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """Everything but the draws, which are each rank's own."""
    rollout = state["rollout"]
    ring = {name: value for name, value in state["ring"].items() if name != "generator"}
    return {**ring, **rollout["env"], "finished": rollout["finished"]}


def test_two_processes_become_one_and_three_and_go_on() -> None:
    whole = source(prioritized=True, slots=11)
    halves = [source(first=first, stop=stop, prioritized=True, slots=11) for first, stop in (part(0, 2), part(1, 2))]
    for each in (whole, *halves):
        for step in range(13):  # more than the ring keeps
            each.collect(step)
    states = [half.state_dict() for half in halves]
    for world in (1, 3):
        for rank in range(world):
            truth = tensors(regrouped([whole.state_dict()], rank, *part(rank, world)))
            regroup = regrouped(states, rank, *part(rank, world))
            assert tensors(regroup).keys() == truth.keys()
            for name, value in truth.items():
                assert torch.equal(tensors(regroup)[name], value), name
            assert ("generator" in regroup["ring"]) == (rank < 2)  # those that there are
    alone = source(prioritized=True, slots=11)
    alone.load_state_dict(regrouped(states, 0, 0, NUM))
    for each in (alone, *halves):
        each.collect(13 + 3)  # steps before updates 0, 4, 8, 12 and 16
    env = alone.state_dict()["rollout"]["env"]
    parts = [half.state_dict()["rollout"]["env"] for half in halves]
    assert torch.equal(env["observation"], torch.cat([each["observation"] for each in parts]))
    assert torch.equal(env["state"], torch.cat([each["state"] for each in parts], 1))
