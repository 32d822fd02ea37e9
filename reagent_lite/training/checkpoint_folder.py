"""Checkpoints without pickle: tensors in safetensors, the rest in JSON, with a manifest, made visible by a rename.

 every rank                          rank 0, the only one that writes
 own tensors ─► one rank at a time ─► checkpoints/step_000210/  rank_0000.safetensors, rank_0001.safetensors, …
                                                                learner, optimizer, evaluators (.safetensors): alike
                                                                state.json  manifest.json
 space checked ─► temporary folder ─► written, synced, hashed ─► renamed ─► read back ─► older ones removed

 LATEST: a hint for people    quarantine_step_000110/: damaged, kept for inspection    .step_000130.77.tmp/: unfinished

If a checkpoint cannot be written, the previous one is kept and the run continues.
"""

import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
from pydantic import AliasChoices, BaseModel, Field, NonNegativeInt, PositiveInt, ValidationError
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor, nn
from torch.optim import Optimizer

from reagent_lite.config.checkpoint import CheckpointConfig
from reagent_lite.config.rendezvous import RendezvousConfig
from reagent_lite.console import Waiting, logger
from reagent_lite.distributed.agreement import StepAgreement
from reagent_lite.distributed.group import Group
from reagent_lite.errors import BundleError, PeerError, Problem, first_line
from reagent_lite.folder_identity import FolderIdentity
from reagent_lite.manifest import CHECKPOINT, read_document, seal_folder, verify_folder
from reagent_lite.training.loop import Running
from reagent_lite.training.stop import StopSignal
from reagent_lite.whole_files import appearing_file, appearing_folder, sync

STATE = "state.json"
LEARNER = "learner.safetensors"
OPTIMIZER = "optimizer.safetensors"
EVALUATORS = "evaluators.safetensors"
_EVALUATORS_BEFORE = "judge.safetensors"  # before release 0.2
LATEST = "LATEST"
_SPARE_BYTES = 1 << 20  # for state.json, the manifest and the folder itself
_FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, so that no power of it is 0: swapped tensors change the checksum

Tree = dict[str, Any]
"""Nested dictionaries whose leaves are tensors and numbers."""


class _Reported(BaseModel):
    """See `Running.reported`."""

    lines: NonNegativeInt
    figures: dict[str, float | None]


class _OptimizerSettings(BaseModel):
    """See `optimizer_state`."""

    kind: Annotated[str, Field(alias="class")]
    groups: list[dict[str, Any]]
    numbers: dict[str, dict[str, Any]]


class _World(BaseModel):
    processes: PositiveInt


class _State(BaseModel):
    """The keys of state.json that are read."""

    run: str
    serial: NonNegativeInt
    step: NonNegativeInt
    rows: NonNegativeInt
    finished: bool
    reported: Annotated[_Reported, Field(validation_alias=AliasChoices("reported", "told"))]
    optimizer: _OptimizerSettings
    schedule: dict[str, int] | None
    world: _World
    config: dict[str, Any]
    identity: dict[str, str]
    order: dict[str, Any]
    steps_per_epoch: PositiveInt
    rows_per_epoch: NonNegativeInt
    versions: dict[str, str]


def read_state(data: bytes, folder: Path) -> Tree:
    """Returns the document of state.json.

    Raises:
        BundleError: it is not the state of a run.
    """
    try:
        _State.model_validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ", ".join([str(folder / STATE), ".".join(map(str, first["loc"]))]).rstrip(", ")
        raise BundleError(
            Problem(where, "the state of a run of this release", first["msg"], CHECKPOINT.outdated)
        ) from error
    state: Tree = json.loads(data)
    if "told" in state:  # before release 0.2
        state["reported"] = state.pop("told")
    return state


def read_files(folder: Path) -> dict[str, bytes]:
    """Returns the files of a checkpoint that are the same on all ranks, without state.json.

    Raises:
        BundleError: the checkpoint is damaged.
    """
    evaluators = EVALUATORS if (folder / EVALUATORS).exists() else _EVALUATORS_BEFORE
    _, files = verify_folder(folder, CHECKPOINT, keep={LEARNER, OPTIMIZER, evaluators})
    return {LEARNER: files[LEARNER], OPTIMIZER: files[OPTIMIZER], EVALUATORS: files[evaluators]}


@contextmanager
def fitting(folder: Path) -> Iterator[None]:
    """Turns errors about missing tensors of a checkpoint, or tensors of another shape, into a BundleError."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, AssertionError, SafetensorError) as error:
        got = f"{type(error).__name__}: {first_line(error)}"
        raise BundleError(Problem(str(folder), "tensors of this run", got, CHECKPOINT.outdated)) from error


def rank_file(rank: int) -> str:
    """Returns the name of the file with the state that only one rank has."""
    return f"rank_{rank:04d}.safetensors"


class CheckpointFolder:
    """The checkpoints of a run on rank 0's disk, in the order in which they were written, not by step.

    Args:
        folder: the run's checkpoints folder; it need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._damaged: list[tuple[str, str]] = []

    def tidy(self) -> None:
        """Removes unfinished checkpoints of killed runs, and restores one that was moved aside."""
        for path in [*self.folder.glob(".step_*.tmp"), *self.folder.glob(".step_*.old")]:
            target = self.folder / path.name.split(".")[1]
            if path.suffix == ".old" and not target.exists():
                path.rename(target)
            else:
                shutil.rmtree(path, ignore_errors=True)

    def names(self) -> list[str]:
        """Returns the names of all checkpoints, the newest first; damaged ones may be among them."""
        written = filter(_is_checkpoint, self.folder.glob("step_*"))  # folders of other programs are left alone
        return [path.name for path in sorted(written, key=_order, reverse=True)]

    def find_unfinished(self) -> Tree | None:
        """Returns state.json and `name` of the newest complete checkpoint of a run that has not ended.

        Damaged ones are not moved until `set_damaged_aside` is called.

        Raises:
            BundleError: there are checkpoints, but none that can be read is complete.
        """
        ended = set()
        damaged = list[tuple[str, str]]()
        newest = None
        for name in self.names():
            try:
                _, kept = verify_folder(self.folder / name, CHECKPOINT, keep={STATE})
                state = read_state(kept[STATE], self.folder / name)
            except (BundleError, OSError) as error:
                damaged.append((name, str(error).splitlines()[0]))
                continue
            if state["finished"]:
                ended.add(state["run"])
            elif state["run"] not in ended:
                newest = {**state, "name": name}
                break
        if damaged and not newest and not ended:  # starting over would discard what may still be repaired
            expected = "a complete checkpoint of the unfinished run"
            todo = "Check the disk, restore a copy, or start over with --set checkpoint.resume=false"
            raise BundleError([Problem(str(self.folder / name), expected, reason, todo) for name, reason in damaged])
        self._damaged = damaged
        return newest

    def set_damaged_aside(self, since: str | None) -> None:
        """Renames the damaged checkpoints that `find_unfinished` found, and warns about each.

        Args:
            since: name of the checkpoint from which the run continues, or None.
        """
        instead = f"continuing from {since}" if since else "there is no other checkpoint of an unfinished run"
        for name, reason in self._damaged:
            aside = self._set_aside(self.folder / name)
            logger.warning(f"checkpoint {name} is damaged ({reason}): set aside as {aside}; {instead}")

    def clear(self) -> None:
        """Removes all checkpoints."""
        for name in self.names():
            shutil.rmtree(self.folder / name)
        (self.folder / LATEST).unlink(missing_ok=True)

    @contextmanager
    def adding(self, name: str, document: Tree, within: FolderIdentity) -> Iterator[Path]:
        """Yields an empty folder that becomes the checkpoint `name` once it is written, hashed and on the disk.

        Args:
            name: the name of the checkpoint; an older one of that name is replaced.
            document: entries of its manifest besides the files.
            within: the run's folder, which must stay the same.

        Raises:
            OSError: the disk is full or fails, or the folder is not mounted; nothing has changed.
            BundleError: the bytes read back differ from those written; the checkpoint has been set aside.
        """
        target = self.folder / name
        with appearing_folder(target, within=within) as temporary:
            yield temporary
            seal_folder(temporary, {"kind": "checkpoint", **document})
        try:
            verify_folder(target, CHECKPOINT)
        except BundleError:
            self._set_aside(target)
            raise
        # the checkpoint is complete; the hint is only for people
        with suppress(OSError), appearing_file(self.folder / LATEST, within=within) as stream:
            stream.write(name.encode() + b"\n")

    def keep_only(self, names: list[str]) -> None:
        """Removes all checkpoints except these."""
        for name in set(self.names()).difference(names):
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def finish(self, name: str, within: FolderIdentity) -> None:
        """Marks a checkpoint as the end of its run; its other files do not change. See `adding`."""
        folder = self.folder / name
        state = json.loads((folder / STATE).read_bytes())
        with self.adding(name, read_document(folder, CHECKPOINT), within) as temporary:
            for file in folder.glob("*.safetensors"):
                try:
                    os.link(file, temporary / file.name)
                except OSError:  # a file system without links
                    shutil.copyfile(file, temporary / file.name)
            (temporary / STATE).write_text(json.dumps({**state, "finished": True}, indent=2))

    def _set_aside(self, folder: Path) -> str:
        names = [f"quarantine_{folder.name}", *(f"quarantine_{folder.name}.{n}" for n in range(1, 1000))]
        name = next(name for name in names if not (folder.parent / name).exists())
        folder.rename(folder.parent / name)
        sync(folder.parent)
        return name


def _is_checkpoint(folder: Path) -> bool:
    """Whether this program wrote the folder: it holds files that only this program writes, or it is empty."""
    if folder.is_symlink() or not folder.is_dir() or not re.fullmatch(r"step_\d+", folder.name):
        return False
    files = {path.name for path in folder.iterdir()}
    return not files or bool(files & {LEARNER, EVALUATORS, rank_file(0)})


def _order(folder: Path) -> tuple[int, int]:
    """Returns a checkpoint's serial number and its step; the step orders checkpoints of equal serial number."""
    try:
        serial = read_document(folder, CHECKPOINT).get("serial", 0)
    except (BundleError, OSError):
        serial = None
    if type(serial) is not int:
        serial = 1 << 62  # unreadable: comes first, so that `find_unfinished` examines it
    return serial, int(folder.name.removeprefix("step_"))


class Checkpoints:
    """Writes a run's checkpoints; every rank has one and calls it at the same steps.

    Args:
        folder: folder of the checkpoints; only rank 0 accesses it.
        group: the ranks.
        running: state that is saved.
        document: further entries of each state.json; `run` and `serial` are among them.
        keep: number of checkpoints of this run that are kept.
        since: name of the checkpoint from which this process continued, or None.

    Attributes:
        running, group: as given.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        group: Group,
        running: Running,
        document: Mapping[str, Any],
        *,
        keep: int,
        since: str | None = None,
    ) -> None:
        self.running = running
        self.group = group
        self._folder = folder
        self._keep = keep
        self._document = dict(document)
        self._serial = int(document["serial"])
        self._written = [] if since is None else [*_older(folder, since, group), since]
        self._saved_step = None if since is None else running.position.step
        self._output = FolderIdentity.mark(folder.folder.parent) if group.is_first else None

    @property
    def latest(self) -> str | None:
        """Name of the newest checkpoint of this run, or None."""
        return self._written[-1] if self._written else None

    def save(self) -> str:
        """Saves the run between two steps; every rank calls it.

        Returns:
            The reason of a failure, the same on every rank, or "".
        """
        step = self.running.position.step
        if self._saved_step == step:
            return ""
        name = f"step_{step:06d}"
        failure = self._gather_and_write(name)
        if not failure:
            older = [kept for kept in self._written if kept != name]
            self._serial += 1
            self._written = [*older[1 - self._keep :], name]
            self._saved_step = step
            if self.group.is_first:
                self._folder.keep_only(self._written)
        return failure

    def _gather_and_write(self, name: str) -> str:
        """Writes the states of all ranks on rank 0; returns "" or the failure, the same on every rank.

            every rank   size ─────────► all_gather        rank 0 checks the free space
                         bytes ────────► gather_bytes      one rank at a time; rank 0 writes each as it comes
                         wait ◄───────── broadcast_text    whether it was written

        All ranks take part in all three, even if rank 0 has failed.
        """
        group = self.group
        data = save(flat(own_state(self.running, group)))
        need = sum(group.all_gather(len(data)))
        parts = group.gather_bytes(data)
        failure = self._write(name, need, parts) if group.is_first else ""
        for _ in parts:  # rank 0: receives the parts left by a failed write; others: send their part
            pass
        return group.broadcast_text(failure)

    def finish(self) -> str:
        """Marks the newest checkpoint as the end of its run; rank 0 calls it once the model is written.

        Returns:
            The reason of a failure, or "".
        """
        assert self.latest is not None
        assert self._output is not None
        try:
            self._output.require()
            self._folder.finish(self.latest, self._output)
        except (OSError, BundleError) as error:
            return str(error)
        return ""

    def _write(self, name: str, need: int, parts: Iterator[bytes]) -> str:
        """Writes all files and returns "", or changes nothing and returns the reason of the failure."""
        assert self._output is not None
        folder = self._folder.folder
        try:
            self._output.require()
            files = self._common()
            need += sum(map(len, files.values())) + _SPARE_BYTES
            folder.mkdir(exist_ok=True)
            free = shutil.disk_usage(folder).free
            if free < need:
                return f"it needs {need:,} bytes, but only {free:,} are free in {folder}"
            head = {"step": self.running.position.step, "serial": self._serial + 1}
            with self._folder.adding(name, head, self._output) as temporary:
                for file, data in files.items():
                    (temporary / file).write_bytes(data)
                for rank, data in enumerate(parts):
                    (temporary / rank_file(rank)).write_bytes(data)
        except OSError as error:
            return f"{os.strerror(error.errno)} ({folder})" if error.errno else str(error)
        except BundleError as error:
            return str(error)
        return ""

    def _common(self) -> dict[str, bytes]:
        """Returns the files whose content is the same on all ranks."""
        running = self.running
        tensors, settings = optimizer_state(running.optimization.optimizer)
        state = {
            **self._document,
            "step": running.position.step,
            "rows": running.position.rows,
            "serial": self._serial + 1,
            "parent": self.latest,
            "finished": False,
            "reported": running.reported(),
            "optimizer": settings,
            "schedule": running.optimization.progress(),
        }
        return {
            LEARNER: save(copy_tensors(running.learner)),
            OPTIMIZER: save(tensors),
            EVALUATORS: save(flat(running.evaluators.state_dict())),
            STATE: json.dumps(state, indent=2).encode(),
        }


def _older(folder: CheckpointFolder, name: str, group: Group) -> list[str]:
    """Returns the names of older checkpoints, the oldest first; empty on ranks other than 0."""
    names = folder.names() if group.is_first else [name]
    return names[names.index(name) + 1 :][::-1]


class CheckpointSchedule:
    """Called after each step on every rank: agrees, compares parameters, saves, and ends all ranks after a signal.

    Args:
        config: schedule of checkpoints.
        waits: timeouts of the ranks, and the interval at which they compare parameters.
        checkpoints: the run's checkpoints.
        signal: signal that asks the run to end.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        waits: RendezvousConfig,
        checkpoints: Checkpoints,
        signal: StopSignal,
    ) -> None:
        self._waits = waits
        self._checkpoints = checkpoints
        self._signal = signal
        self._running = checkpoints.running
        self._group = checkpoints.group
        self._every_steps = config.every_steps or 0
        self._every_seconds = float("inf") if config.every_minutes is None else 60 * config.every_minutes
        self._agreement = StepAgreement(self._group, self._running.position.step)
        self._saved_at = time.monotonic()
        self._set_standing()

    def after_step(self) -> None:
        """Saves the run and compares parameters when they are due.

        Raises:
            Preempted: a rank was asked to end; the run was saved if possible, and all ranks end.
            PeerError: ranks have different parameters.
        """
        done = self._running.position.step
        due = time.monotonic() - self._saved_at >= self._every_seconds
        agreed = self._agreement.after_step(done, stop=self._signal.wanted, save=due)
        if agreed.stop:
            self.stop()
        if agreed.save or (self._every_steps and done % self._every_steps == 0):
            self._save_if_possible()
        elif done % self._waits.checksum_every_steps == 0:
            require_equal(self._running.learner, self._group, done)

    def stop(self) -> NoReturn:
        """Saves the run if possible and ends it between two steps, as all ranks have agreed.

        Raises:
            Preempted: always.
        """
        self._save_if_possible()
        raise self._signal.preemption()

    def _save_if_possible(self) -> None:
        failure = self._save()
        if failure and self._group.is_first:
            done = self._running.position.step
            logger.warning(f"no checkpoint at step {done:,}: {failure}; {self._signal.standing}")

    def at_end(self) -> None:
        """Saves the trained state before anything else can fail, and waits for a folder that cannot be written.

        Raises:
            Preempted: a rank was asked to end meanwhile.
            UnavailableError: the folder cannot be written for ten minutes; raised on rank 0.
        """
        waiting = Waiting()
        while failure := self._save():
            if any(self._group.all_gather(int(self._signal.wanted))):
                raise self._signal.preemption()
            if self._group.is_first:
                waiting.sleep(f"no checkpoint at the end of training: {failure}", "model_output_path")

    def _save(self) -> str:
        waits = self._waits
        with self._group.waiting_at_most(waits.startup_timeout_seconds, then=waits.step_timeout_seconds):
            require_equal(self._running.learner, self._group, self._running.position.step)
            failure = self._checkpoints.save()
        self._saved_at = time.monotonic()
        self._set_standing()
        return failure

    def _set_standing(self) -> None:
        if self._checkpoints.latest is not None:
            self._signal.standing = (
                f"checkpoint {self._checkpoints.latest} is complete; run the same command again to continue"
            )


def own_state(running: Running, group: Group) -> Tree:
    """Returns the state that only this rank has: random numbers, source, sums since the last report."""
    rng = {"cpu": torch.get_rng_state()}
    if group.device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(group.device)
    return {"rng": rng, "source": running.source.state_dict(), "meter": running.position.meter.state_dict()}


def flat(tree: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the leaves by path, contiguous and on the CPU; numbers become scalar tensors of 64 bits."""
    leaves: dict[str, Tensor] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= {f"{name}/{path}": leaf for path, leaf in flat(value).items()}
        elif isinstance(value, Tensor):
            leaves[name] = value.detach().cpu().contiguous()
        else:
            leaves[name] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    return leaves


def nest(leaves: Mapping[str, Tensor]) -> Tree:
    """Returns the tree whose leaves `flat` returned; numbers are scalar tensors, which int() and bool() read."""
    tree: Tree = {}
    for path, leaf in leaves.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def copy_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns a module's tensors on the CPU; tensors that share memory are copied, as safetensors requires."""
    return {name: value.detach().cpu().contiguous().clone() for name, value in module.state_dict().items()}


def optimizer_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], Tree]:
    """Returns an optimizer's tensors by "index.name", and its class, settings and numbers as JSON."""
    whole = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for index, entries in whole["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value.detach().cpu().contiguous().clone()
            else:
                numbers.setdefault(str(index), {})[name] = value
    # the learning rate is a tensor if CUDA graphs read it
    groups = [
        {name: value.item() if isinstance(value, Tensor) else value for name, value in group.items()}
        for group in whole["param_groups"]
    ]
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "numbers": numbers}


def load_optimizer(optimizer: Optimizer, tensors: Mapping[str, Tensor], settings: Tree) -> None:
    """Loads moments and counts; learning rate and decay stay as they are."""
    state: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in settings["numbers"].items()}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def checksum(module: nn.Module) -> int:
    """Returns an int64 that changes with any bit of a module's tensors; waits for the device once."""
    sums = torch.stack([_bits(tensor).sum(dtype=torch.int64) for tensor in module.state_dict().values()])
    factors = torch.full_like(sums, _FACTOR).cumprod(0)
    return int((sums * factors).sum())


def _bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().view(-1).view(kinds[tensor.element_size()])


def require_equal(module: nn.Module, group: Group, step: int) -> None:
    """Compares a module between ranks; every rank calls it, and all raise or none.

    Raises:
        PeerError: some ranks have other values than the majority, or than rank 0 if there is no majority.
    """
    sums = group.all_gather(checksum(module))
    counts = Counter(sums)
    if len(counts) == 1:
        return
    most_common, count = counts.most_common(1)[0]
    reference = most_common if count > len(sums) / 2 else sums[0]
    others = ", ".join(str(rank) for rank, value in enumerate(sums) if value != reference)
    alike = ", ".join(str(rank) for rank, value in enumerate(sums) if value == reference)
    got = f"parameters differ between ranks: {others} from {alike}"
    todo = "Memory or a kernel of one of them is faulty; the previous checkpoint is intact, run the same command again"
    raise PeerError(Problem(f"step {step}", "the same parameters on all ranks", got, todo))
