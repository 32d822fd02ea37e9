"""Train DQN over candidate lists from logged transitions: python -m workflows.parametric_dqn --config x.json."""

import sys

from reagent_lite.config import ParametricDqnConfig
from workflows.command_line_training import main
from workflows.training import train

if __name__ == "__main__":
    sys.exit(main("workflows.parametric_dqn", ParametricDqnConfig, train, "configs/cartpole/parametric_dqn.json"))
