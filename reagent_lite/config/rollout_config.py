"""The comparison of two served policies, and the whole JSON of `workflows.rollout`."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from reagent_lite.config.evaluation import GuardrailConfig
from reagent_lite.config.paths import DataPath
from reagent_lite.config.section import Count, Fraction, Positive, PositiveShare, Section
from reagent_lite.errors import Problem

Range = tuple[float, float]


class RolloutGuardrailConfig(GuardrailConfig):
    """A limit on how much worse a metric may be than under the current policy, in its unit per unit of the rollout."""

    range: Range | None = None
    """Lowest and highest sum of the metric over a unit; absent: its sequence is asymptotic."""


class ComparisonConfig(Section):
    """How two policies are compared, unit by unit; a unit is an episode, or a decision without an episode."""

    level: Fraction = 0.05
    """Probability that reward or a guardrail is ever said to differ if it does not. It is divided by one more than the
    number of guardrails."""
    reward_range: Range | None = None
    """Lowest and highest return that a unit can have: of a single decision, its reward. A unit outside makes the
    comparison invalid. Absent: the sequence is asymptotic, and makes no statement before the effective number of units
    that inform about the difference is 100."""
    gamma: PositiveShare = 1.0
    """Discount of a reward by its number of decisions after the first one of its episode; of metrics as well."""
    guardrails: dict[str, RolloutGuardrailConfig] = {}
    """{metric: limit on how much worse it may be}. A decision without the metric has 0."""
    episode_seconds: Positive = 86400.0
    """Seconds after its first decision at which an episode without an end counts as ended. Later units wait for earlier
    ones, so that no unit is counted sooner for its outcome."""

    def rules(self) -> Iterator[Problem]:
        """Yields a Problem for each range without width."""
        ranges = {"reward_range": self.reward_range} | {
            f"guardrails.{name}.range": guardrail.range for name, guardrail in self.guardrails.items()
        }
        for key, bounds in ranges.items():
            if bounds is not None and bounds[0] >= bounds[1]:
                yield Problem(key, "the lowest value, then a higher one", f"{list(bounds)}")


class ServedRolloutConfig(ComparisonConfig):
    """A second model behind a server that gets a growing share of the units."""

    model: str = ""
    """Folder of the new model. It has the actions, features and `data.columns` of the current one."""
    shares: Annotated[tuple[Fraction, ...], Field(min_length=1)] = (0.02, 0.1, 0.5)
    """Shares of the units that the new model is given, one after the other, each larger than the one before."""
    units_per_share: Count = 2000
    """Number of units that count, without harm, after which the next share begins."""
    on_harm: Literal["stop", "report"] = "stop"
    """Reaction if the new model is worse, a guardrail is violated, or the comparison is invalid. stop: its share
    is 0 from the next decision on, after restarts as well; report: the page reports it."""
    on_better: Literal["promote", "report"] = "report"
    """Reaction if the new model is better, unless a guardrail is violated. promote: it decides alone from then
    on, after restarts as well; report: the page reports it."""

    required: ClassVar = {"model": ("the folder of an exported model",)}

    def rules(self) -> Iterator[Problem]:
        """Yields Problems for shares that do not grow, and of the comparison."""
        yield from super().rules()
        if any(share >= following for share, following in pairwise(self.shares)):
            yield Problem("shares", "shares that grow", f"{list(self.shares)}")

    @property
    def comparison(self) -> ComparisonConfig:
        """The part that says how the policies are compared."""
        return ComparisonConfig(**{name: getattr(self, name) for name in ComparisonConfig.model_fields})


class RolloutConfig(Section):
    """`python -m workflows.rollout`: compares two served policies by the files of their log."""

    log: DataPath = ""
    """The log of a rollout, in any format that training reads."""
    comparison: ComparisonConfig | None = None
    """How to compare; absent: as the server that wrote the log did, or the defaults."""
    rollout: Annotated[str, Field(max_length=100)] = ""
    """Id of a rollout of the log; absent: the newest."""

    required: ClassVar = {"log": ("a path", "Or give --log")}
