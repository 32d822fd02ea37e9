"""The kernel of a whole loss against numpy in float64: every vector width, clang, and its bounds."""

import importlib.util
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import torch
from oracles.native import LANES, Guarded, built, end_of_guarded
from oracles.q_losses import drawn, truth
from torch import Tensor, nn

from reagent_lite.models.dense import Run
from reagent_lite.models.dense_kernel import missing
from reagent_lite.models.q_loss_kernel import QLayers, QLossKernel, QRows, Rule, q_loss_kernel
from reagent_lite.native import compiler
from reagent_lite.rl.td import discount
from reagent_lite.types import TransitionBatch

ROOT = Path(__file__).resolve().parents[2]
GAMMA = 0.9
# a trunk, and for dueling networks the streams of values and advantages
PLAIN = [((4, 128, 64, 2),), ((1, 1),), ((17, 31, 47, 5),), ((3, 130, 19),)]
DUELING = [((4, 40), (40, 20, 1), (40, 20, 2)), ((17, 31, 16), (16, 8, 1), (16, 8, 7)), ((2, 3), (3, 1), (3, 5))]
NETWORKS = PLAIN + DUELING

Widths = tuple[tuple[int, ...], ...]


def network(widths: Widths, seed: int) -> list[list[nn.Linear]]:
    torch.manual_seed(seed)
    parts = [[nn.Linear(i, o) for i, o in pairwise(part)] for part in widths]
    for layer in (layer for part in parts for layer in part):
        nn.init.normal_(layer.bias, std=0.3)
    return parts


def q_layers(parts: Sequence[Sequence[nn.Linear]]) -> QLayers:
    runs = []
    for place, part in enumerate(parts):
        ends_with_relu = place == 0 and len(parts) > 1
        runs.append(Run([(layer, layer is not part[-1] or ends_with_relu) for layer in part]))
    return QLayers(runs)


def parameters(parts: Sequence[Sequence[nn.Linear]]) -> list[list[Tensor]]:
    return [[p for layer in part for p in (layer.weight.detach(), layer.bias.detach())] for part in parts]


def q_rows(batch: TransitionBatch) -> QRows:
    return QRows(
        state=batch.state, next_state=batch.next_state, action=batch.action, next_action=batch.next_action,
        mask=batch.actions.mask, next_mask=batch.next_actions.mask, reward=batch.reward,
        discount=discount(GAMMA, batch.steps, batch.bootstrap), weight=batch.weight,
    )  # fmt: skip


def require_exact(own: QLossKernel, widths: Widths, rows: int, rule: Rule, *, huber: bool) -> None:
    online, target = network(widths, 1), network(widths, 2)
    batch = drawn(rows, widths[0][0], widths[-1][-1], seed=rows)
    loss, losses, gradients = own(q_layers(online), q_layers(target), q_rows(batch), rule, huber=huber)
    wanted = truth(parameters(online), parameters(target), batch, gamma=GAMMA, rule=rule.name.lower(), huber=huber)
    assert loss.item() == pytest.approx(wanted[0], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(losses.double(), torch.from_numpy(wanted[1]), rtol=1e-4, atol=1e-5)
    for one, exact in zip(gradients, wanted[2], strict=True):
        torch.testing.assert_close(one.double(), torch.from_numpy(exact), rtol=1e-4, atol=1e-6 * max(rows, 32))


@pytest.fixture
def own() -> QLossKernel:
    found = q_loss_kernel()
    if found is None:
        pytest.skip(f"no kernel: {missing()}")
    return found


@pytest.mark.parametrize("huber", [False, True], ids=["mse", "huber"])
@pytest.mark.parametrize("rule", list(Rule))
@pytest.mark.parametrize("rows", [1, 47, 48, 130])
@pytest.mark.parametrize("widths", NETWORKS)
def test_loss_and_gradients(own: QLossKernel, widths: Widths, rows: int, rule: Rule, huber: bool) -> None:
    require_exact(own, widths, rows, rule, huber=huber)


def test_no_rows(own: QLossKernel) -> None:
    loss, losses, gradients = own(
        q_layers(network(NETWORKS[0], 1)), q_layers(network(NETWORKS[0], 2)), q_rows(drawn(0, 4, 2, 0)), Rule.DOUBLE,
        huber=False,
    )  # fmt: skip
    assert (loss.item(), losses.shape) == (0.0, (0,))
    assert all(not one.any() for one in gradients)


@pytest.mark.parametrize("lanes", LANES)
def test_vectors_of_every_width(tmp_path: Path, lanes: int) -> None:
    """As other processors have them."""
    other = QLossKernel(built(tmp_path, *LANES[lanes]))
    for widths in NETWORKS:
        for rule in Rule:
            require_exact(other, widths, 97, rule, huber=True)


@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="the Python package ziglang is not installed")
def test_clang_makes_it_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("oracles.native.find_compiler", compiler.zig_compiler)
    other = QLossKernel(built(tmp_path, "-march=native"))
    for widths in NETWORKS:
        require_exact(other, widths, 97, Rule.DOUBLE, huber=False)


@pytest.mark.parametrize("layout", ["one row for all", "columns first"])
def test_masks_in_any_layout(own: QLossKernel, layout: str) -> None:
    widths = DUELING[0]
    online, target, batch = q_layers(network(widths, 1)), q_layers(network(widths, 2)), drawn(60, 4, 2, 5)
    rows = q_rows(batch)
    masks = (rows.mask, rows.next_mask)
    if layout == "one row for all":
        masks = tuple(torch.tensor([[True, False]]).expand(60, 2) for _ in masks)
    plain = own(online, target, with_masks(rows, *(m.contiguous() for m in masks)), Rule.DOUBLE, huber=False)
    if layout == "columns first":
        masks = tuple(m.t().contiguous().t() for m in masks)
    assert not any(m.is_contiguous() for m in masks)
    odd = own(online, target, with_masks(rows, *masks), Rule.DOUBLE, huber=False)
    assert torch.equal(odd[1], plain[1])
    assert all(torch.equal(a, b) for a, b in zip(odd[2], plain[2], strict=True))


def with_masks(rows: QRows, mask: Tensor, next_mask: Tensor) -> QRows:
    return QRows(
        state=rows.state, next_state=rows.next_state, action=rows.action, next_action=rows.next_action, mask=mask,
        next_mask=next_mask, reward=rows.reward, discount=rows.discount, weight=rows.weight,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "value", "rule"), [
    ("action", 2, Rule.DOUBLE), ("action", -1, Rule.GREEDY), ("action", 2**40, Rule.GREEDY),
    ("next_action", 2, Rule.LOGGED),
])  # fmt: skip
def test_an_action_that_is_none_of_the_networks(own: QLossKernel, name: str, value: int, rule: Rule) -> None:
    batch = drawn(70, 4, 2, 0)
    getattr(batch, name)[61] = value
    online, target = q_layers(network(PLAIN[0], 1)), q_layers(network(PLAIN[0], 2))
    with pytest.raises(IndexError, match=rf"row 61 of the batch: .*{value}.* of 2"):
        own(online, target, q_rows(batch), rule, huber=False)


def test_a_next_action_that_nobody_reads_may_be_any(own: QLossKernel) -> None:
    """-1 where the log has none counts as 0, as in dqn.py; other rules do not look."""
    batch = drawn(70, 4, 2, 0)
    online, target = q_layers(network(PLAIN[0], 1)), q_layers(network(PLAIN[0], 2))
    batch.next_action[:] = 0
    zeros = own(online, target, q_rows(batch), Rule.LOGGED, huber=False)[1]
    batch.next_action[:] = -1
    assert torch.equal(own(online, target, q_rows(batch), Rule.LOGGED, huber=False)[1], zeros)
    batch.next_action[:] = 99
    own(online, target, q_rows(batch), Rule.DOUBLE, huber=False)


def touch_only_what_is_handed_in(*, at_end: bool) -> None:
    """Ends by a signal where the kernel reads or writes a number too many; run in a process of its own."""
    torch.set_num_threads(1)
    own = q_loss_kernel()
    assert own is not None
    for widths in NETWORKS:
        for rows in (1, 6, 50):
            guarded = Guarded(at_end=at_end)
            online, target = network(widths, 1), network(widths, 2)
            for layer in (layer for part in (*online, *target) for layer in part):
                for p in layer.parameters():
                    p.data = guarded.copy(p.data)
            batch = drawn(rows, widths[0][0], widths[-1][-1], seed=3)
            for tensor in (batch.state, batch.next_state, batch.reward, batch.weight, batch.steps, batch.bootstrap,
                           batch.action, batch.next_action, batch.actions.mask, batch.next_actions.mask):  # fmt: skip
                tensor.data = guarded.copy(tensor)
            handed = q_rows(batch)
            handed.discount.data = guarded.copy(handed.discount)

            def room(_: Tensor, size: int | Sequence[int], of: Guarded = guarded) -> Tensor:
                shape = (size,) if isinstance(size, int) else tuple(size)
                return of.room(torch.Size(shape).numel()).view(shape)

            with mock.patch.object(torch.Tensor, "new_empty", room):
                loss = own(q_layers(online), q_layers(target), handed, Rule.DOUBLE, huber=False)[0]
            wanted = truth(parameters(online), parameters(target), batch, gamma=GAMMA, rule="double", huber=False)
            assert loss.item() == pytest.approx(wanted[0], rel=1e-5)


@pytest.mark.parametrize("at_end", [True, False], ids=["ends", "begins"])
@pytest.mark.usefixtures("own")
def test_memory_that_was_not_handed_in_is_not_touched(at_end: bool) -> None:
    done = end_of_guarded("test_q_loss_kernel", at_end=at_end)
    assert done.returncode == 0, done.stderr
