"""Faults on purpose: their text, whom they hit, and that they strike."""

import os
import signal
import time

import pytest

from reagent_lite.distributed.faults import VARIABLE, Fault, InjectedFaultError, fault_here
from reagent_lite.distributed.group import ATTEMPT_VARIABLE, Place
from reagent_lite.errors import ConfigError


def test_the_text_of_a_fault() -> None:
    assert Fault.parse("fail:rank=1,step=20,kind=kill") == Fault(rank=1, step=20, kind="kill")
    assert Fault.parse("fail:rank=0,step=3,kind=slow,seconds=0.5,attempt=any") == Fault(
        rank=0, step=3, kind="slow", seconds=0.5, attempt="any"
    )


@pytest.mark.parametrize("text", ["kill", "fail:rank=1,step=2", "fail:rank=x,step=2,kind=kill",
                                  "fail:rank=1,step=2,kind=burn", "fail:rank=1,step=2,kind=kill,when=now"])  # fmt: skip
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"{VARIABLE}: expected text such as fail:rank=1,step=20,kind=kill"):
        fault_here(Place(), {VARIABLE: text})


def test_only_the_rank_and_the_attempt_are_hit() -> None:
    text = {VARIABLE: "fail:rank=1,step=2,kind=kill"}
    assert fault_here(Place(rank=0, world_size=2), text) is None
    assert fault_here(Place(rank=1, world_size=2), {**text, ATTEMPT_VARIABLE: "1"}) is None
    assert fault_here(Place(rank=1, world_size=2), {**text, ATTEMPT_VARIABLE: "0"}) is not None
    assert fault_here(Place(), {}) is None


def test_an_exception_at_its_step_only() -> None:
    fault = Fault(rank=0, step=2, kind="exception")
    fault.before_step(1)
    fault.before_step(3)
    with pytest.raises(InjectedFaultError, match="before step 2"):
        fault.before_step(2)


def test_slow_from_its_step_on() -> None:
    fault = Fault(rank=0, step=1, kind="slow", seconds=0.05)
    start = time.monotonic()
    fault.before_step(0)
    assert time.monotonic() - start < 0.04
    fault.before_step(2)
    assert time.monotonic() - start >= 0.05


def test_kill_and_stop_are_signals_to_the_process_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    for kind in ("kill", "stop"):
        Fault(rank=0, step=0, kind=kind).before_step(0)
    assert sent == [(os.getpid(), signal.SIGKILL), (os.getpid(), signal.SIGSTOP)]
