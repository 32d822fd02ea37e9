"""Estimates from a log beside returns in simulation: what makes the two differ though both are right."""

from collections.abc import Iterator
from dataclasses import dataclass

from reagent_lite.evaluation.returns import RANDOM, Played

_NEGLIGIBLE = 0.01  # what a step counts, against the first; and a share of episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What estimates of an episode's return count.

    Attributes:
        gamma: discount per step.
        by_time: whether the discount goes by the time between rows instead.
        horizon: steps of an episode that are scored.
        longest: steps of the longest logged episode.
        cut_share: of scored episodes, those that were cut before their end.
    """

    gamma: float
    by_time: bool
    horizon: int
    longest: int
    cut_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Whether simulated discounted returns are of the same quantity as estimates of an episode's return.

    Attributes:
        apart: sentences that say why they are not; empty where they are, if the log is the environment's.
        remarks: sentences on parts of the estimates that are not.
    """

    apart: tuple[str, ...]
    remarks: tuple[str, ...]


def beside(counted: Counted, played: Played) -> Beside:
    """Returns how far a log's estimates and simulated returns may be held against each other."""
    return Beside(apart=tuple(_apart(counted, played)), remarks=tuple(_remarks(counted, played)))


def _apart(counted: Counted, played: Played) -> Iterator[str]:
    if counted.by_time:
        yield "Estimates discount by time_diff, as the model was trained, simulated returns by steps."
    if played.longest > counted.horizon and counted.gamma**counted.horizon > _NEGLIGIBLE:
        yield (f"Estimates count {counted.horizon:,} steps of an episode (evaluation.max_horizon), simulated episodes "
               f"have up to {played.longest:,}.")  # fmt: skip
    limit = played.time_limit
    if counted.longest > limit and counted.gamma**limit > _NEGLIGIBLE:
        yield f"Logged episodes have up to {counted.longest:,} steps, simulated ones end at {limit:,}."
    if (
        counted.cut_share > _NEGLIGIBLE
        and counted.longest < min(played.longest, counted.horizon)
        and counted.gamma**counted.longest > _NEGLIGIBLE
    ):
        yield (f"{counted.cut_share:.1%} of the scored episodes were cut, none after more than {counted.longest:,} "
               f"steps; simulated episodes have up to {played.longest:,}.")  # fmt: skip


def _remarks(counted: Counted, played: Played) -> Iterator[str]:
    cut = max(one.cut_share for one in played.policies if one.key != RANDOM)
    left = counted.gamma**played.time_limit
    if cut and left > _NEGLIGIBLE:
        yield (f"The time limit ends {cut:.1%} of the simulated episodes at step {played.time_limit:,}, where a reward "
               f"still counts {left:.2g}: estimates that rest on a value model go on beyond it.")  # fmt: skip
    if counted.cut_share:
        yield (f"{counted.cut_share:.1%} of the scored episodes were cut before their end: estimates by weights alone "
               "stop there.")  # fmt: skip
