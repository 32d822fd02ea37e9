"""Optimizers take torch's own steps; that they import no compiler for it is in tests/test_extras.py."""

import pytest
import torch

from reagent_lite.algorithms.optimizers import optimizer_class
from reagent_lite.config.training import OPTIMIZERS


@pytest.mark.parametrize("name", OPTIMIZERS.values())
def test_steps_and_state_are_those_of_torch(name: str) -> None:
    def state_after(kind: type[torch.optim.Optimizer], steps: int) -> list[object]:
        weight = torch.nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]]))
        optimizer = kind([{"params": [weight], "weight_decay": 0.1}], lr=0.1)  # type: ignore[call-arg]
        for _ in range(steps):
            weight.square().sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        assert weight.grad is None
        return [weight.tolist(), str(optimizer.state_dict())]

    assert state_after(optimizer_class(name), 3) == state_after(getattr(torch.optim, name), 3)  # type: ignore[arg-type]
