"""Entry points: the only place where everything meets."""

import os

# a peer that is gone is reported by our own words; torch's store would print a C++ stack trace before them
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# torch's threads wait for each other by spinning, which takes the cores from each other where other programs run as
# well; so many spins are some microseconds, and then they sleep (tests/benchmarks/threads.py)
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
