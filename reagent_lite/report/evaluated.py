"""The report of workflows.evaluate: what its JSON file says, as a page."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from reagent_lite.errors import counted
from reagent_lite.evaluation.cpe import Estimate
from reagent_lite.evaluation.interval import UNDEFINED, Interval, number
from reagent_lite.evaluation.simulation_document import AIM, DIFFERENCES
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.report.content import Fact, Report, Section, Table
from reagent_lite.report.evaluation import (
    Comparison,
    Simulated,
    actions_section,
    candidates_section,
    compared,
    estimates_section,
    headlines,
    simulated_section,
    unscored,
    weights_section,
)
from reagent_lite.report.run import config_section
from reagent_lite.rl.estimators import ONE_STEP_ESTIMATORS

_MODEL = ("path", "workflow", "steps", "data_hash", "config_hash")


def report_of_evaluation(document: Mapping[str, Any], where: str) -> Report:
    """Returns the page of an evaluation; the first model's headline stands first.

    Args:
        document: content of the JSON file.
        where: name of that file.
    """
    config, model = document["config"], document["model"]
    level, cpe = config["evaluation"]["confidence_level"], model.get("cpe")
    weighted = cpe is not None and not document["log"]["rows_without_propensity"]
    comparisons = (*_beside(compared(cpe), document), *_differences(document))
    simulated, note = tuple(_simulated(document)), _simulated_note(document)
    shares = {name: (one["logged"], None, one["policy"]) for name, one in model.get("actions", {}).items()}
    models = [document[key] for key in ("model", "against") if key in document]
    lineage = Table(
        title="Models that were evaluated",
        head=("Folder", "Workflow", "Steps", "Data hash", "Config hash"),
        rows=[tuple(str(one[key]) for key in _MODEL) for one in models],
    )
    return Report(
        title=f"Evaluation of {model['path']}",
        headlines=headlines(comparisons, simulated, note),
        notes=(*document["warnings"], *unscored(cpe)),
        facts=tuple(_facts(document)),
        sections=(
            estimates_section(comparisons, level, where),
            simulated_section(simulated, level, note),
            weights_section(cpe if weighted else None, config["evaluation"]["min_effective_episodes"]),
            actions_section(shares, where),
            candidates_section(model.get("candidates"), where),
            Section(title="Data lineage", tables=(lineage,)),
            config_section(config),
        ),
    )


def _facts(document: Mapping[str, Any]) -> Iterator[Fact]:
    log, simulation, against = (document.get(key) for key in ("log", "simulation", "against"))
    if log is not None:
        yield "Log", log["path"]
        yield "Episodes scored", f"{log['scored_episodes']:,} of {log['episodes']:,}"
        yield "Episodes that models were fitted to", f"{log['fitted_episodes']:,}"
    if simulation is not None:
        yield "Environment", simulation["env"]
        yield "Episodes played by each policy", f"{simulation['episodes']:,}"
    if against is not None:
        yield "Against", against["path"]
    yield "Policy", document["model"]["policy"]
    if against is not None:
        yield "The other model's policy", against["policy"]
    yield "Discount per step", number(document["gamma"])
    yield "Seed", str(document["config"]["seed"])


def _beside(comparisons: tuple[Comparison, ...], document: Mapping[str, Any]) -> tuple[Comparison, ...]:
    """Returns the comparisons with the simulated value beside the estimates of the same quantity."""
    simulation = document.get("simulation")
    if simulation is None or not comparisons or not simulation["comparable"]:
        return comparisons
    value = Interval.read(document["model"]["simulated"]["discounted_return"])
    first = next((one for one in comparisons if one.decides), None)
    return tuple(replace(one, simulated=value) if one is first else one for one in comparisons)


def _simulated(document: Mapping[str, Any]) -> Iterator[Simulated]:
    """Yields the model, the other one, random actions."""
    simulation = document.get("simulation")
    if simulation is None:
        return
    yield _returns(f"The model, {document['model']['policy']}", document["model"]["simulated"])
    others = {
        "against": ("The other model", document.get("against", {}).get("simulated")),
        "random": ("Random actions", simulation["random"]),
    }
    for key, (name, played) in others.items():
        difference = simulation.get(DIFFERENCES[key])
        if difference is not None:
            yield replace(_returns(name, played), difference=Interval.read(difference["return"]))


def _returns(name: str, played: Mapping[str, Any]) -> Simulated:
    total, discounted = Interval.read(played["return"]), Interval.read(played["discounted_return"])
    return Simulated(
        name=name,
        returns=total,
        discounted=discounted,
        length=played["mean_length"],
        cut_share=played["truncated_share"],
    )


def _simulated_note(document: Mapping[str, Any]) -> str:
    simulation = document.get("simulation")
    if simulation is None:
        return ""
    sentences = [
        f"{counted(simulation['episodes'], 'episode')} of {simulation['env']} for each policy, with the same starts, "
        f"of at most {counted(simulation['time_limit'], 'step')}; discounted by {number(document['gamma'])} a step."
    ]
    if simulation.get("comparable"):
        sentences.append(f"The discounted return is {AIM}.")
    elif "log" in document:
        sentences.append("Estimates from the log are not of the same quantity.")
    return " ".join((*sentences, *simulation.get("remarks", ())))


def _differences(document: Mapping[str, Any]) -> Iterator[Comparison]:
    for outcome, estimates in document.get("difference", {}).items():
        for one_step, unit in ((False, "discounted return of an episode"), (True, "reward of a row")):
            rows = tuple(
                Estimate(
                    name=name,
                    figure=Interval.read(one),
                    difference=Interval.read(one),
                    normalized=UNDEFINED.value,
                    verdict=Verdict(one["verdict"]),
                    reason=one["reason"],
                )
                for name, one in estimates.items()
                if (name in ONE_STEP_ESTIMATORS) == one_step
            )
            yield Comparison(
                outcome=outcome,
                unit=f"{unit}, model minus against",
                decides=False,
                reference_name="other model",
                reference=Interval(value=0.0, low=0.0, high=0.0),
                rows=rows,
            )
