"""torch's optimizers without the import of torch's compiler.

torch decorates an optimizer's methods for `torch.compile`; their first call imports the compiler, which takes as long
as the import of torch. The undecorated methods have the same arithmetic.
"""

import inspect
from collections.abc import Callable

import torch
from torch.optim import Optimizer

_DECORATED = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")


def optimizer_class(name: str) -> Callable[..., Optimizer]:
    """Returns the torch.optim class of this name, its methods without decorators."""
    kind: type[Optimizer] = getattr(torch.optim, name)
    methods = {method: inspect.unwrap(getattr(kind, method)) for method in _DECORATED}
    return type(name, (kind,), {**methods, "step": torch.no_grad()(inspect.unwrap(kind.step))})
