"""Terms of the episodes of a page, and resamples of their sums."""

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reagent_lite.config.evaluation import EvaluationConfig
from reagent_lite.evaluation.evaluation_rows import EvaluationRows, episode_groups, tables_of
from reagent_lite.rl.bootstrap import Resamples, resamples
from reagent_lite.rl.estimators import ESTIMATORS, LOGGED, mean_weight
from reagent_lite.rl.sums import EVERY, EpisodeSums, Estimator

# Limits of a group of episodes, padding included; a longer episode is a group of its own.
_GROUP_ROWS = 2**17
_GROUP_BYTES = 2**24
# More episodes are drawn in so many bags of equal size: the deviation of a resampled mean is off by 0.7 % then, by
# 2.2 % with the fewest bags, which limit memory if episodes are long.
_MOST_BAGS = 10_000
_FEWEST_BAGS = 1_000


def limit(page: EvaluationRows, config: EvaluationConfig) -> tuple[EvaluationRows, int]:
    """Returns the page of the first config.max_horizon rows of each episode, and how many others are left out."""
    beyond = int((page.lengths - config.max_horizon).clamp(min=0).sum())
    if not beyond:
        return page, 0
    return page.rows((page.position < config.max_horizon).nonzero().squeeze(1)), beyond


def _num_bags(episodes: int, rows: int, horizon: int) -> int:
    """Returns in how many bags episodes are drawn: as many as there are, if these are few.

    Sums by step of all bags take no more memory than those of the rows, or than 1 000 bags of the longest length.
    """
    return episodes if episodes <= _MOST_BAGS else min(_MOST_BAGS, max(_FEWEST_BAGS, rows // horizon))


def sums_of_page(page: EvaluationRows, gamma: float, names: Sequence[str] = EVERY) -> EpisodeSums:
    """Returns the terms of a page's episodes."""
    # the rows of a group are copied: without a limit in bytes, many choices or outcomes would double the page
    groups = episode_groups(page.lengths, max_cells=min(_GROUP_ROWS, max(1, _GROUP_BYTES // page.row_bytes)))
    sums = EpisodeSums.of((tables_of(page.rows(group), gamma) for group in groups), names)
    if page.unit is None and page.sample_weight is None:
        return sums
    first = torch.cat([group[_starts(page.episode[group])] for group in groups])
    if page.sample_weight is not None:
        weight = page.sample_weight[first]
        sums = sums.weigh(weight / weight.mean())
    if page.unit is not None:
        sums = replace(sums, unit=torch.unique(page.unit[first], return_inverse=True)[1])
    return sums


def _starts(episode: Tensor) -> Tensor:
    """Returns the indices of the first row of each episode, [n], given a code per row."""
    return torch.cat((torch.ones(1, dtype=torch.bool), episode[1:] != episode[:-1])).nonzero().squeeze(1)


def effective_episodes(page: EvaluationRows, *, gamma: float, config: EvaluationConfig) -> float:
    """Returns only Overlap.effective_episodes of a page."""
    page, _ = limit(page, config)
    if not len(page):
        return 0.0
    sums = sums_of_page(page.only(0, 1), gamma)
    return float(sums.effective_episodes()[sums.effective_horizon])


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Resamples of episodes, of units of episodes, or of bags of many of these.

    Attributes:
        samples: resamples of the bags.
        bag: [units] bag of each unit.
    """

    samples: Resamples
    bag: Tensor

    @classmethod
    def of(cls, page: EvaluationRows, config: EvaluationConfig, generator: torch.Generator) -> "Draws":
        """Returns the draws of a page's episodes, or units; no resamples of a single one, which are all alike."""
        count = len(page.lengths) if page.unit is None else len(torch.unique(page.unit))
        bags = _num_bags(count, len(page), int(page.lengths.max()))
        # resamples of one unit are all alike: no interval rather than one of width 0
        samples = resamples(bags, config.bootstrap_resamples if count > 1 else 0, generator)
        bag = torch.arange(bags) if bags == count else torch.randperm(count, generator=generator) % bags
        return cls(samples=samples, bag=bag)

    def estimates(self, sums: EpisodeSums, missing: Mapping[str, str]) -> tuple[dict[str, Tensor], ...]:
        """Returns the estimates of EpisodeSums.estimates of all estimators but the missing ones.

        If every interval comes from the likelihood, only the mean weight is resampled.
        """
        estimators = [estimator for estimator in (*LOGGED, *ESTIMATORS.values()) if estimator.name not in missing]
        if all(estimator.evidence is not None or estimator is mean_weight for estimator in estimators):
            whole = sums.estimates([torch.ones(1, sums.num_episodes, dtype=torch.uint8)], estimators)
            weights = sums.only(mean_weight.takes)
            return tuple(map(operator.or_, whole, self._resample(weights, [mean_weight])))
        return self._resample(sums, estimators)

    def _resample(self, sums: EpisodeSums, estimators: Sequence[Estimator]) -> tuple[dict[str, Tensor], ...]:
        bags = self.samples.num_episodes
        of_episode = self.bag if sums.unit is None else self.bag[sums.unit]
        units = None if bags == sums.num_episodes else sums.join(of_episode, bags)
        return sums.estimates(self.samples.blocks(), estimators, units)
