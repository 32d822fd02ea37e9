"""Bodies of requests: strict JSON ─► names of the contract ─► numbers of rows and candidates ─► validated rows.

Those of large bodies in a thread, as all of it may take a tenth of a second.
"""

import functools
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from reagent_lite.config.serve import ServeConfig
from reagent_lite.errors import Problem
from reagent_lite.serving.bodies import read_body
from reagent_lite.serving.large import LARGE_BYTES
from reagent_lite.serving.refusals import RefusedError, body_model, problems_of
from reagent_lite.strict_json import parse_json

_body_model = functools.cache(body_model)


class StrictRoute(APIRoute):
    """A route that reads bodies by `strict_json`; they may use the names of the model's training log."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns the handler of a request."""
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strictly


class _StrictRequest(Request):
    async def json(self) -> BaseModel:
        """Returns the body as an object of its class, which FastAPI takes as it is."""
        body = await self.body()
        if len(body) < LARGE_BYTES:
            return self._parsed(body)
        return await self.app.state.worker.large.run(self._parsed, body)  # type: ignore[no-any-return]

    def _parsed(self, body: bytes) -> BaseModel:
        worker = self.app.state.worker
        try:
            tree = parse_json(body, nan=True)
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            raise RefusedError(422, Problem("body", "JSON", str(error))) from error
        tree = read_body(tree, worker.model.bundle)
        _require_few(tree, worker.config)
        endpoint = self.scope["endpoint"]
        try:
            return _body_model(endpoint).model_validate(tree)
        except ValidationError as error:
            faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors(include_url=False)]
            raise RefusedError(422, *problems_of(endpoint, faults)) from error


def _require_few(tree: Any, config: ServeConfig) -> None:
    """Checks the numbers of rows and of candidates in the JSON of a body, before its rows are validated.

    Raises:
        RefusedError: there are too many.
    """
    rows = tree.get("rows") if isinstance(tree, dict) else None
    if not isinstance(rows, list):
        return
    if len(rows) > config.max_rows:
        raise RefusedError(413, Problem("body.rows", f"at most {config.max_rows} rows", f"{len(rows)}"))
    for number, choices in enumerate(_lists(rows)):
        if len(choices) > config.max_candidates:
            expected = f"at most {config.max_candidates} of them"
            raise RefusedError(413, Problem(f"body.rows.{number}.possible_actions", expected, f"{len(choices)}"))


def _lists(rows: Iterable[Any]) -> Iterable[Any]:
    for row in rows:
        choices = row.get("possible_actions") if isinstance(row, dict) else None
        yield choices if isinstance(choices, list) else ()
