"""An optimizer and what surrounds its step: clipping, the schedule of learning rates, cleared gradients."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


@dataclass(slots=True, kw_only=True)
class Optimization:
    """An optimizer and what surrounds its step.

    Attributes:
        optimizer: over the learner's trainable parameters.
        schedule: stepped once an epoch, or None for a fixed learning rate.
        clip_norm: largest norm of the whole gradient, or None.
    """

    optimizer: Optimizer
    schedule: LRScheduler | None = None
    clip_norm: float | None = None

    def step(self) -> None:
        """Clips, moves the parameters and clears the gradients."""
        if self.clip_norm is not None:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def progress(self) -> dict[str, Any] | None:
        """Returns how far the schedule is, as JSON; the rates themselves stand with the optimizer's settings."""
        if self.schedule is None:
            return None
        return {"last_epoch": self.schedule.last_epoch, "_step_count": self.schedule._step_count}

    def load_progress(self, saved: dict[str, Any] | None) -> None:
        """Continues the schedule; call it once the rates are restored."""
        if self.schedule is not None and saved is not None:
            rates = [group["lr"] for group in self.optimizer.param_groups]
            self.schedule.load_state_dict({**saved, "_last_lr": rates})
