"""Train DQN over candidates, from a log or in simulation: python -m workflows.parametric_dqn --config x.json."""

import sys

from reagent_lite.config import ParametricDqnConfig
from reagent_lite.run.launch import main

if __name__ == "__main__":
    sys.exit(main("workflows.parametric_dqn", ParametricDqnConfig, "configs/cartpole/parametric_dqn.json"))
