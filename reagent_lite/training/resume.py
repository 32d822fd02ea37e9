"""Continues a run from a checkpoint: found by rank 0, compared with the current config, sent to all ranks.

newest complete, unfinished ► same learning config? same data? ─► position in the current plan ─► tensors to every rank
                              └ no: refused, with the keys       └ another plan: beginning of the epoch
"""

import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import load, save
from torch import Tensor

from reagent_lite import errors
from reagent_lite.config import WorkflowConfig, expand_config, fingerprint, leaves
from reagent_lite.config.checkpoint import CheckpointConfig
from reagent_lite.console import logger
from reagent_lite.distributed.group import Group, attempt_here
from reagent_lite.errors import ConfigError, Problem, ReagentLiteError, pluralize, raise_any
from reagent_lite.training.checkpoint_folder import (
    EVALUATORS,
    LEARNER,
    OPTIMIZER,
    STATE,
    CheckpointFolder,
    Checkpoints,
    Tree,
    fitting,
    flat,
    load_optimizer,
    nest,
    rank_file,
    read_files,
)
from reagent_lite.training.loop import Running, RunPosition

MAY_CHANGE = {
    "where it computes": (
        *("node_index", "num_nodes", "num_processes_per_node", "use_all_avail_gpus", "use_gpu", "init_method"),
        *("parallel", "rendezvous", "data.training_copy_dir", "data.residency", "simulation.dataset"),
    ),
    "where and how often it is saved": (
        "model_output_path",
        *(f"checkpoint.{key}" for key in ("every_steps", "every_minutes", "keep", "resume")),
    ),
    "when it ends": ("checkpoint.patience",),
    "what follows it": ("tracking",),
    "whether its model is exported": ("publish_if",),
}
"""Keys and sections in which a run may differ from the unfinished run that it continues, by topic."""
LENGTH = "epochs"
"""Key that may also grow if all rows are logged; schedules of a simulation depend on the length of the run."""

IDENTITY = {"data": "training_data_path", "env": "simulation.env"}
"""Config keys of the sources of a run, by their names in state.json."""

_BEGIN_ANEW = "Choose another model_output_path, or start over with --set checkpoint.resume=false"

Files = dict[str, bytes]


def read_on_first(group: Group, read: Callable[[], Files]) -> Files:
    """Returns rank 0's result of `read` on every rank; every rank calls it.

    Raises:
        ReagentLiteError: `read` raised it on rank 0; raised on every rank.
    """
    files: Files = {}
    head = ""
    if group.is_first:
        try:
            files = read()
            head = json.dumps({"names": list(files)})
        except ReagentLiteError as error:
            problems = [[p.where, p.expected, p.got, p.todo] for p in error.problems]
            head = json.dumps({"error": type(error).__name__, "problems": problems})
    answer = json.loads(group.broadcast_text(head))
    if "error" in answer:
        kind: type[ReagentLiteError] = getattr(errors, answer["error"])
        raise kind(Problem(*problem) for problem in answer["problems"])
    return {name: group.broadcast_bytes(files.get(name)) for name in answer["names"]}


def find_unfinished(config: CheckpointConfig, folder: CheckpointFolder, group: Group) -> Tree | None:
    """Returns state.json of the checkpoint to continue from, with its `name`, on every rank; None starts over.

    Args:
        config: without `resume`, the first attempt removes existing checkpoints; later attempts continue the first.
        folder: read and tidied by rank 0.
        group: the ranks.
    """

    def read() -> Files:
        folder.tidy()
        if not (config.resume or attempt_here()):
            folder.clear()
        state = folder.find_unfinished()
        return {} if state is None else {STATE: json.dumps(state).encode()}

    files = read_on_first(group, read)
    return json.loads(files[STATE]) if files else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOrder:
    """The order in which rows are read; a run's position refers to it.

    Attributes:
        order: all settings that determine the rows of a step, as JSON.
        steps: number of steps of an epoch.
        rows: number of rows of an epoch over all ranks.
    """

    order: dict[str, Any]
    steps: int
    rows: int

    def as_json(self) -> dict[str, Any]:
        """Returns the entries of state.json for this order."""
        return {"order": self.order, "steps_per_epoch": self.steps, "rows_per_epoch": self.rows}


Partition = Callable[[Sequence[Tree], int, int], Tree]
"""Maps (states of the source on all ranks that saved, rank, step) to the source's state on that rank at that step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """An earlier start of this run, if there is one.

    Attributes:
        config: the run's config, with the minibatch of the unfinished run unless it gives one.
        group: the ranks.
        folder: the run's checkpoints, on rank 0's disk.
        state: state.json of the checkpoint to continue from, with its `name`, on every rank; None starts over.
        run: id of the run, the same in all its starts.
    """

    config: WorkflowConfig
    group: Group
    folder: CheckpointFolder
    state: Tree | None
    run: str

    @classmethod
    def find(cls, config: WorkflowConfig, group: Group, folder: Path) -> "History":
        """Returns the run to continue in a folder of checkpoints; every rank calls it.

        Raises:
            ConfigError: there is an unfinished run of another learning config.
            BundleError: there are checkpoints, but none of them is complete.
        """
        checkpoints = CheckpointFolder(folder)
        state = find_unfinished(config.checkpoint, checkpoints, group)
        if state is not None:
            saved = complete_config(config, state["config"])
            config = config.with_numbers_of(saved)
            logged = bool(config.training_data_path) and not config.simulated_share
            require_same_learning(saved, expand_config(config), state["name"], may_grow=logged)
        run = uuid.uuid4().hex if state is None else state["run"]
        return cls(config=config, group=group, folder=checkpoints, state=state, run=run)

    @property
    def lines(self) -> int:
        """Number of lines of metrics.jsonl to keep."""
        return 0 if self.state is None else int(self.state["reported"]["lines"])

    @property
    def figures(self) -> dict[str, float]:
        """Figures of the last epoch."""
        return {} if self.state is None else dict(self.state["reported"]["figures"])

    def require_same(self, identity: Mapping[str, str]) -> None:
        """Refuses to continue with other data.

        Args:
            identity: sha256 of data and environment, by the keys of IDENTITY; "" if there is none.

        Raises:
            ConfigError: data or environment differ from those of the checkpoint.
        """
        if self.state is None:
            return
        problems = [
            Problem(
                IDENTITY[name],
                f"the source of the unfinished run of checkpoint {self.state['name']} (sha256 {value[:12]})",
                f"sha256 {identity[name][:12]}",
                f"Restore it, {_BEGIN_ANEW[0].lower()}{_BEGIN_ANEW[1:]}",
            )
            for name, value in self.state["identity"].items()
            if value != identity[name]
        ]
        raise_any(problems, ConfigError)

    def position(self, order: ReadOrder, num_steps: int) -> RunPosition:
        """Returns the position at which the run continues, and logs it.

        Args:
            order: read order of the current run.
            num_steps: its number of steps.

        Raises:
            ConfigError: the run has already done more steps.
        """
        if self.state is None:
            return RunPosition()
        name = self.state["name"]
        step, rows, again = position_in(self.state, order)
        if step > num_steps:
            expected = f"at least {-(-step // order.steps)}, the progress of the unfinished run of checkpoint {name}"
            raise ConfigError(Problem("epochs", expected, str(self.config.epochs)))
        repeated = pluralize(again, "row of an epoch is", "rows of an epoch are")
        note = f"; {repeated} read again, because the minibatches have changed" if again else ""
        checkpoint = f"{self.folder.folder.name}/{name}"
        logger.info(f"resuming from {checkpoint} (epoch {step // order.steps}, {pluralize(rows, 'row')}){note}")
        return RunPosition(step=step, rows=rows)

    def continue_in(
        self,
        running: Running,
        order: ReadOrder,
        partition: Partition,
        identity: Mapping[str, str],
        versions: dict[str, str],
    ) -> Checkpoints:
        """Loads the saved state into the run and returns the run's checkpoints.

        Args:
            running: the run at its position.
            order: read order of the current run.
            partition: divides the source's states if the ranks or the order have changed.
            identity: as in `require_same`.
            versions: versions of the software.
        """
        group = self.group
        state = self.state
        nodes = Counter(group.all_gather(group.node))
        document = {
            "run": self.run,
            "serial": 0 if state is None else state["serial"],
            "config": expand_config(self.config),
            "config_hash": fingerprint(self.config),
            "identity": dict(identity),
            **order.as_json(),
            "world": {"processes": group.world_size, "per_node": [nodes[node] for node in sorted(nodes)]},
            "versions": versions,
        }
        if state is not None:
            saved = state["versions"].items()
            others = [f"{name} {old} -> {versions[name]}" for name, old in saved if versions[name] != old]
            if others and group.is_first:
                logger.warning(f"versions differ from those of the checkpoint: {', '.join(others)}")
            same_order = state["order"] == order.order
            unchanged = same_order and state["world"]["processes"] == group.world_size

            def select_part(states: Sequence[Tree], rank: int) -> Tree:
                source = partition([each["source"] for each in states], rank, running.position.step)
                return regroup_state(states, rank, source, keep_sums=same_order)

            restore(state, self.folder, running, group, None if unchanged else select_part)
        since = None if state is None else state["name"]
        self.folder.set_damaged_aside(since)
        return Checkpoints(self.folder, group, running, document, keep=self.config.checkpoint.keep, since=since)


def complete_config(config: WorkflowConfig, saved: Tree) -> Tree:
    """Returns a saved config with the defaults of keys that did not exist when it was saved."""
    try:
        return expand_config(type(config).model_validate_json(json.dumps(saved)))
    except ValidationError:  # it has keys that no longer exist; the comparison names them
        return saved


def require_same_learning(saved: Mapping[str, Any], now: Mapping[str, Any], name: str, *, may_grow: bool) -> None:
    """Checks that a run has the learning config of the checkpoint that it continues.

    Args:
        saved: resolved config of the checkpoint.
        now: resolved config of this run.
        name: name of the checkpoint.
        may_grow: whether the run may become longer.

    Raises:
        ConfigError: the configs differ; the error names every such key.
    """
    free = [key for keys in MAY_CHANGE.values() for key in keys] + [LENGTH] * may_grow
    before, after = leaves(saved), leaves(now)
    problems = [
        Problem(
            key, f"{_text(before, key)} as in the unfinished run of checkpoint {name}", _text(after, key), _BEGIN_ANEW
        )
        for key in {**after, **before}
        if before.get(key) != after.get(key) and not any(f"{key}.".startswith(f"{each}.") for each in free)
    ]
    if problems:
        raise ConfigError(problems)


def _text(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key]) if key in values else "nothing"


def position_in(state: Mapping[str, Any], now: ReadOrder) -> tuple[int, int, int]:
    """Returns step and rows at which a run continues, and the number of rows it reads again.

    With the same order, the run continues at the step after the last one. With another order a step reads other rows,
    and the run continues at the beginning of the epoch.
    """
    step = int(state["step"])
    rows = int(state["rows"])
    if state["order"] == now.order:
        return step, rows, 0
    epoch = step // int(state["steps_per_epoch"])
    return epoch * now.steps, epoch * now.rows, rows - epoch * int(state["rows_per_epoch"])


def restore(
    state: Mapping[str, Any],
    folder: CheckpointFolder,
    running: Running,
    group: Group,
    partition: Callable[[Sequence[Tree], int], Tree] | None,
) -> None:
    """Loads a checkpoint into a run; every rank calls it.

    Args:
        state: state.json of the checkpoint, with its `name`.
        folder: read by rank 0.
        running: the run; its position is not loaded.
        group: the ranks.
        partition: returns the state of a rank from the states of all ranks that saved; None if nothing has changed.
    """
    saved = folder.folder / state["name"]
    files = read_on_first(group, lambda: read_files(saved))
    with fitting(saved):
        running.learner.load_state_dict(load(files[LEARNER]))
        optimizer = running.optimization.optimizer
        load_optimizer(optimizer, load(files[OPTIMIZER]), state["optimizer"])
        for parameters, settings in zip(optimizer.param_groups, state["optimizer"]["groups"], strict=True):
            if isinstance(parameters["lr"], Tensor):  # CUDA graphs read this tensor: it keeps its address
                parameters["lr"].fill_(settings["lr"])
            else:
                parameters["lr"] = settings["lr"]
        running.optimization.load_progress(state["schedule"])
        running.evaluators.load_state_dict(nest(load(files[EVALUATORS])))

    def own_states() -> Iterator[bytes]:
        """Yields the states of this run's ranks; one at a time is in memory if ranks and order are unchanged."""
        data = ((saved / rank_file(rank)).read_bytes() for rank in range(int(state["world"]["processes"])))
        if partition is None:
            yield from data
            return
        with fitting(saved):
            states = [nest(load(part)) for part in data]
            for rank in range(group.world_size):
                yield save(flat(partition(states, rank)))

    part = group.scatter_bytes(own_states() if group.is_first else None)
    with fitting(saved):
        of_rank = nest(load(part))
        running.source.load_state_dict(of_rank["source"])
        running.position.meter.load_state_dict(of_rank["meter"])
        rng = of_rank.get("rng", {})
        if "cpu" in rng:
            torch.set_rng_state(rng["cpu"])
        if "cuda" in rng and group.device.type == "cuda":
            torch.cuda.set_rng_state(rng["cuda"], group.device)


def regroup_state(states: Sequence[Tree], rank: int, source: Tree, *, keep_sums: bool) -> Tree:
    """Returns the state of a rank if the ranks or the order have changed since it was saved.

    Args:
        states: states of all ranks that saved.
        rank: the rank whose state is returned.
        source: the source's state for this rank.
        keep_sums: whether to keep the sums since the last report.
    """
    of_rank: Tree = {"source": source, "meter": {"steps": 0}}
    if keep_sums:
        sums = [state["meter"].get("sums", {}) for state in states]
        # each rank's share of a mean over ranks, which is divided by the current number of ranks
        mean = {name: sum(each[name] for each in sums) / len(sums) for name in sums[0]}
        of_rank["meter"] = {"steps": states[0]["meter"]["steps"], "sums": mean}
    if rank < len(states):
        of_rank["rng"] = states[rank]["rng"]
    return of_rank
