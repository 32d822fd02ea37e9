"""torch's optimizers, without the compiler that their methods import when they are first called.

torch decorates an optimizer's methods for `torch.compile`, which nothing here uses. That import takes as long as torch
itself; the methods under the decorators are the same arithmetic.
"""

import inspect
from collections.abc import Callable

import torch
from torch.optim import Optimizer

_DECORATED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


def optimizer_class(name: str) -> Callable[..., Optimizer]:
    """Returns torch's optimizer of this name, its methods undecorated."""
    kind: type[Optimizer] = getattr(torch.optim, name)
    methods = {method: inspect.unwrap(getattr(kind, method)) for method in _DECORATED}
    return type(name, (kind,), {**methods, "step": torch.no_grad()(inspect.unwrap(kind.step))})
