"""Learners of several types of agents: each is updated from its own rows alone."""

from copy import deepcopy

import pytest
import torch
from helpers.batches import make_batch
from torch import nn

from reagent_lite.algorithms.dqn import DQN, DQNSettings
from reagent_lite.algorithms.learners import Learners, learners_of
from reagent_lite.models.q_networks import NetworkSettings, build_q_network
from reagent_lite.models.value_heads import ScalarHead
from reagent_lite.training.loop import Optimization
from reagent_lite.types import SourceSpec

# values are biases, as states are 0, and start at 0: an error is a reward
ROWS = {
    "tagger": make_batch([[0.0]] * 2, [[0.0]] * 2, [0, 1], [2.0, -6.0]),
    "runner": make_batch([[0.0]] * 4, [[0.0]] * 4, [0, 0, 0, 1], [1.0, 1.0, 4.0, 0.0]),
}


def both() -> Learners:
    spec = SourceSpec(num_state_features=1, action_names=("a", "b"))
    network = build_q_network(spec, NetworkSettings(hidden=(), activations=()))
    for parameter in network.parameters():
        nn.init.zeros_(parameter)
    settings = DQNSettings(gamma=0.5, target_update_rate=0.1)
    return Learners({name: DQN(deepcopy(network), ScalarHead(), settings) for name in ROWS})


def biases(learners: Learners, network: str = "q_network") -> dict[str, list[float]]:
    """Biases of each type's network."""
    return {
        name: next(p.tolist() for p in getattr(learner, network).parameters() if p.dim() == 1)
        for name, learner in learners.by_type.items()
    }


def step(learners: Learners, rate: float, clip: float | None = None) -> dict[str, float]:
    trained = [[p for p in learner.parameters() if p.requires_grad] for learner in learners.by_type.values()]
    optimizer = torch.optim.SGD([p for each in trained for p in each], lr=rate)
    loss, metrics = learners(ROWS)
    loss.backward()
    Optimization(optimizer=optimizer, clip_norm=clip, clipped=trained).step()
    learners.after_step()
    return {"loss": loss.item()} | {name: value.item() for name, value in metrics.items()}


def test_each_type_moves_by_its_own_rows() -> None:
    learners = both()
    # mean squares of rewards: (4 + 36) / 2 and (1 + 1 + 16 + 0) / 4
    assert step(learners, 0.25) == {"loss": 24.5, "td_loss": 24.5, "tagger.td_loss": 20.0, "runner.td_loss": 4.5}
    # a quarter of 2 * mean of the rewards of an action's rows, over all rows of the type
    assert biases(learners) == {"tagger": [0.5, -1.5], "runner": [0.75, 0.0]}
    assert {name: errors.tolist() for name, errors in learners.row_errors.items()} == {
        "tagger": [2.0, 6.0], "runner": [1.0, 1.0, 4.0, 0.0],
    }  # fmt: skip
    targets = biases(learners, "target_network")  # soft update by a tenth
    assert targets == {"tagger": pytest.approx([0.05, -0.15]), "runner": pytest.approx([0.075, 0.0])}


def test_a_gradient_is_clipped_by_its_own_norm() -> None:
    learners = both()
    step(learners, 1.0, clip=3.0)
    # gradients -(2, -6) and -(3, 0): the first has a norm of sqrt(40), the second just 3 and stays
    assert biases(learners) == {
        "tagger": pytest.approx([6 / 40**0.5, -18 / 40**0.5], rel=1e-5), "runner": pytest.approx([3.0, 0.0], rel=1e-5),
    }  # fmt: skip


def test_names_may_be_those_of_methods_and_one_learner_is_its_own_type() -> None:
    learners = both()
    assert {name.split(".")[1] for name in learners.state_dict()} == {"type_tagger", "type_runner"}
    tagger = learners.by_type["tagger"]
    assert list(learners_of(Learners({"forward": tagger, "keys": tagger}))) == ["forward", "keys"]
    assert learners_of(tagger) == {"": tagger}
