"""Bodies of requests: strict JSON ─► standard names ─► numbers of rows and candidates ─► validated rows.

Those of large bodies in a thread, as all of it may take a tenth of a second.
"""

from collections.abc import Callable, Coroutine, Iterable
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.errors import Problem
from reagent_lite.serving.bodies import HAS_IDS, has_ids, read_body
from reagent_lite.serving.large import LARGE_BYTES
from reagent_lite.serving.refusals import RefusedError, body_model, problems_of
from reagent_lite.strict_json import parse_json


class StrictRoute(APIRoute):
    """A route that reads bodies by `strict_json`; they may use the names of the model's training log.

    Its endpoint is called with the body and the request, and returns the answer: FastAPI's own handler looks for
    other parameters, which there are none of.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns the handler of a request."""
        if "body" not in get_type_hints(self.endpoint):
            return super().get_route_handler()
        endpoint: Callable[[BaseModel, Request], Coroutine[Any, Any, Response]] = self.endpoint
        model = body_model(endpoint)

        async def strictly(request: Request) -> Response:
            return await endpoint(await _read(request, model), request)

        return strictly


async def _read(request: Request, model: type[BaseModel]) -> BaseModel:
    """Returns the body of a request; that of a large one is parsed in the thread of large requests."""
    body = await request.body()
    if not _is_json(request.headers.get("content-type", "")):
        todo = "Send the header content-type: application/json"
        raise RefusedError(422, Problem("body", "JSON", f"{body!r:.100}" if body else "nothing", todo))
    worker = request.app.state.worker
    if len(body) < LARGE_BYTES:
        return _parse(body, model, worker)
    return await worker.large.run(_parse, body, model, worker)  # type: ignore[no-any-return]


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _parse(body: bytes, model: type[BaseModel], worker: Any) -> BaseModel:
    try:
        tree = parse_json(body, nan=True)
    except UnicodeDecodeError as error:
        raise RefusedError(400, Problem("body", "a body in UTF-8", f"{error.object[error.start :]!r:.100}")) from error
    except ValueError as error:
        raise RefusedError(422, Problem("body", "JSON", str(error))) from error
    tree = read_body(tree, worker.model.bundle)
    _require_few(tree, worker.config)
    try:
        return model.model_validate(tree, context={HAS_IDS: has_ids(worker.model.bundle)})
    except ValidationError as error:
        faults = [{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors(include_url=False)]
        raise RefusedError(422, *problems_of(model, faults)) from error


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
