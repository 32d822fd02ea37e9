"""Serve an exported model, and log its decisions: python -m workflows.serve --model BUNDLE --log FOLDER."""

import os
import sys

if not __package__:  # python workflows/serve.py: this folder would hide Python's own module inspect
    sys.path[0] = os.path.dirname(sys.path[0])

from reagent_lite.cli import Command, Flag, main_alone
from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.tasks.serve import require_models, serve

COMMAND = Command(
    module="workflows.serve",
    model=ServeConfig,
    example="configs/serve/serve.json",
    settings="--model outputs/cartpole/model --log outputs/log",
    outcome="model, log, workers, restarts, waiting, seconds",
    codes=(
        "0  stopped by SIGTERM or SIGINT",
        "1  unexpected error",
        "2  config or data error",
        "5  another server has the log",
        "75 stopped by another signal, or before it served",
    ),
    flags={
        "model": Flag("--model", "folder of the exported model"),
        "log": Flag("--log", "folder of the log"),
        "port": Flag("--port", "port to listen on", int),
        "no_token": Flag("--no_token", "let other machines decide and reward without tokens", bool),
        "log_format": Flag("--log_format", "text or json, for messages on standard error"),
    },
    needs_config=False,
    notes="""\
POST /decide {"rows": [{"state_features": {"age": 0.1}, "mdp_id": "7"}]} answers actions with their propensities;
POST /reward {"decision_id": "...", "reward": 1.0} joins a reward to its decision; GET /docs describes all requests.""",
)

if __name__ == "__main__":
    sys.exit(main_alone(COMMAND, serve, check=require_models))
