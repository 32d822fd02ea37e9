"""Decisions: all waiting requests are predicted together and logged in one transaction.

request ─► rows: state, choices ─┐
request ─► rows: state, choices ─┴─► next turn of the event loop: predict ─► draw ─► log ─► answers
large request ─► thread: rows, predict, draw, a part at a time ─► log ─► answer
"""

import asyncio
import base64
import errno
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json

from reagent_lite.data.rows.matrices import FeatureMatrix, Lists
from reagent_lite.errors import BundleError, Problem
from reagent_lite.export.bundle import Bundle, parts
from reagent_lite.serving.bodies import CandidateRow, ItemRow, NamedRow
from reagent_lite.serving.decision_log import (
    BUSY_SECONDS,
    RETRY_SECONDS,
    BusyError,
    DecisionLog,
    EpisodeChangedError,
    LogRow,
    RepeatedError,
)
from reagent_lite.serving.large import LARGE_CHOICES, MOST_CHOICES_OF_REQUEST, LargeRequests
from reagent_lite.serving.recent_steps import EpisodeSteps, Features, RecentSteps
from reagent_lite.serving.refusals import RefusedError
from reagent_lite.serving.rollout_store import RolloutState, ServedUnit
from reagent_lite.serving.served_model import ServedModel
from reagent_lite.serving.server_figures import ServerFigures
from reagent_lite.serving.worker_rollout import WorkerRollout, add_action, columns_of, drawn_from, have_same_inputs

MOST_CHOICES = 1 << 16
"""Largest number of choices in one prediction, if every row is padded to the widest."""


@dataclass(slots=True, kw_only=True)
class _DecisionRow:
    """A row to decide.

    Attributes:
        body: the row of the request.
        state: [F] features of the present step.
        choices: mask [K] of named actions, or features [K, F'] of candidates.
        options: name, id or features of each choice, as in the log.
        possible: the options that the request allows.
        positions: `index` that the answer has for each choice.
        choice: the drawn choice; -1 if no choice is allowed.
        propensity: probability of the draw.
        logged: the decision as the log has it, once it is drawn.
        unit: the unit of a rollout.
        probabilities: those of the current and the new policy for the draw.
        rollout: columns of a rollout.
        earlier: state features of the steps before, if a model reads several.
        steps: the episode's steps with this one; None without an mdp_id, or if models read one step.
    """

    body: NamedRow | CandidateRow | ItemRow
    state: NDArray[np.float32]
    choices: NDArray[Any]
    options: Sequence[Any]
    possible: Sequence[Any]
    positions: Sequence[int]
    choice: int = -1
    propensity: float = 0.0
    logged: LogRow | None = None
    unit: ServedUnit | None = None
    probabilities: tuple[float, float] = (0.0, 0.0)
    rollout: dict[str, Any] = field(default_factory=dict)
    earlier: Sequence[Features] = ()
    steps: EpisodeSteps | None = None

    def event(self) -> dict[str, Any]:
        """Returns the columns of the log that depend on the row."""
        return {
            "mdp_id": self.body.mdp_id,
            "sequence_number": self.body.sequence_number,
            "state_features": _logged_state(self.body.state_features),
            "action": self.options[self.choice],
            "possible_actions": self.possible,
            "action_probability": self.propensity,
            **self.rollout,
        }


@dataclass(frozen=True, slots=True)
class _Request:
    rows: list[_DecisionRow]
    answer: asyncio.Future[bytes]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Requests for one version of the model, or for two versions while a rollout runs."""

    bundle: Bundle
    versions: dict[str, str]
    requests: list[_Request] = field(default_factory=list)
    rollout: RolloutState | None = None
    new: Bundle | None = None
    new_version: str = ""

    @property
    def history(self) -> int:
        """Number of steps that the model, or one of both, reads."""
        return max(self.bundle.history, 1 if self.new is None else self.new.history)


class Decider:
    """Makes the decisions of a worker and logs them.

    Args:
        model: the model that decides.
        log: the log of the worker.
        figures: counters of actions and missing features.
        large: the thread of large requests.
        rng: draws the actions.
        most_logged: largest number of bytes in the log of a request's decisions.
        rollout: the rollout of a second model; None without one.
    """

    def __init__(
        self,
        model: ServedModel,
        log: DecisionLog,
        figures: ServerFigures,
        large: LargeRequests,
        rng: np.random.Generator,
        most_logged: int,
        rollout: WorkerRollout | None = None,
    ) -> None:
        self._model = model
        self._log = log
        self._figures = figures
        self._large = large
        self._rng, self._rng_of_large = rng, rng.spawn(1)[0]
        self._most_logged = most_logged
        self._rollout = rollout
        self._batch: _Batch | None = None
        self._steps: RecentSteps | None = None
        if max(model.bundle.history, 1 if rollout is None else rollout.new.bundle.history) > 1:
            self._steps = RecentSteps(log)

    async def decide(self, bodies: Sequence[NamedRow] | Sequence[CandidateRow] | Sequence[ItemRow]) -> bytes:
        """Returns the JSON of `bodies.Decisions`, one decision per row; the log has all of them or none.

        A request that is repeated, with the sequence numbers and all else as before, gets its first decisions.

        Raises:
            BundleError: a feature that the model does not have.
            RefusedError: an action that the model does not have, a row without an allowed action, a sequence number
                that its episode has already, or more choices or logged bytes than a request may have.
            OSError: the log cannot be written.
        """
        state = self._rollout.present() if self._rollout is not None else None
        bundle = self._model.bundle
        loop = asyncio.get_running_loop()
        if count_choices(bundle, bodies) > LARGE_CHOICES:
            batch = self._new_batch(state)
            units = self._units(batch, bodies, self._rng)
            steps = self._earlier(batch, bodies)
            rows = await self._large.run(self._draw_large, batch, bodies, units, steps)
            request = _Request(rows, loop.create_future())
            self._commit(batch, [request], loop.time() + BUSY_SECONDS)
            return await request.answer
        states = bundle.steps([body.state_features for body in bodies])
        request = _Request(_rows(bundle, bodies, states), loop.create_future())
        if self._batch is None or self._batch.bundle is not bundle or self._batch.rollout != state:
            self._batch = self._new_batch(state)
            loop.call_soon(self._finish, self._batch)
        self._batch.requests.append(request)
        return await request.answer

    @property
    def forget_episode(self) -> Callable[[sqlite3.Connection, int], None] | None:
        """Forgets the steps of an ended episode within a transaction, given the number of its last decision."""
        return None if self._steps is None else self._steps.end

    def _new_batch(self, state: RolloutState | None) -> _Batch:
        bundle = self._model.bundle
        if state is None or self._rollout is None:
            return _Batch(bundle, self._model.versions)
        try:
            new = self._rollout.new_bundle(bundle)
        except BundleError as error:  # a newer item table
            self._rollout.give_up(f"the new model cannot take the item table: {error}")
            return _Batch(bundle, self._model.versions)
        return _Batch(bundle, self._model.versions, rollout=state, new=new, new_version=self._rollout.new.version)

    def _units(self, batch: _Batch, bodies: Sequence[Any], rng: np.random.Generator) -> list[ServedUnit]:
        """Returns the unit of each row; [] without a rollout."""
        if batch.rollout is None or self._rollout is None:
            return []
        return self._rollout.units_of([body.mdp_id for body in bodies], batch.rollout.share, rng)

    def _finish(self, batch: _Batch) -> None:
        if batch is self._batch:
            self._batch = None
        self._decide(batch, batch.requests, asyncio.get_running_loop().time() + BUSY_SECONDS)

    def _decide(self, batch: _Batch, requests: list[_Request], end: float) -> None:
        """Draws, logs and answers requests."""
        requests = [request for request in requests if not request.answer.done()]  # or canceled
        try:
            rows = [row for request in requests for row in request.rows]
            bodies = [row.body for row in rows]
            units = self._units(batch, bodies, self._rng)
            _add_steps(rows, self._earlier(batch, bodies))
            self._draw(batch, rows, units, self._rng)
        except Exception as error:
            _fail(requests, error)
            return
        for request in requests:
            try:
                self._encode(batch, request.rows)
            except RefusedError as error:
                request.answer.set_exception(error)
        if not self._again_without_others(batch, requests, end):
            self._commit(batch, requests, end)

    def _again_without_others(self, batch: _Batch, requests: list[_Request], end: float) -> bool:
        """Decides requests again if their episodes have steps of others, which were refused or cancelled."""
        left = [request for request in requests if not request.answer.done()]
        if batch.history == 1 or not left or len(left) == len(requests):
            return False
        self._decide(batch, left, end)
        return True

    def _earlier(self, batch: _Batch, bodies: Sequence[Any]) -> list[tuple[Sequence[Features], EpisodeSteps | None]]:
        """Returns the steps before each row, and those of its episode with this one; none without an mdp_id.

        Rows of one episode follow each other in the order of their sequence numbers.
        """
        if self._steps is None or batch.history == 1:
            return [((), None)] * len(bodies)
        names = dict.fromkeys(body.mdp_id for body in bodies if body.mdp_id is not None)
        episodes = {steps.episode: steps for steps in self._steps.read(names)}
        result: list[tuple[Sequence[Features], EpisodeSteps | None]] = []
        for body in bodies:
            if body.mdp_id is None:
                result.append(((), None))
                continue
            steps = episodes[body.mdp_id]
            order = body.sequence_number
            if order is None:
                order = max([self._log.microseconds(), *(number + 1 for number, _ in steps.steps)])
            result.append((steps.before(order), steps))
            steps.add(order, _present(body.state_features), batch.history - 1)
        return result

    def _draw_large(
        self,
        batch: _Batch,
        bodies: Sequence[Any],
        units: Sequence[ServedUnit],
        steps: Sequence[tuple[Sequence[Features], EpisodeSteps | None]],
    ) -> list[_DecisionRow]:
        """Returns the drawn rows of a large request; the features of its candidates are in memory a part at a time."""
        states = batch.bundle.steps([body.state_features for body in bodies])
        rows: list[_DecisionRow] = []
        logged = 0
        for part in parts(_widths(batch.bundle, bodies), LARGE_CHOICES):
            drawn = _rows(batch.bundle, bodies[part], states[part], first=part.start)
            _add_steps(drawn, steps[part])
            self._draw(batch, drawn, units[part], self._rng_of_large)
            logged = self._encode(batch, drawn, first=part.start, logged=logged)
            self._count_values(batch.bundle, drawn)
            for row in drawn:
                row.choices = row.choices[:0]
            rows += drawn
        return rows

    def _encode(self, batch: _Batch, rows: Sequence[_DecisionRow], *, first: int = 0, logged: int = 0) -> int:
        """Encodes drawn rows for the log, after `logged` bytes of earlier rows; returns the bytes of all.

        Raises:
            RefusedError: a row without an allowed action, or too many bytes.
        """
        for number, row in enumerate(rows, first):
            if row.choice == -1:
                where = f"rows.{number}.possible_actions"
                raise RefusedError(422, Problem(where, "an action that the model may take", "none"))
        before = [(row.unit, row.unit.log_ratio, row.unit.steps) for row in rows if row.unit is not None]
        for row in rows:
            if batch.rollout is not None and row.unit is not None:
                row.propensity = add_action(row.unit, *row.probabilities)
                row.rollout = columns_of(batch.rollout, row.unit, *row.probabilities)
            row.logged = LogRow.of(_versions(batch, row) | row.event())
            logged += len(row.logged.json)
        if logged > self._most_logged:
            for unit, log_ratio, steps in reversed(before):  # other requests may have rows of the same episode
                unit.log_ratio = log_ratio
                unit.steps = steps
            expected = f"decisions of at most {self._most_logged} bytes in the log"
            raise RefusedError(413, Problem("body.rows", expected, "more", "Send fewer rows at a time"))
        return logged

    def _commit(self, batch: _Batch, requests: list[_Request], end: float) -> None:
        """Logs drawn requests and answers them; tries again until `end` while another process has the database."""
        if self._again_without_others(batch, requests, end):
            return
        requests = [request for request in requests if not request.answer.done()]
        rows = [row for request in requests for row in request.rows]
        try:
            ids = iter(self._append(rows))
        except (RepeatedError, EpisodeChangedError) as error:
            self._commit_each(batch, requests, end, error)
            return
        except BusyError as error:
            loop = asyncio.get_running_loop()
            if loop.time() < end:
                loop.call_later(RETRY_SECONDS, self._commit, batch, requests, end)
            else:
                _fail(requests, error)
            return
        except Exception as error:
            _fail(requests, error)
            return
        for request in requests:
            request.answer.set_result(_decisions(request.rows, ids, _versions(batch, request.rows[-1])))
        self._figures.count_decisions([row.options[row.choice] for row in rows], batch.bundle)
        self._count_values(batch.bundle, [row for row in rows if len(row.choices)])  # those of large requests are

    def _append(self, rows: Sequence[_DecisionRow]) -> list[str]:
        """Logs drawn rows, and the state of their units and episodes, in one transaction; returns the ids."""
        logged = [row.logged for row in rows if row.logged is not None]
        units = {id(row.unit): row.unit for row in rows if row.unit is not None}
        episodes = {id(row.steps): row.steps for row in rows if row.steps is not None}
        if not units and not episodes:
            return self._log.append(logged)

        def keep(database: sqlite3.Connection) -> None:
            if self._rollout is not None:
                self._rollout.store.keep_units(database, units.values())
            if self._steps is not None:
                self._steps.keep(database, episodes.values())

        return self._log.append(logged, keep)

    def _commit_each(self, batch: _Batch, requests: list[_Request], end: float, error: Exception) -> None:
        """Logs requests one by one, after a transaction with all of them failed."""
        is_repeated = isinstance(error, RepeatedError)
        if len(requests) == 1 and is_repeated:
            self._repeat(batch, requests[0])
            return
        if not is_repeated and asyncio.get_running_loop().time() >= end:
            _fail(requests, BusyError(errno.EBUSY, "another process decides about the same episodes"))
            return
        for request in requests:
            if batch.rollout is None and batch.history == 1:
                self._commit(batch, [request], end)
            elif len(request.rows[0].choices):
                self._decide(batch, [request], end)  # its units and steps are others now
            else:  # the features of a large request are not in memory any more
                _fail([request], BusyError(errno.EBUSY, "another process decides about the same episodes"))

    def _repeat(self, batch: _Batch, request: _Request) -> None:
        try:
            request.answer.set_result(self._first_answer(batch, request))
        except Exception as error:
            request.answer.set_exception(error)

    def _first_answer(self, batch: _Batch, request: _Request) -> bytes:
        """Returns the answer to the same request before.

        Raises:
            RefusedError: a row that is not the same, or was not decided before.
        """
        ids = []
        versions = batch.versions
        for number, row in enumerate(request.rows):
            body = row.body
            first_id, first = self._log.find_decision(body.mdp_id, body.sequence_number) or ("", {})
            event = json.loads(to_json(row.event()))
            if any(first.get(name) != event[name] for name in ("state_features", "possible_actions")):
                expected = "rows whose sequence_number is new in their episode, each once, or an earlier request again"
                got = f"mdp_id {body.mdp_id!r} and sequence_number {body.sequence_number}"
                got += (
                    " with other features or actions than before"
                    if first
                    else ", a new row in addition to earlier ones"
                )
                raise RefusedError(409, Problem(f"rows.{number}", expected, got))
            row.choice = row.options.index(first["action"])
            row.propensity = first["action_probability"]
            ids.append(first_id)
            versions = {name: first[name] for name in versions}
        return _decisions(request.rows, iter(ids), versions)

    def _draw(
        self, batch: _Batch, rows: Sequence[_DecisionRow], units: Sequence[ServedUnit], rng: np.random.Generator
    ) -> None:
        """Draws an action of each row; of `units`, one per row, while a rollout runs."""
        name = "candidates" if batch.bundle.parametric else "mask"
        for part in parts((len(row.choices) for row in rows), MOST_CHOICES):
            states = _states(batch.bundle, rows[part])
            choices: Any = {name: [row.choices for row in rows[part]]}
            if batch.new is None:
                drawn = batch.bundle.act(states, **choices, rng=rng)
                for row, choice, propensity in zip(rows[part], drawn[0].tolist(), drawn[1].tolist(), strict=True):
                    row.choice = choice
                    row.propensity = propensity
                continue
            current = batch.bundle.predict(states, **choices)
            if not have_same_inputs(batch.bundle, batch.new):
                states = batch.new.states(_steps_of(batch.new, rows[part]))
                if batch.new.parametric:
                    choices = {name: batch.new.candidates([row.options for row in rows[part]])}
            new = batch.new.predict(states, **choices)
            is_new = np.array([unit.is_new for unit in units[part]])
            mixed = zip(rows[part], units[part], *map(_list, drawn_from(current, new, is_new, rng)), strict=True)
            for row, unit, choice, of_current, of_new in mixed:
                row.choice = choice
                row.unit = unit
                row.probabilities = of_current, of_new

    def _count_values(self, bundle: Bundle, rows: list[_DecisionRow]) -> None:
        if not rows:
            return
        states = np.stack([row.state for row in rows])
        self._figures.missing(np.isnan(states), bundle)
        self._figures.other(bundle.others(states))
        if bundle.parametric:
            candidates = np.concatenate([row.choices for row in rows])
            self._figures.other(bundle.others(candidates, candidates=True))


def _add_steps(rows: Sequence[_DecisionRow], steps: Sequence[tuple[Sequence[Features], EpisodeSteps | None]]) -> None:
    for row, (earlier, of_episode) in zip(rows, steps, strict=True):
        row.earlier = earlier
        row.steps = of_episode


def _states(bundle: Bundle, rows: Sequence[_DecisionRow]) -> NDArray[np.float32]:
    if bundle.history == 1:
        return np.stack([row.state for row in rows])
    return bundle.states(_steps_of(bundle, rows), ignore_unknown=True)  # earlier steps of another model's features


def _steps_of(bundle: Bundle, rows: Sequence[_DecisionRow]) -> list[Any]:
    """Returns the state features of rows as a model reads them: a map for each row, or one for each of its steps."""
    if bundle.history == 1:
        return [row.body.state_features for row in rows]
    return [[*row.earlier, row.body.state_features] for row in rows]


def _list(array: NDArray[Any]) -> list[Any]:
    return list(array.tolist())


def _versions(batch: _Batch, row: _DecisionRow) -> dict[str, str]:
    """Returns the hashes of the model that decided a row, and of its item table."""
    is_new = row.unit is not None and row.unit.is_new
    return batch.versions | {"model": batch.new_version} if is_new else batch.versions


def _decisions(rows: Sequence[_DecisionRow], ids: Iterator[str], versions: dict[str, str]) -> bytes:
    """Returns the JSON of `bodies.Decisions`."""
    decisions = [
        {
            "decision_id": next(ids),
            "action": row.options[row.choice],
            "index": row.positions[row.choice],
            "propensity": row.propensity,
        }
        for row in rows
    ]
    return to_json({"decisions": decisions, **versions})


def _logged_state(features: dict[str, Any] | bytes) -> dict[str, Any] | str:
    """Returns the features that are not null, or the bytes of an image as text."""
    return base64.b64encode(features).decode() if isinstance(features, bytes) else _present(features)


def _present(features: dict[str, Any]) -> dict[str, Any]:
    """Returns the features that are not null."""
    return {key: value for key, value in features.items() if value is not None}


def _fail(requests: Sequence[_Request], error: Exception) -> None:
    for request in requests:
        if not request.answer.done():
            request.answer.set_exception(error)


def count_choices(bundle: Bundle, bodies: Sequence[Any]) -> int:
    """Returns the number of choices in all rows of a request.

    Raises:
        RefusedError: there are too many.
    """
    widths = _widths(bundle, bodies)
    choices = sum(widths)
    if choices > max(MOST_CHOICES_OF_REQUEST, max(widths)):
        expected = f"at most {MOST_CHOICES_OF_REQUEST} possible_actions in all rows"
        raise RefusedError(413, Problem("body.rows", expected, f"{choices}", "Send fewer rows at a time"))
    return choices


def _widths(bundle: Bundle, bodies: Sequence[Any]) -> list[int]:
    """Returns the number of choices of each row."""
    every = len(bundle.action_names) if bundle.items is None else len(bundle.items)
    if not bundle.parametric:
        return [every] * len(bodies)
    return [len(body.possible_actions) if body.possible_actions else every for body in bodies]


def _rows(bundle: Bundle, bodies: Sequence[Any], states: NDArray[np.float32], *, first: int = 0) -> list[_DecisionRow]:
    """Returns rows of a request with states [N, F] and their choices; `first` is the number of the first in errors.

    Equal candidates are one choice, the first of them, as training identifies a candidate by its features. A row
    without a list has all items, or all named actions.
    """
    if not bundle.parametric:
        names = bundle.action_names
        every = np.ones(len(names), np.bool_)
        return [
            _DecisionRow(
                body=body,
                state=state,
                choices=_mask(number, body.possible_actions, names) if body.possible_actions else every,
                options=names,
                possible=body.possible_actions or names,
                positions=range(len(names)),
            )
            for number, (body, state) in enumerate(zip(bodies, states, strict=True), first)
        ]
    items = () if bundle.items is None else bundle.items.ids
    lists: list[Sequence[Any]] = [body.possible_actions or items for body in bodies]
    candidates = bundle.candidates(lists, first=first)
    lengths = np.array([len(values) for values in candidates])
    equal = Lists(lengths, FeatureMatrix(bundle.action_feature_ids, np.concatenate(candidates))).first_equal
    distinct = np.split(equal == np.arange(len(equal)), np.cumsum(lengths)[:-1])
    rows = []
    for body, state, listed, values, kept in zip(bodies, states, lists, candidates, distinct, strict=True):
        positions = np.flatnonzero(kept).tolist()
        options = [listed[k] if isinstance(listed[k], str) else _present(listed[k]) for k in positions]
        choices = values[positions]
        rows.append(
            _DecisionRow(
                body=body, state=state, choices=choices, options=options, possible=options, positions=positions
            )
        )
    return rows


def _mask(row: int, possible: Sequence[str], names: tuple[str, ...]) -> NDArray[np.bool_]:
    """Returns which of the model's actions a row allows."""
    if len(set(possible)) < len(possible) or not set(possible) <= set(names):
        expected = f"names of {', '.join(names)}, each once"
        raise RefusedError(422, Problem(f"rows.{row}.possible_actions", expected, f"{possible}"))
    return np.array([name in possible for name in names])
