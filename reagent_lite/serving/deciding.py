"""Decisions: the requests that wait at the same time are predicted together and are one write of the log.

request ─► states, choices ─┐
request ─► states, choices ─┴─► the loop's next turn: predict ─► draw ─► log ─► an answer each
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json

from reagent_lite.data.rows.matrices import FeatureMatrix, Lists
from reagent_lite.errors import Problem
from reagent_lite.export.bundle import Bundle, parts
from reagent_lite.serving.bodies import CandidateRow, ItemRow, NamedRow
from reagent_lite.serving.decision_log import DecisionLog
from reagent_lite.serving.figures import ServerFigures
from reagent_lite.serving.refusals import RefusedError
from reagent_lite.serving.served_model import ServedModel

MOST_CHOICES = 1 << 16
"""Most choices in one prediction, in which every row is padded to the widest."""
Rows = Sequence[NamedRow] | Sequence[CandidateRow] | Sequence[ItemRow]
Choices = Sequence[NDArray[Any]] | NDArray[np.bool_]


@dataclass(slots=True, kw_only=True)
class _Request:
    """A request that is not answered yet.

    Attributes:
        rows: the rows of its body.
        states: [n, F] their states.
        choices: mask [n, K] of named actions, or the candidates [K, F'] of each row.
        possible: names or candidates of each row, as the log has them.
        places: of each row the index of every choice in the answer.
        answer: future body of the response.
        index, propensities: those of each row, once drawn; index -1 where nothing may be taken.
    """

    rows: Rows
    states: NDArray[np.float32]
    choices: Choices
    possible: Sequence[Sequence[Any]]
    places: Sequence[Sequence[int]]
    answer: asyncio.Future[bytes]
    index: list[int] = field(default_factory=list)
    propensities: list[float] = field(default_factory=list)


class _Batch:
    """Requests for one model."""

    def __init__(self, model: ServedModel) -> None:
        self.bundle = model.bundle
        self.version = model.version
        self.items = {} if model.items_hash is None else {"items": model.items_hash}
        self.requests: list[_Request] = []

    def draw(self, rng: np.random.Generator) -> None:
        """Draws for all rows of the requests."""
        states = np.concatenate([request.states for request in self.requests])
        choices: Any = [choice for request in self.requests for choice in request.choices]
        name = "candidates" if self.bundle.parametric else "mask"
        index = []
        propensities = []
        for part in parts(map(len, choices), MOST_CHOICES):
            drawn = self.bundle.act(states[part], **{name: choices[part]}, rng=rng)
            index += drawn[0].tolist()
            propensities += drawn[1].tolist()
        start = 0
        for request in self.requests:
            rows = slice(start, start + len(request.rows))
            request.index = index[rows]
            request.propensities = propensities[rows]
            start = rows.stop


class Decider:
    """Makes the decisions of a worker and logs them.

    Args:
        model: the model that decides.
        log: the log of the worker.
        figures: count actions and missing features.
        rng: draws the actions.
    """

    def __init__(self, model: ServedModel, log: DecisionLog, figures: ServerFigures, rng: np.random.Generator) -> None:
        self._model = model
        self._log = log
        self._figures = figures
        self._rng = rng
        self._batch: _Batch | None = None

    async def decide(self, rows: Rows) -> bytes:
        """Returns the JSON of `bodies.Decisions`, a decision for each row; all are in the log, or none.

        Raises:
            BundleError: features that the model does not know.
            RefusedError: actions that it does not know, or a row without one that may be taken.
            OSError: the log cannot be written.
        """
        bundle = self._model.bundle
        loop = asyncio.get_running_loop()
        states = bundle.states([row.state_features for row in rows])
        choices, possible, places = _choices(bundle, rows)
        request = _Request(
            rows=rows,
            states=states,
            choices=choices,
            possible=possible,
            places=places,
            answer=loop.create_future(),
        )
        if self._batch is None or self._batch.bundle is not bundle:
            self._batch = _Batch(self._model)
            loop.call_soon(self._finish, self._batch)
        self._batch.requests.append(request)
        return await request.answer

    def _finish(self, batch: _Batch) -> None:
        if batch is self._batch:
            self._batch = None
        batch.requests = [request for request in batch.requests if not request.answer.done()]  # others were cancelled
        try:
            self._decide(batch)
        except Exception as error:
            for request in batch.requests:
                if not request.answer.done():
                    request.answer.set_exception(error)

    def _decide(self, batch: _Batch) -> None:
        batch.draw(self._rng)
        decided: list[tuple[_Request, list[Any]]] = []
        for request in batch.requests:
            if min(request.index) < 0:
                where = f"rows.{request.index.index(-1)}.possible_actions"
                problem = Problem(where, "an action that the model may take", "none")
                request.answer.set_exception(RefusedError(422, problem))
                continue
            options = request.possible if batch.bundle.parametric else repeat(batch.bundle.action_names)
            decided.append((request, [names[k] for names, k in zip(options, request.index, strict=False)]))
        ids = iter(
            self._log.append(
                {
                    "model": batch.version,
                    **batch.items,
                    "mdp_id": row.mdp_id,
                    "sequence_number": row.sequence_number,
                    "state_features": present(row.state_features),
                    "action": action,
                    "possible_actions": possible,
                    "action_probability": propensity,
                }
                for request, actions in decided
                for row, possible, action, propensity in zip(
                    request.rows, request.possible, actions, request.propensities, strict=True
                )
            )
        )
        for request, actions in decided:
            index = [places[k] for places, k in zip(request.places, request.index, strict=True)]
            drawn = zip(actions, index, request.propensities, strict=True)
            decisions = [{"decision_id": next(ids), "action": a, "index": k, "propensity": p} for a, k, p in drawn]
            request.answer.set_result(to_json({"decisions": decisions, "model": batch.version, **batch.items}))
        if decided:
            self._figures.decided([action for _, actions in decided for action in actions], batch.bundle)
            states = np.concatenate([request.states for request, _ in decided])
            self._figures.missing(np.isnan(states), batch.bundle)
            self._figures.other(batch.bundle.others(states))
            if batch.bundle.parametric:
                candidates: Any = [choice for request, _ in decided for choice in request.choices]
                self._figures.other(batch.bundle.others(np.concatenate(candidates), candidates=True))


def present(features: dict[str, Any]) -> dict[str, Any]:
    """Returns the features that are not null."""
    return {key: value for key, value in features.items() if value is not None}


def _logged(candidate: str | dict[str, float | None]) -> str | dict[str, float]:
    """Returns a candidate as the log has it: the id of an item, or the features that are not null."""
    return candidate if isinstance(candidate, str) else present(candidate)


def _choices(bundle: Bundle, rows: Sequence[Any]) -> tuple[Choices, Sequence[Sequence[Any]], Sequence[Sequence[int]]]:
    """Returns what the model may choose among in each row, the same as the log has it, and the index of each choice.

    Equal candidates are one, the first, as training knows a candidate by its features. Without a list a row has all
    items, or all named actions.
    """
    if bundle.parametric:
        items = () if bundle.items is None else bundle.items.ids
        lists = [row.possible_actions or items for row in rows]
        given = bundle.candidates(lists)
        lengths = np.array([len(candidates) for candidates in given])
        first = Lists(lengths, FeatureMatrix(bundle.action_feature_ids, np.concatenate(given))).first_equal
        each = np.split(first == np.arange(len(first)), np.cumsum(lengths)[:-1])
        places = [np.flatnonzero(kept).tolist() for kept in each]
        possible = [[_logged(options[k]) for k in indices] for options, indices in zip(lists, places, strict=True)]
        return [candidates[indices] for candidates, indices in zip(given, places, strict=True)], possible, places
    names = bundle.action_names
    mask = np.ones((len(rows), len(names)), np.bool_)
    for number, row in enumerate(rows):
        if row.possible_actions is not None:
            mask[number] = _allowed(f"rows.{number}", row.possible_actions, names)
    return mask, [row.possible_actions or names for row in rows], [range(len(names))] * len(rows)


def _allowed(where: str, possible: list[str], names: tuple[str, ...]) -> list[bool]:
    if len(set(possible)) < len(possible) or not set(possible) <= set(names):
        expected = f"names of {', '.join(names)}, each once"
        raise RefusedError(422, Problem(f"{where}.possible_actions", expected, f"{possible}"))
    return [name in possible for name in names]
