"""Who may call the server: bearer tokens, names of the server, and files of its certificate."""

import hmac
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.errors import ConfigError, Problem

DECIDING = ("/decide", "/rank")
"""Paths that need a token of `decide_token_file`; the others need one of `reward_token_file`, except OPEN."""
OPEN = "/healthz"
"""The path that needs no token: probes of schedulers and load balancers have none."""
_TOKEN = re.compile(r"[\x21-\x7e]{16,}")
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::[0-9]*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Tokens and host names that a server accepts.

    Attributes:
        decide, reward: the tokens of each kind; empty: none is needed.
        hosts: names in lower case; empty: any.
    """

    decide: tuple[bytes, ...] = ()
    reward: tuple[bytes, ...] = ()
    hosts: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: ServeConfig) -> "Access":
        """Returns the access that a config describes.

        Raises:
            ConfigError: a file of tokens cannot be read, or has none.
        """
        restricted = config.hosts or config.is_local
        return cls(
            decide=_tokens(config, "decide_token_file"),
            reward=_tokens(config, "reward_token_file"),
            hosts=frozenset(name.lower() for name in (*config.hosts, *_LOCAL_NAMES, config.host) if restricted),
        )

    def has_host(self, header: bytes) -> bool:
        """Whether a header Host names this server; its port does not count."""
        if not self.hosts:
            return True
        match = _HOST.fullmatch(header)
        return match is not None and match[1].decode("latin-1").lower() in self.hosts

    def allows(self, path: str, headers: Mapping[bytes, bytes]) -> bool:
        """Whether a request may use a path; compares in constant time."""
        tokens = self.decide if path in DECIDING else self.reward
        if path == OPEN or not tokens:
            return True
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        matches = [hmac.compare_digest(given.strip(), token) for token in tokens]
        return kind.lower() == b"bearer" and any(matches)


def _tokens(config: ServeConfig, key: str) -> tuple[bytes, ...]:
    path = getattr(config, key)
    if not path:
        return ()
    expected = "a file with tokens of at least 16 ASCII characters without spaces, one a line"
    todo = "Write one by: openssl rand -hex 32 > FILE"
    try:
        lines = Path(path).expanduser().read_text("ascii").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        got = getattr(error, "strerror", None) or "other characters"
        raise ConfigError(Problem(key, expected, f"{path}: {got}", todo)) from None
    tokens = [line.strip() for line in lines if line.strip()]
    if not tokens or not all(map(_TOKEN.fullmatch, tokens)):
        got = "a line that is none" if tokens else "no line"  # the message must not have a token
        raise ConfigError(Problem(key, expected, f"{path}: {got}", todo))
    return tuple(token.encode() for token in tokens)


def require_certificate(config: ServeConfig) -> None:
    """Checks that the files of the certificate and its key belong together.

    Raises:
        ConfigError: they cannot be read, do not belong together, or need a passphrase.
    """
    if not config.tls_certificate:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            Path(config.tls_certificate).expanduser(), Path(config.tls_key).expanduser() if config.tls_key else None, ""
        )
    except OSError as error:
        expected = "a PEM certificate with its key, without a passphrase"
        raise ConfigError(Problem("tls_certificate", expected, error.strerror or str(error))) from error
