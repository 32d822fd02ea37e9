"""Refusals: every error is answered with a list of problems.

error in a route, a body or the log ─► `refused` ─► status, {"problems": [...]}
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from reagent_lite.errors import MAX_PROBLEMS, BundleError, Problem, nearest

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


def refusal(status: int, problems: Iterable[Problem], headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Returns the answer with `Problems`."""
    return JSONResponse({"problems": [asdict(problem) for problem in problems]}, status, headers)


def _answers(texts: dict[int, str]) -> Answers:
    return {status: {"model": Problems, "description": text} for status, text in texts.items()}


ERRORS = _answers(
    {
        400: "The body is not UTF-8 text, or the header names another host or two lengths",
        401: "No token, or another one",
        408: "The body did not arrive in time",
        413: "The body is too large, or has too many rows or candidates",
        422: "The body is wrong",
        503: "The log cannot be written, too many requests wait, or a worker is starting: try again later",
    }
)
OF_DECISION = _answers({409: "Another decision of the episode has the sequence number"})
OF_REWARD = _answers({404: "No such decision", 409: "The decision has a reward, or its time is up"})
OF_ROLLOUT = _answers({409: "The rollout has ended"})


async def refused(request: Request, error: Any) -> Response:
    """Returns the answer to an error."""
    if isinstance(error, RefusedError):
        return refusal(error.status_code, error.problems)
    if isinstance(error, BundleError):
        return refusal(422, error.problems)
    if isinstance(error, RequestValidationError):
        return refusal(422, problems_of(request.scope["endpoint"], error.errors()))
    where = f"{request.method} {request.url.path}"
    if isinstance(error, HTTPException):
        expected = "a body in UTF-8" if error.status_code == 400 else "a path and method of /docs"
        return refusal(error.status_code, [Problem(where, expected, error.detail)], error.headers)
    if isinstance(error, OSError):
        got = error.strerror or str(error)
        return refusal(503, [Problem("log", "a log that can be written", got, TRY_LATER)])
    return refusal(500, [Problem(where, "no error of the server", type(error).__name__, "See its log")])


def body_model(endpoint: Any) -> type[BaseModel]:
    """Returns the class of a route's body."""
    model: type[BaseModel] = get_type_hints(endpoint)["body"]
    return model


def problems_of(endpoint: Any, faults: Sequence[Any]) -> list[Problem]:
    """Returns the first of pydantic's descriptions of faults in a body as problems."""
    return [_problem(endpoint, fault) for fault in faults[:MAX_PROBLEMS]]


def _problem(endpoint: Any, fault: dict[str, Any]) -> Problem:
    location = fault["loc"]
    kind = fault["type"]
    given = fault["input"]
    where = ".".join(map(str, location))
    if kind == "missing":
        return Problem(where, "a value", "nothing")
    if kind == "extra_forbidden":
        advice = _advice(body_model(endpoint), location[1:])
        return Problem(where, "a known key", f"unknown key {location[-1]!r}", advice)
    todo = "Send the header content-type: application/json" if isinstance(given, bytes) else ""
    return Problem(where, fault["msg"].removeprefix("Input should be "), f"{given!r:.100}", todo)


def _advice(body: type[BaseModel], location: Sequence[int | str]) -> str:
    """Returns the known key nearest to an unknown one at a location such as ("rows", 0, "mdp"), else all known keys."""
    fields = body.model_fields
    if len(location) > 1:
        fields = get_args(fields["rows"].annotation)[0].model_fields
    return nearest(str(location[-1]), list(fields), otherwise=f"Known keys: {', '.join(fields)}")
