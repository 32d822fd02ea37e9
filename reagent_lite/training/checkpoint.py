"""Checkpoints without pickle: tensors in safetensors, everything else JSON, sealed by a manifest, visible by rename.

 every rank                          rank 0, the only one that writes
 own tensors ─► one rank at a time ─► checkpoints/step_000210/  rank_0000.safetensors, rank_0001.safetensors, …
                                                                learner, optimizer, judge (.safetensors): alike on all
                                                                state.json  manifest.json
 space checked ─► temporary folder ─► written, synced, hashed ─► renamed ─► read back ─► older ones removed

A failure on the way leaves the checkpoint before it, and a run that goes on.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from safetensors.torch import save
from torch import nn

from reagent_lite.distributed.group import Group
from reagent_lite.errors import BundleError
from reagent_lite.files import FolderIdentity
from reagent_lite.training.checkpoint_shelf import JUDGES, LEARNER, OPTIMIZER, STATE, Shelf, rank_file
from reagent_lite.training.loop import Position
from reagent_lite.training.optimization import Optimization
from reagent_lite.training.tensors import Tree, flat, optimizer_state, plain
from reagent_lite.types import BatchSource

_SPARE_BYTES = 1 << 20  # for state.json, the manifest and the folder itself


class Stateful(Protocol):
    """What has a state between two steps."""

    def state_dict(self) -> Tree:
        """Returns nested dictionaries of tensors and numbers."""
        ...

    def load_state_dict(self, state: Tree) -> None:
        """Continues from such a state."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Everything of a run that changes while it learns.

    Attributes:
        learner: all its tensors, target networks and running statistics included.
        optimization: moments, counts, learning rates.
        source: where this rank reads on.
        judges: what they have fitted so far, alike on all ranks.
        position: steps and rows done, and sums since the last report.
        told: what was reported so far, as JSON; asked when the checkpoint is written.
    """

    learner: nn.Module
    optimization: Optimization
    source: BatchSource
    judges: Stateful
    position: Position
    told: Callable[[], dict[str, Any]] = dict

    def own_state(self, group: Group) -> Tree:
        """Returns what this rank alone knows."""
        rng = {"cpu": torch.get_rng_state()}
        if group.device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(group.device)
        return {"rng": rng, "source": self.source.state_dict(), "meter": self.position.meter.state_dict()}


class Checkpoints:
    """Writes a run's checkpoints; every rank has one and calls it at the same steps.

    Args:
        shelf: where they stand; only rank 0 looks at it.
        group: the ranks.
        running: what is saved.
        document: what else each of them says, as JSON; `run` and `serial` among it.
        keep: how many of this run stay.
        since: name of the checkpoint this process continued from, or None.
    """

    def __init__(
        self,
        shelf: Shelf,
        group: Group,
        running: Running,
        document: Mapping[str, Any],
        *,
        keep: int,
        since: str | None = None,
    ) -> None:
        self._shelf, self._group, self._running, self._keep = shelf, group, running, keep
        self._document = dict(document)
        self._serial = int(document["serial"])
        self._mine = [] if since is None else [*_older(shelf, since, group), since]
        self._step = None if since is None else running.position.step
        self._place = FolderIdentity.of(shelf.folder.parent) if group.is_first else None

    @property
    def latest(self) -> str | None:
        """Name of the newest checkpoint of this run, or None."""
        return self._mine[-1] if self._mine else None

    def save(self) -> str:
        """Saves the run as it stands between two steps; every rank calls it.

        Returns:
            What went wrong, the same on every rank, or "".
        """
        if self._step == self._running.position.step:
            return ""
        data = save(flat(self._running.own_state(self._group)))
        need = sum(self._group.each(len(data)))
        name = f"step_{self._running.position.step:06d}"
        parts = self._group.gather_bytes(data)
        failure = self._write(name, need, parts) if self._group.is_first else ""
        for _ in parts:  # every rank must run it to its end, whatever happened to the disk
            pass
        failure = self._group.broadcast_text(failure)
        if not failure:
            self._serial += 1
            self._mine = [*[kept for kept in self._mine if kept != name][1 - self._keep :], name]
            self._step = self._running.position.step
            if self._group.is_first:
                self._shelf.keep_only(self._mine)
        return failure

    def finish(self) -> str:
        """Marks the newest checkpoint as the end of its run; rank 0 calls it once everything stands that it leads to.

        Returns:
            What went wrong, or "".
        """
        assert self.latest is not None
        assert self._place is not None
        try:
            self._place.require()
            self._shelf.finish(self.latest)
        except (OSError, BundleError) as error:
            return str(error)
        return ""

    def _write(self, name: str, need: int, parts: Iterator[bytes]) -> str:
        """Writes all files and returns "", or leaves things as they were and returns the reason."""
        assert self._place is not None
        try:
            self._place.require()
            files = self._common()
            need += sum(map(len, files.values())) + _SPARE_BYTES
            self._shelf.folder.mkdir(exist_ok=True)
            free = shutil.disk_usage(self._shelf.folder).free
            if free < need:
                return f"it needs {need:,} bytes, and {free:,} are free in {self._shelf.folder}"
            head = {"step": self._running.position.step, "serial": self._serial + 1}
            with self._shelf.adding(name, head) as folder:
                for file, data in files.items():
                    (folder / file).write_bytes(data)
                for rank, data in enumerate(parts):
                    (folder / rank_file(rank)).write_bytes(data)
        except OSError as error:
            return f"{os.strerror(error.errno)} ({self._shelf.folder})" if error.errno else str(error)
        except BundleError as error:
            return str(error)
        return ""

    def _common(self) -> dict[str, bytes]:
        """Returns the files whose content is the same on all ranks."""
        running = self._running
        tensors, settings = optimizer_state(running.optimization.optimizer)
        state = {
            **self._document,
            "step": running.position.step,
            "rows": running.position.rows,
            "serial": self._serial + 1,
            "parent": self.latest,
            "finished": False,
            "told": running.told(),
            "optimizer": settings,
            "schedule": running.optimization.progress(),
        }
        return {
            LEARNER: save(plain(running.learner)),
            OPTIMIZER: save(tensors),
            JUDGES: save(flat(running.judges.state_dict())),
            STATE: json.dumps(state, indent=2).encode(),
        }


def _older(shelf: Shelf, name: str, group: Group) -> list[str]:
    """Returns the checkpoints before one, the oldest first; only rank 0 needs to know them."""
    names = shelf.names() if group.is_first else [name]
    return names[names.index(name) + 1 :][::-1]
