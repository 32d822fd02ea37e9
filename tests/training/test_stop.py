"""Signals: noted while learning, heeded at once elsewhere, and handed back afterwards."""

import os
import signal
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from reagent_lite.distributed.worker import STOP_SIGNALS
from reagent_lite.errors import Preempted
from reagent_lite.training.stop import StopSignal


@pytest.fixture(autouse=True)
def terminal() -> None:
    """The tests themselves may run under nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def send(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in STOP_SIGNALS]


def ended_by(work: Callable[[], object], name: str = "SIGTERM") -> Preempted:
    """Returns what ends work under a StopSignal."""
    with pytest.raises(Preempted, match=f"{name}: nothing was saved yet") as caught, StopSignal():
        work()
    return caught.value


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_elsewhere_a_signal_ends_the_work_at_once(number: signal.Signals) -> None:
    assert ended_by(lambda: send(number), number.name).exit_code == 75


@pytest.mark.parametrize("numbers", [*((number,) for number in STOP_SIGNALS), (signal.SIGTERM, signal.SIGTERM)])
def test_while_learning_a_signal_waits_to_be_asked(numbers: tuple[signal.Signals, ...]) -> None:
    def learn() -> None:
        with stop.defer():
            assert not stop.wanted
            for number in numbers:
                send(number)
            assert stop.wanted
            stop.standing = "checkpoint 7 stands"
        raise AssertionError("the signal was lost where nobody asked")

    with StopSignal() as stop, pytest.raises(Preempted, match=f"{numbers[0].name}: checkpoint 7 stands"):
        learn()


def test_a_second_interrupt_does_not_wait() -> None:
    with StopSignal() as stop, stop.defer():
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        stop._name = ""


@pytest.mark.parametrize("hangup", [signal.SIG_DFL, signal.SIG_IGN])
def test_handlers_are_handed_back_and_what_nohup_ignores_stays_ignored(hangup: signal.Handlers) -> None:
    signal.signal(signal.SIGHUP, hangup)
    before = handlers()
    with StopSignal() as stop:
        assert set(before) & set(handlers()) == {hangup} - {signal.SIG_DFL}
        if hangup == signal.SIG_IGN:
            send(signal.SIGHUP)
        assert not stop.wanted
    assert handlers() == before


def test_other_threads_listen_to_nothing() -> None:
    def seen() -> list[object]:
        with StopSignal() as stop, stop.defer():
            return handlers()

    with ThreadPoolExecutor() as pool:
        assert pool.submit(seen).result() == handlers()


def test_code_that_handles_errors_does_not_handle_a_signal() -> None:
    def careful() -> None:
        with suppress(Exception):
            send()
        raise AssertionError("swallowed")

    assert ended_by(careful).__cause__ is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_in_a_callback_whose_errors_are_only_reported_ends_the_next_deferred_work() -> None:
    def work() -> None:
        _ = weakref.ref(set(), lambda _: send())  # at once, as nothing else refers to the set
        with stop.defer():
            assert stop.wanted
        raise AssertionError("the signal was lost")

    with StopSignal() as stop, pytest.raises(Preempted, match="SIGTERM"):
        work()


def test_an_error_after_a_signal_is_its_consequence_and_a_second_one_does_not_interrupt_tidying_up() -> None:
    """As a library that ends its query with a RuntimeError of its own when a signal's handler raises."""

    def query() -> None:
        try:
            send()
        finally:
            send()
            raise RuntimeError("query interrupted")

    assert isinstance(ended_by(query).__cause__, RuntimeError)


def test_behind_the_last_block_signals_are_ignored() -> None:
    with StopSignal(last=True):
        pass
    send()
