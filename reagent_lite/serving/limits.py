"""Limits of requests, and their counters."""

import asyncio
import time
from typing import Any

from reagent_lite.config.serve import ServeConfig
from reagent_lite.errors import Problem
from reagent_lite.serving.figures import ServerFigures
from reagent_lite.serving.refusals import TRY_LATER, RefusedError, refusal

_MOST_AT_ONCE = 1000  # bodies that a worker reads or decides at a time; any more are answered with 503 at once
_ROUTES = ("/decide", "/rank", "/reward", "/healthz", "/metrics", "/openapi.json", "/docs")


class Limits:
    """ASGI middleware that reads bodies within limits and counts requests."""

    def __init__(self, app: Any, config: ServeConfig, figures: ServerFigures) -> None:
        self._app = app
        self._config = config
        self._figures = figures
        self._most = int(config.max_body_kb * 1000)
        self._posts = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Passes a request on, or answers 408, 413, or 503 if too many requests wait."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = time.perf_counter()
        status = 500
        posted = scope["method"] == "POST"
        self._posts += posted

        async def sending(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            if posted:
                receive = _replayed(await self._body(scope, receive), receive)
            await self._app(scope, receive, sending)
        except RefusedError as error:
            await refusal(error.status_code, error.problems, {"connection": "close"})(scope, receive, sending)
        finally:
            self._posts -= posted
            path = scope["path"] if scope["path"] in _ROUTES else "other"
            self._figures.requests.labels(path, str(status)).inc()
            self._figures.seconds.labels(path).observe(time.perf_counter() - begun)

    async def _body(self, scope: Any, receive: Any) -> bytes:
        if self._posts > _MOST_AT_ONCE:
            raise RefusedError(503, Problem("requests", f"at most {_MOST_AT_ONCE} at once", "more", TRY_LATER))
        body = b""
        headers = dict(scope["headers"])
        too_large = int(headers.get(b"content-length", b"0")) > self._most
        more = not (too_large and b"expect" in headers)  # a client that expects an answer before it sends the body
        try:
            async with asyncio.timeout(self._config.request_seconds):
                while more:  # a large body to its end as well: until then most clients read no answer
                    message: dict[str, Any] = await receive()
                    more = message.get("more_body", False)
                    if not too_large:
                        body += bytes(message.get("body", b""))
                        too_large = len(body) > self._most
        except TimeoutError:
            if not too_large:
                expected = f"a whole body within {self._config.request_seconds:g} s"
                raise RefusedError(408, Problem("body", expected, "a part of it")) from None
        if too_large:
            raise RefusedError(413, Problem("body", f"at most {self._most} bytes", "more"))
        return body


def _replayed(body: bytes, receive: Any) -> Any:
    read = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Any:
        return read.pop() if read else await receive()

    return replay
