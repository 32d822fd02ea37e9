"""Makes tests/oracles importable from every test, and lets tests run side by side."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
# [m] threads of several tests that wait for each other on few cores take up to 16 times as long
torch.set_num_threads(1)
