"""The whole JSON of `workflows.serve`: an exported model, the folder of the log, and limits."""

from typing import Annotated, ClassVar

from pydantic import Field

from reagent_lite.config.items import NewerItems
from reagent_lite.config.section import Count, LocalPath, Positive, Section, Seed


class ServeConfig(Section):
    """`python -m workflows.serve`: serves a model's decisions over HTTP, and logs them to train the next model."""

    model: str = ""
    """Folder of an exported model; a model that replaces it, with the same actions and features, is served as soon as
    it is loaded."""
    items: NewerItems = None
    log: LocalPath = ""
    """Folder of the log: Parquet files that training reads. Only one server at a time may use it."""
    database: LocalPath = ""
    """Folder on a local disk for decisions that are in no Parquet file yet; absent: a hidden folder in `log`."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts requests from other machines."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0: a free port, which is logged."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Number of processes that answer on the port."""
    reward_seconds: Positive = 3600.0
    """Seconds of a running server after which a decision is written, with its reward or else with reward 0.

    All decisions wait as long, so that no file is chosen by rewards: choose a time in which rewards arrive."""
    waiting_decisions: Count = 1_000_000
    """Largest number of decisions that wait; above it the oldest are written, without a reward with reward 0."""
    rotate_seconds: Positive = 300.0
    """Seconds between two Parquet files of the decisions that have waited."""
    rotate_mb: Positive = 64.0
    """Megabytes of new decisions after which a file is written before rotate_seconds have passed."""
    max_body_kb: Positive = 1024.0
    """Largest body of a request; a larger one is answered with 413."""
    request_seconds: Positive = 10.0
    """Seconds that the body of a request may take to arrive, and that a process waits for the database."""
    poll_seconds: Positive = 1.0
    """Seconds between checks of the model's folder and of `items`, between syncs of the database, and between checks
    whether a Parquet file is due."""
    seed: Seed | None = None
    """Seed of the draws, for tests; absent: from the system, so that a restart draws differently."""

    required: ClassVar = {
        "model": ("a path", "Or give --model"),
        "log": ("a path", "Or give --log"),
        "host": ("an address to listen on", "127.0.0.1 is this machine, 0.0.0.0 all its addresses"),
    }
