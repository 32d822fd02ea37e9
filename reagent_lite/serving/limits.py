"""Who may send a request, limits of its body, and counters.

head ─► one length? ─► name of this server? ─► token? ─► body: size, time, memory ─► number at once ─► route
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.errors import Problem
from reagent_lite.serving.access import Access
from reagent_lite.serving.refusals import TRY_LATER, RefusedError, refusal
from reagent_lite.serving.server_figures import ServerFigures

_MOST_AT_ONCE = 1000  # requests that a worker decides at a time; any more are answered with 503 at once
_MOST_BODY_BYTES = 256_000_000  # of all bodies that a worker reads; beyond it the oldest incomplete one is refused
_ROUTES = ("/decide", "/rank", "/reward", "/healthz", "/metrics", "/openapi.json", "/docs", "/rollout", "/rollout.json")
_DISCONNECTED = 499  # only in the figures


class _DisconnectedError(Exception):
    """The client has closed the connection before the end of its body."""


class Limits:
    """ASGI middleware that admits requests, reads bodies within limits and counts requests."""

    def __init__(self, app: Any, config: ServeConfig, access: Access, figures: ServerFigures) -> None:
        self._app = app
        self._config = config
        self._access = access
        self._figures = figures
        self._most = int(config.max_body_kb * 1000)
        self._posts = 0
        self._buffered = 0
        self._incomplete: dict[asyncio.Timeout, None] = {}  # of bodies, the oldest first

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Passes a request on, or answers 400, 401, 408, 413, or 503 if too many requests wait."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        status = 500
        is_counted = False

        async def sending(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            headers = dict(scope["headers"])
            self._require_admitted(scope, headers)
            if scope["method"] == "POST":
                receive = _replay(await self._body(headers, receive), receive)
                if self._posts >= _MOST_AT_ONCE:
                    raise RefusedError(503, Problem("requests", f"at most {_MOST_AT_ONCE} at once", "more", TRY_LATER))
                is_counted = True
                self._posts += 1
            await self._app(scope, receive, sending)
        except RefusedError as error:
            if error.status_code == 503:
                self._figures.unavailable.labels(error.problems[0].where).inc()
            extra = {"www-authenticate": "Bearer"} if error.status_code == 401 else {}
            answer = refusal(error.status_code, error.problems, {"connection": "close", **extra})
            await answer(scope, receive, sending)
        except _DisconnectedError:
            status = _DISCONNECTED
        finally:
            self._posts -= is_counted
            path = scope["path"] if scope["path"] in _ROUTES else "other"
            self._figures.requests.labels(path, str(status)).inc()
            self._figures.seconds.labels(path).observe(time.perf_counter() - begun)

    def _require_admitted(self, scope: Any, headers: Mapping[bytes, bytes]) -> None:
        """Checks the head of a request.

        A proxy in front may take the length where h11 takes the chunks, and then the rest of a body as a request.
        """
        chunked = b"transfer-encoding" in headers
        if chunked and (b"content-length" in headers or scope.get("http_version") == "1.0"):
            expected = "a content-length, or chunks of HTTP/1.1"
            raise RefusedError(400, Problem("headers", expected, "both, or chunks of HTTP/1.0"))
        host = headers.get(b"host")  # HTTP/1.0 may have none
        if host is not None and not self._access.has_host(host):
            got = repr(host.decode("latin-1"))[:100]
            todo = "Add the name to hosts in the server's config"
            raise RefusedError(400, Problem("host", "a name of this server", got, todo))
        given = [name for name, _ in scope["headers"]].count(b"authorization")
        if given > 1 or not self._access.allows(scope["path"], headers):  # a proxy may check another one of several
            got = ("none", "another")[given] if given < 2 else f"{given} of them"
            todo = "Send the header authorization: Bearer TOKEN"
            raise RefusedError(401, Problem("authorization", f"a token for {scope['path'][:100]}", got, todo))

    async def _body(self, headers: Mapping[bytes, bytes], receive: Any) -> bytes:
        parts: list[bytes] = []
        size = 0
        too_large = int(headers.get(b"content-length", b"0")) > self._most
        more = not (too_large and b"expect" in headers)  # a client that expects an answer before it sends the body
        try:
            async with asyncio.timeout(self._config.request_seconds) as limit:
                self._incomplete[limit] = None
                while more:  # a large body to its end as well: until then most clients read no answer
                    message: dict[str, Any] = await receive()
                    if message["type"] == "http.disconnect":
                        raise _DisconnectedError
                    more = message.get("more_body", False)
                    part = bytes(message.get("body", b""))
                    if too_large or size + len(part) > self._most:
                        too_large = True
                        continue
                    parts.append(part)
                    size += len(part)
                    self._buffer(len(part))
        except TimeoutError:
            if not too_large:
                expected = f"a whole body within {self._config.request_seconds:g} s"
                raise RefusedError(408, Problem("body", expected, "a part of it")) from None
        finally:
            self._incomplete.pop(limit, None)
            self._buffered -= size
        if too_large:
            raise RefusedError(413, Problem("body", f"at most {self._most} bytes", "more"))
        return b"".join(parts)

    def _buffer(self, size: int) -> None:
        """Counts bytes of an incomplete body; if there are too many, the time of the oldest such body ends."""
        self._buffered += size
        if self._buffered > _MOST_BODY_BYTES and self._incomplete:
            oldest = next(iter(self._incomplete))
            del self._incomplete[oldest]
            oldest.reschedule(asyncio.get_running_loop().time())


def _replay(body: bytes, receive: Any) -> Any:
    read = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Any:
        return read.pop() if read else await receive()

    return replay
