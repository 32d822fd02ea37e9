"""Weights of an earlier run as the beginning of another one: from its output folder, a checkpoint, or its model."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load
from torch import Tensor, nn
from torch.optim import Optimizer

from reagent_lite.distributed.group import Group
from reagent_lite.errors import ConfigError, Problem
from reagent_lite.manifest import BUNDLE, CHECKPOINT, verified
from reagent_lite.training.checkpoint_shelf import LEARNER, OPTIMIZER, STATE, Shelf
from reagent_lite.training.first_reads import Files, first_reads
from reagent_lite.training.tensors import Tree, differences, load_optimizer

_KEY = "training.warm_start_model_path"
_FOLDER, _WEIGHTS = "folder", "weights.safetensors"


def warm_start(path: str, learner: nn.Module, optimizer: Optimizer | None, group: Group) -> str:
    """Loads weights, and the optimizer's state where there is one, and returns a sentence that says what was loaded.

    Args:
        path: output folder, checkpoint or exported model of an earlier run; on rank 0's disk.
        learner: has `q_network`, `target_network` and `imitator`, which may be None.
        optimizer: None to start it anew.
        group: rank 0 reads, all load.

    Raises:
        ConfigError: nothing loadable at the path, or another shape; every tensor that differs is named.
        BundleError: a file there is altered.
    """
    files = first_reads(group, lambda: _read(Path(path).expanduser()))
    folder = files[_FOLDER].decode()
    if _WEIGHTS in files:
        return f"warm start: weights of {folder}; {_of_model(learner, load(files[_WEIGHTS]), path)}"
    _assign(learner, load(files[LEARNER]), path)
    if optimizer is None:
        return f"warm start: learner of {folder}; the optimizer starts anew"
    settings = json.loads(files[STATE])["optimizer"]
    _require_class(optimizer, settings, path)
    load_optimizer(optimizer, load(files[OPTIMIZER]), settings)
    return f"warm start: learner and optimizer of {folder}"


def _of_model(learner: nn.Module, weights: Mapping[str, Tensor], path: str) -> str:
    """Loads an exported model's weights and returns what starts anew, in words."""
    online = learner.get_submodule("q_network")
    _assign(online, _under("network.", weights), path)
    learner.get_submodule("target_network").load_state_dict(online.state_dict())
    imitator, saved = getattr(learner, "imitator", None), _under("imitator.", weights)
    if imitator is None:
        return "the optimizer starts anew"
    if not saved:  # a model trained without BCQ
        return "the optimizer and the imitator of the log start anew"
    _assign(imitator, saved, path)
    return "the optimizer starts anew"


def _under(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def _read(path: Path) -> Files:
    found = _find(path)
    wanted = {_WEIGHTS} if found.model else {LEARNER, OPTIMIZER, STATE}
    _, kept = verified(found.folder, BUNDLE if found.model else CHECKPOINT, keep=wanted)
    return {_FOLDER: str(found.folder).encode(), **kept}


@dataclass(frozen=True, slots=True)
class _Found:
    folder: Path
    model: bool


def _find(path: Path) -> _Found:
    """Accepts what an earlier run left, at any of its levels; the newest checkpoint where there are several."""
    for folder in (path, path / "checkpoints"):
        if (folder / LEARNER).is_file():
            return _Found(folder, model=False)
        steps = [name for name in Shelf(folder).names() if (folder / name / "manifest.json").is_file()]
        if steps:
            return _Found(folder / steps[0], model=False)
    for folder in (path, path / "model"):
        if (folder / _WEIGHTS).is_file():
            return _Found(folder, model=True)
    got = "a file" if path.is_file() else "a folder without either" if path.is_dir() else "nothing"
    advice = "Pickled models of the 2019 workflows are not read" if path.is_file() else ""
    raise ConfigError(Problem(_KEY, f"an output folder, checkpoint or exported model at {path}", got, advice))


def _assign(module: nn.Module, saved: Mapping[str, Tensor], path: str) -> None:
    differs = differences(module.state_dict(), saved)
    if differs:
        shown = "; ".join(differs[:8]) + (f"; and {len(differs) - 8} more" if len(differs) > 8 else "")
        raise ConfigError(
            Problem(_KEY, "the same network", f"at {path}: {shown}",
                    "Give training.layers, rainbow and the features of the earlier run, or start without it")
        )  # fmt: skip
    module.load_state_dict(dict(saved))


def _require_class(optimizer: Optimizer, settings: Tree, path: str) -> None:
    if settings["class"] != type(optimizer).__name__:
        raise ConfigError(
            Problem(_KEY, f"the state of {type(optimizer).__name__}", f"that of {settings['class']} at {path}",
                    "Set training.do_not_warm_start_optimizer to true, or the same training.optimizer")
        )  # fmt: skip
