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
from sim.replay.rings import ring_of
from torch import Tensor
from torch.testing import assert_close

from reagent_lite.errors import SimulationError
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.experience import ONLY, Actor, Exploration, Rollout, RolloutSource, UpdateSchedule, regroup_source
from reagent_lite.sim.replay.ring import ReplayRing

CPU = torch.device("cpu")
NUM = 16


def cartpoles(limit: int = 30, first: int = 0, stop: int = NUM) -> VectorEnv:
    return environments("cartpole_v1", stop - first, first_env=first, seed=3, time_limit=limit)


def ring(num: int = NUM, **settings: Any) -> ReplayRing:
    return ring_of(**{"num_envs": num, "observation_size": 4, "num_actions": 2, "slots": 64, "gamma": 0.9} | settings)


def rollout_of(env: VectorEnv, kept: ReplayRing) -> Rollout:
    """Cartpoles are pushed towards where they lean."""
    actor = Actor(policy=lambda seen, *_: seen[:, 2:3] * torch.tensor([-1, 1]), epsilon=torch.ones(1), ring=kept)
    return Rollout(env, {ONLY: actor}, device=CPU)


def source_of(rollout: Rollout, rows: int = 32) -> RolloutSource:
    return RolloutSource(rollout, Exploration(start=1.0, end=0.2, decay_steps=320),
                         UpdateSchedule(num_envs=NUM, warmup=10, steps=2, updates=4, num_updates=80, beta=0.4),
                         rows=rows, scale=0.5,
                         transform=lambda batch, scale: replace(batch, weight=batch.weight * scale))  # fmt: skip


def source(first: int = 0, stop: int = NUM, **settings: Any) -> RolloutSource:
    return source_of(rollout_of(cartpoles(first=first, stop=stop), ring(stop - first, **settings)))


def drawn(batches: RolloutSource, step: int) -> Any:
    batches.collect(step)
    return next(batches)


def played(steps: int, epsilon: float, limit: int = 30, *, follow_policy: bool = True) -> Rollout:
    rollout = rollout_of(cartpoles(limit), ring())
    rollout.explore(epsilon)
    rollout.run(steps, follow_policy=follow_policy)
    return rollout


def test_stored_transitions_are_the_environments() -> None:
    batch = played(60, 0.5).rings[ONLY].sample(2000).batch
    after, fell = cartpole.step(batch.state.double().numpy(), batch.action.numpy())
    assert_close(batch.next_state, torch.from_numpy(after).float(), atol=1e-5, rtol=1e-5)
    # the limit of 30 steps truncates: such rows bootstrap, those that fell do not
    assert torch.equal(batch.bootstrap == 0, torch.from_numpy(fell))
    assert 0 < fell.sum() < 2000
    greedy = batch.action == (batch.state[:, 2] > 0)
    assert torch.equal(batch.propensity, torch.where(greedy, 0.75, 0.25))  # 1 - 0.5 + 0.5 / 2
    assert greedy.double().mean() == pytest.approx(0.75, abs=0.06)  # 960 draws: 4 standard errors


def test_the_warm_up_draws_uniformly() -> None:
    assert (played(20, 0.0, follow_policy=False).rings[ONLY].sample(500).batch.propensity == 0.5).all()


def test_finished_episodes_are_counted_once() -> None:
    rollout = played(21, 0.0, limit=7)  # leaning never falls within 7 steps, so every environment ends three episodes
    assert [rollout.take_finished().tolist() for _ in range(2)] == [[3 * NUM, 21 * NUM, 21 * NUM], [0, 0, 0]]


def test_an_infinite_reward_of_an_earlier_episode_is_named(counter: Callable[..., VectorEnv]) -> None:
    env = counter(num_envs=2, parameters={"goal": 1, "worth": 3e38})  # every step ends an episode, and pays 3e38
    rollout = Rollout(
        env, {ONLY: Actor(policy=lambda *seen: torch.tensor([[1.0, 0, 0]] * 2), epsilon=torch.zeros(1))}, device=CPU
    )
    env.field("count")[0] = 2  # its first step pays 9e38
    rollout.run(2)
    rollout.check()  # the present returns are finite
    with pytest.raises(SimulationError, match="rewards of counter: expected finite"):
        rollout.take_finished()


def test_epsilon_falls_linearly_and_stays() -> None:
    exploration = Exploration(start=1.0, end=0.2, decay_steps=100)
    assert [exploration.epsilon(steps) for steps in (0, 50, 100, 1000)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


def test_environments_step_as_the_schedule_says_and_weights_are_scaled() -> None:
    batches = source()
    # 10 warm-up steps of 16, then 2 more of each before updates 0, 4 and 8
    for step, env_steps in enumerate([192] * 4 + [224] * 4 + [256]):
        weight = drawn(batches, step).weight
        assert (len(weight), float(weight.sum()), batches.env_steps) == (32, pytest.approx(0.5), env_steps)


def test_a_priority_is_the_error_to_the_power_alpha_and_decides_what_is_drawn() -> None:
    batches = source(prioritized=True)
    drawn(batches, 0)
    batches.record_errors(torch.full((32,), 9.0))
    assert float(batches.state_dict()["ring"]["priority"].max()) == pytest.approx(9**0.6)
    for _ in range(60):  # until every row has been drawn
        # a large loss where the pole leans right
        batches.record_errors(torch.where(next(batches).state[:, 2] > 0, 100.0, 1e-8))
    assert float((next(batches).state[:, 2] > 0).double().mean()) > 0.9


def test_a_saved_source_goes_on_as_it_would_have() -> None:
    saved, loaded = source(), source()
    for step in range(5):
        drawn(saved, step)
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    for step in range(5, 15):
        expected, batch = (drawn(each, step) for each in (saved, loaded))
        assert_close((batch.state, batch.action), (expected.state, expected.action), rtol=0, atol=0)


def test_masks_and_features_of_the_state_acted_in_are_stored() -> None:
    env = environments("recommend", NUM, seed=3, time_limit=50, parametric=True)
    kept = ring(observation_size=env.spec.observation_size, num_actions=env.spec.num_actions, candidates=True,
                action_feature_size=env.spec.action_feature_size)  # fmt: skip
    shown: dict[bytes, tuple[Tensor, Tensor]] = {}

    def policy(observation: Tensor, mask: Tensor, features: Tensor) -> Tensor:
        shown.update(
            zip(
                [state.numpy().tobytes() for state in observation],
                zip(mask.clone(), features.clone(), strict=True),
                strict=True,
            )
        )
        return features.sum(2)

    Rollout(env, {ONLY: Actor(policy=policy, epsilon=torch.tensor([0.3]), ring=kept)}, device=CPU).run(30)
    batch = kept.sample(200).batch
    masks, features = zip(*(shown[state.numpy().tobytes()] for state in batch.state), strict=True)
    mask = torch.stack(masks)
    assert torch.equal(batch.actions.mask, mask)
    assert torch.equal(batch.actions.features[mask], torch.stack(features)[mask])
    assert mask[torch.arange(200), batch.action].all()


def test_playing_without_where_transitions_led_is_the_same_play() -> None:
    whole, advanced, bare = envs = [cartpoles() for _ in range(3)]
    for _ in range(40):
        for env in envs:
            env.act(None, epsilon=torch.ones(1))
        whole.step()
        advanced.advance()
        bare.advance(observe=False)
        states = [(env.ended, env.field("x")) for env in envs]
        assert_close(states, states[:1] * 3, rtol=0, atol=0)
        assert torch.equal(advanced.observation, whole.observation)
    assert [bool(env.next_observation.any()) for env in envs] == [True, False, False]


# -- Several types of agents ------------------------------------------------------------------------------------------


def team_rollout(team: Path, first: int = 0, stop: int = 4, *, prioritized: bool = True) -> Rollout:
    """A leader that takes the largest step, and two followers that draw; see the oracle for the rewards."""
    env = environments(team, stop - first, parameters={"size": 3.0}, first_env=first, seed=3)
    numbers = torch.arange(env.num_rows).view(-1, 3)

    def far(observation: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
        assert len(observation) == stop - first
        return torch.tensor([0.0, 1.0, 2.0]).expand(len(observation), 3)

    actors = {
        name: Actor(policy=policy, epsilon=torch.zeros(1), rows=rows.flatten(),
                    ring=ring(rows.numel(), observation_size=3, num_actions=3, slots=40, absences=True,
                              prioritized=prioritized))
        for name, policy, rows in (("leader", far, numbers[:, :1]), ("follower", None, numbers[:, 1:]))
    }  # fmt: skip
    return Rollout(env, actors, device=CPU)


def test_each_type_acts_by_its_policy_and_fills_its_ring(team: Path) -> None:
    rollout = team_rollout(team)
    rollout.run(30)
    leaders, followers = (rollout.rings[name].sample(400).batch for name in ("leader", "follower"))
    # the leader takes two steps of 3 and is at 6; what it is shown afterwards has no weight
    assert (leaders.action == 2).all()
    assert set(map(tuple, torch.stack((leaders.state[:, 0], leaders.reward, leaders.bootstrap), 1).tolist())) == {
        (0, 33, 1), (3, 66, 0)
    }  # fmt: skip
    assert leaders.weight.sum() == pytest.approx(1)
    # a follower's reward is its own count and ten times the leader's, 3 after the first step, then 6
    assert (followers.propensity == torch.tensor(1 / 3)).all()
    count = followers.next_state[:, 0]
    assert torch.equal(count, followers.state[:, 0] + 1 + followers.action)
    assert set((followers.reward - count).tolist()) == {30, 60}
    assert torch.equal(followers.bootstrap == 0, count >= 4)
    episodes, lengths, leader, follower = rollout.take_finished().tolist()
    assert leader == 99 * episodes  # 33 + 66
    assert episodes * 2 <= lengths <= episodes * 4
    # two steps at least: 1 + 30 and 2 + 60; four at most: 30 + 3 * 60, and counts up to 1, 2, 3 and 6
    assert 93 * episodes < follower <= 222 * episodes


def test_rows_of_agents_that_have_left_have_no_weight_where_draws_are_uniform(team: Path) -> None:
    rollout = team_rollout(team, prioritized=False)
    rollout.run(30)
    batch = rollout.rings["leader"].sample(400).batch
    present = batch.state[:, 0] != 6
    assert 0 < present.sum() < 400
    assert_close(batch.weight, present / present.sum())


# -- Dealt out to another number of processes -------------------------------------------------------------------------


def comparable(state: dict[str, Any]) -> dict[str, Any]:
    """Everything but the draws, which are each rank's own."""
    return {**state, **{key: {**part, "generator": None} for key, part in state.items() if key.startswith("ring")}}


def require_regrouped(states: list[dict[str, Any]], whole: dict[str, Any], *ranges: tuple[int, int]) -> None:
    """Asserts that ranks with these environments get of several processes' states what they get of one's."""
    for rank, (first, stop) in enumerate(ranges):
        got, truth = (regroup_source(saved, rank, first, stop) for saved in (states, [whole]))
        assert {key: "generator" in part for key, part in got.items() if key.startswith("ring")} == dict.fromkeys(
            (key for key in truth if key.startswith("ring")), rank < len(states)
        )
        assert_close(comparable(got), comparable(truth), rtol=0, atol=0)


def test_environments_of_several_agents_are_dealt_out_anew(team: Path) -> None:
    def state(first: int, stop: int) -> dict[str, Any]:
        batches = source_of(team_rollout(team, first, stop), rows=8)
        assert {name: len(batch) for name, batch in drawn(batches, 0).items()} == {"leader": 8, "follower": 8}
        return batches.state_dict()

    require_regrouped([state(0, 1), state(1, 4)], state(0, 4), (0, 3), (3, 4))


def test_two_processes_become_one_and_three_and_go_on() -> None:
    whole, *halves = (source(first, stop, prioritized=True, slots=11) for first, stop in ((0, 16), (0, 8), (8, 16)))
    for each in (whole, *halves):
        for step in range(13):  # more than the ring keeps
            each.collect(step)
    states = [half.state_dict() for half in halves]
    require_regrouped(states, whole.state_dict(), (0, 16))
    require_regrouped(states, whole.state_dict(), (0, 5), (5, 10), (10, 16))
    alone = source(prioritized=True, slots=11)
    alone.load_state_dict(regroup_source(states, 0, 0, NUM))
    for each in (alone, *halves):
        each.collect(13 + 3)  # steps before updates 0, 4, 8, 12 and 16
    env, *parts = (each.state_dict()["rollout"]["env"] for each in (alone, *halves))
    for name, axis in (("observation", 0), ("state", 1)):
        assert torch.equal(env[name], torch.cat([part[name] for part in parts], axis))
