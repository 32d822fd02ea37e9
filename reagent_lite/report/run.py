"""The report of a training run: report.html next to the model.

config, evaluation, counts ─┐
metrics.jsonl ──────────────┼─► Report ─► report.html
normalization, drift.json ──┤
training copies, stages ────┘
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reagent_lite.algorithms.reward_fit import describe_explained, described_parts
from reagent_lite.config import WorkflowConfig, expand_config, fingerprint
from reagent_lite.config.paths import show_paths
from reagent_lite.data.copy.location import CopyManifest
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.sampling.discounts import TimeDiscounts
from reagent_lite.data.stage_folder import StageManifest
from reagent_lite.errors import pluralize
from reagent_lite.evaluation.decision import Choice, ShipDecision, decide_findings, evidence_of
from reagent_lite.evaluation.document import Evaluation
from reagent_lite.evaluation.explanation import Explanation
from reagent_lite.evaluation.gate import Gate
from reagent_lite.evaluation.interval import number, percent
from reagent_lite.evaluation.played import MODEL, EstimatedReturn
from reagent_lite.feature_ids import id_of
from reagent_lite.item_table import ItemTable
from reagent_lite.report.content import Cell, Column, PageSection, Report, Table, made_now, note_omitted
from reagent_lite.report.curves import Series, curves_section, last, read_series
from reagent_lite.report.html_page import render
from reagent_lite.report.sections import (
    Shares,
    actions_section,
    candidates_section,
    evaluation_notes,
    evaluation_sections,
)
from reagent_lite.training.best import KEPT
from reagent_lite.types import FeatureType
from reagent_lite.whole_files import write_whole

PAGE = "report.html"

_WHERE = "model/evaluation.json and metrics.jsonl"
_MOST_FEATURES = 500
_MOST_TABLES = 20
_MOST_FILES = 50
_MOST_LETTERS = 400
_MOST_CONFIG_LETTERS = 100_000
_AGAINST_OTHERS = "train again while models of other runs play the other types: simulation.policies."
_SCORES = {
    "td_loss/mean": ("TD loss on evaluated rows", "Loss of predicted rewards on evaluated rows"),
    "value/model/mean": (
        "Mean value of the policy's choices, a discounted return",
        "Mean reward that the model predicts for the policy's choices",
    ),
}
"""Names of scores where later rewards count, and where they do not (gamma 0)."""
_SHIFT_SIGN = {"stable": "●", "moderate": "◇", "large": "✕"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Training or eval data of a run.

    Attributes:
        use: "training data" or "eval data".
        path: path in the config.
        rows: number of rows on all machines.
        counts: further counts of the rows, as text.
        copy: this machine's training copy.
        on_node: whether other machines have other rows.
        logs: (path, rows, share) of each of several logs.
    """

    use: str
    path: str
    rows: int
    counts: str
    copy: TrainingCopy
    on_node: bool
    logs: tuple[tuple[str, int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureFacts:
    """A feature in a sample of rows.

    Attributes:
        present: share of the rows that have the feature.
        mean, stddev: mean and standard deviation in the units of the data; None for texts.
        other: number of values without their own column, in all rows; 0 for features that are not one-hot.
    """

    present: float
    mean: float | None
    stddev: float | None
    other: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """Facts about the data of a run; empty for simulation.

    Attributes:
        features: {column: {id: facts}}.
        note: description of the sample that the facts are from.
        sources: training and eval data.
        items: the item table, or None.
        discounts: discounts by time_diff in the training data; None if discounts are by rows.
    """

    features: Mapping[str, Mapping[int, FeatureFacts]] = field(default_factory=dict)
    note: str = ""
    sources: tuple[DataSource, ...] = ()
    items: ItemTable | None = None
    discounts: TimeDiscounts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFigures:
    """Content of the report of a training run.

    Attributes:
        config: the config of the run.
        policy: the evaluated policy, in words.
        evaluation: report of its evaluation, from `evaluation_of_run`.
        candidates: statistics of the choices among candidates; None with named actions.
        steps, rows: optimizer steps, and rows learned from.
        normalization: the normalization of state features and of candidates' features, in the encoding of ReAgent 2019.
        facts: facts about the data.
        identity: sha256 of the data or of the environment.
        seconds: wall-clock time of the run since its start.
    """

    config: WorkflowConfig
    policy: str
    evaluation: Report
    candidates: Mapping[str, Any] | None
    steps: int
    rows: int
    normalization: Mapping[str, Mapping[str, str]]
    facts: DataFacts
    identity: str
    seconds: float


def write_page(folder: Path, figures: RunFigures) -> str | None:
    """Writes report.html into a run's folder; returns the reason of a failure, or None.

    The model is valid without its report, so a failure here does not end the run.
    """
    try:
        write_whole(folder / PAGE, render(report_of_run(folder, figures)).encode())
    except Exception as error:
        logging.getLogger(__name__).debug("report page", exc_info=True)
        return f"{type(error).__name__}: {error}"
    return None


def report_of_run(folder: Path, figures: RunFigures) -> Report:
    """Returns the report of a run whose metrics.jsonl is in the folder."""
    config = figures.config
    evaluation = figures.evaluation
    series = read_series(folder / "metrics.jsonl")
    algorithm = config.algorithm.upper() if config.takes_steps else config.algorithm.capitalize()
    return Report(
        title=f"{'' if config.actions else 'Parametric '}{algorithm} run: {folder.resolve().name}",
        decision=evaluation.decision,
        notes=evaluation.notes,
        facts=(*_facts(figures), *evaluation.facts),
        made=made_now(figures.seconds),
        sections=(
            *evaluation.sections,
            curves_section(series),
            actions_section(_shares(config.actions, series), _WHERE),
            candidates_section(figures.candidates, _WHERE),
            features_section(figures.normalization, figures.facts.features, figures.facts.note),
            drift_section(config),
            lineage_section(figures.facts.sources),
            config_section(expand_config(config)),
        ),
    )


def evaluation_of_run(
    config: WorkflowConfig,
    policy: str,
    evaluation: Evaluation,
    scores: Mapping[str, float | None],
    gate: Gate | None = None,
) -> Report:
    """Returns the report of a run's evaluation, for the page and the model card.

    Args:
        config: the config of the run.
        policy: the evaluated policy, in words.
        evaluation: the evaluation of the learner.
        scores: the scores of the run, by tag.
        gate: the decision of publish_if; None if the config does not have it.
    """
    if evaluation.agents:
        of_types = {kind: evaluation_of_run(config, policy, of_type, {}) for kind, of_type in evaluation.agents.items()}
        return _joint_report(of_types, evaluation.document)
    result = evaluation.result
    played = evaluation.played
    estimated = EstimatedReturn.of(
        None if result is None else result.overlap,
        gamma=config.rl.gamma,
        by_time=config.rl.use_seq_num_diff_as_time_diff,
        horizon=config.evaluation.max_horizon,
    )
    evidence = evidence_of(
        result, played, estimated, seen=evaluation.seen, gate=gate, guardrails=config.evaluation.guardrails
    )
    decision = decide_findings(evidence)
    others = evaluation.document.get("agents", {}).get("others", "")
    ending = f"; in all of them {others}." if others else "."
    note = "" if played is None else f"{pluralize(played.episodes, 'episode')} of {played.env}{ending}"
    if "agents" in evaluation.document and decision.choice is Choice.SHIP:
        decision = replace(decision, next_step=_AGAINST_OTHERS)
    return Report(
        title="Evaluation",
        decision=decision,
        notes=(
            *evaluation.document.get("warnings", ()),
            *evaluation.document.get("policy", {}).get("notes", ()),
            *evaluation_notes(result),
        ),
        facts=(
            *_kept_facts(evaluation.document),
            *_reward_facts(evaluation.document),
            *((names[not config.rl.gamma], scores[tag]) for tag, names in _SCORES.items() if tag in scores),
        ),
        sections=evaluation_sections(
            evidence,
            decision,
            config.evaluation,
            names={MODEL: f"The learned policy, {policy}"},
            note=note,
            where=_WHERE,
            explanation=evaluation.explanation or Explanation.without_log(),
        ),
    )


def _reward_facts(document: Mapping[str, Any]) -> tuple[tuple[str, Cell], ...]:
    """Returns how well rewards of unseen rows are predicted, () if later rewards count."""
    errors = document.get("reward_model")
    if errors is None:
        return ()
    constant = errors["constant_error"]
    of_model = describe_explained(errors["error"], constant)
    of_line = describe_explained(errors["linear_error"], constant)
    if "trees" not in errors:
        return (("Rewards explained", f"{of_model} of their variance in scored rows; a linear model: {of_line}"),)
    model = described_parts(errors)
    how = f"{of_model} of the variance of rewards that it has not seen; linear alone: {of_line}"
    return (("Reward model", f"{model}, chosen on rows that it has not seen; it explains {how}"),)


def _kept_facts(document: Mapping[str, Any]) -> tuple[tuple[str, Cell], ...]:
    """Returns which epoch's policy is evaluated, () if checkpoint.keep_best kept none."""
    if KEPT not in document:
        return ()
    kept = document[KEPT]
    chosen = f"{kept['by']}: {number(kept['value'])}"
    return (("Policy kept", f"that of {kept['unit']} {kept['number']} of {kept['of']}, by the {chosen}"),)


def _joint_report(reports: Mapping[str, Report], document: Mapping[str, Any]) -> Report:
    """Returns the joint evaluation of several types of agents; its decision is the most cautious of theirs."""
    agents = document["agents"]
    decisions = {kind: report.decision for kind, report in reports.items()}
    by_caution = (Choice.DO_NOT_SHIP, Choice.NOT_ENOUGH, Choice.DISCUSS, Choice.SHIP)
    most_cautious = min(decisions.values(), key=lambda decision: by_caution.index(decision.choice))
    decision = ShipDecision(
        choice=most_cautious.choice,
        reason="; ".join(f"{kind}: {decision.reason}" for kind, decision in decisions.items()),
        next_step=most_cautious.next_step,
        findings=tuple(
            replace(finding, reason=f"{kind}: {finding.reason}")
            for kind, decision in decisions.items()
            for finding in decision.findings
        ),
    )
    return Report(
        title="Evaluation",
        decision=decision,
        facts=(
            *_kept_facts(document),
            *_reward_facts(document),
            ("Episodes that ended before the time limit", percent(agents["terminated_share"])),
            *((f"Return of an agent: {kind}", value) for kind, value in agents["returns"].items()),
        ),
        sections=tuple(
            replace(section, title=f"{section.title}: {kind}")
            for kind, report in reports.items()
            for section in report.sections
        ),
    )


def _facts(figures: RunFigures) -> tuple[tuple[str, Cell], ...]:
    config = figures.config
    env = f"simulation of {config.simulation.env}" if config.simulation else ""
    return (
        ("Learned from", show_paths(config.training_data_path) or env),
        *((("Optimizer steps", figures.steps),) if config.takes_steps else ()),
        ("Rows learned from, repeats included", figures.rows),
        *_discount_facts(config, figures.facts.discounts),
        ("Policy", figures.policy),
        ("Seed", str(config.seed)),
        ("Data hash", figures.identity[:16]),
        ("Config hash", fingerprint(config)[:16]),
        *items_facts(figures.facts.items),
    )


def _discount_facts(config: WorkflowConfig, discounts: TimeDiscounts | None) -> Iterator[tuple[str, Cell]]:
    if not config.rl.use_seq_num_diff_as_time_diff:
        if config.rl.gamma:
            yield "Discount per step", f"{config.rl.gamma:g}"
        return
    yield f"Discount per {config.rl.time_diff_unit_length:g} of time_diff", f"{config.rl.gamma:g}"
    if discounts is not None:
        yield "Median time_diff of a step", discounts.time_diff
        yield "Median discount of a step", discounts.discount


def items_facts(items: ItemTable | None) -> tuple[tuple[str, Cell], ...]:
    """Returns the number of items and the hash of their table, or () without a table."""
    return () if items is None else (("Items", len(items)), ("Hash of the item table", items.sha256[:16]))


def _shares(names: Sequence[str], series: Series) -> Shares:
    """Returns the latest shares of named actions, {} if none were measured."""
    tags = ("actions/logged/{}", "actions/model/{}", "propensities/model/{}/mean")
    shares = {name: tuple(last(series, tag.format(name)) for tag in tags) for name in names}
    return shares if any(share[0] is not None for share in shares.values()) else {}  # type: ignore[return-value]


def features_section(
    normalization: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Mapping[int, FeatureFacts]], note: str
) -> PageSection:
    """Returns a section with type and statistics of every feature of states, then of candidates."""
    entries = [
        (name, column, text) for column, parameters in normalization.items() for name, text in parameters.items()
    ]
    rows = []
    for name, column, text in entries[:_MOST_FEATURES]:
        parameter = json.loads(text) if isinstance(text, str) else text
        sampled = facts.get(column, {}).get(id_of(name))
        figures = (None, None, None) if sampled is None else (sampled.present, sampled.mean, sampled.stddev)
        levels = parameter.get("levels") or ()
        kind = (
            f"{parameter['feature_type']}, {pluralize(len(levels), 'level')}" if levels else parameter["feature_type"]
        )
        other = None if sampled is None or parameter["feature_type"] != FeatureType.ENUM else sampled.other
        rows.append((name, column, kind, *figures, other))
    table = Table(
        title="Features and how they are normalized",
        columns=(
            ("Feature", "name"),
            ("Of", "name"),
            ("Type", "name"),
            ("Present", "share"),
            ("Mean", "number"),
            ("Standard deviation", "number"),
            ("Other values", "number"),
        ),
        rows=rows,
        note=note_omitted(len(entries) - len(rows), "features", "normalization.json"),
    )
    return PageSection(title="Features", notes=(note,), tables=(table,) if rows else ())


def drift_section(config: WorkflowConfig) -> PageSection:
    """Returns a section with the drift that workflows.normalize wrote next to the run's normalization."""
    paths = [path for path in (config.state_norm_data_path, config.action_norm_data_path) if path and "://" not in path]
    files = dict.fromkeys(Path(path).expanduser().parent / "drift.json" for path in paths)
    drifted = [
        (column, feature)
        for file in files
        if file.is_file()
        for column, drift in json.loads(file.read_bytes()).items()
        for feature in drift["features"]
    ]
    rows = [
        (
            str(feature["feature_id"]),
            column,
            f"{_SHIFT_SIGN.get(feature['verdict'], '')} {feature['verdict']}",
            feature["psi"],
            feature["ks"],
            f"{percent(feature['reference_present'])} → {percent(feature['present'])}",
            f"{number(feature['reference_mean'])} → {number(feature['mean'])}",
            feature.get("other"),
        )
        for column, feature in drifted[:_MOST_FEATURES]
    ]
    table = Table(
        title="Features against the reference data, most drifted first",
        columns=(
            ("Feature", "name"),
            ("Of", "name"),
            ("Drift", "mark"),
            ("PSI", "number"),
            ("KS", "number"),
            ("Present: reference → training", "number"),
            ("Mean: reference → training", "number"),
            ("Values not in the reference", "share"),
        ),
        rows=rows,
        note=note_omitted(len(drifted) - len(rows), "features", "drift.json"),
    )
    return PageSection(title="Drift", tables=(table,) if rows else ())


def lineage_section(sources: Sequence[DataSource]) -> PageSection:
    """Returns a section with the data of all machines, and files, hashes and stages of this machine."""
    tables = [
        Table(
            title="Data of the config",
            columns=(("Use", "name"), ("Path", "name"), ("Rows", "number"), ("Counts", "words")),
            rows=[(source.use, source.path, source.rows, source.counts) for source in sources],
        ),
        Table(
            title="Rows of each log",
            columns=(("Use", "name"), ("Log", "name"), ("Rows", "number"), ("Share", "number")),
            rows=[(source.use, log, rows, percent(share)) for source in sources for log, rows, share in source.logs],
        ),
    ]
    for source in sources:
        use = f"{source.use} on node 0" if source.on_node else source.use
        copy = source.copy
        manifest = CopyManifest.read(str(copy.folder))
        states = manifest.inputs if manifest is not None and len(manifest.inputs) == len(copy.files) else ()
        files = [(path, state.size, state.sha256) for path, state in zip(copy.files, states, strict=False)]
        tables.append(_files(f"Files of the {use}", files))
        if manifest is not None and manifest.report:
            tables.append(_stage(use, str(copy.folder), manifest)[0])
        for folder in dict.fromkeys(str(Path(file).parent) for file in copy.files if "://" not in file):
            stage = StageManifest.read(folder)
            if stage is not None:
                tables += _stage(use, folder, stage)
    shown = [table for table in tables if table.rows]
    rest = note_omitted(len(shown) - _MOST_TABLES, "tables", "the manifests of the stages")
    return PageSection(title="Data lineage", tables=tuple(shown[:_MOST_TABLES]), rest=(rest,))


def _files(title: str, files: Sequence[tuple[str, int, str]]) -> Table:
    columns: tuple[Column, ...] = (("File", "name"), ("Bytes", "number"), ("SHA-256", "name"))
    note = note_omitted(len(files) - _MOST_FILES, "files", "the manifest")
    return Table(title=title, columns=columns, rows=files[:_MOST_FILES], note=note)


def _stage(use: str, folder: str, manifest: StageManifest) -> tuple[Table, Table]:
    """Returns the tables of a stage's manifest: its report, and its inputs."""
    facts: list[tuple[str, Cell]] = [("folder", folder), ("rows in it", manifest.rows), ("digest", manifest.digest)]
    facts += [("made from the stage with digest", manifest.parent)] if manifest.parent else []
    facts += _flat(manifest.report)
    title = f"Stage {manifest.kind} ({use}): read, kept, refused"
    inputs = [(file.name, file.size, file.sha256) for file in manifest.inputs]
    return (
        Table(title=title, columns=(("What", "name"), ("How many", "name")), rows=facts),
        _files(f"Inputs of stage {manifest.kind} ({use})", inputs),
    )


def _flat(report: Mapping[str, Any]) -> Iterator[tuple[str, Cell]]:
    """Yields a report's entries as text; empty ones are left out."""
    for key, value in report.items():
        name = key.replace("_", " ")
        if isinstance(value, int | float):
            yield name, value
        elif isinstance(value, list) and value:
            yield from ((name, _cut(entry)) for entry in value[:_MOST_FILES])
        elif value:
            yield name, _cut(value)


def _cut(value: Any) -> str:
    if isinstance(value, Mapping):
        words = (f"{key}: {count:,}" if isinstance(count, int) else f"{key}: {count}" for key, count in value.items())
        text = ", ".join(sorted(words, key=len))  # counts before sentences
    else:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"


def config_section(config: Mapping[str, Any]) -> PageSection:
    """Returns the resolved config, folded."""
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False)
    shown = text[:_MOST_CONFIG_LETTERS]
    rest = note_omitted(len(text) - len(shown), "letters", "config.json")
    return PageSection(title="Config", rest=(rest,), folded=("The resolved config", shown))
