"""The last steps of running episodes in the log's database, for models that read several steps.

All processes of a server share them, and they survive it. An episode is forgotten when a reward ends it, and when more
episodes than `waiting_decisions` have had a decision since.
"""

import json
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from pydantic_core import to_json

from reagent_lite.serving.decision_log import DecisionLog, EpisodeChangedError

_TABLES: Final = (
    "CREATE TABLE IF NOT EXISTS steps (episode TEXT PRIMARY KEY, version INTEGER NOT NULL, changed INTEGER NOT NULL, "
    "steps BLOB NOT NULL)",
    "CREATE INDEX IF NOT EXISTS steps_changed ON steps (changed)",
)
_READ: Final = "SELECT version, steps FROM steps WHERE episode = ?"

Features = dict[str, Any]


@dataclass(slots=True)
class EpisodeSteps:
    """The last steps of an episode.

    Attributes:
        episode: its mdp_id.
        steps: (order, state features) of each step, ascending.
        version: number of changes in the database when it was read; 0 for an episode that it does not have.
    """

    episode: str
    steps: list[tuple[int, Features]]
    version: int = 0

    def before(self, order: int) -> list[Features]:
        """Returns the features of the steps before an order, the oldest first."""
        return [features for number, features in self.steps if number < order]

    def add(self, order: int, features: Features, most: int) -> None:
        """Adds a step, in place of one with the same order, and keeps the last `most`."""
        others = [step for step in self.steps if step[0] != order]
        self.steps = sorted([*others, (order, features)], key=lambda step: step[0])[-most:]


class RecentSteps:
    """Access of a worker to the steps.

    Args:
        log: the worker's log.
    """

    def __init__(self, log: DecisionLog) -> None:
        self._log = log
        log.write(lambda database: [database.execute(table) for table in _TABLES])

    def read(self, episodes: Iterable[str]) -> Iterator[EpisodeSteps]:
        """Yields the steps of episodes, none of an episode that begins."""
        for episode in episodes:
            rows = self._log.read(_READ, episode)
            version, steps = rows[0] if rows else (0, b"[]")
            yield EpisodeSteps(episode, [(order, features) for order, features in json.loads(steps)], version)

    def keep(self, database: sqlite3.Connection, episodes: Iterable[EpisodeSteps]) -> None:
        """Stores steps within a transaction.

        Raises:
            EpisodeChangedError: another process has changed an episode since it was read.
        """
        for steps in episodes:
            content = to_json(steps.steps)
            now = self._log.microseconds()
            if steps.version:
                sql = "UPDATE steps SET version = version + 1, changed = ?, steps = ? WHERE episode = ? AND version = ?"
                values: tuple[Any, ...] = (now, content, steps.episode, steps.version)
            else:
                sql = "INSERT OR IGNORE INTO steps VALUES (?, 1, ?, ?)"
                values = (steps.episode, now, content)
            if not database.execute(sql, values).rowcount:
                raise EpisodeChangedError

    def end(self, database: sqlite3.Connection, decision: int) -> None:
        """Forgets the steps of an episode up to a decision, by its number, within a transaction."""
        sql = "SELECT episode, ifnull(number, at) FROM decisions WHERE id = ? AND episode IS NOT NULL"
        for episode, order in database.execute(sql, (decision,)).fetchall():
            for version, content in database.execute(_READ, (episode,)).fetchall():
                later = [step for step in json.loads(content) if step[0] > order]
                if later:
                    sql = "UPDATE steps SET version = ?, steps = ? WHERE episode = ?"
                    database.execute(sql, (version + 1, to_json(later), episode))
                else:
                    database.execute("DELETE FROM steps WHERE episode = ?", (episode,))


def forget_old_episodes(log: DecisionLog, most: int) -> None:
    """Forgets all but the `most` episodes with the newest decisions; does nothing in a log without steps.

    Raises:
        OSError: the database cannot be read or written.
    """
    if not log.read("SELECT 1 FROM sqlite_master WHERE name = 'steps'"):
        return
    if oldest := log.read("SELECT changed FROM steps ORDER BY changed DESC LIMIT 1 OFFSET ?", most):
        log.write(lambda database: database.execute("DELETE FROM steps WHERE changed <= ?", oldest[0]))
