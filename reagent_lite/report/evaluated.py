"""The report of workflows.evaluate: what its JSON file says, as a page."""

from collections.abc import Iterator, Mapping
from typing import Any

from reagent_lite.errors import counted
from reagent_lite.evaluation.decision import Choice
from reagent_lite.evaluation.document import comparisons_of, decision_of
from reagent_lite.evaluation.played import AIM, simulated_of
from reagent_lite.report.content import Cell, Report, Section, Table
from reagent_lite.report.run import config_section
from reagent_lite.report.sections import (
    actions_section,
    candidates_section,
    estimates_section,
    not_scored,
    simulated_section,
    weights_section,
)

_MODEL = {"path": "Folder", "workflow": "Workflow", "steps": "Steps", "data_hash": "Data hash",
          "config_hash": "Config hash"}  # fmt: skip


def report_of_evaluation(document: Mapping[str, Any], where: str) -> Report:
    """Returns the page of an evaluation.

    Args:
        document: content of the JSON file.
        where: name of that file.
    """
    config, model, decision = document["config"], document["model"], decision_of(document)
    level, cpe = config["evaluation"]["confidence_level"], model.get("cpe")
    weighted = cpe is not None and not document["log"]["rows_without_propensity"]
    overlap = cpe["overlap"] if weighted else None
    shares = {name: (one["logged"], None, one["policy"]) for name, one in model.get("actions", {}).items()}
    models = [document[key] for key in ("model", "against") if key in document]
    lineage = Table(
        title="Models that were evaluated",
        columns=tuple((name, "name") for name in _MODEL.values()),
        rows=[[one[key] for key in _MODEL] for one in models],
    )
    return Report(
        title=f"Evaluation of {model['path']}",
        decision=decision,
        notes=(*document["warnings"], *not_scored(cpe)),
        facts=tuple(_facts(document)),
        sections=(
            estimates_section(
                comparisons_of(document), level, where, overlap=overlap, plain=decision.choice is Choice.NOT_ENOUGH
            ),
            simulated_section(simulated_of(document), level, _simulated_note(document)),
            weights_section(overlap, config["evaluation"]["min_effective_episodes"]),
            actions_section(shares, where),
            candidates_section(model.get("candidates"), where),
            Section(title="Data lineage", tables=(lineage,)),
            config_section(config),
        ),
    )


def _facts(document: Mapping[str, Any]) -> Iterator[tuple[str, Cell]]:
    log, simulation, against = (document.get(key) for key in ("log", "simulation", "against"))
    if log is not None:
        yield "Log", log["path"]
        yield "Episodes scored", f"{log['scored_episodes']:,} of {log['episodes']:,}"
        yield "Episodes that models were fitted to", log["fitted_episodes"]
    if simulation is not None:
        yield "Environment", simulation["env"]
        yield "Episodes played by each policy", simulation["episodes"]
    yield "Policy", document["model"]["policy"]
    if against is not None:
        yield "Against", against["path"]
        yield "The other model's policy", against["policy"]
    yield "Discount per step", f"{document['gamma']:g}"
    yield "Seed", str(document["config"]["seed"])


def _simulated_note(document: Mapping[str, Any]) -> str:
    simulation = document.get("simulation")
    if simulation is None:
        return ""
    sentences = [
        f"{counted(simulation['episodes'], 'episode')} of {simulation['env']} for each policy, with the same starts, "
        f"of at most {counted(simulation['time_limit'], 'step')}; discounted by {document['gamma']:g} a step."
    ]
    if simulation.get("comparable"):
        sentences.append(f"The discounted return is {AIM}.")
    elif "log" in document:
        sentences.append("Estimates from the log are not of the same quantity.")
    return " ".join((*sentences, *simulation.get("remarks", ())))
