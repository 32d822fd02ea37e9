"""The whole JSON of `workflows.compare`: which runs are compared, and by which score."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Literal

from reagent_lite.config.loader import Source, apply_override, check, leaves, read_tree
from reagent_lite.config.section import Count, LocalPath, Positive, Section, Seed, checked_by, within
from reagent_lite.config.workflow import DqnConfig, ParametricDqnConfig, WorkflowConfig, has_named_actions
from reagent_lite.errors import ConfigError, Problem, raise_any

_CLASSES: Final[dict[str, type[WorkflowConfig]]] = {"dqn": DqnConfig, "parametric_dqn": ParametricDqnConfig}
_CHOOSING_SHARE = 0.5
_SAVED_EVERY_MINUTES = 5.0


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

    @cached_property
    def trees(self) -> dict[str, dict[str, Any]]:
        """The training config of each of `configs`, without seed and model_output_path."""
        return {name: self._tree(name) for name in self.configs}

    def _tree(self, name: str) -> dict[str, Any]:
        changes = self.configs[name]
        return choosing_run(changes, {}) if isinstance(changes, str) else choosing_run(self.base, changes)

    def workflow_of(self, tree: dict[str, Any]) -> str:
        """Returns the workflow of a training config."""
        return self.workflow or ("dqn" if has_named_actions(tree) else "parametric_dqn")

    @cached_property
    def score_tag(self) -> str:
        """Tag of the score that runs are compared by."""
        return self.score or default_score(next(iter(self._checked.values())))

    @cached_property
    def _checked(self) -> dict[str, WorkflowConfig]:
        return {name: self._check(name) for name in self.configs}

    def _check(self, name: str) -> WorkflowConfig:
        tree = self._tree(name)
        return check(_CLASSES[self.workflow_of(tree)], {**tree, "model_output_path": self.output_path or "."})

    def rules(self) -> Iterator[Problem]:
        """Yields Problems of the training configs, and of keys that make their scores incomparable."""
        if not self.base and not all(isinstance(config, str) for config in self.configs.values()):
            yield self.wrong("base", "a config, or configs that are all paths")
            return
        problems = []
        for name in self.configs:
            try:
                self._check(name)
            except ConfigError as error:
                problems += [within(f"configs.{name}", problem) for problem in error.problems]
        yield from problems
        if problems:
            return
        first, *_ = self._checked.values()
        for name, config in self._checked.items():
            yield from (within(f"configs.{name}", each) for each in _incomparable(config, first, self.score_tag))


def choosing_run(base: Source, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config of a run that is one of several to choose from, and that can be continued.

    Args:
        base: a training config.
        changes: {key: value} by keys such as "rl.gamma", or sections with keys.

    Raises:
        ConfigError: the config cannot be read, or a change is no change of a config.
    """
    tree, problems = read_tree(base)
    for key, value in leaves(changes).items():
        problems += apply_override(tree, f"{key}={json.dumps(value)}")
    raise_any(problems, ConfigError)
    tree["evaluation"] = {"choosing_share": _CHOOSING_SHARE, **(tree.get("evaluation") or {})}
    saved = {**(tree.get("checkpoint") or {})}
    if saved.keys().isdisjoint(("every_steps", "every_minutes")):
        tree["checkpoint"] = {**saved, "every_minutes": _SAVED_EVERY_MINUTES}
    return tree


def default_score(config: WorkflowConfig) -> str:
    """Returns the tag of the score by which runs of a config are compared."""
    if config.simulation is not None:
        return "simulation/return/mean"
    return f"CPE/Reward/{'Weighted_Sequential_Doubly_Robust' if config.rl.gamma else 'Doubly_Robust_Reward'}"


def _incomparable(config: WorkflowConfig, first: WorkflowConfig, score: str) -> Iterator[Problem]:
    """Yields the keys with which a config's score is not comparable with that of the first config."""
    if config.num_nodes > 1 or config.collects:
        todo = "Several machines share the runs"
        yield Problem("num_nodes, simulation.mode", "one machine for each run", "several", todo)
    if config.evaluation.choosing_share is None:
        yield config.wrong("evaluation.choosing_share", "a share, or absent", "Other episodes choose than decide")
    if score.startswith("CPE/") and config.rl.gamma != first.rl.gamma:
        todo = "Values with different discounts are not comparable; compare returns in simulation by `score`"
        yield config.wrong("rl.gamma", f"{first.rl.gamma:g}, as in the first config", todo)
    envs = [None if each.simulation is None else each.simulation.env for each in (first, config)]
    if score.startswith("simulation/") and envs[0] != envs[1]:
        yield Problem("simulation.env", f"{envs[0]}, as in the first config", str(envs[1]), "Compare each by itself")
