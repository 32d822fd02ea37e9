"""Train DQN over candidates, from a log or in simulation: python -m workflows.parametric_dqn --config x.json."""

import sys

from reagent_lite.config import ParametricDqnConfig
from reagent_lite.run.launch import main
from reagent_lite.run.train import train

if __name__ == "__main__":
    sys.exit(main("workflows.parametric_dqn", ParametricDqnConfig, train, "configs/cartpole/parametric_dqn.json"))
