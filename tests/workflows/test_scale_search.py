"""The search against a simulated device, whose knee and memory are known."""

from dataclasses import dataclass, field

import pytest

from reagent_lite.run.scaling.search import search, smallest


@dataclass
class Device:
    """A round of n environments takes start + n microseconds; more than `memory` of them do not fit."""

    start: float
    memory: int = 2**40
    asked: list[int] = field(default_factory=list)

    def rate(self, size: int) -> float:
        return 1e6 * size / (self.start + size)

    def __call__(self, size: int) -> float:
        self.asked.append(size)
        return 0.0 if size > self.memory else self.rate(size)


def test_doubling_stops_behind_the_knee() -> None:
    """At 32 768 of 1000 + n the rate is 97 % of what is possible; one doubling gains 1.5 %, two gain 2.2 %."""
    device = Device(start=1000)
    rates = search(device, 64, 2**30)
    assert device.asked == [64 * 2**i for i in range(12)]
    assert smallest(rates) == 32768
    assert rates[32768] == device.rate(32768)


@pytest.mark.parametrize("start", [0, 10, 1000, 37_000, 10**6])
@pytest.mark.parametrize("memory", [64, 100, 5000, 123_456, 2**30])
def test_the_choice_is_within_5_percent_of_the_best_that_fits(start: float, memory: int) -> None:
    device = Device(start=start, memory=memory)
    best = smallest(search(device, 64, 2**22))
    assert best is not None
    # bisection leaves an eighth of the size open, which is less of the rate
    most = device.rate(min(memory, 2**22))
    beyond = device.rate(min(memory, 2**22) * 8 // 9)
    assert device.rate(best) > 0.95 * (most if memory >= 2**22 else beyond)


def test_bisection_finds_the_limit_of_memory() -> None:
    """Doubling fails at 1024; then 768, 640 and 576 do or do not fit into 700; an eighth of 640 is the end."""
    device = Device(start=1e6, memory=700)
    assert list(search(device, 64, 2**20)) == [64, 128, 256, 512, 1024, 768, 640, 704]
    assert smallest(search(device, 64, 2**20)) == 640


def test_bisection_ends_where_it_gains_nothing() -> None:
    device = Device(start=40, memory=1500)
    assert list(search(device, 1000, 2**20)) == [1000, 2000, 1500]


def test_a_limit_is_tried_and_not_passed() -> None:
    device = Device(start=1e6)
    assert list(search(device, 64, 300)) == [64, 128, 256, 300]
    assert list(search(device, 64, 64)) == [64]


def test_a_dip_does_not_end_the_doubling() -> None:
    rates = {1: 10.0, 2: 9.0, 4: 20.0, 8: 20.1, 16: 20.2}
    measured = search(rates.__getitem__, 1, 16)
    assert list(measured) == [1, 2, 4, 8, 16]
    assert smallest(measured) == 4


def test_nothing_fits() -> None:
    device = Device(start=1, memory=10)
    rates = search(device, 64, 2**20)
    assert device.asked == [64]
    assert smallest(rates) is None
