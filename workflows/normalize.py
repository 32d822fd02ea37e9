"""Types, statistics and drift of features: python -m workflows.normalize --config x.json.

1 look      input files and output folder; nothing to do where the folder stands and its inputs are unchanged
2 read      training data ─► LogSummary; reference data ─► LogSummary
3 fit       LogSummary ─► normalization files, statistics.json
4 compare   two LogSummaries ─► drift.json
5 appear    the folder gets its name

    <output_dir>/state_features_norm.json, action_norm.json    what state_norm_data_path and action_norm_data_path take
                 statistics.json, drift.json                   for people
                 manifest.json                                 what it was made from
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from reagent_lite.config import resolved
from reagent_lite.config.normalize import NormalizeConfig
from reagent_lite.data.features.drift import Drift, drift_between, drift_lines
from reagent_lite.data.features.fitting import VERSION, Fitted, check_overrides, fit_columns
from reagent_lite.data.features.log import ACTION, STATE, LogSummary, summarize_log
from reagent_lite.data.features.normalization import write_normalization
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.stage import (
    StageManifest,
    data_files,
    left_out,
    read_manifest,
    standing,
    states_of,
    write_manifest,
)
from reagent_lite.errors import ConfigError, DataError, Problem, counted
from reagent_lite.files import appearing_folder, require_writable, write_whole
from reagent_lite.manifest import FILE_NAME
from reagent_lite.progress import log, progress
from workflows.command_line import Command, main_alone

KIND = "normalization"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalized:
    """The outcome; printed as the last line of standard output.

    Attributes:
        folder: of the files.
        skipped: whether they stood there already, made from the same inputs.
        parametric: whether actions are candidates with features.
        rows: of the training data.
        features: {column: how many}.
        types: {column: {type: how many}}.
        drift: {column: {verdict: how many}}; None without a reference.
        seconds: total wall-clock time.
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
    """Writes the folder, unless it stands already, and returns what is in it."""
    start = time.monotonic()
    folder = Path(config.norm_params.output_dir or "").expanduser().absolute()
    paths = {"training": config.training_data_path}
    if config.reference_data_path is not None:
        paths["reference"] = config.reference_data_path
    files = {side: data_files(path) for side, path in paths.items()}
    for note in (note for path in paths.values() for note in left_out(path)):
        log(f"warning: {note}")
    # files under names that tell which of the two they are of
    inputs = tuple(replace(file, name=f"{side}/{file.name}") for side, some in files.items() for file in some)
    settings = _settings(config)
    manifest = standing(folder, KIND, settings, inputs)
    if manifest is not None:
        log(f"{folder}: made from these inputs by these settings; nothing to do")
        return _outcome(folder, manifest, start, skipped=True)
    _require_own(folder)
    require_writable(folder.parent, "norm_params.output_dir")

    training = _summary(config, files["training"], "reading", config.parametric)
    fitted = _fitted(config, training)
    drifts: dict[str, Drift] = {}
    hashes = training.hashes
    if "reference" in files:
        reference = _summary(config, files["reference"], "reading the reference", training.parametric)
        hashes += reference.hashes
        where = " and ".join(paths.values())
        drifts = {
            name: drift_between(column, reference.columns[name], config.drift, where=f"{where}: {name}")
            for name, column in training.columns.items()
        }
    ids = {name: tuple(column.features) for name, column in training.columns.items()}
    parent = _parent(config.training_data_path)
    manifest = StageManifest(
        kind=KIND,
        rows=training.rows,
        columns={},
        state_ids=ids.get(STATE, ()),
        action_ids=ids.get(ACTION, ()),
        settings=settings,
        inputs=states_of(inputs, hashes),
        parent=parent,
        report=_report(training, fitted, drifts),
        files={},
    )
    _write(folder, manifest, fitted, _statistics(config, training, fitted), drifts)
    _log_results(config, training, fitted, drifts)
    return _outcome(folder, manifest, start, skipped=False)


def _settings(config: NormalizeConfig) -> Json:
    """Returns what the content depends on, beside the inputs."""
    tree = resolved(config)
    del tree["norm_params"]["output_dir"], tree["training_data_path"], tree["reference_data_path"]
    return {**tree, "version": VERSION, "compared": config.reference_data_path is not None}


def _require_own(folder: Path) -> None:
    """Raises ConfigError where the folder has something that this workflow did not make: it would be replaced."""
    where = "norm_params.output_dir"
    if folder.exists() and not folder.is_dir():
        raise ConfigError(Problem(where, "a folder", f"the file {folder}", "Choose another folder"))
    present = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    try:
        manifest = read_manifest(str(folder)) if present else None
    except DataError:
        manifest = None
    own = {FILE_NAME, *manifest.files} if manifest is not None and manifest.kind == KIND else set()
    if others := sorted(present - own):
        expected = "a new or empty folder, or one that workflows.normalize made"
        todo = "It would be replaced: choose a subfolder"
        raise ConfigError(Problem(where, expected, f"{folder} with {', '.join(others[:5])}", todo))


def _summary(config: NormalizeConfig, files: tuple[InputFile, ...], title: str, parametric: bool | None) -> LogSummary:
    with progress(title, "bytes", enabled=True) as show:
        return summarize_log(files, config.norm_params, parametric=parametric, seed=config.seed, progress=show)


def _fitted(config: NormalizeConfig, training: LogSummary) -> dict[str, Fitted]:
    """Returns the normalization of each column.

    Raises:
        ConfigError: no column to fit; an override for a feature that no column has.
        DataError: all features that cannot be fitted.
    """
    params, where = config.norm_params, config.training_data_path
    if not training.columns:
        expected = "state_features among them where actions are names"
        raise ConfigError(Problem("norm_params.cols_to_norm", expected, str(list(params.cols_to_norm))))
    check_overrides(params, {one for column in training.columns.values() for one in column.features}, where)
    return fit_columns(training.columns, params, where=where)


def _parent(path: str) -> str:
    """Returns the digest of the manifest of the stage's folder that was read; "" for other data."""
    may_be = "://" in path or Path(path).expanduser().is_dir()
    manifest = read_manifest(path) if may_be else None
    return "" if manifest is None else manifest.digest


def _report(training: LogSummary, fitted: dict[str, Fitted], drifts: dict[str, Drift]) -> Json:
    return {
        "parametric": training.parametric,
        "rows_by_position": training.rows_by_position,
        "types": {name: _counted(str(one.feature_type) for one in fit.spec.features) for name, fit in fitted.items()},
        "drift": {name: _counted(one.verdict for one in drift.features) for name, drift in drifts.items()} or None,
        "notes": [note for fit in fitted.values() for note in fit.notes],
    }


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _statistics(config: NormalizeConfig, training: LogSummary, fitted: dict[str, Fitted]) -> Json:
    return {
        "data": config.training_data_path,
        "rows": training.rows,
        "seed": config.seed,
        "parametric": training.parametric,
        "rows_by_position": training.rows_by_position,
        "columns": {
            name: {
                "rows": fit.rows,
                "sampled": fit.sampled,
                "features": {str(one): asdict(report) for one, report in fit.features.items()},
            }
            for name, fit in fitted.items()
        },
    }


def _write(
    folder: Path, manifest: StageManifest, fitted: dict[str, Fitted], statistics: Json, drifts: dict[str, Drift]
) -> None:
    """Makes the folder appear.

    Raises:
        DataError: the disk is full, or refuses for another reason.
    """
    rows = {f"{name}_norm.json": len(fit.spec.features) for name, fit in fitted.items()}
    trees = {"statistics.json": statistics}
    rows["statistics.json"] = sum(rows.values())
    if drifts:
        trees["drift.json"] = {name: asdict(one) for name, one in drifts.items()}
        rows["drift.json"] = sum(len(one.features) for one in drifts.values())
    try:
        with appearing_folder(folder) as temporary:
            for name, fit in fitted.items():
                write_normalization(str(temporary / f"{name}_norm.json"), fit.spec)
            for name, tree in trees.items():
                write_whole(temporary / name, json.dumps(tree, indent=1, allow_nan=False).encode() + b"\n")
            write_manifest(temporary, replace(manifest, files={name: {"rows": count} for name, count in rows.items()}))
    except OSError as error:
        expected, got = "a folder that can be written", error.strerror or str(error)
        raise DataError(Problem(str(folder), expected, got, "Free some space there")) from error


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


def _log_results(
    config: NormalizeConfig, training: LogSummary, fitted: dict[str, Fitted], drifts: dict[str, Drift]
) -> None:
    kind = "candidates with features" if training.parametric else "names"
    by = "by the action column" if config.parametric is None else "as parametric says"
    log(f"{config.training_data_path}: {counted(training.rows, 'row')}; actions are {kind}, {by}")
    if training.rows_by_position:
        unnamed = counted(training.rows_by_position, "row")
        log(
            f"note: {unnamed} without mdp_id or sequence_number; which of them are in the sample depends on their order"
        )
    for name, fit in fitted.items():
        types = _counted(str(one.feature_type) for one in fit.spec.features)
        log(f"{name}: {', '.join(f'{count} {one}' for one, count in types.items())}")
        for note in fit.notes:
            log(f"warning: {note}")
    for name, drift in drifts.items():
        for line in drift_lines(name, drift):
            log(line)


COMMAND = Command(
    module="workflows.normalize",
    model=NormalizeConfig,
    example="configs/cartpole/normalize.json",
    settings="--set reference_data_path=last_month.parquet --set norm_params.output_dir=outputs/normalization",
    outcome="folder, skipped, parametric, rows, features, types, drift, seconds",
)

if __name__ == "__main__":
    sys.exit(main_alone(COMMAND, NormalizeConfig, normalize))
