"""Evaluate a policy: python -m workflows.evaluate --model BUNDLE --data LOGS --env ENVIRONMENT."""

import os
import sys

if not __package__:  # python workflows/evaluate.py: this folder would hide Python's own module inspect
    sys.path[0] = os.path.dirname(sys.path[0])

from reagent_lite.cli import Command, Flag, main_alone
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.tasks.evaluate import evaluate, open_policies

COMMAND = Command(
    module="workflows.evaluate",
    model=EvaluateConfig,
    example="configs/cartpole/evaluate.json",
    settings="--model outputs/new/model --set against=outputs/old/model",
    outcome="decision, report, page, episodes, rows, scores, difference, warnings, seconds",
    flags={
        "model": Flag(
            "--model", "folder of an exported model, uniform, logged or column:NAME; or several", several=True
        ),
        "data_path": Flag("--data", "the log"),
        "simulation.env": Flag("--env", "environment to play in, a name, a .cuh file or gymnasium:name"),
    },
    needs_config=False,
    notes="One process does the work, on the CPU. It needs --model and one of --data and --env, or both; without\n"
    "--config all other keys have their defaults.",
)

if __name__ == "__main__":
    sys.exit(main_alone(COMMAND, evaluate, check=open_policies))
