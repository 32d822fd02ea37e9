"""Rollouts: what a policy saw, did and got reaches the ring; when environments step and how exploration falls."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracles import cartpole
from torch import Tensor

from reagent_lite.sim.backend import open_backend
from reagent_lite.sim.env import Policy, VectorEnv
from reagent_lite.sim.replay.ring import ReplayRing, ReplaySettings
from reagent_lite.sim.rollout import ONLY, Exploration, Player, Rollout, RolloutSource, UpdateSchedule, regrouped
from reagent_lite.types import TransitionBatch

CPU = torch.device("cpu")
NUM = 16


def environments(limit: int = 30, name: str = "cartpole_v1", first: int = 0, stop: int = NUM) -> VectorEnv:
    backend = open_backend(name, backend="cpu", device=CPU, parameters={}, math="exact")
    return VectorEnv(
        backend, num_envs=stop - first, first_env=first, seed=3, time_limit=limit, parametric=name == "recommend"
    )


def ring(num: int = NUM, slots: int = 64, *, prioritized: bool = False) -> ReplayRing:
    settings = ReplaySettings(
        num_envs=num, observation_size=4, num_actions=2, slots=slots, gamma=0.9, prioritized=prioritized, seed=1
    )
    return ReplayRing(settings, CPU)


def lean(observation: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
    """Pushes towards where the pole leans."""
    return torch.stack((-observation[:, 2], observation[:, 2]), 1)


def scaled(batch: TransitionBatch, scale: float) -> TransitionBatch:
    return replace(batch, weight=batch.weight * scale)


SCHEDULE = UpdateSchedule(num_envs=NUM, warmup=10, steps=2, updates=4, num_updates=80, beta=0.4)


def rollouts(env: VectorEnv, policy: Policy, kept: ReplayRing) -> Rollout:
    return Rollout(env, {ONLY: Player(policy=policy, epsilon=torch.ones(1), ring=kept)}, device=CPU)


def source(*, prioritized: bool = False, first: int = 0, stop: int = NUM, slots: int = 64) -> RolloutSource:
    kept = ring(stop - first, slots, prioritized=prioritized)
    exploration = Exploration(start=1.0, end=0.2, decay_steps=320)
    return RolloutSource(
        rollouts(environments(first=first, stop=stop), lean, kept), exploration, SCHEDULE,
        rows=32, scale=0.5, transform=scaled,
    )  # fmt: skip


def test_stored_transitions_are_the_environments() -> None:
    kept = ring()
    rollout = rollouts(environments(), lean, kept)
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
    rollout = rollouts(environments(), lean, kept)
    rollout.explore(0.0)
    rollout.run(20, informed=False)
    assert torch.equal(kept.sample(500).batch.propensity, torch.full((500,), 0.5))


def test_finished_episodes_are_counted_once() -> None:
    rollout = rollouts(environments(limit=7), lean, ring())
    rollout.explore(0.0)
    rollout.run(21)  # leaning never falls within 7 steps, so every environment ends three episodes of 7
    assert rollout.finished().tolist() == [3 * NUM, 21 * NUM, 21 * NUM]
    assert rollout.finished().tolist() == [0, 0, 0]


def test_epsilon_falls_linearly_and_stays() -> None:
    exploration = Exploration(start=1.0, end=0.2, decay_steps=100)
    assert [exploration.epsilon(steps) for steps in (0, 50, 100, 1000)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_environments_step_as_the_schedule_says() -> None:
    batches = source()
    steps = []
    for step in range(9):
        batches.collect(step)
        assert len(next(batches)) == 32
        steps.append(batches.env_steps)
    # 10 warm-up steps of 16, then 2 more of each before updates 0, 4 and 8
    assert steps == [192] * 4 + [224] * 4 + [256]


def test_weights_are_scaled_shares() -> None:
    batches = source()
    batches.collect(0)
    assert float(next(batches).weight.sum()) == pytest.approx(0.5)


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
    one = source()
    for step in range(5):
        one.collect(step)
        next(one)
    other = source()
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for step in range(5, 15):
        one.collect(step)
        other.collect(step)
        expected, got = next(one), next(other)
        assert torch.equal(expected.state, got.state)
        assert torch.equal(expected.action, got.action)


def test_masks_and_features_of_the_state_acted_in_are_stored() -> None:
    env = environments(limit=50, name="recommend")
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
    whole, lean_one, bare = environments(), environments(), environments()
    for env in (whole, lean_one, bare):
        env.reset()
    for _ in range(40):
        for env in (whole, lean_one, bare):
            env.act(None, epsilon=torch.ones(1))
        whole.step()
        lean_one.advance()
        bare.advance(observe=False)
        for env in (lean_one, bare):
            assert torch.equal(env.ended, whole.ended)
            assert torch.equal(env.field("x"), whole.field("x"))
        assert torch.equal(lean_one.observation, whole.observation)
    assert whole.next_observation.any()
    assert not lean_one.next_observation.any()
    assert not bare.next_observation.any()


# -- Dealt out to another number of processes -------------------------------------------------------------------------


def part(rank: int, world: int) -> tuple[int, int]:
    return NUM * rank // world, NUM * (rank + 1) // world


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """Everything but the draws, which are each rank's own."""
    rollout = state["rollout"]
    ring = {name: value for name, value in state["ring"].items() if name != "generator"}
    return {**ring, **rollout["env"], "finished": rollout["finished"]}


def halves(prioritized: bool) -> list[RolloutSource]:
    found = [
        source(first=first, stop=stop, prioritized=prioritized, slots=11) for first, stop in (part(0, 2), part(1, 2))
    ]
    for half in found:
        for step in range(13):  # more than the ring keeps
            half.collect(step)
    return found


def test_two_processes_become_one_and_three() -> None:
    whole = source(prioritized=True, slots=11)
    for step in range(13):
        whole.collect(step)
    states = [half.state_dict() for half in halves(prioritized=True)]
    for world in (1, 3):
        for rank in range(world):
            truth = tensors(regrouped([whole.state_dict()], rank, *part(rank, world)))
            got = regrouped(states, rank, *part(rank, world))
            assert tensors(got).keys() == truth.keys()
            for name, value in truth.items():
                assert torch.equal(tensors(got)[name], value), name
            assert ("generator" in got["ring"]) == (rank < 2)  # those that there are


def test_what_was_dealt_out_goes_on() -> None:
    both, alone = halves(prioritized=False), source(slots=11)
    alone.load_state_dict(regrouped([half.state_dict() for half in both], 0, 0, NUM))
    for each in (alone, *both):
        each.collect(13 + 3)  # steps before updates 0, 4, 8, 12 and 16
    env = alone.state_dict()["rollout"]["env"]
    parts = [half.state_dict()["rollout"]["env"] for half in both]
    assert torch.equal(env["observation"], torch.cat([each["observation"] for each in parts]))
    assert torch.equal(env["state"], torch.cat([each["state"] for each in parts], 1))
