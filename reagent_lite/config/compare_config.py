"""The whole JSON of `workflows.compare`: which runs are compared, and by what."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from reagent_lite.config.section import Count, LocalPath, Positive, Section, Seed, checked_by
from reagent_lite.errors import Problem


def _names(configs: Mapping[str, Any]) -> Iterator[Problem]:
    if not configs:
        yield Problem("", "at least one config", "none")
    for name in configs:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", name):
            yield Problem("", "names of letters, digits and _ . + -", repr(name), "They are names of folders")


def _seeds(seeds: Sequence[int]) -> Iterator[Problem]:
    if not seeds or len({*seeds}) < len(seeds):
        yield Problem("", "at least one seed, each once", str([*seeds]))


class CompareConfig(Section):
    """`python -m workflows.compare`: trains configs with several seeds each, and chooses one of them.

    Each run is a process with the command of its workflow. Runs are chosen by episodes that do not decide.
    """

    base: str | dict[str, Any] = {}
    """The training config that `configs` change: the path of a JSON file, or an object. Absent: every one of `configs`
    is a path."""
    configs: Annotated[dict[str, str | dict[str, Any]], checked_by(_names)] = {"base": {}}
    """{name: changes of `base`}, such as {"wide": {"training.layers": [-1, 512, -1]}}; sections may be objects as well.
    Or the path of another config."""
    seeds: Annotated[tuple[Seed, ...], checked_by(_seeds)] = (0, 1, 2)
    """Seeds of the runs of each config."""
    workflow: Literal["dqn", "parametric_dqn"] | None = None
    """The workflow of all runs; absent: dqn if a config names `actions` or has no data, else parametric_dqn."""
    score: str | None = None
    """Tag of the score that runs are compared by, the higher the better. Absent: simulation/return/mean with a
    simulation; on a log CPE/Reward/Weighted_Sequential_Doubly_Robust, with rl.gamma 0
    CPE/Reward/Doubly_Robust_Reward."""
    output_path: LocalPath = ""
    """Folder for runs, results and page. On a share, the same command on several machines divides the runs among
    them; they may see it by different paths."""
    processes: Count | None = None
    """Number of runs at the same time on this machine; absent: one for each processor. A run computes with one
    thread."""
    lost_after_seconds: Positive = 30.0
    """Seconds without a sign of life from another machine after which its runs are taken over."""

    required: ClassVar = {"output_path": ("a path",)}

    def rules(self) -> Iterator[Problem]:
        """Yields changes of a base that is absent."""
        if not self.base and not all(isinstance(config, str) for config in self.configs.values()):
            yield self.wrong("base", "a config, or configs that are all paths")
