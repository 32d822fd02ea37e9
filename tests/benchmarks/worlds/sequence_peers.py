"""Policies that d3rlpy learns from a log of episodes: python -m tests.benchmarks.worlds.sequence_peers log result peer

Runs in the root of the project, in an environment that has d3rlpy and Gymnasium, and none of this project. The log has
observation [N, F], action, reward, terminal and last [N], actions, seed, and either `env`, the id of an environment, or
state [S, F] and allowed [S, A] of a world of few states. The result is `value` of 100 played episodes, or `choice` [S]:
where a peer's choice is not allowed, the action of those allowed that it values most.

Algorithms and networks are as d3rlpy has them by default, 10 000 steps; categories are one-hot, numbers as they are.
"""

import sys

import d3rlpy
import numpy as np
import torch

from tests.benchmarks.worlds.playing import play

STEPS, EPISODES = 10_000, 100
PEERS = {
    "double_dqn": d3rlpy.algos.DoubleDQNConfig,
    "cql": d3rlpy.algos.DiscreteCQLConfig,
    "bcq": d3rlpy.algos.DiscreteBCQConfig,
}


def learned(peer: str, log: dict[str, np.ndarray]) -> d3rlpy.algos.QLearningAlgoBase:
    cut = log["last"] & ~log["terminal"]
    data = d3rlpy.dataset.MDPDataset(
        log["observation"].astype(np.float32), log["action"], log["reward"].astype(np.float32),
        log["terminal"].astype(np.float32), cut.astype(np.float32), action_size=int(log["actions"]),
        action_space=d3rlpy.constants.ActionSpace.DISCRETE,
    )  # fmt: skip
    learner = PEERS[peer]().create()
    learner.fit(
        data, n_steps=STEPS, n_steps_per_epoch=STEPS, show_progress=False, save_interval=STEPS + 1,
        logger_adapter=d3rlpy.logging.NoopAdapterFactory(),
    )  # fmt: skip
    return learner


def choices(learner: d3rlpy.algos.QLearningAlgoBase, state: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    states, actions = allowed.shape
    choice = learner.predict(state)
    each = [learner.predict_value(state, np.full(states, action)) for action in range(actions)]
    best = np.where(allowed, np.stack(each, 1), -np.inf).argmax(1)
    return np.where(allowed[np.arange(states), choice], choice, best)


if __name__ == "__main__":
    path, result, peer = sys.argv[1:]
    with np.load(path) as arrays:
        log = dict(arrays)
    torch.set_num_threads(1)
    d3rlpy.seed(int(log["seed"]))
    learner = learned(peer, log)
    if "env" in log:
        np.savez(result, value=play(str(log["env"]), lambda seen: learner.predict(seen.astype(np.float32)), EPISODES))
    else:
        np.savez(result, choice=choices(learner, log["state"].astype(np.float32), log["allowed"]))
