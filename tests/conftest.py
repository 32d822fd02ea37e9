"""Makes tests/oracles importable from every test, and lets tests run side by side."""

import sys
from pathlib import Path

import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
# [m] threads of several tests that wait for each other on few cores take up to 16 times as long
torch.set_num_threads(1)
# a busy machine takes any time for an example
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")
