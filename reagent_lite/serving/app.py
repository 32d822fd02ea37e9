"""The HTTP interface of one worker; each route is one function.

POST /decide   rows ─► act ─► log ─► answer          GET /healthz   health check
POST /rank     candidates by value; not logged       GET /metrics   figures of all workers, for Prometheus
POST /reward   ─► log                                GET /openapi.json, /docs
POST /rollout  share, stop, promote                  GET /rollout, /rollout.json   two models, compared
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter, FastAPI, Request, Response
from pydantic_core import to_json
from starlette.exceptions import HTTPException

from reagent_lite.cli import message_of
from reagent_lite.config.serve_config import ServeConfig
from reagent_lite.console import machine_logger
from reagent_lite.errors import BundleError, Problem
from reagent_lite.export.bundle import Bundle, ChoiceKind, parts
from reagent_lite.report.rollout_page import render_rollout
from reagent_lite.serving.access import Access
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
    Rankings,
    Reward,
    RolloutChange,
    with_model_schema,
)
from reagent_lite.serving.deciding import Decider, count_choices
from reagent_lite.serving.decision_log import BUSY_SECONDS, RETRY_SECONDS, BusyError, DecisionLog, Joined
from reagent_lite.serving.docs import docs_page
from reagent_lite.serving.large import LARGE_CHOICES, LargeRequests
from reagent_lite.serving.limits import Limits
from reagent_lite.serving.parsing import StrictRoute
from reagent_lite.serving.refusals import ERRORS, OF_DECISION, OF_REWARD, OF_ROLLOUT, RefusedError, refuse
from reagent_lite.serving.served_model import ServedModel
from reagent_lite.serving.server_figures import ServerFigures
from reagent_lite.serving.worker_rollout import WorkerRollout

of_any_model = APIRouter(route_class=StrictRoute)
of_named_actions = APIRouter(route_class=StrictRoute)
of_candidates = APIRouter(route_class=StrictRoute)
of_items = APIRouter(route_class=StrictRoute)
of_rollout = APIRouter(route_class=StrictRoute)
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
        large: the thread of large requests.
        rollout: the rollout of a second model; None without one.
    """

    config: ServeConfig
    model: ServedModel
    log: DecisionLog
    figures: ServerFigures
    decider: Decider
    large: LargeRequests
    rollout: WorkerRollout | None


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


_RANK: Any = {"response_model": Rankings, "responses": ERRORS}


@of_candidates.post("/rank", summary="Order the candidates of each row by value; not logged", **_RANK)
async def rank(body: CandidateLists, request: Request) -> Response:
    """Orders candidates without a decision."""
    return await _rank(_worker(request), body.rows, [row.possible_actions for row in body.rows])


@of_items.post("/rank", summary="Order items of each row by value; not logged", **_RANK)
async def rank_items(body: ItemLists, request: Request) -> Response:
    """Orders items without a decision."""
    items = _worker(request).model.bundle.items
    assert items is not None
    return await _rank(_worker(request), body.rows, [row.possible_actions or items.ids for row in body.rows])


async def _rank(worker: Worker, rows: Sequence[CandidateList | ItemList], lists: Sequence[Sequence[Any]]) -> Response:
    bundle = worker.model.bundle
    if bundle.history > 1:
        got = f"one of {bundle.history}, whose earlier steps a list to rank does not have"
        raise RefusedError(422, Problem("body", "a model that reads one step", got, "Use /decide, with mdp_id"))
    versions = worker.model.versions
    if count_choices(bundle, rows) > LARGE_CHOICES:
        content = await worker.large.run(_rankings, bundle, versions, rows, lists)
    else:
        content = _rankings(bundle, versions, rows, lists)
    return Response(content, media_type="application/json")


def _rankings(
    bundle: Bundle,
    versions: dict[str, str],
    rows: Sequence[CandidateList | ItemList],
    lists: Sequence[Sequence[Any]],
) -> bytes:
    """Returns the JSON of `bodies.Rankings`: the candidates of each row by value, the largest first.

    Raises:
        BundleError: a feature or an item that the model does not have.
        RefusedError: a value that is not finite.
    """
    states = bundle.states([row.state_features for row in rows])
    rankings: list[bytes] = []
    for part in parts(map(len, lists), LARGE_CHOICES):
        candidates = bundle.candidates(lists[part], first=part.start)
        predicted = bundle.predict(states[part], candidates=candidates)
        for q, mask, choices in zip(predicted.q, predicted.mask, lists[part], strict=True):
            infinite = q[mask & ~np.isfinite(q)]
            if infinite.size:
                where = f"rows.{len(rankings)}.possible_actions"
                raise RefusedError(422, Problem(where, "candidates of finite value", f"{infinite[0]}"))
            order = [k for k in np.argsort(-q, kind="stable").tolist() if mask[k]]
            names = {} if bundle.items is None else {k: {"action": choices[k]} for k in order}
            rankings.append(to_json([{**names.get(k, {}), "index": k, "score": float(q[k])} for k in order]))
    return b'{"rankings":[%b],%b' % (b",".join(rankings), to_json(versions)[1:])


@of_any_model.post("/reward", responses=ERRORS | OF_REWARD, status_code=204)
async def reward(body: Reward, request: Request) -> Response:
    """Joins a reward to its decision."""
    worker = _worker(request)
    result = await _join(worker, body)
    worker.figures.rewards.labels(result).inc()
    if result == "unknown":
        expected = "the id of a decision of this log"
        raise RefusedError(404, Problem("decision_id", expected, repr(body.decision_id)))
    if result == "again":
        expected = f"one reward for {body.decision_id}, within {worker.config.reward_seconds:g} s"
        raise RefusedError(409, Problem("decision_id", expected, "a second or late reward"))
    return Response(status_code=204)


async def _join(worker: Worker, body: Reward) -> Joined:
    """Logs a reward; tries again for a moment while another process has the database."""
    also = worker.decider.forget_episode if body.terminal else None
    given = body.model_dump(exclude={"decision_id"}, exclude_none=True)
    end = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return worker.log.join(body.decision_id, given, also)
        except BusyError:
            if time.monotonic() >= end:
                raise
        await asyncio.sleep(RETRY_SECONDS)


@of_rollout.get("/rollout", response_class=Response, summary="Comparison of two models, as a page")
async def rollout_page(request: Request) -> Response:
    """Returns a page that refreshes itself, unless asked for with ?refresh=no, and loads nothing from other servers."""
    refreshes = request.query_params.get("refresh") != "no"
    return Response(render_rollout(_rollout(request).document(), refreshes=refreshes), media_type="text/html")


@of_rollout.get("/rollout.json", response_class=Response, summary="Comparison of two models")
async def rollout_figures(request: Request) -> Response:
    """Returns state, share, figures and events; counted are decisions that are in a file of the log."""
    rollout = _rollout(request)
    return Response(to_json(rollout.document()), media_type="application/json")


@of_rollout.post(
    "/rollout", responses=ERRORS | OF_ROLLOUT, summary="Change the share, stop or promote", status_code=204
)
async def change_rollout(body: RolloutChange, request: Request) -> Response:
    """Changes a running rollout from the next decision on; the log has it as an event."""
    rollout = _rollout(request)
    cause = "asked for by POST /rollout"
    if body.stop:
        changed = rollout.store.change("stop", cause, state="stopped", share=0.0)
    elif body.promote:
        changed = rollout.store.change("promote", cause, state="promoted", share=1.0)
    else:
        changed = rollout.store.change("share", cause, share=body.share)
    if not changed:
        todo = "Start the server with another new model for a new rollout"
        raise RefusedError(409, Problem("rollout", "a rollout that runs", rollout.store.state.state, todo))
    machine_logger.info(f"rollout: {body.model_dump_json(exclude_defaults=True)} by POST /rollout")
    return Response(status_code=204)


def _rollout(request: Request) -> WorkerRollout:
    rollout = _worker(request).rollout
    assert rollout is not None
    return rollout


@of_any_model.get("/healthz", responses={503: ERRORS[503]}, response_model_exclude_none=True)
async def healthz(request: Request) -> Health:
    """Health check."""
    worker = _worker(request)
    if worker.log.failure:
        raise OSError(worker.log.failure)
    return Health(**worker.model.versions, waiting=worker.log.waiting, refused_model=worker.model.refusal or None)


@of_any_model.get("/docs", response_class=Response, include_in_schema=False)
async def docs(request: Request) -> Response:
    """Returns the OpenAPI as a page, which loads nothing from other servers."""
    return Response(docs_page(request.app.openapi()), media_type="text/html")


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
            if worker.rollout is not None:
                worker.rollout.present()
                worker.figures.copy_rollout(worker.rollout.document())
            await worker.model.poll()
            worker.figures.gauge(worker.model, worker.log)
        except Exception as error:  # the next poll may succeed
            machine_logger.warning(message_of(error))


def create_app(
    config: ServeConfig,
    number: int,
    model: ServedModel,
    log: DecisionLog,
    access: Access | None = None,
    rollout: WorkerRollout | None = None,
) -> FastAPI:
    """Returns the application of a worker.

    Args:
        config: the server's config.
        number: number of the worker.
        model: the model that decides.
        log: the server's log.
        access: the tokens and names of the server; None: those of the config.
        rollout: the rollout of a second model; None without one.
    """
    figures = ServerFigures()
    rng = np.random.default_rng(None if config.seed is None else [config.seed, number])
    routers = (_OF_CHOICES[model.bundle.choices], of_any_model, *([] if rollout is None else [of_rollout]))
    routes = [route for router in routers for route in router.routes]
    app = FastAPI(title="reagent-lite: decisions", routes=routes, lifespan=_polling, docs_url=None, redoc_url=None)
    large = LargeRequests()
    decider = Decider(model, log, figures, large, rng, int(config.max_logged_kb * 1000), rollout)
    app.state.worker = Worker(
        config=config, model=model, log=log, figures=figures, decider=decider, large=large, rollout=rollout
    )
    app.add_middleware(Limits, config=config, access=access or Access.of(config), figures=figures)
    for kind in (BundleError, HTTPException, OSError, Exception):
        app.add_exception_handler(kind, refuse)
    openapi = app.openapi
    app.openapi = lambda: with_model_schema(openapi(), model.bundle)  # type: ignore[method-assign]
    return app
