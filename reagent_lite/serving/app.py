"""The HTTP interface of one worker; each route is one function.

POST /decide   rows ─► act ─► log ─► answer          GET /healthz   health check
POST /rank     candidates by value; not logged       GET /metrics   figures of all workers, for Prometheus
POST /reward   ─► log                                GET /openapi.json, /docs
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from reagent_lite.cli import message_of
from reagent_lite.config.serve import ServeConfig
from reagent_lite.console import machine_logger
from reagent_lite.errors import BundleError, Problem
from reagent_lite.export.bundle import ChoiceKind, parts
from reagent_lite.serving.bodies import (
    CandidateList,
    CandidateLists,
    CandidateRows,
    Decisions,
    Health,
    ItemList,
    ItemLists,
    ItemRows,
    NamedRows,
    Ranked,
    Rankings,
    Reward,
    with_model_schema,
)
from reagent_lite.serving.deciding import MOST_CHOICES, Decider
from reagent_lite.serving.decision_log import DecisionLog
from reagent_lite.serving.figures import ServerFigures
from reagent_lite.serving.limits import Limits
from reagent_lite.serving.refusals import ERRORS, OF_DECISION, OF_REWARD, RefusedError, StrictRoute, refused
from reagent_lite.serving.served_model import ServedModel

of_any_model = APIRouter(route_class=StrictRoute)
of_named_actions = APIRouter(route_class=StrictRoute)
of_candidates = APIRouter(route_class=StrictRoute)
of_items = APIRouter(route_class=StrictRoute)
_OF_CHOICES: dict[ChoiceKind, APIRouter] = {
    "named actions": of_named_actions,
    "candidates": of_candidates,
    "items": of_items,
}
_DECIDE = "Choose an action for each row and log it"


@dataclass(frozen=True, kw_only=True)
class Worker:
    """The state of a worker; its routes read it from `request.app.state.worker`.

    Attributes:
        config: the server's config.
        model: the model that decides.
        log: the server's log.
        figures: counters of this worker.
        decider: makes the decisions.
    """

    config: ServeConfig
    model: ServedModel
    log: DecisionLog
    figures: ServerFigures
    decider: Decider


@of_named_actions.post("/decide", response_model=Decisions, responses=ERRORS | OF_DECISION, summary=_DECIDE)
async def decide_named(body: NamedRows, request: Request) -> Response:
    """Chooses among the model's actions."""
    return Response(await _worker(request).decider.decide(body.rows), media_type="application/json")


@of_candidates.post("/decide", response_model=Decisions, responses=ERRORS | OF_DECISION, summary=_DECIDE)
async def decide_listed(body: CandidateRows, request: Request) -> Response:
    """Chooses among the candidates of each row."""
    return Response(await _worker(request).decider.decide(body.rows), media_type="application/json")


@of_items.post("/decide", response_model=Decisions, responses=ERRORS | OF_DECISION, summary=_DECIDE)
async def decide_items(body: ItemRows, request: Request) -> Response:
    """Chooses among the items of each row."""
    return Response(await _worker(request).decider.decide(body.rows), media_type="application/json")


@of_candidates.post(
    "/rank",
    responses=ERRORS,
    response_model_exclude_none=True,
    summary="Order the candidates of each row by value; not logged",
)
async def rank(body: CandidateLists, request: Request) -> Rankings:
    """Orders candidates without a decision."""
    return _rankings(_worker(request).model, body.rows, [row.possible_actions for row in body.rows])


@of_items.post(
    "/rank", responses=ERRORS, response_model_exclude_none=True, summary="Order items of each row by value; not logged"
)
async def rank_items(body: ItemLists, request: Request) -> Rankings:
    """Orders items without a decision."""
    model = _worker(request).model
    assert model.bundle.items is not None
    return _rankings(model, body.rows, [row.possible_actions or model.bundle.items.ids for row in body.rows])


def _rankings(model: ServedModel, rows: Sequence[CandidateList | ItemList], lists: Sequence[Sequence[Any]]) -> Rankings:
    """Returns the candidates of each row by value, the largest first.

    Raises:
        BundleError: a feature or an item that the model does not have.
        RefusedError: a value that is not finite.
    """
    bundle = model.bundle
    candidates = bundle.candidates(lists)
    states = bundle.states([row.state_features for row in rows])
    rankings: list[list[Ranked]] = []
    for part in parts(map(len, candidates), MOST_CHOICES):
        predicted = bundle.predict(states[part], candidates=candidates[part])
        for q, mask, choices in zip(predicted.q, predicted.mask, lists[part], strict=True):
            infinite = q[mask & ~np.isfinite(q)]
            if infinite.size:
                where = f"rows.{len(rankings)}.possible_actions"
                raise RefusedError(422, Problem(where, "candidates of finite value", f"{infinite[0]}"))
            order = [k for k in np.argsort(-q, kind="stable").tolist() if mask[k]]
            names = {} if bundle.items is None else {k: choices[k] for k in order}
            rankings.append([Ranked(action=names.get(k), index=k, score=float(q[k])) for k in order])
    return Rankings(rankings=rankings, **model.versions)


@of_any_model.post("/reward", responses=ERRORS | OF_REWARD, status_code=204)
async def reward(body: Reward, request: Request) -> None:
    """Joins a reward to its decision."""
    worker = _worker(request)
    result = worker.log.join(body.decision_id, body.model_dump(exclude={"decision_id"}, exclude_none=True))
    worker.figures.rewards.labels(result).inc()
    if result == "unknown":
        expected = "the id of a decision of this log"
        raise RefusedError(404, Problem("decision_id", expected, repr(body.decision_id)))
    if result == "again":
        expected = f"one reward for {body.decision_id}, within {worker.config.reward_seconds:g} s"
        raise RefusedError(409, Problem("decision_id", expected, "a second or late reward"))


@of_any_model.get("/healthz", responses={503: ERRORS[503]}, response_model_exclude_none=True)
async def healthz(request: Request) -> Health:
    """Health check."""
    worker = _worker(request)
    if worker.log.failure:
        raise OSError(worker.log.failure)
    return Health(**worker.model.versions, waiting=worker.log.waiting)


@of_any_model.get("/metrics", response_class=Response, include_in_schema=False)
async def metrics(request: Request) -> Response:
    """Returns the figures of all workers."""
    return Response(_worker(request).figures.page(), media_type="text/plain; version=0.0.4")


def _worker(request: Request) -> Worker:
    worker: Worker = request.app.state.worker
    return worker


@asynccontextmanager
async def _polling(app: FastAPI) -> AsyncIterator[None]:
    """Polls the model while the application runs."""
    task = asyncio.create_task(_poll(app.state.worker))
    yield
    task.cancel()


async def _poll(worker: Worker) -> None:
    while True:
        await asyncio.sleep(worker.config.poll_seconds)
        try:
            await worker.model.poll()
            worker.figures.gauge(worker.model, worker.log)
        except Exception as error:  # the next poll may succeed
            machine_logger.warning(message_of(error))


def create_app(config: ServeConfig, number: int, model: ServedModel, log: DecisionLog) -> FastAPI:
    """Returns the application of a worker.

    Args:
        config: the server's config.
        number: number of the worker.
        model: the model that decides.
        log: the server's log.
    """
    figures = ServerFigures()
    rng = np.random.default_rng(None if config.seed is None else [config.seed, number])
    routers = (_OF_CHOICES[model.bundle.choices], of_any_model)
    routes = [route for router in routers for route in router.routes]
    app = FastAPI(title="reagent-lite: decisions", routes=routes, lifespan=_polling, redoc_url=None)
    app.state.worker = Worker(
        config=config, model=model, log=log, figures=figures, decider=Decider(model, log, figures, rng)
    )
    app.add_middleware(Limits, config=config, figures=figures)
    for kind in (BundleError, RequestValidationError, HTTPException, OSError, Exception):
        app.add_exception_handler(kind, refused)
    openapi = app.openapi
    app.openapi = lambda: with_model_schema(openapi(), model.bundle)  # type: ignore[method-assign]
    return app
