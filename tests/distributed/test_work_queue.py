"""Work that several workers claim by renames; the second of two is another machine."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reagent_lite.distributed.work_queue import WorkQueue, fill_queue

LOST_AFTER = 0.2


@pytest.fixture
def queues(tmp_path: Path) -> tuple[WorkQueue, WorkQueue]:
    fill_queue(tmp_path, ["a", "b"])
    return WorkQueue(tmp_path, LOST_AFTER, polled_every=0.05), WorkQueue(tmp_path, LOST_AFTER, polled_every=0.05)


def test_each_work_is_claimed_once(tmp_path: Path) -> None:
    names = [f"{number:03}" for number in range(200)]
    fill_queue(tmp_path, names)
    workers = [WorkQueue(tmp_path, 10.0, polled_every=1.0) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        claims = [*threads.map(lambda worker: [*iter(worker.claim, None)], workers)]
    assert sorted(name for claimed in claims for name in claimed) == names


def test_work_ends_with_a_record_and_failed_work_waits_again(queues: tuple[WorkQueue, WorkQueue]) -> None:
    first, second = queues
    assert (first.claim(), second.claim(), second.claim()) == ("a", "b", None)
    assert not second.finish("a", {})  # it is the first one's
    assert first.finish("a", {"score": 1})
    assert second.finish("b", {"error": "x"}, failed=True)
    assert (second.names("done"), second.names("failed"), first.record("a")) == (["a"], ["b"], {"score": 1})
    second.retry_failed()
    assert (first.names("failed"), first.claim()) == ([], "b")
    first.release("b")
    assert first.names("waiting") == ["b"]


def test_a_silent_worker_loses_its_work_and_one_with_signs_of_life_does_not(
    queues: tuple[WorkQueue, WorkQueue],
) -> None:
    silent, alive = queues
    watching = WorkQueue(alive._folder, LOST_AFTER, polled_every=0.05)
    assert (silent.claim(), alive.claim()) == ("a", "b")
    taken = []
    deadline = time.monotonic() + 5
    while not taken and time.monotonic() < deadline:
        assert alive.beat("b")
        taken = watching.take_over()
        time.sleep(0.02)
    assert (taken, watching.claim(), watching.claim()) == (["a"], "a", None)
    assert not silent.beat("a")
    assert not silent.finish("a", {"score": 1})
    assert alive.finish("b", {})
