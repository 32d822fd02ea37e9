"""State as named tensors, which is what safetensors holds: trees, modules and optimizers, there and back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Tree = dict[str, Any]
"""Nested dictionaries whose leaves are tensors and numbers."""

_LEVEL = "/"


def flat(tree: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the leaves by path, on the CPU and contiguous; numbers become tensors [] of 64 bits."""
    leaves: dict[str, Tensor] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= {f"{name}{_LEVEL}{path}": leaf for path, leaf in flat(value).items()}
        elif isinstance(value, Tensor):
            leaves[name] = value.detach().cpu().contiguous()
        else:
            leaves[name] = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    return leaves


def nested(leaves: Mapping[str, Tensor]) -> Tree:
    """Returns the tree that `flat` took apart; what were numbers are tensors [], which int() and bool() read."""
    tree: Tree = {}
    for path, leaf in leaves.items():
        *parents, name = path.split(_LEVEL)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def differences(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> list[str]:
    """Returns a phrase for every tensor that is missing, unknown, or of another shape."""
    return [
        f"{name} {_shape(saved.get(name))} instead of {_shape(own.get(name))}"
        for name in sorted(own.keys() | saved.keys())
        if _shape(saved.get(name)) != _shape(own.get(name))
    ]


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(list(tensor.shape))


def plain(module: nn.Module) -> dict[str, Tensor]:
    """Returns a module's tensors on the CPU; tensors that share memory are taken apart, as safetensors wants it."""
    return {name: value.detach().cpu().contiguous().clone() for name, value in module.state_dict().items()}


def optimizer_state(optimizer: Optimizer) -> tuple[dict[str, Tensor], Tree]:
    """Splits an optimizer's state into tensors by "index.name", and class, settings and numbers as JSON."""
    whole = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for index, entries in whole["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value.detach().cpu().contiguous().clone()
            else:
                numbers.setdefault(str(index), {})[name] = value
    # a learning rate that CUDA graphs read is a tensor
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
    own = optimizer.state_dict()
    optimizer.load_state_dict({"state": state, "param_groups": own["param_groups"]})


def load_rates(optimizer: Optimizer, settings: Tree) -> None:
    """Sets learning rates as saved; one that CUDA graphs read stays where it is."""
    for group, saved in zip(optimizer.param_groups, settings["groups"], strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(saved["lr"])
        else:
            group["lr"] = saved["lr"]
