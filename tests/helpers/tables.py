"""Tables of episodes as estimators take them: by hand, and at random."""

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from reagent_lite.rl.sums import EpisodeSums, EpisodeTable, Estimator

NAMES = tuple(field.name for field in fields(EpisodeTable))


def table(lengths: Sequence[int], gamma: float, **columns: Sequence[Sequence[float]] | Tensor) -> EpisodeTable:
    """Episodes of some lengths; columns [episodes, steps] that are not given are 0, weights 1."""
    running = (torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)).double()
    usual = {
        **dict.fromkeys(NAMES, running * 0),
        "running": running,
        "weight": running * 0 + 1,
        "discount": gamma ** (running.cumsum(1) - 1) * running,
    }
    return EpisodeTable(**usual | {name: torch.as_tensor(column).double() for name, column in columns.items()})


def rows(weight: list[float], reward: list[float], taken: list[float], expected: list[float]) -> EpisodeTable:
    """Episodes of one row, whose reward model is the value model as well."""
    w, r, t, e = (torch.tensor(column).double().unsqueeze(1) for column in (weight, reward, taken, expected))
    return table(
        [1] * len(weight), 1.0, weight=w, reward=r, reward_taken=t, reward_expected=e, value_taken=t, value_expected=e
    )


def random_table(
    lengths: Sequence[int], seed: int, *, spread: float = 1.0, zeros: float = 0.0, gamma: float = 0.95
) -> EpisodeTable:
    """Everything is normal; weights are e^(spread x), some of them 0."""
    generator = torch.Generator().manual_seed(seed)
    running = table(lengths, gamma).running

    def draw() -> Tensor:
        return torch.randn(running.shape, generator=generator, dtype=torch.float64) * running

    weight = (spread * draw()).exp()
    weight = torch.where(draw() > 3 * (1 - zeros), 0.0, weight) if zeros else weight
    return table(
        lengths, gamma, weight=torch.where(running > 0, weight, 1.0), reward=draw() + running, reward_taken=draw(),
        reward_expected=draw(), value_taken=draw() + 5 * running, value_expected=draw() + 5 * running,
        tail=draw() * (running - running.roll(-1, 1)).clamp(min=0),
    )  # fmt: skip


def some(e: EpisodeTable, which: Tensor | slice) -> EpisodeTable:
    """Some episodes, laid out no longer than they are."""
    length = int(e.running[which].sum(1).max())
    return EpisodeTable(**{name: getattr(e, name)[which, :length] for name in NAMES})


def estimates(estimator: Estimator, e: EpisodeTable, counts: Tensor) -> Tensor:
    """The estimate in each sample, [R], given how often each episode is in it, counts [R, n]."""
    return EpisodeSums.of([[e]]).estimates([counts], [estimator])[0][estimator.name]


# episode A: two steps with w 2, .5, so that rho is 2, 1; episode B: one step with w 3, held; gamma .5
TWO_EPISODES = table((2, 1), 0.5, weight=[[2, 0.5], [3, 1]], reward=[[1, 4], [2, 0]],
                     value_taken=[[2, 3], [1, 0]], value_expected=[[4, 5], [6, 0]])  # fmt: skip
