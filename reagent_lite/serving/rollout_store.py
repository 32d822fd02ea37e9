"""State of rollouts in the log's database, which all processes of a server share and which survives them.

rollouts        a row each: the two models, settings, state, share, figures
rollout_units   episodes of the running rollout: policy, share when they began, log ratio of their actions so far
rollout_events  what happened, which the parent also writes into the log's folder
"""

import json
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

from reagent_lite.config.rollout_config import ComparisonConfig, ServedRolloutConfig
from reagent_lite.data.served_log import ROLLOUT_EVENTS
from reagent_lite.errors import DataError, Problem
from reagent_lite.serving.decision_log import DecisionLog

State = Literal["running", "stopped", "promoted", "superseded"]
_TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS rollouts (number INTEGER PRIMARY KEY, id TEXT NOT NULL, current TEXT NOT NULL, "
    "new TEXT NOT NULL, comparison TEXT NOT NULL, state TEXT NOT NULL, share REAL NOT NULL, "
    "share_units INTEGER NOT NULL, figures TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS rollout_units (episode TEXT PRIMARY KEY, is_new INTEGER NOT NULL, "
    "share REAL NOT NULL, log_ratio REAL NOT NULL, steps INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS rollout_events (number INTEGER PRIMARY KEY, event TEXT NOT NULL)",
)


class UnitChangedError(Exception):
    """Another process has decided about an episode of these decisions meanwhile."""


@dataclass(frozen=True, slots=True)
class RolloutState:
    """A rollout at a moment.

    Attributes:
        number, id: its number in the database, and its id in the log.
        state: whether it runs.
        share: share of the units that the new model is given.
        share_units: number of units that counted when the share began.
    """

    number: int
    id: str
    state: State
    share: float
    share_units: int


@dataclass(slots=True)
class ServedUnit:
    """An episode, or a decision without one.

    Attributes:
        episode: its mdp_id; None for an independent decision.
        is_new: whether the new model has it.
        share: probability with which it was given to the new model.
        log_ratio: log of the ratio of both models' probabilities of its actions.
        steps, stored_steps: number of its decisions, and of those in the database.
    """

    episode: str | None
    is_new: bool
    share: float
    log_ratio: float = 0.0
    steps: int = 0
    stored_steps: int = 0


class RolloutStore:
    """Access to the state of one rollout.

    Args:
        log: the server's log.
        number: number of the rollout.
    """

    def __init__(self, log: DecisionLog, number: int) -> None:
        self._log = log
        self._number = number

    @classmethod
    def begun(
        cls,
        log: DecisionLog,
        config: ServedRolloutConfig,
        current: str,
        new: str,
        recorded: Sequence[dict[str, Any]] = (),
    ) -> "RolloutStore":
        """Returns the rollout of two models, given their versions: the earlier one, or a new one.

        A rollout of the same models that was stopped or promoted stays so, whatever the settings. One that runs goes on
        if it is the newest and the policies are compared as before; otherwise a new one begins.

        Args:
            log: the server's log.
            config: the section of the server's config.
            current: version of the current model.
            new: version of the new model.
            recorded: events in the log's folder, which has them if the database was lost.

        Raises:
            DataError: an event in the folder is not one of a server.
        """
        comparison = config.comparison.model_dump_json()

        def begin(database: sqlite3.Connection) -> int:
            for table in _TABLES:
                database.execute(table)
            if not database.execute("SELECT 1 FROM rollout_events").fetchone():
                _restore(database, recorded)
            earlier = database.execute(
                "SELECT number, state, comparison FROM rollouts WHERE current = ? AND new = ? ORDER BY number DESC",
                (current, new),
            ).fetchone()
            newest = database.execute("SELECT ifnull(max(number), 0) FROM rollouts").fetchone()[0]
            if earlier and (
                earlier[1] in ("stopped", "promoted")
                or (earlier[0] == newest and earlier[1] == "running" and earlier[2] == comparison)
            ):
                return int(earlier[0])
            running = "SELECT number FROM rollouts WHERE state = 'running'"
            for (number,) in database.execute(running).fetchall():
                _note(database, number, "superseded", "the server was started with other models or settings")
                database.execute("UPDATE rollouts SET state = 'superseded' WHERE number = ?", (number,))
            database.execute("DELETE FROM rollout_units")
            database.execute(
                "INSERT INTO rollouts VALUES (?, ?, ?, ?, ?, 'running', ?, 0, '{}')",
                (newest + 1, secrets.token_hex(4), current, new, comparison, config.shares[0]),
            )
            more = {"current": current, "new": new, "comparison": json.loads(comparison)}
            _note(database, newest + 1, "begin", f"the new model is given {config.shares[0]:g} of the units", **more)
            return int(newest + 1)

        return cls(log, log.write(begin))

    @property
    def number(self) -> int:
        """Number of the rollout."""
        return self._number

    @property
    def state(self) -> RolloutState:
        """The present state.

        Raises:
            OSError: the database cannot be read.
        """
        sql = "SELECT number, id, state, share, share_units FROM rollouts WHERE number = ?"
        return RolloutState(*self._log.read(sql, self._number)[0])

    @property
    def comparison(self) -> ComparisonConfig:
        """How the policies are compared."""
        ((settings,),) = self._log.read("SELECT comparison FROM rollouts WHERE number = ?", self._number)
        return ComparisonConfig.model_validate_json(settings)

    @property
    def figures(self) -> dict[str, Any]:
        """The newest comparison as JSON; {} before the first."""
        ((figures,),) = self._log.read("SELECT figures FROM rollouts WHERE number = ?", self._number)
        return dict(json.loads(figures))

    @property
    def events(self) -> list[str]:
        """Events of all rollouts of the log, a JSON object each."""
        return [event for (event,) in self._log.read("SELECT event FROM rollout_events ORDER BY number")]

    def keep_figures(self, figures: dict[str, Any]) -> None:
        """Replaces the comparison."""
        values = (json.dumps(figures), self._number)
        self._log.write(lambda database: database.execute("UPDATE rollouts SET figures = ? WHERE number = ?", values))

    def change(
        self,
        event: str,
        cause: str,
        *,
        state: State = "running",
        share: float | None = None,
        figures: dict[str, Any] | None = None,
    ) -> bool:
        """Changes the state of a running rollout and notes the event; returns false if it does not run any more.

        Args:
            event: what happens: share, stop, promote, or report, which changes nothing.
            cause: its cause in words.
            state: the state from now on.
            share: the share from now on, which begins with the units of the newest comparison; None: it stays.
            figures: the comparison that caused it.
        """

        def write_change(database: sqlite3.Connection) -> bool:
            sql = "UPDATE rollouts SET state = ? WHERE number = ? AND state = 'running'"
            if not database.execute(sql, (state, self._number)).rowcount:
                return False
            if share is not None:
                units = "ifnull(json_extract(figures, '$.comparison.units'), 0)"
                sql = f"UPDATE rollouts SET share = ?, share_units = {units} WHERE number = ?"
                database.execute(sql, (share, self._number))
            more: dict[str, Any] = {} if figures is None else {"figures": figures}
            _note(database, self._number, event, cause, **more)
            return True

        return self._log.write(write_change)

    def units(self, episodes: Iterable[str]) -> Iterator[ServedUnit]:
        """Yields the units of episodes that have begun in this rollout."""
        for episode in episodes:
            sql = "SELECT is_new, share, log_ratio, steps FROM rollout_units WHERE episode = ?"
            for is_new, share, log_ratio, steps in self._log.read(sql, episode):
                yield ServedUnit(episode, bool(is_new), share, log_ratio, steps, steps)

    def keep_units(self, database: sqlite3.Connection, units: Iterable[ServedUnit]) -> None:
        """Stores units within a transaction.

        Raises:
            UnitChangedError: another process has stored one of them since it was read.
        """
        for unit in units:
            if unit.episode is None:
                continue
            ratio = max(min(unit.log_ratio, 1e300), -1e300)  # SQLite has no infinity
            if unit.stored_steps:
                sql = "UPDATE rollout_units SET log_ratio = ?, steps = ? WHERE episode = ? AND steps = ?"
                values: tuple[Any, ...] = (ratio, unit.steps, unit.episode, unit.stored_steps)
            else:
                sql = "INSERT OR IGNORE INTO rollout_units VALUES (?, ?, ?, ?, ?)"
                values = (unit.episode, unit.is_new, unit.share, ratio, unit.steps)
            if not database.execute(sql, values).rowcount:
                raise UnitChangedError


def _restore(database: sqlite3.Connection, events: Sequence[dict[str, Any]]) -> None:
    """Stores rollouts by their events; those that ran are superseded, as their units are not known any more."""
    states = {"stop": "stopped", "promote": "promoted", "superseded": "superseded"}
    try:
        for event in events:
            database.execute("INSERT INTO rollout_events (event) VALUES (?)", (json.dumps(event),))
            if event["event"] == "begin":
                sql = "INSERT INTO rollouts VALUES (NULL, ?, ?, ?, ?, 'running', ?, 0, '{}')"
                models = event["current"], event["new"]
                database.execute(sql, (event["rollout"], *models, json.dumps(event["comparison"]), event["share"]))
            elif event["event"] in states:
                sql = "UPDATE rollouts SET state = ?, share = ? WHERE id = ?"
                database.execute(sql, (states[event["event"]], event["share"], event["rollout"]))
    except (KeyError, sqlite3.Error) as error:
        todo = "Move the file out of the log's folder"
        raise DataError(Problem(ROLLOUT_EVENTS, "events of a server", f"{error!r}", todo)) from error
    for (number,) in database.execute("SELECT number FROM rollouts WHERE state = 'running'").fetchall():
        _note(database, number, "superseded", "the database of the log was lost, and with it the units that had begun")
        database.execute("UPDATE rollouts SET state = 'superseded' WHERE number = ?", (number,))


def _note(database: sqlite3.Connection, number: int, event: str, cause: str, **more: Any) -> None:
    """Adds an event within a transaction."""
    row = database.execute("SELECT id, share FROM rollouts WHERE number = ?", (number,)).fetchone()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    tree = {"event": event, "rollout": row[0], "time": now, "share": row[1], "cause": cause, **more}
    database.execute("INSERT INTO rollout_events (event) VALUES (?)", (json.dumps(tree),))
