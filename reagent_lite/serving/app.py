"""The HTTP interface of one worker.

POST /decide   rows ─► act ─► log ─► answer          GET /healthz   whether decisions are made
POST /rank     candidates by value; not logged       GET /metrics   of all workers, for Prometheus
POST /reward   ─► the worker of the decision ─► log  GET /openapi.json, /docs
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
from fastapi import FastAPI, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from reagent_lite.cli import message_of
from reagent_lite.config.serve import ServeConfig
from reagent_lite.console import machine_logger
from reagent_lite.errors import BundleError, Problem
from reagent_lite.export.bundle import parts
from reagent_lite.serving.bodies import (
    CandidateLists,
    CandidateRows,
    Decisions,
    Health,
    NamedRows,
    Ranked,
    Rankings,
    Reward,
    exact,
)
from reagent_lite.serving.deciding import MOST_CHOICES, Decider
from reagent_lite.serving.decision_log import DecisionLog, Joined
from reagent_lite.serving.figures import Figures
from reagent_lite.serving.limits import Limits
from reagent_lite.serving.refusals import ERRORS, OF_REWARD, RefusedError, StrictRoute, refused
from reagent_lite.serving.served_model import ServedModel

Join = Callable[[str, dict[str, Any]], Awaitable[Joined]]


class Service:
    """The routes of a worker, and the polls of its model and log.

    Args:
        config: limits, and the seed.
        worker: number of the worker.
        model: the model that decides.
        log: the log of this worker.
        join: takes a reward to the log of its decision; raises OSError or RefusedError where that is not possible.
    """

    def __init__(self, config: ServeConfig, worker: int, model: ServedModel, log: DecisionLog, join: Join) -> None:
        self._config, self._model, self._log, self._join = config, model, log, join
        self.figures = Figures()
        rng = np.random.default_rng(None if config.seed is None else [config.seed, worker])
        self._decider = Decider(model, log, self.figures, rng)

    async def decide_named(self, body: NamedRows) -> Response:
        """Chooses among the model's actions."""
        return Response(await self._decider.decide(body.rows), media_type="application/json")

    async def decide_listed(self, body: CandidateRows) -> Response:
        """Chooses among the candidates of each row."""
        return Response(await self._decider.decide(body.rows), media_type="application/json")

    async def rank(self, body: CandidateLists) -> Rankings:
        """Orders candidates without a decision."""
        bundle = self._model.bundle
        candidates = bundle.candidates([row.possible_actions for row in body.rows])
        states = bundle.states([row.state_features for row in body.rows])
        rankings: list[list[Ranked]] = []
        for part in parts(map(len, candidates), MOST_CHOICES):
            found = bundle.predict(states[part], candidates=candidates[part])
            for q, mask in zip(found.q, found.mask, strict=True):
                if not np.isfinite(values := q[mask]).all():
                    place, bad = f"rows.{len(rankings)}.possible_actions", values[~np.isfinite(values)]
                    raise RefusedError(422, Problem(place, "candidates of finite value", f"{bad[0]}"))
                order = np.argsort(-q, kind="stable")
                rankings.append([Ranked(index=int(k), score=float(q[k])) for k in order if mask[k]])
        return Rankings(rankings=rankings, model=self._model.version)

    async def reward(self, body: Reward) -> None:
        """Joins a reward to its decision."""
        result = await self._join(body.decision_id, body.model_dump(exclude={"decision_id"}, exclude_none=True))
        self.figures.rewards.labels(result).inc()
        if result == "unknown":
            expected = "the id of a decision that waits for its reward"
            raise RefusedError(404, Problem("decision_id", expected, repr(body.decision_id)))
        if result == "again":
            expected = f"one reward of {body.decision_id}, within {self._config.reward_seconds:g} s"
            raise RefusedError(409, Problem("decision_id", expected, "a second one, or one that is too late"))

    async def healthz(self) -> Health:
        """Says whether decisions are made and logged."""
        if self._log.failure:
            raise OSError(self._log.failure)
        return Health(model=self._model.version, waiting=self._log.waiting)

    async def metrics(self) -> Response:
        """Returns the figures of all workers."""
        return Response(self.figures.page(), media_type="text/plain; version=0.0.4")

    @asynccontextmanager
    async def polling(self, _: FastAPI) -> AsyncIterator[None]:
        """Polls model and log while the application runs."""
        ended = asyncio.Event()
        task = asyncio.create_task(self._poll_until(ended))
        yield
        ended.set()
        await task  # not cancelled: it may be writing a file

    async def _poll_until(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), self._config.poll_seconds)
            try:
                await self._model.poll()
                await self._log.poll()
                self.figures.gauge(self._model, self._log)
            except Exception as error:  # the next poll may succeed; without polls no file would be written
                machine_logger.warning(message_of(error))


def create_app(config: ServeConfig, worker: int, model: ServedModel, log: DecisionLog, join: Join) -> FastAPI:
    """Returns the application of a worker; arguments as of `Service`."""
    service = Service(config, worker, model, log, join)
    app = FastAPI(title="reagent-lite: decisions", lifespan=service.polling, redoc_url=None)
    app.router.route_class = StrictRoute
    app.add_middleware(Limits, config=config, figures=service.figures)
    for kind in (BundleError, RequestValidationError, HTTPException, OSError, Exception):
        app.add_exception_handler(kind, refused)
    decide: Any = service.decide_listed if model.bundle.parametric else service.decide_named
    app.post(
        "/decide", response_model=Decisions, responses=ERRORS, summary="Choose an action for each row, and log it"
    )(decide)
    if model.bundle.parametric:
        app.post("/rank", responses=ERRORS, summary="Order the candidates of each row by value; not logged")(
            service.rank
        )
    app.post("/reward", responses=ERRORS | OF_REWARD, status_code=204)(service.reward)
    app.get("/healthz", responses={503: ERRORS[503]})(service.healthz)
    app.get("/metrics", response_class=Response, include_in_schema=False)(service.metrics)
    plain = app.openapi
    app.openapi = lambda: exact(plain(), model.bundle)  # type: ignore[method-assign]
    return app
