"""Train DQN over candidates, from a log or in simulation: python -m workflows.parametric_dqn --config x.json."""

import os
import sys

if not __package__:  # python workflows/parametric_dqn.py: this folder would hide Python's own module inspect
    sys.path[0] = os.path.dirname(sys.path[0])

from reagent_lite.config import ParametricDqnConfig
from reagent_lite.tasks.train import main

if __name__ == "__main__":
    sys.exit(main("workflows.parametric_dqn", ParametricDqnConfig, "configs/cartpole/parametric_dqn.json"))
