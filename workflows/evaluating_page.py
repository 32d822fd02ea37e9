"""The report page of an evaluation: what its JSON file says, for the eye."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from reagent_lite.errors import counted
from reagent_lite.evaluation.verdict import Verdict
from reagent_lite.evaluation.webpage_candidates import chosen_candidates
from reagent_lite.evaluation.webpage_content import (
    ActionShare,
    Comparison,
    Estimated,
    Interval,
    Report,
    Simulated,
    Table,
    compared,
    interval,
    number,
    unscored,
    weighed,
)
from reagent_lite.rl.estimators import ONE_STEP_ESTIMATORS
from workflows.evaluating_simulation import RANDOM
from workflows.evaluating_simulation_report import AGAINST, AIM, DIFFERENCES

_NOTHING = Interval(value=0.0, low=0.0, high=0.0)


def page_of(document: Mapping[str, Any], beside: str) -> Report:
    """Returns the page of what evaluating_report.document_of gives; the first model's verdict stands first.

    Args:
        document: what was found.
        beside: name of the file that has all of it.
    """
    config, model = document["config"], document["model"]
    settings, cpe = config["evaluation"], model.get("cpe")
    weighted = cpe is not None and not document["log"]["rows_without_propensity"]
    return Report(
        title=f"Evaluation of {model['path']}",
        facts=tuple(_facts(document)),
        comparisons=() if cpe is None else (*_beside(compared(cpe), document), *_differences(document)),
        level=settings["confidence_level"],
        weights=weighed(cpe, enough=settings["min_effective_episodes"]) if weighted else None,
        simulated=tuple(_simulated(document)),
        simulated_note=_simulated_note(document),
        actions=tuple(
            ActionShare(name=name, logged=one["logged"], greedy=None, propensity=one["policy"])
            for name, one in model.get("actions", {}).items()
        ),
        candidates=chosen_candidates(model.get("candidates")),
        lineage=(_lineage(document),),
        config=config,
        beside=beside,
        notes=(*document["warnings"], *(() if cpe is None else unscored(cpe))),
    )


def _facts(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    config, log, simulation = document["config"], document.get("log"), document.get("simulation")
    if log is not None:
        yield "Log", log["path"]
        yield "Episodes scored", f"{log['scored_episodes']:,} of {log['episodes']:,}"
        yield "Episodes that models were fitted to", f"{log['fitted_episodes']:,}"
    if simulation is not None:
        yield "Environment", simulation["env"]
        yield "Episodes played by each policy", f"{simulation['episodes']:,}"
    if "against" in document:
        yield "Against", document["against"]["path"]
    yield "Policy", document["model"]["policy"]
    if "against" in document:
        yield "The other model's policy", document["against"]["policy"]
    yield "Discount per step", number(document["gamma"])
    yield "Seed", str(config["seed"])


def _beside(comparisons: tuple[Comparison, ...], document: Mapping[str, Any]) -> tuple[Comparison, ...]:
    """Returns the comparisons with the simulated value beside the estimates of the same quantity."""
    simulation = document.get("simulation")
    if simulation is None or not simulation["comparable"]:
        return comparisons
    value = interval(document["model"]["simulated"]["discounted_return"])
    first = next((one for one in comparisons if one.decides), None)
    return tuple(replace(one, simulated=value) if one is first else one for one in comparisons)


def _simulated(document: Mapping[str, Any]) -> Iterator[Simulated]:
    """Yields the model, the other one, random actions."""
    simulation = document.get("simulation")
    if simulation is None:
        return
    yield _returns(f"The model, {document['model']['policy']}", document["model"]["simulated"])
    others = {AGAINST: ("The other model", document.get(AGAINST, {}).get("simulated")),
              RANDOM: ("Random actions", simulation["random"])}  # fmt: skip
    for key, (name, played) in others.items():
        difference = simulation.get(DIFFERENCES[key])
        if difference is not None:
            yield replace(_returns(name, played), difference=interval(difference["return"]))


def _returns(name: str, played: Mapping[str, Any]) -> Simulated:
    return Simulated(name=name, returns=interval(played["return"]), discounted=interval(played["discounted_return"]),
                     length=played["mean_length"], cut_share=played["truncated_share"])  # fmt: skip


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
