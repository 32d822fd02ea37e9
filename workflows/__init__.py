"""Entry points: the only place where everything meets."""

import os

# a peer that is gone is reported by our own words; torch's store would print a C++ stack trace before them
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
