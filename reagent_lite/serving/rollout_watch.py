"""The parent's part of a rollout: compares the models by the files of the log, and changes shares.

    new file of the log ─► units ─► comparison ─► figures for the page; stop, promotion or the next share

All that it knows is in the files, which have each decision once, so that a server that was killed starts from them, and
`workflows.rollout` says the same. Decisions are compared when they are in a file, with their rewards: after
`reward_seconds`.
"""

import json
import time
from pathlib import Path
from typing import Any

from reagent_lite.config.rollout_config import ServedRolloutConfig
from reagent_lite.console import machine_logger
from reagent_lite.data.logs import Log
from reagent_lite.data.rollout_rows import rows_in
from reagent_lite.data.served_log import ROLLOUT_EVENTS, decision_files
from reagent_lite.evaluation.policy_comparison import Comparer, RolloutComparison, UnitCollector, find_unmeasured
from reagent_lite.serving.rollout_store import RolloutState, RolloutStore
from reagent_lite.whole_files import write_whole

_AT_ONCE_SECONDS = 1.0  # in which files are read before workers are looked after again


class RolloutWatch:
    """Compares the models of a rollout, and acts.

    Args:
        store: the state of the rollout.
        config: the section of the server's config.
        folder: folder of the log.
    """

    def __init__(self, store: RolloutStore, config: ServedRolloutConfig, folder: Path) -> None:
        self._store = store
        self._config = config
        self._folder = folder
        comparison = store.comparison
        self._metrics = list(comparison.guardrails)
        self._collector = UnitCollector(comparison.gamma, comparison.episode_seconds)
        self._comparer = Comparer(comparison)
        self._id = store.state.id
        self._read: set[str] = set()
        self._written = 0

    @property
    def number(self) -> int:
        """Number of the rollout in the database."""
        return self._store.number

    def poll(self) -> None:
        """Reads new files, acts on what they show, and writes new events into the log's folder.

        Raises:
            DataError: a file cannot be read.
            OSError: the database or the log cannot be written.
        """
        begun = time.monotonic()
        is_complete = True
        for name in decision_files(self._folder):
            if name in self._read:
                continue
            if time.monotonic() - begun > _AT_ONCE_SECONDS:
                is_complete = False
                break
            for rows in rows_in(Log(str(self._folder / name)).files[0], self._metrics, self._id):
                self._comparer.add(self._collector.add(rows))
            self._read.add(name)
        if is_complete:
            comparison = self._comparer.comparison()
            figures = {
                "comparison": comparison.figures() | {"history": _points(comparison)},
                "waiting_units": self._collector.waiting,
                "late_rows": self._collector.late_rows,
                "unmeasured": find_unmeasured(self._metrics, self._collector),
                "first": self._collector.first,
                "last": self._collector.last,
            }
            if figures != self._store.figures:
                self._store.keep_figures(figures)
            self._act(comparison)
        events = self._store.events
        if len(events) != self._written:
            write_whole(self._folder / ROLLOUT_EVENTS, "".join(f"{event}\n" for event in events).encode())
            self._written = len(events)

    def _act(self, comparison: RolloutComparison) -> None:
        state = self._store.state
        if state.state != "running":
            return
        changed = False
        if comparison.decision in ("worse", "invalid"):
            if self._config.on_harm == "stop":
                figures = comparison.figures()
                changed = self._store.change("stop", comparison.sentence, state="stopped", share=0.0, figures=figures)
            else:
                changed = self._report(comparison)
        elif comparison.decision == "better":
            if self._config.on_better == "promote":
                figures = comparison.figures()
                changed = self._store.change(
                    "promote", comparison.sentence, state="promoted", share=1.0, figures=figures
                )
            else:
                changed = self._report(comparison)
        elif comparison.units - state.share_units >= self._config.units_per_share:
            changed = self._grow(state, comparison)
        if changed:
            machine_logger.info(f"rollout {self._id}: {comparison.sentence}")

    def _grow(self, state: RolloutState, comparison: RolloutComparison) -> bool:
        """Begins the next larger share; returns false if there is none."""
        share = next((share for share in self._config.shares if share > state.share), None)
        if share is None:
            return False
        units = f"{comparison.units - state.share_units:,} units without harm"
        cause = f"{units}: the new model is given {share:g} of the units"
        return self._store.change("share", cause, share=share, figures=comparison.figures())

    def _report(self, comparison: RolloutComparison) -> bool:
        """Notes a decision, unless it is the one that was noted last; returns whether it was noted."""
        reported = [json.loads(event) for event in self._store.events]
        last = [each["figures"]["decision"] for each in reported if each["rollout"] == self._id and "figures" in each]
        if last and last[-1] == comparison.decision:
            return False
        return self._store.change("report", comparison.sentence, figures=comparison.figures())


def _points(comparison: RolloutComparison) -> list[dict[str, Any]]:
    return [
        {"units": point.units, "name": point.name, "value": point.value, "low": point.low, "high": point.high}
        for point in comparison.history
    ]
