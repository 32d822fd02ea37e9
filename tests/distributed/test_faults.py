"""Deliberate faults: their text, the ranks they affect, and their effects."""

import os
import signal
import time

import pytest

from reagent_lite.distributed.faults import VARIABLE, Fault, fault_here
from reagent_lite.distributed.group import ATTEMPT_VARIABLE, Place
from reagent_lite.errors import ConfigError

KILL = "fail:rank=1,step=20,kind=kill"


def test_the_text_of_a_fault_and_whom_it_hits(monkeypatch: pytest.MonkeyPatch) -> None:
    position = Place(rank=1, world_size=2)
    assert fault_here(position) is None
    monkeypatch.setenv(VARIABLE, KILL)
    assert fault_here(position) == Fault(rank=1, step=20, kind="kill")
    assert fault_here(Place(rank=0, world_size=2)) is None
    monkeypatch.setenv(ATTEMPT_VARIABLE, "7")
    assert fault_here(position) is None
    monkeypatch.setenv(VARIABLE, "fail:rank=1,step=3,kind=slow,seconds=0.5,attempt=any")
    assert fault_here(position) == Fault(rank=1, step=3, kind="slow", seconds=0.5, attempt="any")


@pytest.mark.parametrize("text", ["kill", "fail:rank=1,step=2", "fail:rank=x,step=2,kind=kill",
                                  "fail:rank=1,step=2,kind=burn", "fail:rank=1,step=2,kind=kill,when=now"])  # fmt: skip
def test_other_texts_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ConfigError, match=f"{VARIABLE}: expected text such as {KILL}"):
        fault_here(Place())


def test_what_a_fault_does_at_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are slow from this step on; the other faults happen once."""
    done: list[object] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: done.append((pid, number)))
    monkeypatch.setattr(time, "sleep", done.append)
    for kind in ("kill", "stop", "slow"):
        for step in (1, 2, 3):
            Fault(rank=0, step=2, kind=kind, seconds=0.5).before_step(step)
    assert done == [(os.getpid(), signal.SIGKILL), (os.getpid(), signal.SIGSTOP), 0.5, 0.5]
    with pytest.raises(RuntimeError, match="before step 2"):
        Fault(rank=0, step=2, kind="exception").before_step(2)
