"""Evaluate an exported model: python -m workflows.evaluate --model BUNDLE --data LOGS --env ENVIRONMENT."""

import sys

from reagent_lite.cli import Command, main_alone
from reagent_lite.config.evaluate import EvaluateConfig
from reagent_lite.exported.evaluate import evaluate

COMMAND = Command(
    module="workflows.evaluate",
    model=EvaluateConfig,
    example="configs/cartpole/evaluate.json",
    settings="--model outputs/new/model --set against=outputs/old/model",
    outcome="report, page, episodes, rows, scores, difference, warnings, seconds",
    texts={
        "model": ("--model", "folder of an exported model"),
        "data_path": ("--data", "the log"),
        "simulation.env": ("--env", "environment to play in, a name or a .cuh file"),
    },
    needs_config=False,
    story="One process does the work, on the CPU. Without --config every key but those with a flag has its default:\n"
    "--model and one of --data and --env, or both.",
)

if __name__ == "__main__":
    sys.exit(main_alone(COMMAND, EvaluateConfig, evaluate))
