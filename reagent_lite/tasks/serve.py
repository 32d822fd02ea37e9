"""Serve an exported model, and log its decisions.

1 check    the model's hashes, the log's folder and lock, the port
2 serve    POST /decide, /rank and /reward in worker processes; each decision is logged before it is answered
3 rotate   decisions that are reward_seconds old into Parquet in the log's folder, which workflows.dqn trains on
4 stop     SIGTERM: requests in progress are answered; decisions that wait for their reward stay for the next start
"""

import time
from dataclasses import dataclass

from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.errors import needing
from reagent_lite.export import load_bundle


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


def require_models(config: ServeConfig) -> None:
    """Checks that the model, and that of a rollout, can be loaded.

    Raises:
        BundleError: a model does not exist, or a file of it is missing or altered.
    """
    load_bundle(config.model)
    if config.rollout is not None:
        load_bundle(config.rollout.model)


def serve(config: ServeConfig) -> Served:
    """Serves until SIGTERM or SIGINT."""
    with needing("serve", "workflows.serve"):
        from reagent_lite.serving import workers

    start = time.monotonic()
    restarts, waiting = workers.run_workers(config)
    seconds = round(time.monotonic() - start, 3)
    return Served(
        model=config.model,
        log=config.log,
        workers=config.workers,
        restarts=restarts,
        waiting=waiting,
        seconds=seconds,
    )
