"""Refusals: every error is answered with a list of problems.

error in a route, a body or the log ─► `refused` ─► status, {"problems": [...]}
`StrictRoute` applies the rules for JSON files to bodies, such as no duplicate keys.
"""

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from reagent_lite.errors import MAX_PROBLEMS, BundleError, Problem, nearest
from reagent_lite.serving.bodies import read_body
from reagent_lite.strict_json import parse_json

TRY_LATER = "Try again later"
Answers = dict[int | str, dict[str, Any]]


class Problems(BaseModel):
    """All faults of a request."""

    problems: list[Problem]


class RefusedError(HTTPException):
    """An error that is answered with a status and problems."""

    def __init__(self, status: int, *problems: Problem) -> None:
        super().__init__(status)
        self.problems = problems


class _StrictRequest(Request):
    async def json(self) -> Any:
        try:
            tree = parse_json(await self.body(), nan=True)
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            raise RefusedError(422, Problem("body", "JSON", str(error))) from error
        return read_body(tree, self.app.state.worker.model.bundle)


class StrictRoute(APIRoute):
    """A route that reads bodies by `strict_json`; they may use the names of the model's training log."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Returns the handler of a request."""
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strictly


def refusal(status: int, problems: Iterable[Problem], headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Returns the answer with `Problems`."""
    return JSONResponse({"problems": [asdict(problem) for problem in problems]}, status, headers)


def _answers(texts: dict[int, str]) -> Answers:
    return {status: {"model": Problems, "description": text} for status, text in texts.items()}


ERRORS = _answers(
    {
        400: "The body is not UTF-8 text",
        408: "The body did not arrive in time",
        413: "The body is too large",
        422: "The body is wrong",
        503: "The log cannot be written, too many requests wait, or a worker is starting: try again later",
    }
)
OF_DECISION = _answers({409: "Another decision of the episode has the sequence number"})
OF_REWARD = _answers({404: "No such decision", 409: "The decision has a reward, or its time is up"})


async def refused(request: Request, error: Any) -> Response:
    """Returns the answer to an error."""
    if isinstance(error, RefusedError):
        return refusal(error.status_code, error.problems)
    if isinstance(error, BundleError):
        return refusal(422, error.problems)
    if isinstance(error, RequestValidationError):
        return refusal(422, [_problem(request, fault) for fault in error.errors()[:MAX_PROBLEMS]])
    where = f"{request.method} {request.url.path}"
    if isinstance(error, HTTPException):
        expected = "a body in UTF-8" if error.status_code == 400 else "a path and method of /docs"
        return refusal(error.status_code, [Problem(where, expected, error.detail)], error.headers)
    if isinstance(error, OSError):
        got = error.strerror or str(error)
        return refusal(503, [Problem("log", "a log that can be written", got, TRY_LATER)])
    return refusal(500, [Problem(where, "no error of the server", type(error).__name__, "See its log")])


def _problem(request: Request, fault: dict[str, Any]) -> Problem:
    """Returns pydantic's description of a fault in a body as a problem."""
    location = fault["loc"]
    kind = fault["type"]
    given = fault["input"]
    where = ".".join(map(str, location))
    if kind == "missing":
        return Problem(where, "a value", "nothing")
    if kind == "extra_forbidden":
        body = get_type_hints(request.scope["endpoint"])["body"]
        return Problem(where, "a known key", f"unknown key {location[-1]!r}", _advice(body, location[1:]))
    todo = "Send the header content-type: application/json" if isinstance(given, bytes) else ""
    return Problem(where, fault["msg"].removeprefix("Input should be "), f"{given!r:.100}", todo)


def _advice(body: type[BaseModel], location: Sequence[int | str]) -> str:
    """Returns the known key nearest to an unknown one at a location such as ("rows", 0, "mdp"), else all known keys."""
    fields = body.model_fields
    if len(location) > 1:
        fields = get_args(fields["rows"].annotation)[0].model_fields
    return nearest(str(location[-1]), list(fields), otherwise=f"Known keys: {', '.join(fields)}")
