"""Refusals: every error is answered with a list of problems.

error in a route, a body or the log ─► `refused` ─► status, {"problems": [...]}
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args, get_type_hints

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from reagent_lite.errors import MAX_PROBLEMS, BundleError, Problem, suggest_nearest
from reagent_lite.serving.decision_log import BusyError

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


async def refuse(request: Request, error: Any) -> Response:
    """Returns the answer to an error."""
    figures = request.app.state.worker.figures
    if isinstance(error, RefusedError):
        if error.status_code == 503:
            figures.unavailable.labels(error.problems[0].where).inc()
        return refusal(error.status_code, error.problems)
    if isinstance(error, BundleError):
        return refusal(422, error.problems)
    where = f"{request.method} {request.url.path}"
    if isinstance(error, HTTPException):
        return refusal(error.status_code, [Problem(where, "a path and method of /docs", error.detail)], error.headers)
    if isinstance(error, OSError):
        where = "database" if isinstance(error, BusyError) else "log"
        figures.unavailable.labels(where).inc()
        got = error.strerror or str(error)
        return refusal(503, [Problem(where, "a log that can be written", got, TRY_LATER)])
    return refusal(500, [Problem(where, "no error of the server", type(error).__name__, "See its log")])


def body_model(endpoint: Any) -> type[BaseModel]:
    """Returns the class of a route's body."""
    model: type[BaseModel] = get_type_hints(endpoint)["body"]
    return model


def problems_of(body: type[BaseModel], faults: Sequence[Any]) -> list[Problem]:
    """Returns the first of pydantic's descriptions of faults in a body as problems."""
    return [_problem(body, fault) for fault in faults[:MAX_PROBLEMS]]


def _problem(body: type[BaseModel], fault: dict[str, Any]) -> Problem:
    location = fault["loc"]
    kind = fault["type"]
    where = ".".join(map(str, location))
    if kind == "missing":
        return Problem(where, "a value", "nothing")
    if kind == "extra_forbidden":
        advice = _advice(body, location[1:])
        return Problem(where, "a known key", f"unknown key {location[-1]!r}", advice)
    expected = "a JSON object" if kind == "model_type" else fault["msg"].removeprefix("Input should be ")
    return Problem(where, expected, f"{fault['input']!r:.100}")


def _advice(body: type[BaseModel], location: Sequence[int | str]) -> str:
    """Returns the known key nearest to an unknown one at a location such as ("rows", 0, "mdp"), else all known keys."""
    fields = body.model_fields
    if len(location) > 1:
        fields = get_args(fields["rows"].annotation)[0].model_fields
    return suggest_nearest(str(location[-1]), list(fields), otherwise=f"Known keys: {', '.join(fields)}")
