"""The report of workflows.evaluate as a page."""

from collections.abc import Iterator

from reagent_lite.config import expand_config
from reagent_lite.config.paths import show_paths
from reagent_lite.data.log_shares import shares_in_words, shares_of_counts
from reagent_lite.errors import pluralize
from reagent_lite.evaluation.document import Findings
from reagent_lite.evaluation.played import AGAINST, AIM, MODEL
from reagent_lite.report.content import Cell, PageSection, Report, Table, made_now
from reagent_lite.report.run import config_section, items_facts
from reagent_lite.report.sections import (
    actions_section,
    candidates_section,
    evaluation_notes,
    evaluation_sections,
    ranking_section,
)

_ORIGIN = {"workflow": "Workflow", "steps": "Steps", "data_hash": "Data hash", "config_hash": "Config hash"}


def report_of_evaluation(findings: Findings, where: str, seconds: float) -> Report:
    """Returns the page of an evaluation of so many seconds; `where` is the name of its JSON file."""
    evidence = findings.evidence
    decision = findings.decision
    policy = findings.policies[findings.models[findings.best].key]
    config = findings.config
    choices = {} if findings.estimates is None else findings.estimates.choices[findings.best]
    shares = {name: (share["logged"], None, share["policy"]) for name, share in choices.get("actions", {}).items()}
    lineage = Table(
        title="Models that were evaluated",
        columns=(("Folder", "name"), *((name, "name") for name in _ORIGIN.values())),
        rows=[[str(model.path), *(model.origin[key] for key in _ORIGIN)] for model in findings.models],
    )
    return Report(
        title=f"Evaluation of {show_paths(config.model)}",
        decision=decision,
        notes=(*findings.warnings, *evaluation_notes(evidence.result)),
        facts=tuple(_facts(findings)),
        made=made_now(seconds),
        sections=(
            ranking_section(findings.ranking, config.evaluation.confidence_level),
            *evaluation_sections(
                evidence,
                decision,
                config.evaluation.model_copy(update={"confidence_level": config.level}),
                names={MODEL: f"The model, {policy}", AGAINST: "The other model"},
                note=_simulated_note(findings),
                where=where,
                explanation=findings.explanations[findings.best],
            ),
            actions_section(shares, where),
            candidates_section(choices.get("candidates"), where),
            PageSection(title="Data lineage", tables=(lineage,)),
            config_section(expand_config(config)),
        ),
    )


def _facts(findings: Findings) -> Iterator[tuple[str, Cell]]:
    if findings.estimates is not None:
        counts = findings.estimates.log.counts
        path = findings.config.data_path
        yield "Log", show_paths(path)
        if shares := shares_of_counts(path, findings.estimates.log.copy.counts):
            yield "Rows by log", shares_in_words(shares)
        yield "Episodes scored", f"{counts['scored_episodes']:,} of {counts['episodes']:,}"
        yield "Episodes that models were fitted to", counts["fitted_episodes"]
        yield from items_facts(findings.estimates.log.evaluated.items)
    if findings.played is not None:
        yield "Environment", findings.played.env
        yield "Episodes played by each policy", findings.played.episodes
    yield "Policy", findings.policies[findings.models[findings.best].key]
    for against in () if findings.is_choice else findings.models[1:]:
        yield "Against", str(against.path)
        yield "The other model's policy", findings.policies[AGAINST]
    yield "Discount per step", f"{findings.gamma:g}"
    yield "Seed", str(findings.config.seed)


def _simulated_note(findings: Findings) -> str:
    played = findings.played
    if played is None:
        return ""
    sentences = [
        f"{pluralize(played.episodes, 'episode')} of {played.env} for each policy, with the same starts, of at most "
        f"{pluralize(played.time_limit, 'step')}; discounted by {findings.gamma:g} a step."
    ]
    if findings.comparable:
        sentences.append(f"The discounted return is {AIM}.")
    elif findings.estimates is not None:
        sentences.append("Estimates from the log are not of the same quantity.")
    obstacles, remarks = findings.obstacles_and_remarks
    return " ".join((*sentences, *obstacles, *remarks))
