"""Commands: one module each."""

import os

# a lost peer has a message of its own; torch's store would print a C++ stack trace before it
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# torch's threads wait for each other by spinning, which takes cores from other programs; after this number of spins,
# some microseconds, they sleep (tests/benchmarks/threads.py)
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
