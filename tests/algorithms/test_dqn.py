"""The learner's loss on rows worked out by hand, and its invariances."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.batches import StateValues, make_batch, random_batch
from helpers.bundles import Habit
from torch import Tensor

from reagent_lite.algorithms.bcq import BCQActionFilter, LoggingPolicy
from reagent_lite.algorithms.dqn import DQN, DQNSettings
from reagent_lite.data.sampling.mixture import join_batches
from reagent_lite.models.q_networks import NetworkSettings, build_q_network
from reagent_lite.models.value_heads import CategoricalHead, QuantileHead, ScalarHead, ScaledHead
from reagent_lite.types import Actions, SourceSpec

SPEC = SourceSpec(num_state_features=3, action_names=("a", "b"))
SETTINGS = DQNSettings(gamma=0.5, target_update_rate=0.1)


def learner(*, target_scale: float = 1.0, reward_boost: Tensor | None = None, **settings: Any) -> DQN:
    made = DQN(StateValues(), ScalarHead(), replace(SETTINGS, **settings), reward_boost=reward_boost)
    made.target_network = StateValues(target_scale).requires_grad_(False)
    return made


ROWS = make_batch(
    [[1.0, 2.0]] * 3, [[3.0, 4.0], [4.0, 2.0], [9.0, 9.0]], [0, 1, 1], [1.0, 0.0, 5.0],
    bootstrap=torch.tensor([1.0, 1.0, 0.0]), steps=torch.tensor([1.0, 2.0, 1.0]),
)  # fmt: skip


def test_double_q_loss_on_three_rows() -> None:
    # targets: 1 + 1/2 * 4 * 10 = 21; 0 + 1/4 * 40 = 10; 5 + 0 = 5. Errors 1 - 21, 2 - 10, 2 - 5
    loss, metrics = learner(target_scale=10.0)(ROWS)
    assert [loss.item(), metrics["td_loss"].item()] == pytest.approx([(400 + 64 + 9) / 3] * 2)


@pytest.mark.parametrize(
    ("keys", "other", "loss"),
    [
        # the target network negates: its best of (-3, -4) is -3, the online network's choice is worth -4
        ({"double": True, "target_scale": -1.0}, {}, 2**2),
        ({"double": False, "target_scale": -1.0}, {}, 1.5**2),
        # the logged next action
        ({"maxq": False}, {"next_action": torch.tensor([0, 1])}, (1.5**2 + 2**2) / 2),
        # the mask restricts the next action, and empty means zero
        ({}, {"next_actions": Actions(mask=torch.tensor([[True, False], [False, False]]))}, 1.5**2 / 2),
        # targets of 2 are clipped
        ({"value_bounds": (-1.0, 1.8)}, {}, 1.8**2),
    ],
    ids=["double", "single", "sarsa", "mask", "bounds"],
)
def test_the_next_action(keys: dict[str, Any], other: dict[str, Any], loss: float) -> None:
    batch = make_batch([[0.0, 0.0]] * 2, [[3.0, 4.0]] * 2, [0, 0], [0.0, 0.0], **other)
    assert learner(**keys)(batch)[0].item() == pytest.approx(loss)


def test_bcq_keeps_only_actions_the_imitator_finds_likely() -> None:
    batch = make_batch([[0.0, 0.0]], [[3.0, 4.0]], [0], [0.0])
    settings = replace(SETTINGS, drop_threshold=0.1)
    restricted = DQN(StateValues(), ScalarHead(), settings, behavior_cloning=Habit([0.95, 0.05]))
    loss, metrics = restricted(batch)
    # action 1 is dropped: 1/2 * 3
    assert {**metrics, "loss": loss.detach()} == pytest.approx(
        {"td_loss": 2.25, "imitation_loss": -math.log(0.95), "loss": 2.25 - math.log(0.95)}, rel=1e-5
    )
    evaluation = restricted.evaluate(batch)
    expected = {"q": [[0, 0]], "choices": [[True, False]], "td_loss": 2.25, "target": [1.5]}
    assert {name: getattr(evaluation, name).tolist() for name in expected} == expected


@pytest.mark.parametrize("parametric", [False, True])
def test_the_estimated_logging_policy_by_hand(parametric: bool) -> None:
    """Odds of 3 in state 1, a fifth of uniform choices: 0.8 * 0.75 + 0.2 / 2. A third action is forbidden."""
    actions = () if parametric else ("a", "b", "c")
    policy = LoggingPolicy(
        SourceSpec(num_state_features=1, num_action_features=3 * parametric, action_names=actions, metric_names=())
    )
    policy.weight.copy_(torch.tensor([[math.log(3)], [0.0], [9.0]]))
    policy.share.fill_(0.2)
    row = (torch.ones(1, 1), torch.tensor([[True, True, False]]), torch.eye(3).unsqueeze(0) if parametric else None)
    torch.testing.assert_close(policy(*row).squeeze(2).exp(), torch.tensor([[0.7, 0.3, 0.0]]))
    assert BCQActionFilter(policy, 0.5)(*row).tolist() == [[True, False, False]]
    assert not list(policy.parameters())


@pytest.mark.parametrize(("bounds", "targets"), [(None, [21, 9, 4]), ((-1.0, 5.0), [5, 5, 4])])
def test_evaluated_targets_are_those_of_the_loss(bounds: tuple[float, float] | None, targets: list[float]) -> None:
    # as in test_double_q_loss_on_three_rows, b costs 1
    made = learner(target_scale=10.0, reward_boost=torch.tensor([0.0, -1.0]), value_bounds=bounds)
    assert made.evaluate(ROWS).target.tolist() == targets


def test_targets_of_distributions_are_means() -> None:
    last = make_batch([[0.0] * 3] * 2, [[0.0] * 3] * 2, [0, 0], [1.0, 2.0], bootstrap=torch.zeros(2))
    for head in ("c51", "quantile"):
        made = build(head, SPEC)
        assert (made.evaluate(last).target.tolist(), made.constant_loss(0.0, 1.0)) == ([1, 2], None)
    assert learner().constant_loss(3.0, 4.0) == 4


@pytest.mark.parametrize(("kind", "scale"), [("mse", 2), ("huber", 1)])
def test_conservative_term_beside_half_the_squared_error(kind: str, scale: int) -> None:
    """Kumar et al. (2020), eq. 4, times `scale`: alpha (log(e^q_0 + e^q_1) - q_0) + 1/2 delta^2."""
    made = DQN(StateValues(), ScalarHead(kind), replace(SETTINGS, cql_alpha=0.7))
    # q = (1, 0) w at w = 1; the reward 1.5 ends the episode: delta = w - 1.5, small enough for Huber to be a square
    loss, metrics = made(make_batch([[1.0, 0.0]], [[0.0, 0.0]], [0], [1.5], bootstrap=torch.zeros(1)))
    (gradient,) = torch.autograd.grad(loss, made.q_network.scale)
    gap = math.log(math.e + 1) - 1
    assert {**metrics, "loss": loss.detach()} == pytest.approx(
        {"cql_gap": gap, "td_loss": scale * 0.5**2 / 2, "loss": scale * (0.7 * gap + 0.5**2 / 2)}
    )
    assert gradient.item() == pytest.approx(scale * (0.7 * (math.e / (math.e + 1) - 1) - 0.5))


# the error of bce_with_logits is that of the probability sigma(3)
@pytest.mark.parametrize(
    ("kind", "reward", "loss", "error"),
    [
        ("mse", -7.0, 100, 10),
        ("huber", -7.0, 9.5, 10),
        ("bce_with_logits", 1.0, math.log(1 + math.exp(-3)), 1 - 1 / (1 + math.exp(-3))),
    ],
)
def test_priorities_are_absolute_errors(kind: str, reward: float, loss: float, error: float) -> None:
    """Whatever the loss makes of a large one."""
    made = DQN(StateValues(), ScalarHead(kind), SETTINGS)
    result = made(make_batch([[3.0, 0.0]], [[0.0, 0.0]], [0], [reward]))[0]
    assert [result.item(), *made.row_errors.tolist()] == pytest.approx([loss, error])
    assert not made.row_errors.requires_grad


@pytest.mark.parametrize("kind", ["mse", "huber"])
def test_scaled_values_learn_like_values_of_scaled_rewards(kind: str) -> None:
    """With reward (r - (1 - d) c) / s, where d is the discount, values are (Q - c) / s: loss and gradient are equal."""
    center, scale = 40.0, 8.0
    settings = replace(SETTINGS, cql_alpha=0.7, double=True)
    scaled = DQN(StateValues(), ScaledHead(kind, center, scale), replace(settings, value_bounds=(-8.0, 56.0)))
    plain = DQN(StateValues(), ScalarHead(kind), replace(settings, value_bounds=(-6.0, 2.0)))
    state, following = [[1.0, -2.0], [0.5, 3.0], [1.0, 2.0]], [[2.0, 1.0], [-1.0, 1.0], [9.0, 1.0]]
    bootstrap = torch.tensor([1.0, 0.0, 1.0])
    rewards = torch.tensor([30.0, 44.0, 50.0])
    equivalent = (rewards - (1 - SETTINGS.gamma * bootstrap) * center) / scale
    results = []
    for made, reward in ((scaled, rewards), (plain, equivalent)):
        batch = make_batch(state, following, [0, 1, 1], reward.tolist(), bootstrap=bootstrap)
        loss, _ = made(batch)
        (gradient,) = torch.autograd.grad(loss, made.q_network.scale)
        results.append((made, batch, [loss.item(), gradient.item()]))
    assert results[0][2] == pytest.approx(results[1][2], rel=1e-5)
    (_, _, _), (_, plain_batch, _) = results
    evaluation = scaled.evaluate(results[0][1])
    other = plain.evaluate(plain_batch)
    torch.testing.assert_close(evaluation.q, other.q * scale + center)
    torch.testing.assert_close(evaluation.target, other.target * scale + center)
    torch.testing.assert_close(scaled.row_errors, plain.row_errors * scale)
    torch.testing.assert_close(evaluation.td_loss, other.td_loss)
    assert scaled.constant_loss(99.0, 4 * scale**2) == pytest.approx(plain.constant_loss(0.0, 4.0))


def test_values_of_a_cross_entropy_are_probabilities() -> None:
    made = DQN(StateValues(), ScalarHead("bce_with_logits"), SETTINGS)
    evaluation = made.evaluate(make_batch([[math.log(3), 0.0]], [[0.0, 0.0]], [0], [1.0], bootstrap=torch.zeros(1)))
    torch.testing.assert_close(evaluation.q, torch.tensor([[0.75, 0.5]]))
    assert [evaluation.td_loss.item(), *evaluation.target.tolist()] == pytest.approx([-math.log(0.75), 1])


@pytest.mark.parametrize("head", ["c51", "quantile"])
def test_priorities_of_distributions_are_losses(head: str) -> None:
    made = build(head, SPEC)
    loss, _ = made(batch := random_batch(6, 3, 2, seed=1))
    assert float(batch.weight.dot(made.row_errors)) == pytest.approx(loss.item())


def test_each_quantile_s_target_is_clipped_to_value_bounds() -> None:
    network = StateValues()
    network.forward = lambda state, mask, features=None: state.unsqueeze(2).expand(-1, -1, 3)  # type: ignore[method-assign]
    made = DQN(network, QuantileHead(3), replace(SETTINGS, value_bounds=(-1.0, 2.0)))
    # targets 3 + 1/2 * 4 = 5 and -7 become 2 and -1; 0 + 1/2 * 2 = 1 stays
    # three quantiles 0 against three targets alike: midpoints (1/6, 1/2, 5/6) sum to 1.5 from either side
    made(make_batch([[0.0, 0.0]] * 3, [[4.0, 0.0], [4.0, 0.0], [2.0, 0.0]], [0] * 3, [3.0, -9.0, 0.0]))
    assert made.row_errors.tolist() == pytest.approx([1.5 * (2 - 0.5), 1.5 * 0.5, 1.5 * 0.5])


HEADS = {"scalar": ScalarHead, "c51": lambda: CategoricalHead(11, -5.0, 5.0), "quantile": lambda: QuantileHead(7)}


def build(
    head: str, spec: SourceSpec, *, dueling: bool = False, bcq: bool = False, settings: DQNSettings = SETTINGS
) -> DQN:
    torch.manual_seed(0)
    made = HEADS[head]()
    plain = NetworkSettings(hidden=(8,), activations=("relu",))
    network = build_q_network(spec, replace(plain, dueling=dueling, outputs=made.outputs))
    return DQN(network, made, settings, behavior_cloning=build_q_network(spec, plain) if bcq else None)


@pytest.mark.parametrize("bcq", [False, True])
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize(
    "spec", [SPEC, SourceSpec(num_state_features=3, num_action_features=2)], ids=["discrete", "parametric"]
)
@pytest.mark.parametrize("head", list(HEADS))
def test_every_combination_has_finite_gradients_that_padding_does_not_change(
    head: str, spec: SourceSpec, dueling: bool, bcq: bool
) -> None:
    batch, longer = (
        random_batch(rows, 3, 2 if spec is SPEC else most, seed=rows, num_features=spec.num_action_features)
        for rows, most in ((6, 4), (1, 7))
    )
    made = build(
        head, spec, dueling=dueling, bcq=bcq, settings=DQNSettings(gamma=0.9, target_update_rate=0.1, cql_alpha=0.5)
    )
    trained = [p for p in made.parameters() if p.requires_grad]
    # padded by a row of weight 0, with more candidates
    gradients = [
        torch.autograd.grad(made(rows)[0], trained) for rows in (batch, join_batches((batch, longer), (1.0, 0.0)))
    ]
    assert all(g.isfinite().all() and g.abs().sum() > 0 for g in gradients[0] if g.numel() > 1)
    torch.testing.assert_close(*gradients)


def test_the_soft_update_follows_parameters_that_are_loaded() -> None:
    made = learner(target_scale=11.0)
    made.after_step()
    made.q_network.load_state_dict({"scale": torch.tensor(5.0)})
    made.target_network.load_state_dict({"scale": torch.tensor(15.0)})
    made.after_step()
    assert made.target_network.scale.item() == pytest.approx(14.0)  # 0.1 * 5 + 0.9 * 15


def test_networks_have_the_mode_asked_for_even_after_a_failure() -> None:
    class Failing(StateValues):
        def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None) -> Tensor:
            if not self.training:
                raise ValueError("on the next state")
            return super().forward(state, mask, features)

    made = DQN(Failing(), ScalarHead(), SETTINGS)
    modes = [made.train(mode).q_network.training for mode in (False, True)]
    assert (modes, made.target_network.training) == ([False, True], False)
    with pytest.raises(ValueError, match="on the next state"):
        made(ROWS)
    assert made.q_network.training
