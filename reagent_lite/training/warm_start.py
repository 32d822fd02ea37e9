"""Initial weights from an earlier run: from its output folder, a checkpoint, or its model."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

from safetensors.torch import load
from torch import Tensor, nn
from torch.optim import Optimizer

from reagent_lite.distributed.group import Group
from reagent_lite.errors import ConfigError, Problem, join_names
from reagent_lite.manifest import BUNDLE, CHECKPOINT, FILE_NAME, FolderKind, verify_folder
from reagent_lite.training.best import kept_tensors
from reagent_lite.training.checkpoint_folder import (
    EVALUATORS,
    LEARNER,
    OPTIMIZER,
    STATE,
    CheckpointFolder,
    fitting,
    load_optimizer,
    read_state,
)
from reagent_lite.training.resume import Files, read_on_first

_KEY = "training.warm_start_model_path"
Assign = Callable[[nn.Module, Mapping[str, Tensor]], None]
_FOLDER = "folder"
_WEIGHTS = "weights.safetensors"
_CONFIG = "config.json"
_NORMALIZATION = "normalization.json"
_FITTED = {"state": "state_features_norm.json", "action": "action_norm.json"}
"""Files of the normalization that a run has fitted, in its output folder."""


@runtime_checkable
class StartsWarm(Protocol):
    """A learner of one policy; see algorithms.policy_learner."""

    name: ClassVar[str]

    def warm_start(self, weights: Mapping[str, Tensor], assign: Assign) -> str:
        """Loads an exported model's weights and returns a text that names the parts that start anew."""
        ...


def warm_start(
    path: str,
    learner: nn.Module,
    optimizer: Optimizer | None,
    group: Group,
    actions: Sequence[str] = (),
    normalization: Mapping[str, Mapping[str, Any]] | None = None,
    value_scale: Sequence[float] | None = None,
) -> str:
    """Loads weights and, if there is one, the optimizer's state; returns a text that names the loaded parts.

    Args:
        path: output folder, checkpoint or exported model of an earlier run; on rank 0's disk.
        learner: a PolicyLearner, or the learners of several types of agents.
        optimizer: the optimizer, or None to start a new one.
        group: the ranks; rank 0 reads, all load.
        actions: names of this run's actions; empty with candidates.
        normalization: this run's normalization by side, which is compared with that of an exported model, or that the
            run of a checkpoint has fitted; None: it is not compared.
        value_scale: this run's rl.value_scale.

    Raises:
        ConfigError: there is nothing to load at the path, tensors have another shape, actions another order, or
            features other columns; the error names them.
        BundleError: a file there has been changed.
    """
    files = read_on_first(group, lambda: _read(Path(path).expanduser()))
    folder = files[_FOLDER].decode()
    if _WEIGHTS in files:
        if not isinstance(learner, StartsWarm):
            sentence = f"this run trains several agent types, and {path} is an exported model, which has one"
            raise ConfigError(Problem.stating(_KEY, sentence, "Give the run's folder or a checkpoint of it"))
        config = json.loads(files[_CONFIG])
        algorithm = config.get("algorithm", "dqn")  # none in models of older releases
        if algorithm != learner.name:
            todo = "Its outputs have another meaning: set algorithm to that of the model, or start without it"
            raise ConfigError(Problem(_KEY, f"a model of algorithm {learner.name}", f"{algorithm} at {path}", todo))
        _require_order(config, actions, path)
        _require_scale(config, value_scale, path)
        if normalization is not None:
            _require_columns(json.loads(files[_NORMALIZATION]), normalization, path)
        starts_anew = learner.warm_start(load(files[_WEIGHTS]), lambda module, saved: _assign(module, saved, path))
        return f"warm start: weights of {folder}; {starts_anew}"
    state = json.loads(files[STATE])
    _require_order(state["config"], actions, path)
    _require_scale(state["config"], value_scale, path)
    fitted = {side: json.loads(files[name]) for side, name in _FITTED.items() if name in files}
    if normalization is not None and fitted:
        _require_columns(fitted, {side: normalization[side] for side in fitted.keys() & normalization.keys()}, path)
    with fitting(Path(folder)):
        saved = kept_tensors(files.get(EVALUATORS)) or load(files[LEARNER])
    _assign(learner, saved, path)
    if optimizer is None:
        return f"warm start: learner of {folder}; the optimizer starts anew"
    settings = state["optimizer"]
    if settings["class"] != type(optimizer).__name__:
        expected = f"the state of {type(optimizer).__name__}"
        got = f"that of {settings['class']} at {path}"
        todo = "Set training.do_not_warm_start_optimizer to true, or the same training.optimizer"
        raise ConfigError(Problem(_KEY, expected, got, todo))
    with fitting(Path(folder)):
        load_optimizer(optimizer, load(files[OPTIMIZER]), settings)
    return f"warm start: learner and optimizer of {folder}"


def value_scale_of(path: str, group: Group) -> tuple[float, float] | None:
    """Returns the rl.value_scale of an earlier run, in whose unit its network's outputs are; every rank calls it.

    Args:
        path: see `warm_start`, which raises the same errors.
        group: the ranks; rank 0 reads.
    """
    files = read_on_first(group, lambda: _read(Path(path).expanduser()))
    config = json.loads(files[_CONFIG]) if _CONFIG in files else json.loads(files[STATE])["config"]
    scale = _scale_of(config)
    return None if scale is None else (scale[0], scale[1])


def _scale_of(config: Mapping[str, Any]) -> list[float] | None:
    scale: list[float] | None = config.get("rl", {}).get("value_scale")  # no key in models of older releases
    return scale


def _require_scale(earlier: Mapping[str, Any], value_scale: Sequence[float] | None, path: str) -> None:
    """Raises a ConfigError if the outputs of an earlier run, which has this config, are in another unit."""
    before = _scale_of(earlier)
    now = None if value_scale is None else list(value_scale)
    if before != now:
        todo = 'The network\'s outputs are in this unit: set the same, or "returns", which takes it over'
        raise ConfigError(Problem("rl.value_scale", f"{json.dumps(before)}, as at {path}", json.dumps(now), todo))


def _read(path: Path) -> Files:
    folder, kind = _find(path)
    wanted = {_WEIGHTS, _CONFIG, _NORMALIZATION} if kind is BUNDLE else {LEARNER, OPTIMIZER, STATE}
    files = verify_folder(folder, kind, keep=wanted, if_present=set() if kind is BUNDLE else {EVALUATORS})[1]
    if STATE in files:
        read_state(files[STATE], folder)
        fitted = (folder.parent.parent / name for name in _FITTED.values())
        files |= {file.name: file.read_bytes() for file in fitted if file.is_file()}
    return {_FOLDER: str(folder).encode(), **files}


def _find(path: Path) -> tuple[Path, FolderKind]:
    """Returns the folder at or below a path of an earlier run, and its kind; of several checkpoints the newest."""
    for folder in (path, path / "checkpoints"):
        if (folder / LEARNER).is_file():
            return folder, CHECKPOINT
        names = (name for name in CheckpointFolder(folder).names() if (folder / name / FILE_NAME).is_file())
        if newest := next(names, None):
            return folder / newest, CHECKPOINT
    for folder in (path, path / "model"):
        if (folder / _WEIGHTS).is_file():
            return folder, BUNDLE
    got = "a folder without either" if path.is_dir() else "nothing"
    advice = ""
    if path.is_file():
        got = "a file"
        advice = "Pickled models of ReAgent 2019 are not read"
    raise ConfigError(Problem(_KEY, f"an output folder, checkpoint or exported model at {path}", got, advice))


def _require_order(earlier: Mapping[str, Any], actions: Sequence[str], path: str) -> None:
    """Raises a ConfigError if an action's output index differs from the earlier run's (`earlier` is its config)."""
    names = list(earlier.get("actions") or ())
    if any(name in names and names.index(name) != index for index, name in enumerate(actions)):
        todo = "In another order a name would stand for another action"
        raise ConfigError(Problem("actions", f"{names}, the order at {path}", str(list(actions)), todo))


def _require_columns(
    earlier: Mapping[str, Mapping[str, Any]], normalization: Mapping[str, Mapping[str, Any]], path: str
) -> None:
    """Raises a ConfigError if features have other columns of the network's input than at an exported model."""
    before = _columns(earlier)
    now = _columns(normalization)
    differs = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if differs:
        todo = "Give the normalization files of the earlier run (state_norm_data_path, action_norm_data_path)"
        expected = f"the features, types and values of {path}, each a column of the network's input"
        raise ConfigError(Problem(_KEY, expected, f"others of {join_names(differs)}", todo))


def _columns(normalization: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[Any, Any]]:
    """Returns what determines the columns of each feature: its type and possible values."""
    columns = {}
    for side, features in normalization.items():
        for name, text in features.items():
            parameters = json.loads(text)
            columns[f"{side} feature {name}"] = (parameters["feature_type"], parameters.get("possible_values"))
    return columns


def _assign(module: nn.Module, saved: Mapping[str, Tensor], path: str) -> None:
    """Loads tensors, or raises a ConfigError that names those that are missing, unknown, or of another shape."""
    expected = module.state_dict()
    differs = [
        f"{name} {_shape(saved.get(name))} instead of {_shape(expected.get(name))}"
        for name in sorted(expected.keys() | saved.keys())
        if _shape(saved.get(name)) != _shape(expected.get(name))
    ]
    if differs:
        more = f"; and {len(differs) - 8} more" if len(differs) > 8 else ""
        todo = "Use algorithm, training.layers, rainbow and features of the earlier run, or start without it"
        raise ConfigError(Problem(_KEY, "the same network", f"at {path}: {'; '.join(differs[:8])}{more}", todo))
    module.load_state_dict(dict(saved))


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(list(tensor.shape))
