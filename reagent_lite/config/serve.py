"""The whole JSON of `workflows.serve`: an exported model, the folder of its log, and limits."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from reagent_lite.config.items import NewerItems
from reagent_lite.config.section import Count, LocalPath, Positive, Section, Seed
from reagent_lite.errors import Problem


class ServeConfig(Section):
    """`python -m workflows.serve`: answers with a model's decisions over HTTP, and logs them to train the next."""

    model: str = ""
    """Folder of an exported model; another model that takes its place is served as soon as it is loaded."""
    items: NewerItems = None
    log: LocalPath = ""
    """Folder of the log: Parquet files that training reads as they are. Only one server at a time may use it."""
    database: LocalPath = ""
    """Folder on a local disk for the decisions that are in no Parquet file yet; absent: a hidden one in the log's."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for those of other machines."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 takes a free one, which the log names."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Processes that answer on the port."""
    reward_seconds: Positive = 3600.0
    """How long a decision waits for its reward; one that got none is then written with reward 0."""
    waiting_decisions: Count = 1_000_000
    """Most decisions that wait for their reward; above that the oldest are written as if time were up."""
    rotate_seconds: Positive = 300.0
    """Seconds after which complete decisions are written into a Parquet file."""
    rotate_mb: Positive = 64.0
    """Megabytes of new decisions after which they are written earlier."""
    max_body_kb: Positive = 1024.0
    """Largest body of a request; a larger one is answered with 413."""
    request_seconds: Positive = 10.0
    """How long the body of a request may take to arrive, and a process wait for the others to use the database."""
    poll_seconds: Positive = 1.0
    """Seconds between checks of the model's folder and of `items`, syncs of the database, and checks whether a file is
    due."""
    seed: Seed | None = None
    """Seed of the draws, for tests; absent: from the system, so that a restart does not repeat them."""

    def rules(self) -> Iterator[Problem]:
        """Yields missing paths, and an address that would be all of this machine's."""
        if not self.model:
            yield self.wrong("model", "a path", "Or give --model")
        if not self.log:
            yield self.wrong("log", "a path", "Or give --log")
        if not self.host:
            yield self.wrong("host", "an address to listen on", "127.0.0.1 is this machine, 0.0.0.0 all its addresses")
