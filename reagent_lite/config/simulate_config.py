"""The whole JSON of `workflows.simulate`: an environment, a policy that plays in it, and the log to write."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from pydantic import model_validator

from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.config.section import Count, Episodes, Fraction, LocalPath, NoEffect, Positive, Section, Seed, Share
from reagent_lite.errors import Problem

LOG_SUFFIXES: Final = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow", ".csv")


def output_problems(path: str, suffixes: tuple[str, ...]) -> Iterator[Problem]:
    """Yields a problem if `output_path` does not name a file of one of the formats."""
    name = path.rstrip("/").rpartition("/")[2]
    if not path:
        yield Problem("output_path", "a path", "nothing")
    elif not any(name.endswith(suffix) and name != suffix for suffix in suffixes):
        yield Problem("output_path", f"a name that ends in {', '.join(suffixes)}", repr(path))
    elif Path(path).expanduser().is_dir():
        yield Problem("output_path", "a file", f"the folder {path}", "Choose another name")


class PlayConfig(Section):
    """A policy and its random choices."""

    kind: str
    """Kind of the policy; the subclasses list their kinds."""
    model: str | None = None
    """Folder of the exported model whose values the policy uses; required unless kind is random."""
    epsilon: Share = 0.1
    """Used by epsilon_greedy: share of uniformly random choices."""
    temperature: Positive = 1.0
    """Used by softmax: softmax(q / temperature)."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(lambda play: play.kind == "random", ("model",), "absent with kind random", "It plays no model"),
        NoEffect(
            lambda play: play.kind != "epsilon_greedy",
            ("epsilon",),
            "absent with kind {0.kind}",
            "Only used by epsilon_greedy",
        ),
        NoEffect(
            lambda play: play.kind != "softmax", ("temperature",), "absent with kind {0.kind}", "Only used by softmax"
        ),
    )

    def rules(self) -> Iterator[Problem]:
        """Yields a Problem if the model is missing."""
        if self.kind != "random" and not self.model:
            yield self.wrong("model", f"the folder of an exported model for kind {self.kind}")


class PolicyConfig(PlayConfig):
    """The policy of the log."""

    kind: Literal["random", "epsilon_greedy", "softmax"] = "random"
    """random: uniform over the allowed choices; the other kinds use a model's values."""


class ValueOfConfig(PlayConfig):
    """A policy whose true value in this environment is computed by playing it."""

    kind: Literal["greedy", "epsilon_greedy", "softmax", "random"] = "greedy"
    """greedy: always the choice with the largest value; the other kinds as in `policy`."""
    episodes: Episodes = 1000
    """Number of episodes, each in a separate environment."""
    gamma: Share = 0.99
    """Discount per step of the discounted return."""
    confidence_level: Fraction = 0.95
    """Confidence level of the intervals (empirical likelihood over episodes)."""


class SimulateConfig(EnvironmentConfig):
    """`python -m workflows.simulate`: plays a policy in an environment and writes its log, with true propensities."""

    num_envs: Count = 256
    """Number of environments side by side, at most the number of episodes to write."""
    seed: Seed = 0
    """The same seed and num_envs give the same bytes."""
    use_gpu: bool = True
    """Play on a GPU; without a GPU, on the CPU with a warning."""
    output_path: LocalPath = ""
    """The log: .jsonl, .jsonl.gz, .jsonl.zst, .parquet, .arrow or .csv; an older file is replaced once the new one is
    complete."""
    rows: Count | None = 30_000
    """Smallest number of rows: whole episodes in the order of their starts until there are enough."""
    episodes: Count | None = None
    """Number of episodes of environments, instead of rows; with several agents, the log has an episode of each
    agent."""
    format: Literal["events", "transitions"] = "events"
    """events: logged decisions, for a timeline; the last row of an episode that a limit cut has the next state.
    transitions: rows with next states, which training reads."""
    ds: str | None = None
    """Date partition of events; absent: no such column."""
    parametric: bool = False
    """Write actions as candidates with features, for parametric DQN."""
    policy: PolicyConfig = PolicyConfig()
    policies: dict[str, str] = {}
    """The policy of each agent type, by the names of the environment's types: "random" (uniformly random actions), or
    the folder of an exported model, whose own policy plays. An absent type plays by `policy`."""
    value_of: ValueOfConfig | None = None
    """A policy whose true value is computed as well; it is printed, and written to output_path + ".truth.json"."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        *EnvironmentConfig.no_effect,
        NoEffect(
            lambda config: config.format != "events",
            ("ds",),
            "absent with format transitions",
            "Only events have partitions",
        ),
    )

    @model_validator(mode="before")
    @classmethod
    def _episodes_instead_of_rows(cls, tree: Any) -> Any:
        """Removes the default of `rows` if `episodes` is given, so that the resolved config has one of them."""
        if isinstance(tree, dict) and tree.get("episodes") is not None:
            return {"rows": None, **tree}
        return tree

    def rules(self) -> Iterator[Problem]:
        """Yields Problems for paths and lengths that are missing or contradict each other."""
        yield from super().rules()
        if self.backend == "cuda" and not self.use_gpu:
            yield self.wrong("backend", "auto or cpu while use_gpu is false")
        yield from output_problems(self.output_path, LOG_SUFFIXES)
        if self.rows is not None and self.episodes is not None:
            got = f"rows {self.rows}, episodes {self.episodes}"
            yield self.wrong("episodes", "absent while rows is given", "Keep one of them", got=got)
        if self.rows is None and self.episodes is None:
            yield self.wrong("rows", "a number, or episodes instead")
