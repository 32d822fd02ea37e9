"""The whole JSON of `workflows.serve`: an exported model, the folder of the log, and limits."""

from collections.abc import Iterator
from ipaddress import ip_address
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from reagent_lite.config.items import NewerItems
from reagent_lite.config.rollout_config import ServedRolloutConfig
from reagent_lite.config.section import Count, LocalPath, Positive, Section, Seed
from reagent_lite.errors import Problem


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
    rollout: ServedRolloutConfig | None = None
    """A second model that gets a share of the decisions and is compared with `model` at every unit; neither is replaced
    by a newer one meanwhile."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts requests from other machines, and needs tokens."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0: a free port, which is logged."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Number of processes that answer on the port."""
    decide_token_file: LocalPath = ""
    """File with the bearer tokens for /decide and /rank, one a line; absent: no token is needed on this machine."""
    reward_token_file: LocalPath = ""
    """File with the bearer tokens for /reward, /metrics, /rollout, /docs and /openapi.json, one a line."""
    no_token: bool = False
    """Whether other machines may decide and reward without tokens."""
    tls_certificate: LocalPath = ""
    """PEM file with the certificate and its chain; answers are encrypted then."""
    tls_key: LocalPath = ""
    """PEM file with the certificate's private key, without a passphrase; absent: it is in tls_certificate."""
    hosts: tuple[str, ...] = ()
    """Names by which clients may call the server, as in the header Host; localhost and its addresses always are among
    them. Absent: if `host` is an address of this machine alone, these only, otherwise any."""
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
    max_rows: Count = 1000
    """Largest number of rows of a request; more are answered with 413."""
    max_candidates: Count = 10_000
    """Largest number of possible_actions of a row; more are answered with 413."""
    max_logged_kb: Positive = 4096.0
    """Largest size in the log of a request's decisions; more are answered with 413 and not logged."""
    max_connections: Count = 4096
    """Largest number of connections of a worker. Beyond it the oldest connection whose TLS handshake or request is
    incomplete is closed, or else the new one."""
    max_client_connections: Count = 1024
    """The same for the connections of a worker from one address, which may be a proxy."""
    request_seconds: Positive = 10.0
    """Seconds that the head of a request may take to arrive, and as many for its body, and for a TLS handshake."""
    poll_seconds: Positive = 1.0
    """Seconds between checks of the model's folder and of `items`, between syncs of the database, and between checks
    whether a Parquet file is due."""
    seed: Seed | None = None
    """Seed of the draws, for tests; absent: from the system, so that a restart draws differently."""
    log_format: Literal["text", "json"] = "text"
    """Format of messages on standard error; json: an object a line, with time, level and message."""

    required: ClassVar = {
        "model": ("a path", "Or give --model"),
        "log": ("a path", "Or give --log"),
        "host": ("an address to listen on", "127.0.0.1 is this machine, 0.0.0.0 all its addresses"),
    }

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach `host`."""
        if self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def rules(self) -> Iterator[Problem]:
        """Yields Problems if other machines need no token, or a key has no certificate."""
        for key in ("decide_token_file", "reward_token_file"):
            if not getattr(self, key) and not self.is_local and not self.no_token:
                expected = f"a file with a token, as other machines can reach {self.host}"
                todo = "Write one by: openssl rand -hex 32 > FILE; or give --no_token if everyone may use the server"
                yield self.wrong(key, expected, todo)
        if self.tls_key and not self.tls_certificate:
            yield self.wrong("tls_certificate", "the certificate of tls_key")
