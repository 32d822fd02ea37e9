"""Limits of requests, and what is counted of each."""

import asyncio
import json
import time
from typing import Any

from reagent_lite.config.serve import ServeConfig
from reagent_lite.serving.figures import Figures

_ROUTES = ("/decide", "/rank", "/reward", "/healthz", "/metrics", "/openapi.json", "/docs")


class _TooLargeError(Exception):
    pass


class Limits:
    """ASGI middleware that reads bodies within limits and measures requests."""

    def __init__(self, app: Any, config: ServeConfig, figures: Figures) -> None:
        self._app, self._config, self._figures = app, config, figures
        self._most = int(config.max_body_kb * 1000)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers 408 and 413, or hands the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 500

        async def sending(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            if scope["method"] == "POST":
                body = await self._body(scope, receive)
                receive = _replayed(body, receive)
            await self._app(scope, receive, sending)
        except TimeoutError:
            await _answer(sending, 408, f"a whole body within {self._config.request_seconds:g} s", "a part of it")
        except _TooLargeError:
            await _answer(sending, 413, f"at most {self._most} bytes", "more")
        finally:
            path = scope["path"] if scope["path"] in _ROUTES else "other"
            self._figures.requests.labels(path, str(status)).inc()
            self._figures.seconds.labels(path).observe(time.perf_counter() - begun)

    async def _body(self, scope: Any, receive: Any) -> bytes:
        if int(dict(scope["headers"]).get(b"content-length", b"0")) > self._most:
            raise _TooLargeError
        body = b""
        async with asyncio.timeout(self._config.request_seconds):
            while True:
                message: dict[str, Any] = await receive()
                body += bytes(message.get("body", b""))
                if len(body) > self._most:
                    raise _TooLargeError
                if not message.get("more_body", False):
                    return body


def _replayed(body: bytes, receive: Any) -> Any:
    first = True

    async def replay() -> Any:
        nonlocal first
        if first:
            first = False
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


async def _answer(send: Any, status: int, expected: str, got: str) -> None:
    content = json.dumps({"problems": [{"where": "body", "expected": expected, "got": got, "todo": ""}]}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
