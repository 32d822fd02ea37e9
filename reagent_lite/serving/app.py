"""The HTTP interface of one worker.

POST /decide   rows ─► act ─► log ─► answer          GET /healthz   whether decisions are made
POST /rank     candidates by value; not logged       GET /metrics   of all workers, for Prometheus
POST /reward   ─► the worker of the decision ─► log  GET /openapi.json, /docs
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from reagent_lite.cli import message_of
from reagent_lite.config.serve import ServeConfig
from reagent_lite.console import machine_logger
from reagent_lite.errors import BundleError, Problem
from reagent_lite.serving.bodies import (
    CandidateLists,
    CandidateRows,
    Decision,
    Decisions,
    Faults,
    Health,
    NamedRows,
    Ranked,
    Rankings,
    Reward,
    exact,
)
from reagent_lite.serving.decision_log import DecisionLog, Joined
from reagent_lite.serving.figures import Figures
from reagent_lite.serving.limits import Limits
from reagent_lite.serving.served_model import ServedModel

Join = Callable[[str, dict[str, Any]], Awaitable[Joined]]


class RefusedError(Exception):
    """A request that is answered with an error; `status` is its HTTP status."""

    def __init__(self, status: int, *problems: Problem) -> None:
        self.status, self.problems = status, problems


def create_app(config: ServeConfig, worker: int, model: ServedModel, log: DecisionLog, join: Join) -> FastAPI:
    """Returns the application of a worker.

    Args:
        config: limits, and the seed.
        worker: number of the worker.
        model: that decides.
        log: of this worker.
        join: takes a reward to the log of its decision; raises OSError where that is not possible.
    """
    figures = Figures()
    rng = np.random.default_rng(None if config.seed is None else [config.seed, worker])

    async def poll() -> None:
        await model.poll()
        await log.poll()
        figures.gauge(model, log)

    @asynccontextmanager
    async def polling(_: FastAPI) -> AsyncIterator[None]:
        ended = asyncio.Event()

        async def forever() -> None:
            while not ended.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), config.poll_seconds)
                try:
                    await poll()
                except Exception as error:  # the next poll may succeed; without polls no file would be written
                    machine_logger.warning(message_of(error))

        task = asyncio.create_task(forever())
        yield
        ended.set()
        await task  # not cancelled: it may be writing a file

    errors: dict[int | str, dict[str, Any]] = {
        code: {"model": Faults, "description": text}
        for code, text in {
            408: "The body did not arrive in time", 413: "The body is too large", 422: "The body is wrong",
            503: "The log cannot be written: try again later",
        }.items()
    }  # fmt: skip
    of_reward = {404: "No such decision", 409: "It has a reward, or its time is up"}
    app = FastAPI(title="reagent-lite: decisions", lifespan=polling)
    app.add_middleware(Limits, config=config, figures=figures)

    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> Response:
        return JSONResponse({"problems": [asdict(one) for one in error.problems]}, error.status)

    @app.exception_handler(BundleError)
    async def refused_by_model(_: Request, error: BundleError) -> Response:
        return JSONResponse({"problems": [asdict(one) for one in error.problems]}, 422)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        problems = [
            Problem(".".join(map(str, one["loc"])), one["msg"], f"{one['input']!r:.100}") for one in error.errors()
        ]
        return JSONResponse({"problems": [asdict(one) for one in problems[:20]]}, 422)

    @app.exception_handler(OSError)
    async def no_disk(_: Request, error: OSError) -> Response:
        problem = Problem("log", "a disk that takes the log", error.strerror or str(error), "Try again later")
        return JSONResponse({"problems": [asdict(problem)]}, 503)

    def logged(rows: list[dict[str, Any]], index: list[int], propensities: list[float], actions: list[Any]) -> Response:
        ids = log.append(rows)
        figures.decided(actions, parametric=model.bundle.parametric)
        found = zip(ids, actions, index, propensities, strict=True)
        decisions = [Decision(decision_id=one, action=a, index=k, propensity=p) for one, a, k, p in found]
        answer = Decisions(decisions=decisions, model=model.version)
        return Response(answer.model_dump_json(), media_type="application/json")  # not checked a second time

    def event(row: Any, action: Any, possible: Any, propensity: float) -> dict[str, Any]:
        return {
            "model": model.version, "mdp_id": row.mdp_id, "sequence_number": row.sequence_number,
            "state_features": _present(row.state_features), "action": action, "possible_actions": possible,
            "action_probability": propensity,
        }  # fmt: skip

    def drawn(rows: list[Any], **choices: Any) -> tuple[list[int], list[float]]:
        states = model.bundle.states([row.state_features for row in rows])
        index, propensities = model.bundle.act(states, rng=rng, **choices)
        if (index < 0).any():
            place = f"rows.{int(index.argmin())}.possible_actions"
            raise RefusedError(422, Problem(place, "an action that the model may take", "none"))
        figures.missing(model.bundle, np.isnan(states))
        return index.tolist(), propensities.tolist()

    def listed(rows: list[Any]) -> list[Any]:
        return model.bundle.candidates([row.possible_actions for row in rows])

    if model.bundle.parametric:

        @app.post(
            "/decide", response_model=Decisions, responses=errors, summary="Choose a candidate in each row, and log it"
        )
        async def decidelisted(body: CandidateRows) -> Response:
            candidates = listed(body.rows)
            index, propensities = drawn(body.rows, candidates=candidates)
            possible = [[_present(one) for one in row.possible_actions] for row in body.rows]
            actions = [lists[place] for lists, place in zip(possible, index, strict=True)]
            rows = [event(*parts) for parts in zip(body.rows, actions, possible, propensities, strict=True)]
            return logged(rows, index, propensities, actions)

        @app.post("/rank", responses=errors, summary="Order the candidates of each row by their value; not logged")
        async def rank(body: CandidateLists) -> Rankings:
            states = model.bundle.states([row.state_features for row in body.rows])
            found = model.bundle.predict(states, candidates=listed(body.rows))
            rankings = []
            for q, mask in zip(found.q, found.mask, strict=True):
                order = np.argsort(-q, kind="stable")
                rankings.append([Ranked(index=int(k), score=float(q[k])) for k in order if mask[k]])
            return Rankings(rankings=rankings, model=model.version)
    else:

        @app.post(
            "/decide", response_model=Decisions, responses=errors, summary="Choose an action in each row, and log it"
        )
        async def decide_named(body: NamedRows) -> Response:
            names = model.bundle.action_names
            mask = None
            if any(row.possible_actions is not None for row in body.rows):
                mask = np.array([_allowed(f"rows.{n}", row.possible_actions, names) for n, row in enumerate(body.rows)])
            index, propensities = drawn(body.rows, mask=mask)
            actions = [names[place] for place in index]
            possible = [row.possible_actions or names for row in body.rows]
            rows = [event(*parts) for parts in zip(body.rows, actions, possible, propensities, strict=True)]
            return logged(rows, index, propensities, actions)

    @app.post("/reward", responses=errors | {n: {"model": Faults, "description": of_reward[n]} for n in of_reward},
              status_code=204)  # fmt: skip
    async def reward(body: Reward) -> None:
        """Joins a reward to its decision."""
        result = await join(body.decision_id, body.model_dump(exclude={"decision_id"}, exclude_none=True))
        figures.rewards.labels(result).inc()
        if result == "unknown":
            raise RefusedError(404, Problem("decision_id", "the id of a decision that waits", repr(body.decision_id)))
        if result == "again":
            expected = f"one reward, within {config.reward_seconds:g} s"
            raise RefusedError(409, Problem("decision_id", expected, f"{body.decision_id} with another, or too late"))

    @app.get("/healthz", responses={503: errors[503]})
    async def healthz() -> Health:
        """Says whether decisions are made and logged."""
        if log.failure:
            raise RefusedError(503, Problem("log", "a disk that takes the log", log.failure))
        return Health(model=model.version, waiting=log.waiting)

    @app.get("/metrics", response_class=Response, include_in_schema=False)
    async def metrics() -> Response:
        return Response(figures.page(), media_type="text/plain; version=0.0.4")

    plain = app.openapi
    app.openapi = lambda: exact(plain(), model.bundle)  # type: ignore[method-assign]
    app.state.poll = poll
    return app


def _present(features: dict[str, float | None]) -> dict[str, float]:
    return {key: value for key, value in features.items() if value is not None}


def _allowed(where: str, possible: list[str] | None, names: tuple[str, ...]) -> list[bool]:
    if possible is None:
        return [True] * len(names)
    if len(set(possible)) < len(possible) or not set(possible) <= set(names):
        expected = f"names of {', '.join(names)}, each once"
        raise RefusedError(422, Problem(f"{where}.possible_actions", expected, f"{possible}"))
    return [name in possible for name in names]
