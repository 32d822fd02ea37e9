"""Train DQN over named actions, from a log or in simulation: python -m workflows.dqn --config x.json."""

import sys

from reagent_lite.config import DqnConfig
from reagent_lite.run.launch import main

if __name__ == "__main__":
    sys.exit(main("workflows.dqn", DqnConfig, "configs/cartpole/dqn.json"))
