"""Faults on purpose, to test what a cluster survives: REAGENT_LITE_FAULT=fail:rank=1,step=20,kind=kill.

kind   what the rank does before optimizer step `step`
kill   ends by SIGKILL, as the system ends a process that takes too much memory
stop   stops by SIGSTOP, as a machine that hangs
exception   raises
slow   sleeps `seconds`, 5 by default, before this step and each after it
Only the first start of a run is hit (attempt 0), or the one of `attempt=n`, or with `attempt=any` each.
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
    """What happens to one rank.

    Attributes:
        rank: the rank it happens to.
        step: before which optimizer step, numbered from 0.
        kind: see above.
        seconds: how long a slow step sleeps.
        attempt: which start of the run, or "any".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    step: int
    kind: Literal["kill", "stop", "exception", "slow"]
    seconds: float = 5.0
    attempt: int | Literal["any"] = 0

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """Returns the fault that a text such as `fail:rank=1,step=20,kind=kill` describes.

        Raises:
            ConfigError: the text is no such description.
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
        """Fails if this is the step."""
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


def fault_here(place: Place) -> Fault | None:
    """Returns the fault that the environment asks of this process, or None.

    Raises:
        ConfigError: see Fault.parse.
    """
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    fault = Fault.parse(text)
    return fault if fault.rank == place.rank and fault.attempt in ("any", attempt_here()) else None
