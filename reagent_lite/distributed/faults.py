"""Deliberate faults, to test a cluster: REAGENT_LITE_FAULT=fail:rank=1,step=20,kind=kill.

kind        effect on the rank before optimizer step `step`
kill        SIGKILL, like a process that the system ends because it takes too much memory
stop        SIGSTOP, like a machine that hangs
exception   an exception
slow        sleeps `seconds`, 5 by default, before this step and every later step
The fault happens in the first start of a run (attempt 0), in start n with `attempt=n`, or in all with `attempt=any`.
"""

import os
import signal
import time
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from reagent_lite.distributed.group import Place, attempt_here
from reagent_lite.errors import ConfigError, Problem

VARIABLE = "REAGENT_LITE_FAULT"
_EXAMPLE = "fail:rank=1,step=20,kind=kill"


class Fault(BaseModel):
    """A fault of a rank.

    Attributes:
        rank: the rank.
        step: number of the optimizer step after the fault, from 0.
        kind: see above.
        seconds: length of a slow step's sleep.
        attempt: number of the run's start, or "any".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    step: int
    kind: Literal["kill", "stop", "exception", "slow"]
    seconds: float = 5.0
    attempt: int | Literal["any"] = 0

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Parses a text such as `fail:rank=1,step=20,kind=kill`.

        Raises:
            ConfigError: the text does not describe a fault.
        """
        head, _, rest = text.partition(":")
        try:
            return cls.model_validate(
                dict(item.partition("=")[::2] for item in rest.split(",")) if head == "fail" else {}
            )
        except ValidationError as error:
            advice = "kind is one of kill, stop, exception, slow; seconds and attempt may follow"
            raise ConfigError(Problem(VARIABLE, f"text such as {_EXAMPLE}", repr(text), advice)) from error

    def before_step(self, step: int) -> None:
        """Causes the fault if this is the step."""
        if self.kind == "slow" and step >= self.step:
            time.sleep(self.seconds)
        if step != self.step:
            return
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.kind == "exception":
            raise RuntimeError(f"{VARIABLE} asked for an exception of rank {self.rank} before step {step}")


def fault_here(position: Place) -> Fault | None:
    """Returns the fault that the environment sets for this process, or None.

    Raises:
        ConfigError: see Fault.parse.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    fault = Fault.parse(text)
    return fault if fault.rank == position.rank and fault.attempt in ("any", attempt_here()) else None
