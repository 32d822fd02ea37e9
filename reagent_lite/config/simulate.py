"""The whole JSON of `workflows.simulate`: an environment, a policy that plays it, and the log that is written."""

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from reagent_lite.config.environment import EnvironmentConfig, Share
from reagent_lite.config.section import Section, local_problems
from reagent_lite.errors import Problem

LOG_SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow", ".csv")


_READ_BY: Final = {
    "model": ("greedy", "epsilon_greedy", "softmax"),
    "epsilon": ("epsilon_greedy",),
    "temperature": ("softmax",),
}


class PlayConfig(Section):
    """How a policy draws its actions."""

    kind: str
    """One of the kinds of each use."""
    model: str | None = None
    """Folder of an exported model, whose values the policy weighs; required unless kind is random."""
    epsilon: Share = 0.1
    """epsilon_greedy: share of uniformly random choices."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """softmax: of softmax(q / temperature)."""

    def problems(self, path: str) -> Iterator[Problem]:
        """Yields a missing model, and keys that this kind of policy does not read."""
        if self.kind != "random" and not self.model:
            yield Problem(f"{path}.model", f"the folder of an exported model for kind {self.kind}", "nothing")
        for key, kinds in _READ_BY.items():
            if self.kind not in kinds and key in self.changed:
                yield Problem(f"{path}.{key}", f"absent with kind {self.kind}", repr(getattr(self, key)),
                              f"It is of {' and '.join(kinds)}")  # fmt: skip


class PolicyConfig(PlayConfig):
    """How actions are drawn while the log is written."""

    kind: Literal["random", "epsilon_greedy", "softmax"] = "random"
    """random: uniform over the allowed choices; the others weigh them by a model's values."""


class ValueOfConfig(PlayConfig):
    """A policy whose true value in this environment is wanted, by playing it."""

    kind: Literal["greedy", "epsilon_greedy", "softmax", "random"] = "greedy"
    """greedy: always the choice of the largest value; the others as in `policy`."""
    episodes: Annotated[int, Field(ge=2, le=10_000)] = 1000
    """Episodes played, each in an environment of its own."""
    gamma: Share = 0.99
    """Discount per step of the discounted return."""
    confidence_level: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Of the intervals: percentile bootstrap over episodes."""


class SimulateConfig(EnvironmentConfig):
    """`python -m workflows.simulate`: a policy plays an environment and writes its log, with true propensities."""

    num_envs: Annotated[int, Field(ge=1)] = 256
    """Environments side by side; no more are started than there are episodes to write."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """The same seed and num_envs give the same bytes."""
    use_gpu: bool = True
    """Play on a GPU; with none, one warning and then the CPU."""
    output_path: str = ""
    """The log: .jsonl, .jsonl.gz, .jsonl.zst, .parquet, .arrow or .csv; replaced if it is there, and whole or not there
    at all."""
    rows: Annotated[int, Field(ge=1)] | None = 30_000
    """At least so many rows: whole episodes in the order of their starts until there are enough."""
    episodes: Annotated[int, Field(ge=1)] | None = None
    """Exactly so many episodes, instead of rows."""
    format: Literal["events", "transitions"] = "events"
    """events: logged decisions, for a timeline, and where a limit cut an episode the state behind it; transitions: rows
    with next states, which training reads."""
    ds: str | None = None
    """Date partition of events; absent: no such column."""
    parametric: bool = False
    """Write actions as candidates with features, for parametric DQN."""
    policy: PolicyConfig = PolicyConfig()
    value_of: ValueOfConfig | None = None
    """A policy whose true value is computed as well: printed, and written to output_path + ".truth.json"."""

    @model_validator(mode="before")
    @classmethod
    def _episodes_instead_of_rows(cls, tree: Any) -> Any:
        """Lets `episodes` replace the default of `rows`, so that the resolved config says one of them."""
        if isinstance(tree, dict) and tree.get("episodes") is not None:
            return {"rows": None, **tree}
        return tree

    def problems(self, path: str = "") -> Iterator[Problem]:
        """Yields everything wrong beyond single keys, in this section and below."""
        yield from super().problems(path)
        if self.backend == "cuda" and not self.use_gpu:
            yield Problem("backend", "auto or cpu while use_gpu is false", "'cuda'")
        yield from self._output_problems()
        if self.rows is not None and self.episodes is not None:
            yield Problem("episodes", "absent while rows is given", f"rows {self.rows}, episodes {self.episodes}",
                          "Keep one of them")  # fmt: skip
        if self.rows is None and self.episodes is None:
            yield Problem("rows", "a number, or episodes instead", "null")
        if self.ds is not None and self.format != "events":
            yield Problem("ds", "absent with format transitions", repr(self.ds), "Only events have partitions")
        yield from self.policy.problems("policy")
        if self.value_of is not None:
            yield from self.value_of.problems("value_of")

    def _output_problems(self) -> Iterator[Problem]:
        if not self.output_path:
            yield Problem("output_path", "a path", "nothing")
            return
        name = self.output_path.rsplit("/", 1)[-1]
        if not any(name.endswith(suffix) and name != suffix for suffix in LOG_SUFFIXES):
            yield Problem("output_path", f"a file name that ends in {', '.join(LOG_SUFFIXES)}", repr(self.output_path))
        yield from local_problems("output_path", self.output_path)
