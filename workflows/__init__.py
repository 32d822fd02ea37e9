"""Commands: one module each."""

import os

# the loss of a peer is reported by our own message; torch's store would print a C++ stack trace before it
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# torch's threads spin while they wait for each other, which takes cores from other programs; after this number of
# spins, some microseconds, they sleep (tests/benchmarks/threads.py)
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
