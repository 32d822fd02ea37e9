"""Checkpoints without pickle: tensors in safetensors, everything else JSON, sealed by a manifest, visible by rename.

checkpoints/step_000210/  learner.safetensors  optimizer.safetensors  state.json  manifest.json
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer

from reagent_lite.errors import ConfigError, Problem
from reagent_lite.files import appearing_folder
from reagent_lite.manifest import FILE_NAME, SCHEMA_VERSION, file_entries, sealed, verified

_KEY = "training.warm_start_model_path"


def save_checkpoint(folder: Path, step: int, learner: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> Path:
    """Writes a checkpoint folder, removes those of earlier runs once it stands, and returns its path.

    Args:
        folder: the run's checkpoints folder.
        step: optimizer steps done.
        learner: all its tensors are saved, target networks and running statistics included.
        optimizer: its tensors and settings are saved.
        state: what else a later run may want to know, as JSON.
    """
    target = folder / f"step_{step:06d}"
    tensors, settings = _flatten(optimizer)
    with appearing_folder(target) as temporary:
        (temporary / "learner.safetensors").write_bytes(save(_plain(learner.state_dict())))
        (temporary / "optimizer.safetensors").write_bytes(save(tensors))
        (temporary / "state.json").write_text(json.dumps({"optimizer": settings, **state}, indent=2))
        document = {"schema_version": SCHEMA_VERSION, "kind": "checkpoint", "step": step}
        (temporary / FILE_NAME).write_bytes(sealed({**document, "files": file_entries(temporary)}))
    for older in folder.glob("step_*"):
        if older != target:  # of an earlier run into this folder: its step count says nothing about this one
            shutil.rmtree(older)
    return target


def warm_start(path: str, learner: nn.Module, optimizer: Optimizer | None) -> str:
    """Loads weights, and the optimizer's state where there is one, and returns a sentence that says what was loaded.

    Args:
        path: output folder, checkpoint or exported model of an earlier run.
        learner: has `q_network` and `target_network`.
        optimizer: None to start it anew.

    Raises:
        ConfigError: nothing loadable at the path, or another shape; every tensor that differs is named.
        BundleError: a file there is altered.
    """
    found = _find(Path(path).expanduser())
    if found.model:
        _, kept = verified(found.folder, keep={"weights.safetensors"})
        weights = load(kept["weights.safetensors"])
        saved = {name.removeprefix("network."): value for name, value in weights.items() if name.startswith("network.")}
        online = learner.get_submodule("q_network")
        _assign(online, saved, path)
        learner.get_submodule("target_network").load_state_dict(online.state_dict())
        return f"warm start: weights of {found.folder}; the optimizer starts anew"
    _, kept = verified(found.folder, keep={"learner.safetensors", "optimizer.safetensors", "state.json"})
    _assign(learner, load(kept["learner.safetensors"]), path)
    if optimizer is None:
        return f"warm start: learner of {found.folder}; the optimizer starts anew"
    _restore(optimizer, load(kept["optimizer.safetensors"]), json.loads(kept["state.json"])["optimizer"], path)
    return f"warm start: learner and optimizer of {found.folder}"


@dataclass(frozen=True, slots=True)
class _Found:
    folder: Path
    model: bool


def _find(path: Path) -> _Found:
    """Accepts what an earlier run left, at any of its levels; the newest checkpoint where there are several."""
    for folder in (path, path / "checkpoints"):
        if (folder / "learner.safetensors").is_file():
            return _Found(folder, model=False)
        steps = sorted(folder.glob("step_*/manifest.json"), key=lambda file: int(file.parent.name.split("_")[1]))
        if steps:
            return _Found(steps[-1].parent, model=False)
    for folder in (path, path / "model"):
        if (folder / "weights.safetensors").is_file():
            return _Found(folder, model=True)
    got = "a file" if path.is_file() else "a folder without either" if path.is_dir() else "nothing"
    advice = "Pickled models of the 2019 workflows are not read" if path.is_file() else ""
    raise ConfigError(Problem(_KEY, f"an output folder, checkpoint or exported model at {path}", got, advice))


def _assign(module: nn.Module, saved: Mapping[str, Tensor], path: str) -> None:
    own = module.state_dict()
    differs = [
        f"{name} {_shape(saved.get(name))} instead of {_shape(own.get(name))}"
        for name in sorted(own.keys() | saved.keys())
        if _shape(saved.get(name)) != _shape(own.get(name))
    ]
    if differs:
        shown = "; ".join(differs[:8]) + (f"; and {len(differs) - 8} more" if len(differs) > 8 else "")
        raise ConfigError(
            Problem(_KEY, "the same network", f"at {path}: {shown}",
                    "Give training.layers, rainbow and the features of the earlier run, or start without it")
        )  # fmt: skip
    module.load_state_dict(dict(saved))


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(list(tensor.shape))


def _plain(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}


def _flatten(optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Splits an optimizer's state into tensors by "index.name" and the rest as JSON."""
    whole = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for index, entries in whole["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value
            else:
                numbers.setdefault(str(index), {})[name] = value
    # a learning rate that CUDA graphs read is a tensor
    groups = [
        {name: value.item() if isinstance(value, Tensor) else value for name, value in group.items()}
        for group in whole["param_groups"]
    ]
    return _plain(tensors), {"class": type(optimizer).__name__, "groups": groups, "numbers": numbers}


def _restore(optimizer: Optimizer, tensors: Mapping[str, Tensor], settings: dict[str, Any], path: str) -> None:
    """Loads moments and counts; learning rate and decay stay those of the present config."""
    if settings["class"] != type(optimizer).__name__:
        raise ConfigError(
            Problem(_KEY, f"the state of {type(optimizer).__name__}", f"that of {settings['class']} at {path}",
                    "Set training.do_not_warm_start_optimizer to true, or the same training.optimizer")
        )  # fmt: skip
    state: dict[int, dict[str, Any]] = {int(index): dict(values) for index, values in settings["numbers"].items()}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    own = optimizer.state_dict()
    optimizer.load_state_dict({"state": state, "param_groups": own["param_groups"]})
