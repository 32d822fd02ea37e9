"""Serve an exported model, and log its decisions: python -m workflows.serve --model BUNDLE --log FOLDER.

1 check    the model's hashes, the log's folder and lock, the port
2 serve    POST /decide, /rank and /reward in worker processes; each decision is logged before it is answered
3 rotate   decisions that are reward_seconds old into Parquet in the log's folder, which workflows.dqn trains on
4 stop     SIGTERM: requests in progress are answered; decisions that wait for their reward stay for the next start
"""

import os
import sys

if not __package__:  # python workflows/serve.py: this folder would hide Python's own module inspect
    sys.path[0] = os.path.dirname(sys.path[0])

import time
from dataclasses import dataclass

from reagent_lite.cli import Command, Flag, main_alone
from reagent_lite.config.serve import ServeConfig
from reagent_lite.errors import needing


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The results; printed as the last line of standard output.

    Attributes:
        model, log: paths from the config.
        workers: number of worker processes.
        restarts: number of restarts of workers that ended by themselves.
        waiting: number of decisions that wait for rewards, and are in no file yet.
        seconds: total wall-clock time of the run.
    """

    model: str
    log: str
    workers: int
    restarts: int
    waiting: int
    seconds: float


def serve(config: ServeConfig) -> Served:
    """Serves until SIGTERM or SIGINT."""
    with needing("serve", "workflows.serve"):
        from reagent_lite.serving import workers

    start = time.monotonic()
    restarts, waiting = workers.serve(config)
    seconds = round(time.monotonic() - start, 3)
    return Served(
        model=config.model,
        log=config.log,
        workers=config.workers,
        restarts=restarts,
        waiting=waiting,
        seconds=seconds,
    )


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
    sys.exit(main_alone(COMMAND, serve))
