"""Faults on purpose: a rank that REAGENT_LITE_FAULT=fail:rank=1,step=20,kind=kill names has one before that step.

Python imports this module when it starts, if its folder is on PYTHONPATH, and so do the workers that a run starts.

kind        effect on the rank before optimizer step `step`
kill        SIGKILL, like a process that the system ends because it takes too much memory
stop        SIGSTOP, like a machine that hangs
exception   an exception
slow        sleeps `seconds`, 5 by default, before this step and every later step
The fault happens in the first start of a run (attempt 0), or in all with `attempt=any`.
"""

import os
import signal
import time


def install(text: str) -> None:
    """Makes the steps of runs in this process faulty."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as workflows does before torch is loaded
    from reagent_lite.distributed.group import attempt_here
    from reagent_lite.run.sources.stream import Stream

    fault = dict(item.split("=") for item in text.removeprefix("fail:").split(","))
    kind, step_of_fault = fault["kind"], int(fault["step"])
    before_step = Stream.before_step

    def faulty(stream: Stream, step: int) -> None:
        if (stream.group.rank == int(fault["rank"])) and (fault.get("attempt") == "any" or attempt_here() == 0):
            if kind == "slow" and step >= step_of_fault:
                time.sleep(float(fault.get("seconds", 5)))
            elif step == step_of_fault and kind == "exception":
                raise RuntimeError(f"an exception of rank {fault['rank']} on purpose, before step {step}")
            elif step == step_of_fault and kind in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        before_step(stream, step)

    Stream.before_step = faulty  # type: ignore[method-assign]


if os.environ.get("REAGENT_LITE_FAULT"):
    install(os.environ["REAGENT_LITE_FAULT"])
