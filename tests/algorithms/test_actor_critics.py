"""CRR and IQL: losses on rows worked out by hand, and their exact solutions on the gridworld."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from helpers.batches import StateValues, make_batch
from oracles import gridworld
from torch import Tensor

from reagent_lite.algorithms.actor_critic import ActorCritic
from reagent_lite.algorithms.crr import CRR
from reagent_lite.algorithms.iql import IQL
from reagent_lite.algorithms.policy_learner import TargetSettings
from reagent_lite.algorithms.registry import ALGORITHMS
from reagent_lite.config import DqnConfig, ParametricDqnConfig, check
from reagent_lite.config.algorithm import CRRConfig, IQLConfig
from reagent_lite.models.value_heads import ScalarHead
from reagent_lite.types import Actions, SourceSpec

SETTINGS = TargetSettings(gamma=0.5, target_update_rate=0.1)
THREE = math.log(3)  # logits (0, THREE) are probabilities 1/4 and 3/4


def crr(target: float = 1.0, boost: Tensor | None = None, **keys: Any) -> ActorCritic:
    critic, actor = (StateValues(columns=part) for part in (slice(2), slice(2, 4)))
    return aiming(target, CRR(critic, actor, ScalarHead(), SETTINGS, CRRConfig(**keys), reward_boost=boost))


def iql(target: float = 1.0, **keys: Any) -> ActorCritic:
    critic, actor, value = (StateValues(columns=part) for part in (slice(2), slice(2, 4), slice(4, 5)))
    return aiming(target, IQL(critic, actor, value, ScalarHead(), SETTINGS, IQLConfig(**keys)))


def aiming(scale: float, made: ActorCritic) -> ActorCritic:
    """The learner, with values of the target network that are so many times those of the critic."""
    made.target_network.scale.fill_(scale)  # type: ignore[operator, union-attr]
    return made


# Q(s, .), logits, V(s)
STATE = [[1.0, 2.0, 0.0, 0.0, 1.0], [1.0, 2.0, 0.0, THREE, 5.0], [1.0, 9.0, 0.0, 0.0, 0.0]]
ROWS = make_batch(
    STATE, [[3.0, 4.0, 0.0, THREE, 3.0], [4.0, 2.0, 0.0, 0.0, 2.0], [7.0, 7.0, 0.0, 0.0, 7.0]], [0, 1, 1],
    [1.0, 0.0, 5.0],
    bootstrap=torch.tensor([1.0, 1.0, 0.0]), steps=torch.tensor([1.0, 2.0, 1.0]),
)  # fmt: skip


def test_crr_on_three_rows() -> None:
    """Next values under the actor are 10 (3/4 + 3) and 10 * 3, so that targets are 19.75, 7.5 and 5."""
    made = crr(target=10.0)
    loss, metrics = made(ROWS)
    td = ((1 - 19.75) ** 2 + (2 - 7.5) ** 2 + (9 - 5) ** 2) / 3
    assert [metrics["td_loss"].item(), loss.item()] == pytest.approx([td, td + metrics["actor_loss"].item()])
    assert made.row_errors.tolist() == pytest.approx([18.75, 5.5, 4.0])


@pytest.mark.parametrize(
    ("keys", "weights"),
    [
        # advantages 1 - 1.5, 2 - 1.75 and 9 - 5, whose weight e^4 is cut to 20
        ({}, (math.exp(-0.5), math.exp(0.25), 20)),
        ({"beta": 0.5}, (math.exp(-1), math.exp(0.5), 20)),
        ({"weights": "binary"}, (0, 1, 1)),
    ],
)
def test_crr_imitates_what_is_better_than_the_policy(keys: dict[str, Any], weights: tuple[float, ...]) -> None:
    _, metrics = crr(target=10.0, **keys)(ROWS)
    assert metrics["actor_loss"].item() == pytest.approx(np.dot(weights, np.log([2, 4 / 3, 2])) / 3)


def test_iql_on_three_rows() -> None:
    """Targets are 1 + 3/2, 2/4 and 5; of the target network Q(s, a) is 2, 4 and 18, V(s) is 1, 5 and 0."""
    loss, metrics = iql(target=2.0, expectile=0.7, beta=0.5)(ROWS)
    td = ((1 - 2.5) ** 2 + (2 - 0.5) ** 2 + (9 - 5) ** 2) / 3
    value = (0.7 * 1 + 0.3 * 1 + 0.7 * 18**2) / 3
    actor = (math.exp(0.5) * math.log(2) + math.exp(-0.5) * math.log(4 / 3) + 100 * math.log(2)) / 3
    assert {**metrics, "loss": loss.detach()} == pytest.approx(
        {"td_loss": td, "actor_loss": actor, "value_loss": value, "loss": td + value + actor}
    )


@pytest.mark.parametrize("made", [crr(), iql()], ids=["crr", "iql"])
def test_choices_that_are_not_allowed_do_not_count(made: ActorCritic) -> None:
    """One choice is left: its probability is 1 and its advantage 0; nothing follows a row without a next choice."""
    first = Actions(mask=torch.tensor([[True, False]]))
    batch = make_batch([[2.0, 9.0, 0.0, 5.0, 2.0]], [[9.0] * 5], [0], [1.0], actions=first,
                       next_actions=Actions(mask=torch.tensor([[False, False]])))  # fmt: skip
    metrics = made(batch)[1]
    assert (metrics["actor_loss"].item(), metrics["td_loss"].item()) == (0, 1)  # (2 - 1)^2
    assert made(replace(batch, next_actions=first))[1]["td_loss"].item() == (2 - (1 + 9 / 2)) ** 2


@pytest.mark.parametrize(
    ("made", "target"),
    [(crr(boost=torch.tensor([0.0, 1.0])), [1 + 3.75 / 2, 1 + 3 / 4, 6]), (iql(), [2.5, 0.5, 5])],
    ids=["crr", "iql"],
)
def test_values_are_the_critics_and_scores_the_actors(made: ActorCritic, target: list[float]) -> None:
    evaluation = made.evaluate(ROWS)
    scores = made.scorer(torch.tensor(STATE), ROWS.actions.mask, None).tolist()
    assert {name: getattr(evaluation, name).tolist() for name in ("q", "scores", "choices", "td_loss", "target")} == {
        "q": [row[:2] for row in STATE], "scores": scores, "choices": [[True, True]] * 3,
        "td_loss": made(ROWS)[1]["td_loss"].item(), "target": pytest.approx(target),
    }  # fmt: skip
    assert scores == torch.tensor(STATE)[:, 2:4].tolist()
    assert made.constant_loss(3.0, 4.0) == 4


def test_nothing_but_the_actor_learns_from_its_loss_and_the_target_follows() -> None:
    made = crr()
    made(ROWS)[0].backward()
    # d of -w log pi by the scale of logits (0, THREE): w THREE (pi_1 - 1) in row 2 alone
    assert made.actor.scale.grad.item() == pytest.approx(math.exp(0.25) * THREE * -0.25 / 3)  # type: ignore[operator, union-attr]
    made.critic.scale.data.fill_(2.0)  # type: ignore[operator, union-attr]
    made.after_step()
    assert made.target_network.scale.item() == pytest.approx(1.1)  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(
    ("name", "section", "parametric", "solution"),
    [
        ("crr", {"beta": 1.0}, False, partial(gridworld.crr_solution, 1.0, 20.0)),
        ("iql", {"expectile": 0.7, "beta": 1.0}, True, partial(gridworld.iql_solution, 0.7, 1.0, 100.0)),
    ],
    ids=["crr", "iql"],
)
def test_policy_and_values_of_the_gridworld_are_exact(
    name: str,
    section: dict[str, Any],
    parametric: bool,
    solution: Callable[[], tuple[gridworld.Array, gridworld.Array]],
) -> None:
    policy, values = solution()
    learner = on_gridworld(name, {name: section}, parametric=parametric)
    allowed = torch.from_numpy(gridworld.allowed())
    rows = (torch.eye(25), allowed, torch.eye(100).view(25, 4, 100) if parametric else None)
    q = learner.head(learner.critic(*rows)).detach()
    chances = learner.scorer(*rows).detach().masked_fill(~allowed, -1e9).softmax(1)
    free = gridworld.allowed().any(1)
    np.testing.assert_allclose(chances[free].numpy(), policy[free], atol=0.01)
    np.testing.assert_allclose(q[allowed].numpy(), values[gridworld.allowed()], atol=0.02)


def on_gridworld(name: str, section: dict[str, Any], *, parametric: bool) -> ActorCritic:
    """A table learned from every transition of random actions, weighted by how likely it is."""
    tree = {
        "model_output_path": "out", "training_data_path": "log", "algorithm": name, **section,
        "rl": {"gamma": 0.9, "target_update_rate": 0.2}, "rainbow": {"dueling_architecture": False},
        "training": {"layers": [-1, -1], "activations": ["linear"], "l2_decay": 0.0},
        **({"norm_params": {"cols_to_norm": ["state_features", "action"]}} if parametric
           else {"actions": list(gridworld.ACTIONS)}),
    }  # fmt: skip
    config = check(ParametricDqnConfig if parametric else DqnConfig, tree)
    spec = SourceSpec(num_state_features=25, num_action_features=100 * parametric,
                      action_names=() if parametric else gridworld.ACTIONS)  # fmt: skip
    chances = gridworld.transition_matrix()
    state, action, after = (torch.from_numpy(part) for part in np.nonzero(chances))
    tables = torch.eye(100).view(25, 4, 100)
    now, following = (
        Actions(mask=torch.from_numpy(gridworld.allowed())[part], features=tables[part] if parametric else None)
        for part in (state, after)
    )
    weight = torch.from_numpy(chances[state, action, after] * gridworld.random_policy()[state, action]).float()
    over = after == gridworld.GOAL
    batch = make_batch(
        torch.eye(25)[state], torch.eye(25)[after], action, 10.0 * over,
        actions=now, next_actions=following, bootstrap=(~over).float(), weight=weight,
    )  # fmt: skip
    torch.manual_seed(0)
    learner = ALGORITHMS[name].build(config, spec, None)
    optimizer = torch.optim.Adam(learner.parameter_groups(config), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.994)
    for _ in range(700):
        optimizer.zero_grad()
        learner(batch)[0].backward()
        optimizer.step()
        learner.after_step()
        schedule.step()
    return learner
