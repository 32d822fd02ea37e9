"""Counters for Prometheus; those of all workers if PROMETHEUS_MULTIPROC_DIR is set."""

import os
from collections import Counter as Counts
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess

from reagent_lite.export import Bundle
from reagent_lite.serving.bodies import MOST_NAMED
from reagent_lite.serving.decision_log import DecisionLog
from reagent_lite.serving.served_model import ServedModel

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


class ServerFigures:
    """Counters of one worker.

    Attributes:
        requests: number of requests by path and status.
        seconds: time from request to answer by path.
        rewards: number of rewards by result.
        unavailable: number of answers 503 by reason, `where` of the answer's problem: database (another process has
            it), log, requests, large requests; refused connections are in `connections`.
        connections: number of connections that were closed or refused, by reason.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        common: Any = {"registry": self._registry}
        self.requests = Counter("reagent_requests", "Requests", ("path", "status"), **common)
        self.seconds = Histogram("reagent_request_seconds", "Time to an answer", ("path",), buckets=_SECONDS, **common)
        self.rewards = Counter("reagent_rewards", "Rewards: joined, again, unknown", ("result",), **common)
        self.unavailable = Counter(
            "reagent_unavailable", "Answers 503: database, log, requests, large requests", ("reason",), **common
        )
        self.connections = Counter(
            "reagent_connections_closed",
            "Connections: refused as there are too many, replaced by newer ones, late with a head",
            ("reason",),
            **common,
        )
        self._decisions = Counter("reagent_decisions", "Decisions by action", ("action",), **common)
        self._missing = Counter("reagent_features_missing", "Rows without a feature", ("feature",), **common)
        self._other = Counter(
            "reagent_features_other", "Values of one-hot features without a column in the model", ("feature",), **common
        )
        latest: Any = common | {"multiprocess_mode": "livemostrecent"}
        self._waiting = Gauge("reagent_decisions_waiting", "Decisions in no Parquet file yet", **latest)
        self._written = Gauge("reagent_decisions_written", "Decisions in Parquet files", **latest)
        most: Any = common | {"multiprocess_mode": "livemax"}  # each worker loads each model
        self._rollout = Gauge(
            "reagent_rollout", "Share of the new model, units that count, and those that wait", ("figure",), **latest
        )
        self._difference = Gauge(
            "reagent_rollout_difference", "New model minus current one, per unit", ("outcome", "figure"), **latest
        )
        self._models = Gauge("reagent_models", "New models: served, refused", ("result",), **most)

    def count_decisions(self, actions: Sequence[Any], bundle: Bundle) -> None:
        """Counts decisions by action; candidates without names, and items of a long table, count together."""
        few = bundle.items is not None and len(bundle.items) <= MOST_NAMED
        by_name = Counts(actions) if few or not bundle.parametric else {"candidate": len(actions)}
        for action, count in by_name.items():
            self._decisions.labels(action).inc(count)

    def missing(self, absent: NDArray[Any], bundle: Bundle) -> None:
        """Counts missing features in rows [N, F]."""
        counts = absent.sum(0).tolist()
        for feature, column in bundle.features["state"].items():
            if counts[column]:
                self._missing.labels(feature).inc(counts[column])

    def other(self, counts: Mapping[int, int]) -> None:
        """Adds counts of values of one-hot features without a column in the model, results of `Bundle.others`."""
        for feature, count in counts.items():
            self._other.labels(str(feature)).inc(count)

    def gauge(self, model: ServedModel, log: DecisionLog) -> None:
        """Copies the counters of model and log."""
        self._waiting.set(log.waiting)
        self._written.set(log.written)
        self._models.labels("served").set(model.swapped)
        self._models.labels("refused").set(model.refused)

    def copy_rollout(self, document: Mapping[str, Any]) -> None:
        """Copies the figures of a rollout, `WorkerRollout.document`."""
        self._rollout.labels("share").set(document["share"])
        if (comparison := document.get("comparison")) is None:
            return
        self._rollout.labels("units").set(comparison["units"])
        self._rollout.labels("waiting").set(document["waiting_units"])
        for difference in comparison["differences"]:
            for figure in ("value", "low", "high"):
                if difference[figure] is not None:
                    self._difference.labels(difference["name"], figure).set(difference[figure])

    def page(self) -> bytes:
        """Returns the page for Prometheus."""
        registry = self._registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)
