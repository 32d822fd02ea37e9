"""Makes tests/oracles and tests/helpers importable from every test, and lets tests run side by side."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from reagent_lite.distributed.worker import STOP_SIGNALS
from reagent_lite.sim.cache import cache_folder

sys.path.insert(0, str(Path(__file__).parent))
# environments are compiled once for all tests and all runs, whatever other caches a test has
os.environ.setdefault("REAGENT_LITE_CACHE", str(cache_folder()))
# threads of several tests that wait for each other on few cores take up to 16 times as long
torch.set_num_threads(1)
# a busy machine takes any time for an example
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    """Undoes what a command or a run in the test's process leaves: ignored signals, and threads of torch."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)
