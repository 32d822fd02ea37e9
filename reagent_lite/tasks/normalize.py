"""Types, statistics and drift of features.

1 compare   the input files with the output folder's manifest; a folder that is up to date is kept
2 read      training data ─► LogSummary; reference data ─► LogSummary
3 fit       LogSummary ─► normalization files, statistics.json
4 drift     two LogSummaries ─► drift.json
5 publish   the folder is renamed to its name; in the folder of the training file the norm files alone are written

    <output_dir>/state_features_norm.json, action_norm.json    for state_norm_data_path and action_norm_data_path
                 statistics.json, drift.json                   for people
                 manifest.json                                 inputs and settings
"""

import json
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reagent_lite.config import expand_config
from reagent_lite.config.embedding_config import counted_ids, id_features
from reagent_lite.config.normalize_config import NormalizeConfig
from reagent_lite.config.paths import logs_of, show_paths
from reagent_lite.console import logger, progress
from reagent_lite.data.features.column_fits import VERSION, Fitted, check_overrides, fit_columns
from reagent_lite.data.features.drift import Drift, drift_between, drift_lines
from reagent_lite.data.features.normalization_files import left_out_features, normalization_json, write_normalization
from reagent_lite.data.log_shares import shares_in_words, shares_of
from reagent_lite.data.logs import Log
from reagent_lite.data.stage_folder import StageManifest, require_own, states_of
from reagent_lite.disk_room import disk_errors, require_writable
from reagent_lite.errors import ConfigError, Problem, needing, pluralize
from reagent_lite.feature_ids import id_of
from reagent_lite.whole_files import appearing_folder, write_whole

if TYPE_CHECKING:
    from reagent_lite.data.features.log_features import LogSummary

KIND = "normalization"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalized:
    """The outcome; printed as the last line of standard output.

    Attributes:
        folder: the folder of the files.
        skipped: whether the files were up to date.
        parametric: whether actions are candidates with features.
        rows: number of rows of the training data.
        features: {column: number of features}.
        types: {column: {type: number of features}}.
        drift: {column: {verdict: number of features}}; None without a reference.
        seconds: total wall-clock time of the run.
    """

    folder: str
    skipped: bool
    parametric: bool
    rows: int
    features: dict[str, int]
    types: dict[str, dict[str, int]]
    drift: dict[str, dict[str, int]] | None
    seconds: float


def normalize(config: NormalizeConfig) -> Normalized:
    """Writes the folder unless it is up to date, and returns its content.

    Raises:
        ConfigError: the data lack a column or an overridden feature, or the output folder has other files.
        DataError: the data have faults, features cannot be fitted, or the disk is full.
    """
    with needing("data", "training_data_path"):
        from reagent_lite.data.features.summary import ACTION, STATE
        from reagent_lite.data.rows.item_files import given_items
    start = time.monotonic()
    folder = Path(config.norm_params.output_dir or "").expanduser().absolute()
    key = "norm_params.output_dir"
    embedded = id_features(config.embeddings)
    items = given_items(config.items, config.item_id, config.possible_items, embedded)
    paths = {"training": config.training_data_path, "reference": config.reference_data_path}
    given = {side: path for side, path in paths.items() if path is not None}
    log_at = partial(Log, columns=config.columns, items=items, id_features=embedded)
    logs = {side: log_at(path) for side, path in given.items()}
    for log in logs.values():
        for note in log.notes():
            logger.warning(note)
    inputs = tuple(replace(file, name=f"{side}/{file.name}") for side, log in logs.items() for file in log.files)
    settings = expand_config(config)
    del settings["norm_params"]["output_dir"], settings["training_data_path"], settings["reference_data_path"]
    sha256 = None if items is None else items.sha256
    settings |= {"version": VERSION, "compared": "reference" in logs, "items": sha256}
    settings |= {"several": [side for side, log in logs.items() if log.is_several]}
    if manifest := StageManifest.up_to_date(folder, KIND, settings, inputs):
        logger.info(f"{folder}: up to date")
        return _outcome(folder, manifest, start, skipped=True)
    beside_data = folder in [Path(path).expanduser().absolute().parent for path in logs_of(config.training_data_path)]
    if not beside_data:
        require_own(folder, KIND, key)
    require_writable(folder.parent, key)

    training = _summary(config, logs["training"], "reading", config.parametric)
    fitted = _fit(config, training)
    drifts = dict[str, Drift]()
    hashes = training.hashes
    parent = logs["training"].manifest
    if (source := logs.get("reference")) is not None:
        reference = _summary(config, source, "reading the reference", training.parametric)
        hashes += reference.hashes
        for name, column in training.columns.items():
            where = f"{show_paths(config.training_data_path)} and {source.name}: {name}"
            drifts[name] = drift_between(column, reference.columns[name], config.drift, where=where)
    ids = {name: tuple(column.features) for name, column in training.columns.items()}
    documents = _documents(config, training, fitted, drifts)
    manifest = StageManifest(
        kind=KIND,
        rows=training.rows,
        columns={},
        state_ids=ids.get(STATE, ()),
        action_ids=ids.get(ACTION, ()),
        settings=settings,
        inputs=states_of(inputs, hashes),
        parent="" if parent is None else parent.digest,
        report={
            "parametric": training.parametric,
            "rows_by_position": training.rows_by_position,
            "types": {name: _counts(spec.feature_type for spec in fit.spec.features) for name, fit in fitted.items()},
            "drift": {name: _counts(shift.verdict for shift in drift.features) for name, drift in drifts.items()}
            or None,
            "notes": [note for fit in fitted.values() for note in fit.notes] + _left_out(config, training, fitted),
        },
        files={name: {"rows": rows} for name, (rows, _) in documents.items()},
    )
    errors = disk_errors(str(folder), "a folder that can be written", "Free some space there")
    if beside_data:  # other files stay, and the data is not taken for the files of a stage
        for name, fit in fitted.items():
            write_normalization(folder / f"{name}_norm.json", fit.spec)
    else:
        with errors, appearing_folder(folder) as temporary:
            for name, (_, tree) in documents.items():
                write_whole(temporary / name, json.dumps(tree, indent=1, allow_nan=False).encode() + b"\n")
            manifest.write(temporary)
    _log_results(config, manifest, drifts)
    return _outcome(folder, manifest, start, skipped=False)


def _documents(
    config: NormalizeConfig, training: "LogSummary", fitted: dict[str, Fitted], drifts: dict[str, Drift]
) -> dict[str, tuple[int, Json]]:
    """Returns (number of features, content) of each file by its name."""
    numbers = {name: len(fit.spec.features) for name, fit in fitted.items()}
    documents: dict[str, tuple[int, Json]] = {
        f"{name}_norm.json": (numbers[name], dict(normalization_json(fit.spec))) for name, fit in fitted.items()
    }
    about = {name: getattr(training, name) for name in ("rows", "parametric", "rows_by_position")}
    statistics = {name: fit.statistics for name, fit in fitted.items()}
    logs = {log: rows for log, rows, _ in shares_of(config.training_data_path, training.logs)}
    about |= {"logs": logs} if logs else {}
    about = {"data": config.training_data_path, "seed": config.seed, **about, "columns": statistics}
    documents["statistics.json"] = (sum(numbers.values()), about)
    if drifts:
        compared = sum(len(drift.features) for drift in drifts.values())
        documents["drift.json"] = (compared, {name: drift.document() for name, drift in drifts.items()})
    return documents


def _summary(config: NormalizeConfig, log: Log, title: str, parametric: bool | None) -> "LogSummary":
    from reagent_lite.data.features.log_features import summarize_log

    log.require_one_kind()
    with progress(title, "bytes") as show:
        summary = summarize_log(
            log.files,
            config.norm_params,
            parametric=parametric,
            seed=config.seed,
            id_features=counted_ids(config.embeddings),
            progress=show,
        )
    if shares := shares_of(log.path, summary.logs):
        logger.info(f"rows by log: {shares_in_words(shares)}")
    return summary


def _fit(config: NormalizeConfig, training: "LogSummary") -> dict[str, Fitted]:
    """Returns the normalization of each column.

    Raises:
        ConfigError: there is no column to fit, or no column has an overridden feature.
        DataError: features cannot be fitted; lists all of them.
    """
    params = config.norm_params
    where = show_paths(config.training_data_path)
    if not training.columns:
        expected = "state_features among them where actions are names"
        raise ConfigError(Problem("norm_params.cols_to_norm", expected, str(list(params.cols_to_norm))))
    check_overrides(params, {feature for column in training.columns.values() for feature in column.features}, where)
    embeddings = {id_of(name): section for name, section in config.embeddings.items()}
    return fit_columns(training.columns, params, where=where, embeddings=embeddings)


def _left_out(config: NormalizeConfig, training: "LogSummary", fitted: dict[str, Fitted]) -> list[str]:
    """Returns a sentence for each column with features that are too rare."""
    fewest = config.norm_params.min_present_values
    sentences = [
        left_out_features(
            fit.spec,
            tuple(training.columns[name].features),
            where=f"{show_paths(config.training_data_path)}: {name}",
            fewest=fewest,
        )
        for name, fit in fitted.items()
    ]
    return [sentence for sentence in sentences if sentence]


def _counts(words: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(map(str, words)).items()))


def _outcome(folder: Path, manifest: StageManifest, start: float, *, skipped: bool) -> Normalized:
    report = manifest.report
    return Normalized(
        folder=str(folder),
        skipped=skipped,
        parametric=report["parametric"],
        rows=manifest.rows,
        features={name: sum(types.values()) for name, types in report["types"].items()},
        types=report["types"],
        drift=report["drift"],
        seconds=round(time.monotonic() - start, 3),
    )


def _log_results(config: NormalizeConfig, manifest: StageManifest, drifts: dict[str, Drift]) -> None:
    report = manifest.report
    kind = "candidates with features" if report["parametric"] else "names"
    by = "by the action column" if config.parametric is None else "as parametric says"
    logger.info(f"{show_paths(config.training_data_path)}: {pluralize(manifest.rows, 'row')}; actions are {kind}, {by}")
    if report["rows_by_position"]:
        unnamed = pluralize(report["rows_by_position"], "row")
        logger.info(
            f"note: {unnamed} without mdp_id or sequence_number; the sample of these rows depends on their order"
        )
    for name, types in report["types"].items():
        logger.info(f"{name}: {', '.join(f'{count} {feature_type}' for feature_type, count in types.items())}")
    for note in report["notes"]:
        logger.warning(note)
    for line in (line for name, drift in drifts.items() for line in drift_lines(name, drift)):
        logger.info(line)
