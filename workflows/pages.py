"""The report page of a training run: what it left, collected and written as report.html beside the model.

config, evaluation, counts ─┐
metrics.jsonl ──────────────┼─► Report ─► report.html
normalization, drift.json ──┤
training copies, stages ────┘
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reagent_lite.config import WorkflowConfig, fingerprint, resolved
from reagent_lite.errors import counted
from reagent_lite.evaluation.webpage import render
from reagent_lite.evaluation.webpage_candidates import chosen_candidates
from reagent_lite.evaluation.webpage_content import (
    ActionShare,
    Interval,
    Report,
    Simulated,
    compared,
    number,
    unscored,
    weighed,
)
from reagent_lite.files import write_whole
from workflows.learning import target_policy
from workflows.pages_curves import Series, curves_of, read_series
from workflows.pages_data import SAMPLE, Shares, features_of, lineage_of, shifts_of
from workflows.preparation import Data

PAGE = "report.html"

_BESIDE = "model/evaluation.json and metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A training run that has ended.

    Attributes:
        config: of the run.
        document: what evaluation.json says, without scores.
        steps, rows: optimizer steps, and rows learned from.
        normalization: of state features and of candidates' features, in the 2019 encoding.
        data: what was learned from, or None.
        present: how often each feature is there, by column and id; see present_shares.
        identity: sha256 of it, or of the environment.
        notes: sentences to stand at the top, such as why no model was published.
    """

    config: WorkflowConfig
    document: Mapping[str, Any]
    steps: int
    rows: int
    normalization: Mapping[str, Mapping[str, str]]
    data: Data | None
    identity: str
    present: Mapping[str, Shares]
    notes: tuple[str, ...] = ()


def write_page(folder: Path, ended: Ended) -> str | None:
    """Writes report.html into a run's folder; returns why that failed, or None.

    The model stands whether or not it can be told of, so that no failure here ends a run.
    """
    try:
        write_whole(folder / PAGE, render(collect(folder, ended)).encode())
    except Exception as error:
        logging.getLogger(__name__).debug("report page", exc_info=True)
        return f"{type(error).__name__}: {error}"
    return None


def collect(folder: Path, ended: Ended) -> Report:
    """Returns the report of a run whose metrics.jsonl lies in the folder."""
    series, config, cpe = read_series(folder / "metrics.jsonl"), ended.config, ended.document.get("cpe")
    simulated = _simulated(ended.document.get("simulation", {}), str(target_policy(config.rl)))
    return Report(
        title=f"{_workflow(config)} run: {folder.resolve().name}",
        facts=_facts(ended),
        comparisons=compared(cpe) if cpe else (),
        level=config.evaluation.confidence_level,
        weights=weighed(cpe, enough=config.evaluation.min_effective_episodes) if cpe else None,
        simulated=simulated,
        simulated_note=_simulated_note(ended) if simulated else "",
        curves=curves_of(series),
        actions=_actions(config.actions, series),
        candidates=chosen_candidates(cpe.get("candidates")) if cpe else None,
        features=features_of(ended.normalization, ended.present),
        features_note=f"Present: in at most {SAMPLE:,} rows spread over the training data." if ended.data else "",
        shifts=shifts_of(config),
        lineage=lineage_of(config, ended.data),
        config=resolved(config),
        notes=(*ended.notes, *(unscored(cpe) if cpe else ())),
        beside=_BESIDE,
    )


def _workflow(config: WorkflowConfig) -> str:
    return "DQN" if config.actions else "Parametric DQN"


def _facts(ended: Ended) -> tuple[tuple[str, str], ...]:
    config = ended.config
    facts = [
        ("Learned from", config.training_data_path or f"simulation of {_environment(config)}"),
        ("Optimizer steps", f"{ended.steps:,}"),
        ("Rows learned from, repeats included", f"{ended.rows:,}"),
        ("Discount per step", number(config.rl.gamma)),
        ("Policy", str(target_policy(config.rl))),
        ("Seed", str(config.seed)),
        ("Data hash", ended.identity[:16]),
        ("Config hash", fingerprint(config)[:16]),
    ]
    return tuple(fact for fact in facts if fact[1])


def _environment(config: WorkflowConfig) -> str:
    return "" if config.simulation is None else config.simulation.env


def _simulated(document: Mapping[str, Any], policy: str) -> tuple[Simulated, ...]:
    def figure(tag: str) -> Interval | None:
        if f"simulation/{tag}/mean" not in document:
            return None
        ends = (document[f"simulation/{tag}/{end}"] for end in ("mean", "lower", "upper"))
        return Interval(**dict(zip(("value", "low", "high"), ends, strict=True)))

    learned, random = figure("return"), figure("random_return")
    if learned is None:
        return ()
    first = Simulated(name=f"The learned policy, {policy}", returns=learned, discounted=figure("discounted_return"),
                      length=document.get("simulation/length/mean"))  # fmt: skip
    return (first,) if random is None else (first, Simulated(name="Random actions", returns=random))


def _simulated_note(ended: Ended) -> str:
    document = ended.document["simulation"]
    return f"{counted(document['episodes'], 'episode')} of {_environment(ended.config)}."


def _actions(names: tuple[str, ...], series: Series) -> tuple[ActionShare, ...]:
    """Returns the last shares of named actions; candidates have no names to tell apart."""

    def last(tag: str) -> float | None:
        points = series.get(tag)
        return points[-1][1] if points else None

    shares = tuple(
        ActionShare(
            name=name,
            logged=last(f"actions/logged/{name}"),
            greedy=last(f"actions/model/{name}"),
            propensity=last(f"propensities/model/{name}/mean"),
        )
        for name in names
    )
    known = any(one.logged is not None for one in shares)
    return shares if known else ()
