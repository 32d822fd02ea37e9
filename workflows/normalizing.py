"""The story of a normalization: every feature's type and statistics from all rows, and drift against other data.

1 look      input files and output folder; nothing to do where the folder stands and its inputs are unchanged
2 read      training data ─► Summary; reference data ─► Summary
3 fit       Summary ─► normalization files, statistics.json
4 compare   two Summaries ─► drift.json
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
from reagent_lite.data.features.drift import Drift, FeatureDrift, drift_between
from reagent_lite.data.features.full_fit import Fitted, fit_summary
from reagent_lite.data.features.full_statistics import ACTION, STATE, Summary, Wanted, summarize
from reagent_lite.data.features.normalization import check_overrides, write_normalization
from reagent_lite.data.formats.files import InputFile
from reagent_lite.data.formats.input_state import states_of
from reagent_lite.data.formats.stage import StageManifest, data_files, left_out, read_manifest, standing, write_manifest
from reagent_lite.errors import ConfigError, DataError, Problem, counted
from reagent_lite.files import appearing_folder, require_writable, write_whole
from reagent_lite.manifest import FILE_NAME
from reagent_lite.progress import progress

KIND = "normalization"
# A change of what is computed from unchanged inputs counts it up, so that folders of before are made again.
VERSION = 1
MOST_TABLE_ROWS = 40

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalized:
    """What is left; printed as the last line of standard output.

    Attributes:
        folder: of the files.
        skipped: whether they stood there already, made from the same inputs.
        parametric: whether actions are candidates with features.
        rows: of the training data.
        features: {column: how many}.
        types: {column: {type: how many}}.
        drift: {column: {verdict: how many}}; None without a reference.
        seconds: in all.
    """

    folder: str
    skipped: bool
    parametric: bool
    rows: int
    features: dict[str, int]
    types: dict[str, dict[str, int]]
    drift: dict[str, dict[str, int]] | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The files of both data sets, named apart; no reference: none."""

    training: tuple[InputFile, ...]
    reference: tuple[InputFile, ...]

    @property
    def all(self) -> tuple[InputFile, ...]:
        """Files under names that tell which data set they are of."""
        sides = (("training", self.training), ("reference", self.reference))
        return tuple(replace(file, name=f"{side}/{file.name}") for side, files in sides for file in files)


def normalize(config: NormalizeConfig) -> Normalized:
    """Writes the folder, where it does not stand already, and returns what is in it."""
    start = time.monotonic()
    folder = Path(config.norm_params.output_dir or "").expanduser().absolute()
    reference = config.reference_data_path
    inputs = Inputs(
        training=data_files(config.training_data_path), reference=() if reference is None else data_files(reference)
    )
    for path in filter(None, (config.training_data_path, reference)):
        for note in left_out(path):
            _say(f"warning: {note}")
    settings = _settings(config)
    manifest = standing(folder, KIND, settings, inputs.all)
    if manifest is not None:
        _say(f"{folder}: made from these inputs by these settings; nothing to do")
        return _outcome(folder, manifest, start, skipped=True)
    _require_own(folder)
    require_writable(folder.parent, "norm_params.output_dir")
    training = _summary(config, inputs.training, "reading", config.parametric)
    fitted = _fitted(config, training)
    drifts: dict[str, Drift] = {}
    compared = None
    if reference is not None:
        compared = _summary(config, inputs.reference, "reading the reference", training.parametric)
        drifts = _drifts(config, training, compared)
    hashes = training.hashes + (() if compared is None else compared.hashes)
    parent = read_manifest(config.training_data_path) if _is_folder(config.training_data_path) else None
    manifest = StageManifest(
        kind=KIND, rows=training.rows, columns={},
        state_ids=_ids(training, STATE), action_ids=_ids(training, ACTION),
        settings=settings, inputs=states_of(inputs.all, hashes), parent="" if parent is None else parent.digest,
        report=_report(training, fitted, drifts), files={},
    )  # fmt: skip
    _write(folder, manifest, fitted, _statistics(config, training, fitted), drifts)
    _tell(config, training, fitted, drifts)
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
    if present - own:
        raise ConfigError(
            Problem(where, "a new or empty folder, or one that workflows.normalize made",
                    f"{folder} with {', '.join(sorted(present - own)[:5])}", "It would be replaced: choose a subfolder")
        )  # fmt: skip


def _is_folder(path: str) -> bool:
    return "://" in path or Path(path).expanduser().is_dir()


def _summary(config: NormalizeConfig, files: tuple[InputFile, ...], title: str, parametric: bool | None) -> Summary:
    wanted = Wanted(
        columns=config.norm_params.cols_to_norm, parametric=parametric,
        num_samples=config.norm_params.num_samples, most_distinct=config.norm_params.max_unique_enum_values,
        seed=config.seed,
    )  # fmt: skip
    with progress(title, "bytes", enabled=True) as show:
        return summarize(files, wanted, show)


def _fitted(config: NormalizeConfig, training: Summary) -> dict[str, Fitted]:
    """Returns the normalization of each column.

    Raises:
        ConfigError: no column to fit.
        DataError: an override for a feature that no column has, and all features that cannot be fitted.
    """
    if not training.columns:
        raise ConfigError(
            Problem("norm_params.cols_to_norm", "state_features among them where actions are names",
                    str(list(config.norm_params.cols_to_norm)))
        )  # fmt: skip
    where = config.training_data_path
    known = sorted({one for column in training.columns.values() for one in column.features})
    check_overrides(config.norm_params, known, where)
    fitted: dict[str, Fitted] = {}
    problems: list[Problem] = []
    for name, column in training.columns.items():
        try:
            fitted[name] = fit_summary(column, config.norm_params, where=f"{where}: {name}")
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    return fitted


def _drifts(config: NormalizeConfig, training: Summary, reference: Summary) -> dict[str, Drift]:
    where = f"{config.training_data_path} and {config.reference_data_path}"
    return {
        name: drift_between(training.columns[name], reference.columns[name], config.drift, where=f"{where}: {name}")
        for name in training.columns
    }


def _ids(summary: Summary, column: str) -> tuple[int, ...]:
    return tuple(summary.columns[column].features) if column in summary.columns else ()


def _report(training: Summary, fitted: dict[str, Fitted], drifts: dict[str, Drift]) -> Json:
    return {
        "parametric": training.parametric,
        "rows_by_position": training.rows_by_position,
        "types": {name: _counted(str(one.feature_type) for one in fit.spec.features) for name, fit in fitted.items()},
        "drift": {name: _counted(one.verdict for one in drift.features) for name, drift in drifts.items()} or None,
        "notes": [note for fit in fitted.values() for note in fit.notes],
    }


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _statistics(config: NormalizeConfig, training: Summary, fitted: dict[str, Fitted]) -> Json:
    return {
        "data": config.training_data_path,
        "rows": training.rows,
        "seed": config.seed,
        "parametric": training.parametric,
        "rows_by_position": training.rows_by_position,
        "columns": {
            name: {
                "rows": training.columns[name].rows,
                "sampled": len(training.columns[name].sample),
                "features": {str(one): asdict(report) for one, report in fit.reports.items()},
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
    try:
        with appearing_folder(folder) as temporary:
            rows = {}
            for name, fit in fitted.items():
                file = f"{name}_norm.json"
                write_normalization(str(temporary / file), fit.spec)
                rows[file] = len(fit.spec.features)
            write_whole(temporary / "statistics.json", _lines(statistics))
            rows["statistics.json"] = sum(len(fit.reports) for fit in fitted.values())
            if drifts:
                write_whole(temporary / "drift.json", _lines({name: asdict(one) for name, one in drifts.items()}))
                rows["drift.json"] = sum(len(one.features) for one in drifts.values())
            write_manifest(temporary, replace(manifest, files={name: {"rows": count} for name, count in rows.items()}))
    except OSError as error:
        raise DataError(
            Problem(str(folder), "a folder that can be written", error.strerror or str(error), "Free some space there")
        ) from error


def _lines(tree: Json) -> bytes:
    return json.dumps(tree, indent=1, allow_nan=False).encode() + b"\n"


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


def _tell(config: NormalizeConfig, training: Summary, fitted: dict[str, Fitted], drifts: dict[str, Drift]) -> None:
    kind = "candidates with features" if training.parametric else "names"
    by = "by the action column" if config.parametric is None else "as parametric says"
    _say(f"{config.training_data_path}: {counted(training.rows, 'row')}; actions are {kind}, {by}")
    if training.rows_by_position:
        _say(f"note: {counted(training.rows_by_position, 'row')} without mdp_id or sequence_number; which of them are "
             "in the sample depends on their order")  # fmt: skip
    for name, fit in fitted.items():
        types = ", ".join(
            f"{count} {one}" for one, count in _counted(str(f.feature_type) for f in fit.spec.features).items()
        )
        _say(f"{name}: {types}")
        for note in fit.notes:
            _say(f"warning: {note}")
    for name, drift in drifts.items():
        for line in drift_lines(name, drift):
            _say(line)


def drift_lines(name: str, drift: Drift) -> list[str]:
    """Returns a column's drift as a table, most drifted features first."""
    lines = [f"drift of {name} against the reference", f"{'feature':>12}  verdict   {'PSI':>8} {'KS':>7}  present"
             "             mean"]  # fmt: skip
    lines += [_drift_line(one) for one in drift.features[:MOST_TABLE_ROWS]]
    if len(drift.features) > MOST_TABLE_ROWS:
        lines.append(f"{len(drift.features) - MOST_TABLE_ROWS} more in drift.json")
    for what, ids in (("training data", drift.only_in_training), ("reference", drift.only_in_reference)):
        if ids:
            lines.append(f"only in the {what}: {', '.join(map(str, ids))}")
    return lines


def _drift_line(one: FeatureDrift) -> str:
    figures = [("n/a" if figure is None else f"{figure:.4f}") for figure in (one.psi, one.ks)]
    means = ["n/a" if mean is None else f"{mean:.4g}" for mean in (one.reference_mean, one.mean)]
    return (
        f"{one.feature_id:>12}  {one.verdict:<8}  {figures[0]:>8} {figures[1]:>7}  "
        f"{one.reference_present:7.2%} → {one.present:7.2%}  {means[0]} → {means[1]}"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
