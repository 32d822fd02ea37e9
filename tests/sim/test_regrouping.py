"""Environments and replay dealt out to another number of processes: as if they had always been there."""

from typing import Any

import torch
from torch import Tensor

from reagent_lite.data.replay.ring import ReplayRing, ReplaySettings
from reagent_lite.sim.backend import open_backend
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.rollout import Exploration, Rollout, RolloutSource, UpdateSchedule, regrouped
from reagent_lite.types import TransitionBatch

CPU = torch.device("cpu")
NUM_ENVS, SLOTS = 6, 5


def source(first: int, stop: int, *, prioritized: bool) -> tuple[RolloutSource, ReplayRing]:
    backend = open_backend("cartpole_v0", backend="cpu", device=CPU, parameters={}, math="exact")
    env = VectorEnv(backend, num_envs=stop - first, first_env=first, seed=3)
    spec = backend.spec
    ring = ReplayRing(
        ReplaySettings(num_envs=stop - first, observation_size=spec.observation_size, num_actions=spec.num_actions,
                       slots=SLOTS, gamma=0.9, prioritized=prioritized, seed=first),
        CPU,
    )  # fmt: skip
    rollout = Rollout(env, lambda observation, mask, features: observation[:, :2], ring, device=CPU)
    schedule = UpdateSchedule(num_envs=NUM_ENVS, warmup=2, steps=1, updates=1, num_updates=30, beta=0.4)
    exploration = Exploration(start=1.0, end=0.1, decay_steps=60)

    def raw(batch: TransitionBatch, scale: float) -> TransitionBatch:
        return batch

    return RolloutSource(rollout, ring, exploration, schedule, rows=4, scale=1.0, transform=raw, device=CPU), ring


def part(rank: int, world: int) -> tuple[int, int]:
    return NUM_ENVS * rank // world, NUM_ENVS * (rank + 1) // world


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """Everything but the draws, which are each rank's own."""
    rollout = state["rollout"]
    ring = {name: value for name, value in state["ring"].items() if name != "generator"}
    return {**ring, **rollout["env"], "finished": rollout["finished"]}


def test_two_processes_become_one_and_three() -> None:
    whole, _ = source(0, NUM_ENVS, prioritized=True)
    halves = [source(*part(rank, 2), prioritized=True)[0] for rank in range(2)]
    for step in range(7):  # more than the ring keeps
        for each in (whole, *halves):
            each.collect(step)
    states = [half.state_dict() for half in halves]
    for world in (1, 3):
        made = [regrouped(states, rank, *part(rank, world)) for rank in range(world)]
        expected = [regrouped([whole.state_dict()], rank, *part(rank, world)) for rank in range(world)]
        for mine, truth in zip(made, expected, strict=True):
            assert tensors(mine).keys() == tensors(truth).keys()
            for name, value in tensors(truth).items():
                assert torch.equal(tensors(mine)[name], value), name
    assert [("generator" in regrouped(states, rank, *part(rank, 3))["ring"]) for rank in range(3)] == [
        True,
        True,
        False,
    ]


def test_what_was_dealt_out_goes_on() -> None:
    halves = [source(*part(rank, 2), prioritized=False)[0] for rank in range(2)]
    for step in range(7):
        for half in halves:
            half.collect(step)
    alone, ring = source(0, NUM_ENVS, prioritized=False)
    alone.load_state_dict(regrouped([half.state_dict() for half in halves], 0, 0, NUM_ENVS))
    assert ring.rows == SLOTS * NUM_ENVS
    for each in (alone, *halves):
        each.collect(7)
    env = alone.state_dict()["rollout"]["env"]
    parts = [half.state_dict()["rollout"]["env"] for half in halves]
    assert torch.equal(env["observation"], torch.cat([each["observation"] for each in parts]))
    assert torch.equal(env["state"], torch.cat([each["state"] for each in parts], 1))
