"""The report page of an evaluation: what its JSON file says, for the eye."""

from collections.abc import Iterator, Mapping
from typing import Any

from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.evaluation.webpage_content import (
    ActionShare,
    Comparison,
    Estimated,
    Interval,
    Report,
    Table,
    compared,
    interval,
    number,
    unscored,
    weighed,
)
from reagent_lite.rl.estimators import ONE_STEP_ESTIMATORS

_NOTHING = Interval(value=0.0, low=0.0, high=0.0)


def page_of(document: Mapping[str, Any]) -> Report:
    """Returns the page of what evaluating_report.document_of gives; the first model's verdict stands first."""
    config, model, log = document["config"], document["model"], document["log"]
    cpe, weighted = model["cpe"], not log["rows_without_propensity"]
    settings = config["evaluation"]
    return Report(
        title=f"Evaluation of {model['path']}",
        facts=tuple(_facts(document)),
        comparisons=(*compared(cpe), *_differences(document)),
        level=settings["confidence_level"],
        weights=weighed(cpe, enough=settings["min_effective_episodes"]) if weighted else None,
        actions=tuple(
            ActionShare(name=name, logged=one["logged"], greedy=None, propensity=one["policy"])
            for name, one in model["actions"].items()
        ),
        lineage=(_lineage(document),),
        config=config,
        notes=(*document["warnings"], *unscored(cpe)),
    )


def _facts(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    config, log = document["config"], document["log"]
    yield "Log", log["path"]
    yield "Episodes scored", f"{log['scored_episodes']:,} of {log['episodes']:,}"
    yield "Episodes that models were fitted to", f"{log['fitted_episodes']:,}"
    if "against" in document:
        yield "Against", document["against"]["path"]
    yield "Policy", config["policy"] if config["temperature"] is None else f"softmax at {config['temperature']:g}"
    yield "Discount per step", number(document["gamma"])
    yield "Seed", str(config["seed"])


def _differences(document: Mapping[str, Any]) -> Iterator[Comparison]:
    for outcome, estimates in document.get("difference", {}).items():
        for one_step, unit in ((False, "return of an episode"), (True, "reward of a row")):
            yield Comparison(
                outcome=outcome, unit=f"{unit}, model minus against", decides=False, reference_name="other model",
                reference=_NOTHING,
                rows=tuple(
                    Estimated(name=name, figure=interval(one), difference=interval(one),
                              verdict=Verdict(one["verdict"]), reason=one["reason"])
                    for name, one in estimates.items() if (name in ONE_STEP_ESTIMATORS) == one_step
                ),
            )  # fmt: skip


def _lineage(document: Mapping[str, Any]) -> Table:
    models = [document[key] for key in ("model", "against") if key in document]
    keys = ("path", "workflow", "steps", "data_hash", "config_hash")
    rows = tuple(tuple(str(model[key]) for key in keys) for model in models)
    return Table(title="Models that were evaluated", head=("Folder", "Workflow", "Steps", "Data hash", "Config hash"),
                 rows=rows)  # fmt: skip
