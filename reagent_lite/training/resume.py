"""From a checkpoint back to a run: found by rank 0, compared with the present config, handed out to all ranks.

newest whole, unfinished ─► same learning config? same data? ─► position in the present plan ─► tensors to every rank
                              └ no: refused, with the keys       └ another plan: beginning of the epoch
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from reagent_lite import errors
from reagent_lite.distributed.group import Group
from reagent_lite.errors import ConfigError, Problem, ReagentLiteError
from reagent_lite.manifest import CHECKPOINT, verified
from reagent_lite.training.checkpoint import (
    EVALUATORS,
    LEARNER,
    OPTIMIZER,
    STATE,
    CheckpointFolder,
    Tree,
    flat,
    load_optimizer,
    nested,
    rank_file,
)
from reagent_lite.training.loop import Running

SAME_RESULT = (
    *("node_index", "num_nodes", "num_processes_per_node", "use_all_avail_gpus", "init_method", "use_gpu"),
    *("model_output_path", "rendezvous", "checkpoint", "data.training_copy_dir", "data.residency", "publish_if"),
)
"""Keys, and sections, that say where and how a run computes, not what it learns."""

_ADVICE = "Give another model_output_path, or begin anew with --set checkpoint.resume=false"


Files = dict[str, bytes]


def first_reads(group: Group, read: Callable[[], Files]) -> Files:
    """Returns what `read` returns on rank 0, on every rank; every rank calls it.

    Raises:
        ReagentLiteError: what `read` raised on rank 0, on every rank alike.
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
    said = json.loads(group.broadcast_text(head))
    if "error" in said:
        kind: type[ReagentLiteError] = getattr(errors, said["error"])
        raise kind(Problem(*problem) for problem in said["problems"])
    return {name: group.broadcast_bytes(files.get(name)) for name in said["names"]}


def look_for(folder: CheckpointFolder, group: Group, *, wanted: bool) -> dict[str, Any] | None:
    """Returns state.json of the checkpoint to continue from, with its `name`, on every rank; None begins anew.

    Args:
        folder: looked at, and tidied, by rank 0.
        group: the ranks.
        wanted: false removes the checkpoints that are there.
    """

    def read() -> Files:
        folder.tidy()
        if not wanted:
            folder.clear()
        found = folder.unfinished()
        return {} if found is None else {STATE: json.dumps(found).encode()}

    files = first_reads(group, read)
    return json.loads(files[STATE]) if files else None


def require_same_learning(
    saved: Mapping[str, Any], now: Mapping[str, Any], name: str, *, growing: Sequence[str]
) -> None:
    """Refuses to continue a run as another one.

    Args:
        saved: resolved config of the checkpoint.
        now: that of this run.
        name: of the checkpoint.
        growing: keys that may differ.

    Raises:
        ConfigError: naming every key that says something else about what is learned.
    """
    before, after = _leaves(saved), _leaves(now)
    apart = (*SAME_RESULT, *growing)
    keys = [key for key in {**after, **before} if not any(key == each or key.startswith(f"{each}.") for each in apart)]
    problems = [
        Problem(key, f"{_text(before, key)} as in the unfinished run of checkpoint {name}", _text(after, key), _ADVICE)
        for key in keys
        if before.get(key) != after.get(key)
    ]
    if problems:
        raise ConfigError(problems)


def _leaves(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= _leaves(value, f"{path}{name}.")
        else:
            leaves[f"{path}{name}"] = value
    return leaves


def _text(leaves: Mapping[str, Any], key: str) -> str:
    return json.dumps(leaves[key]) if key in leaves else "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOrder:
    """What a position counts in.

    Attributes:
        order: what decides which rows a step reads, as JSON; equal for equal orders.
        steps: of an epoch.
        rows: of an epoch, over all ranks.
    """

    order: dict[str, Any]
    steps: int
    rows: int

    def as_json(self) -> dict[str, Any]:
        """Returns what a checkpoint says of it."""
        return {"order": self.order, "steps_per_epoch": self.steps, "rows_per_epoch": self.rows}


def position_in(state: Mapping[str, Any], now: ReadOrder) -> tuple[int, int, int]:
    """Returns step and rows at which a run goes on, and how many rows it reads again.

    With the same order that is where it stopped. With another one a step is other rows, so that only the beginnings of
    epochs are the same place in both.
    """
    step, rows = int(state["step"]), int(state["rows"])
    if state["order"] == now.order:
        return step, rows, 0
    epoch = step // int(state["steps_per_epoch"])
    return epoch * now.steps, epoch * now.rows, rows - epoch * int(state["rows_per_epoch"])


def restore(
    state: Mapping[str, Any],
    folder: CheckpointFolder,
    running: Running,
    group: Group,
    regrouped: Callable[[list[Tree], int], Tree] | None,
) -> None:
    """Loads a checkpoint into a run; every rank calls it.

    Args:
        state: from look_for.
        folder: read by rank 0.
        running: takes everything but its position.
        group: the ranks.
        regrouped: makes the own state of a rank from those of all ranks that saved; None where they are the same.
    """
    saved = folder.folder / state["name"]
    files = first_reads(group, lambda: verified(saved, CHECKPOINT, keep={LEARNER, OPTIMIZER, EVALUATORS})[1])
    running.learner.load_state_dict(load(files[LEARNER]))
    optimizer = running.optimization.optimizer
    load_optimizer(optimizer, load(files[OPTIMIZER]), state["optimizer"])
    for parameters, settings in zip(optimizer.param_groups, state["optimizer"]["groups"], strict=True):
        if isinstance(parameters["lr"], Tensor):  # one that CUDA graphs read stays where it is
            parameters["lr"].fill_(settings["lr"])
        else:
            parameters["lr"] = settings["lr"]
    running.optimization.load_progress(state["schedule"])
    running.evaluators.load_state_dict(nested(load(files[EVALUATORS])))

    def own_states() -> Iterator[bytes]:
        """Yields those of this run's ranks; as saved, one is in memory at a time."""
        data = ((saved / rank_file(rank)).read_bytes() for rank in range(int(state["world"]["processes"])))
        if regrouped is None:
            yield from data
            return
        states = [nested(load(one)) for one in data]
        for rank in range(group.world_size):
            yield save(flat(regrouped(states, rank)))

    own = nested(load(group.scatter_bytes(own_states() if group.is_first else None)))
    running.source.load_state_dict(own["source"])
    running.position.meter.load_state_dict(own["meter"])
    rng = own.get("rng", {})
    if "cpu" in rng:
        torch.set_rng_state(rng["cpu"])
    if "cuda" in rng and group.device.type == "cuda":
        torch.cuda.set_rng_state(rng["cuda"], group.device)


def regrouped_own(states: list[Tree], rank: int, source: Tree, *, between: bool) -> Tree:
    """Returns what a rank goes on with when other ranks than now saved, or in another order.

    Args:
        states: own states of all ranks that saved.
        rank: whose turn it is.
        source: the source's part, made for this rank.
        between: go on in the middle of a report; else its sums are dropped.
    """
    own: Tree = {"source": source, "meter": {"steps": 0}}
    if between:
        sums = [state["meter"].get("sums", {}) for state in states]
        # each rank's share of a mean over ranks: the present number of ranks divides by itself again
        mean = {name: sum(each[name] for each in sums) / len(sums) for name in sums[0]}
        own["meter"] = {"steps": states[0]["meter"]["steps"], "sums": mean}
    if rank < len(states):
        own["rng"] = states[rank]["rng"]
    return own
