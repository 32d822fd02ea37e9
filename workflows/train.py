"""Train DQN over named actions or candidates, as the config has them: python -m workflows.train --config x.json."""

import os
import sys

if not __package__:  # python workflows/train.py: this folder would hide Python's own module inspect
    sys.path[0] = os.path.dirname(sys.path[0])

import argparse

from reagent_lite.cli import add_config
from reagent_lite.tasks.train import WORKFLOWS, choose_workflow, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    add_config(parser)
    options, _ = parser.parse_known_args()
    name = "dqn" if options.config is None else choose_workflow(options.config, options.set)
    sys.exit(main("workflows.train", WORKFLOWS[name], "configs/offers/dqn.json"))
