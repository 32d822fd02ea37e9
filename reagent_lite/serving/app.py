"""The HTTP interface of one worker; each route is one function.

POST /decide   rows ─► act ─► log ─► answer          GET /healthz   whether decisions are made
POST /rank     candidates by value; not logged       GET /metrics   of all workers, for Prometheus
POST /reward   ─► log                                GET /openapi.json, /docs
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
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
from reagent_lite.export.bundle import Bundle, ChoiceKind, parts
from reagent_lite.serving.bodies import (
    CandidateList,
    CandidateLists,
    CandidateRows,
    Decisions,
    Health,
    ItemDecisions,
    ItemList,
    ItemLists,
    ItemRankings,
    ItemRows,
    NamedRows,
    Ranked,
    RankedItem,
    Rankings,
    Reward,
    exact,
)
from reagent_lite.serving.deciding import MOST_CHOICES, Decider
from reagent_lite.serving.decision_log import DecisionLog
from reagent_lite.serving.figures import ServerFigures
from reagent_lite.serving.limits import Limits
from reagent_lite.serving.refusals import ERRORS, OF_REWARD, RefusedError, StrictRoute, refused
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
_DECIDE = "Choose an action for each row, and log it"


@dataclass(frozen=True, kw_only=True)
class Worker:
    """The state of a worker, which its routes find at `request.app.state.worker`.

    Attributes:
        config: limits.
        model: the model that decides.
        log: the log of the server.
        figures: what is counted.
        decider: makes the decisions.
    """

    config: ServeConfig
    model: ServedModel
    log: DecisionLog
    figures: ServerFigures
    decider: Decider


@of_named_actions.post("/decide", response_model=Decisions, responses=ERRORS, summary=_DECIDE)
async def decide_named(body: NamedRows, request: Request) -> Response:
    """Chooses among the model's actions."""
    return Response(await _worker(request).decider.decide(body.rows), media_type="application/json")


@of_candidates.post("/decide", response_model=Decisions, responses=ERRORS, summary=_DECIDE)
async def decide_listed(body: CandidateRows, request: Request) -> Response:
    """Chooses among the candidates of each row."""
    return Response(await _worker(request).decider.decide(body.rows), media_type="application/json")


@of_items.post("/decide", response_model=ItemDecisions, responses=ERRORS, summary=_DECIDE)
async def decide_items(body: ItemRows, request: Request) -> Response:
    """Chooses among the items of each row."""
    return Response(await _worker(request).decider.decide(body.rows), media_type="application/json")


@of_candidates.post("/rank", responses=ERRORS, summary="Order the candidates of each row by value; not logged")
async def rank(body: CandidateLists, request: Request) -> Rankings:
    """Orders candidates without a decision."""
    model = _worker(request).model
    lists = [row.possible_actions for row in body.rows]
    rankings = [[Ranked(index=k, score=score) for k, score in row] for row in _ranked(model.bundle, body.rows, lists)]
    return Rankings(rankings=rankings, model=model.version)


@of_items.post("/rank", responses=ERRORS, summary="Order items of each row by value; not logged")
async def rank_items(body: ItemLists, request: Request) -> ItemRankings:
    """Orders items without a decision."""
    model = _worker(request).model
    items = model.bundle.items
    assert items is not None
    lists = [row.possible_actions or items.ids for row in body.rows]
    rankings = [
        [RankedItem(action=ids[k], index=k, score=score) for k, score in row]
        for ids, row in zip(lists, _ranked(model.bundle, body.rows, lists), strict=True)
    ]
    return ItemRankings(rankings=rankings, model=model.version, items=items.sha256)


def _ranked(
    bundle: Bundle, rows: Sequence[CandidateList | ItemList], lists: Sequence[Sequence[Any]]
) -> list[list[tuple[int, float]]]:
    """Returns of each row the places of its candidates with their values, the largest first.

    Raises:
        BundleError: features or items that the model does not know.
        RefusedError: a value that is no finite number.
    """
    candidates = bundle.candidates(lists)
    states = bundle.states([row.state_features for row in rows])
    rankings: list[list[tuple[int, float]]] = []
    for part in parts(map(len, candidates), MOST_CHOICES):
        predicted = bundle.predict(states[part], candidates=candidates[part])
        for q, mask in zip(predicted.q, predicted.mask, strict=True):
            if not np.isfinite(values := q[mask]).all():
                where = f"rows.{len(rankings)}.possible_actions"
                bad = values[~np.isfinite(values)]
                raise RefusedError(422, Problem(where, "candidates of finite value", f"{bad[0]}"))
            order = np.argsort(-q, kind="stable")
            rankings.append([(int(k), float(q[k])) for k in order if mask[k]])
    return rankings


@of_any_model.post("/reward", responses=ERRORS | OF_REWARD, status_code=204)
async def reward(body: Reward, request: Request) -> None:
    """Joins a reward to its decision."""
    worker = _worker(request)
    result = worker.log.join(body.decision_id, body.model_dump(exclude={"decision_id"}, exclude_none=True))
    worker.figures.rewards.labels(result).inc()
    if result == "unknown":
        expected = "the id of a decision that waits for its reward"
        raise RefusedError(404, Problem("decision_id", expected, repr(body.decision_id)))
    if result == "again":
        expected = f"one reward of {body.decision_id}, within {worker.config.reward_seconds:g} s"
        raise RefusedError(409, Problem("decision_id", expected, "a second one, or one that is too late"))


@of_any_model.get("/healthz", responses={503: ERRORS[503]}, response_model_exclude_none=True)
async def healthz(request: Request) -> Health:
    """Health check."""
    worker = _worker(request)
    if worker.log.failure:
        raise OSError(worker.log.failure)
    return Health(model=worker.model.version, items=worker.model.items_hash, waiting=worker.log.waiting)


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
    ended = asyncio.Event()
    task = asyncio.create_task(_poll_until(ended, app.state.worker))
    yield
    ended.set()
    await task


async def _poll_until(ended: asyncio.Event, worker: Worker) -> None:
    while not ended.is_set():
        with suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), worker.config.poll_seconds)
        try:
            await worker.model.poll()
            worker.figures.gauge(worker.model, worker.log)
        except Exception as error:  # the next poll may succeed
            machine_logger.warning(message_of(error))


def create_app(config: ServeConfig, number: int, model: ServedModel, log: DecisionLog) -> FastAPI:
    """Returns the application of a worker.

    Args:
        config: limits, and the seed.
        number: number of the worker.
        model: the model that decides.
        log: the log of the server.
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
    plain = app.openapi
    app.openapi = lambda: exact(plain(), model.bundle)  # type: ignore[method-assign]
    return app
