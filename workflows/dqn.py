"""Train DQN over named actions, from a log or in simulation: python -m workflows.dqn --config x.json."""

import os
import sys

if not __package__:  # python workflows/dqn.py: this folder would hide Python's own module inspect
    sys.path[0] = os.path.dirname(sys.path[0])

from reagent_lite.config import DqnConfig
from reagent_lite.tasks.train import main

if __name__ == "__main__":
    sys.exit(main("workflows.dqn", DqnConfig, "configs/cartpole/dqn.json"))
