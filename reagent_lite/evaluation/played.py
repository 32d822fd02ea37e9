"""Returns of policies in simulation, compared with each other and with a log's estimates: figures, JSON, tags."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reagent_lite.evaluation.interval import Interval
from reagent_lite.evaluation.overlap import Overlap
from reagent_lite.rl.likelihood import Contributions, intervals
from reagent_lite.sim.spec import EnvSpec

MODEL = "model"
AGAINST = "against"
RANDOM = "random"
AIM = (
    "the quantity that the estimates of the discounted return per episode estimate, if the log is from this environment"
)
_DIFFERENCES = {AGAINST: "difference", RANDOM: "difference_to_random"}
_NEGLIGIBLE = 0.01  # discount of a step relative to the first; and a share of episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Earned:
    """Mean return and mean discounted return per episode, or their differences."""

    total: Interval
    discounted: Interval

    def json(self) -> dict[str, Any]:
        """Returns both as in the report file."""
        return {"return": self.total.json(), "discounted_return": self.discounted.json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedPolicy(Earned):
    """Results of a policy in simulation.

    Attributes:
        length: mean number of steps.
        cut_share: share of episodes that the time limit ended.
    """

    length: float
    cut_share: float

    def json(self) -> dict[str, Any]:
        """Returns a policy's part of the report file."""
        return {**Earned.json(self), "mean_length": self.length, "truncated_share": self.cut_share}


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Results of policies in an environment, on the same starts.

    Attributes:
        env: name of the environment.
        parameters: constants of its dynamics.
        time_limit: largest number of steps of an episode.
        episodes: number of episodes of each policy.
        longest: number of steps of the longest episode of any model.
        policies: results by key: MODEL first, then AGAINST and RANDOM, uniformly random actions.
        differences: MODEL minus the policy with this key, episode by episode.
    """

    env: str
    parameters: dict[str, Any]
    time_limit: int
    episodes: int
    longest: int
    policies: dict[str, PlayedPolicy]
    differences: dict[str, Earned]

    @classmethod
    def of(cls, spec: EnvSpec, time_limit: int, tables: Mapping[str, Tensor], *, level: float) -> "Played":
        """Returns means with intervals, given the table of `returns.play` of each policy on the same starts."""
        earned = {key: table[:2] for key, table in tables.items()}
        all_episodes = torch.cat(list(earned.values()), dim=1)
        lowest = all_episodes.amin(1)
        highest = all_episodes.amax(1)
        pairs = {key: earned[MODEL] - values for key, values in earned.items() if key != MODEL}
        largest = [
            values.abs().amax(1) for values in pairs.values()
        ]  # a difference may be as large in either direction
        means = mean_returns(
            torch.cat((*earned.values(), *pairs.values())),
            torch.cat((*[lowest] * len(earned), *(-most for most in largest))),
            torch.cat((*[highest] * len(earned), *largest)),
            level,
        )
        estimated = list(zip(means[::2], means[1::2], strict=True))
        policies = {}
        for (key, table), (total, discounted) in zip(tables.items(), estimated[: len(tables)], strict=True):
            length, cut_share = table[2:].mean(1).tolist()
            policies[key] = PlayedPolicy(total=total, discounted=discounted, length=length, cut_share=cut_share)
        differences = {
            key: Earned(total=total, discounted=discounted)
            for key, (total, discounted) in zip(pairs, estimated[len(tables) :], strict=True)
        }
        return cls(
            env=spec.name,
            parameters={
                name: float(str(np.float32(value))) if isinstance(value, float) else value
                for name, value in spec.parameters.items()
            },
            time_limit=time_limit,
            episodes=all_episodes.shape[1] // len(tables),
            longest=max(int(table[2].max()) for key, table in tables.items() if key != RANDOM),
            policies=policies,
            differences=differences,
        )

    @property
    def other(self) -> str:
        """Key of the policy that MODEL is compared with: the other model, or random actions without one."""
        return AGAINST if AGAINST in self.policies else RANDOM

    def json(self) -> dict[str, Any]:
        """Returns the parts shared by all models: environment, random actions and differences."""
        document: dict[str, Any] = {
            "env": self.env,
            "env_parameters": self.parameters,
            "time_limit": self.time_limit,
            "episodes": self.episodes,
            "random": self.policies[RANDOM].json(),
        }
        return document | {_DIFFERENCES[key]: difference.json() for key, difference in self.differences.items()}

    def scores(self) -> dict[str, float]:
        """Returns the model's figures, and the return of random actions if they were played, by TensorBoard tag."""
        model = self.policies[MODEL]
        scores = model.total.tags("simulation/return") | model.discounted.tags("simulation/discounted_return")
        if RANDOM in self.policies:
            scores |= self.policies[RANDOM].total.tags("simulation/random_return")
        return scores | {"simulation/length/mean": model.length, "simulation/truncated_share": model.cut_share}


def mean_returns(values: Tensor, lowest: Tensor, highest: Tensor, level: float) -> list[Interval]:
    """Returns the row means of episodes' results [n, E] with intervals by empirical likelihood.

    Any result between `lowest` and `highest` [n] is possible, as rare ones may be missing in these episodes. If the
    two are equal, the interval is undefined: episodes that do not vary do not show how much others would.
    """
    ones = torch.ones_like(values[0])
    ranges = list(zip(lowest.tolist(), highest.tolist(), strict=True))
    parts = [
        Contributions(total=row, size=ones, weight=ones, outcome=row, bounds=possible)
        for row, possible in zip(values, ranges, strict=True)
    ]
    ends = intervals([(part, None) for part in parts], level)
    return [
        Interval(value=part.value, low=low, high=high).within(*possible)
        for part, possible, (low, high) in zip(parts, ranges, ends, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedReturn:
    """The return per episode that a log's estimates estimate.

    Attributes:
        gamma: discount per step.
        by_time: whether the discount depends on the time between rows instead.
        horizon: largest number of scored steps of an episode.
        longest: scored steps of the longest logged episode.
        cut_share: share of scored episodes that were cut before their end.
    """

    gamma: float
    by_time: bool
    horizon: int
    longest: int
    cut_share: float

    @classmethod
    def of(cls, overlap: Overlap | None, *, gamma: float, by_time: bool, horizon: int) -> "EstimatedReturn":
        """Returns the return that scored episodes estimate; `overlap` is None if no episode was scored."""
        return cls(
            gamma=gamma,
            by_time=by_time,
            horizon=horizon,
            longest=0 if overlap is None else overlap.horizon,
            cut_share=0.0 if overlap is None else overlap.cut_share,
        )

    def find_simulated(self, played: Played) -> Interval | None:
        """Returns the model's discounted return in simulation; None if it is another quantity or has no interval."""
        discounted = played.policies[MODEL].discounted
        return discounted if discounted.defined and not any(self.obstacles(played)) else None

    def obstacles(self, played: Played) -> Iterator[str]:
        """Yields reasons why simulated discounted returns are another quantity, even with a log of this environment."""
        if self.by_time:
            yield "Estimates discount by time_diff, as the model was trained, simulated returns by steps."
        if self.gamma == 0 and self.longest > 1:
            yield "With gamma 0 estimates are of the reward per row, simulated returns are rewards of a first step."
        if played.longest > self.horizon and self.gamma**self.horizon > _NEGLIGIBLE:
            yield (
                f"Estimates count {self.horizon:,} steps of an episode (evaluation.max_horizon), simulated episodes "
                f"have up to {played.longest:,}."
            )
        if self.longest > played.time_limit and self.gamma**played.time_limit > _NEGLIGIBLE:
            yield f"Logged episodes have up to {self.longest:,} steps, simulated ones end at {played.time_limit:,}."
        if (
            self.cut_share > _NEGLIGIBLE
            and self.longest < min(played.longest, self.horizon)
            and self.gamma**self.longest > _NEGLIGIBLE
        ):
            yield (
                f"{self.cut_share:.1%} of the scored episodes were cut, none after more than {self.longest:,} "
                f"steps; simulated episodes have up to {played.longest:,}."
            )

    def remarks(self, played: Played) -> Iterator[str]:
        """Yields sentences on estimates that count more or fewer steps of an episode than were played."""
        cut = max(policy.cut_share for key, policy in played.policies.items() if key != RANDOM)
        left = self.gamma**played.time_limit
        if cut and left > _NEGLIGIBLE:
            yield (
                f"The time limit ends {cut:.1%} of the simulated episodes at step {played.time_limit:,}, where a "
                f"reward still counts {left:.2g}: estimates that rest on a value model go on beyond it."
            )
        if self.cut_share:
            yield (
                f"{self.cut_share:.1%} of the scored episodes were cut before their end: estimates by weights alone "
                "stop there."
            )
