"""Normalization of a run's features: read from files, or fitted to the rows of all machines.

shard 0 ─► summary of its rows ─┐
shard 1 ─► summary of its rows ─┴► rank 0: merge, fit ─► file ─► sent to all
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from reagent_lite.config import WorkflowConfig
from reagent_lite.config.embedding_config import counted_ids, require_features
from reagent_lite.config.paths import show_paths
from reagent_lite.console import logger
from reagent_lite.data.copy.copy_summaries import Agreement
from reagent_lite.data.copy.feature_summaries import summarize_copy
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.features.column_fits import VERSION, check_overrides, fit_columns
from reagent_lite.data.features.normalization_files import (
    normalization_json,
    parse_normalization,
    read_normalization,
    write_normalization,
)
from reagent_lite.data.features.summary import ColumnSummary, Merge
from reagent_lite.data.sampling.shards import Shards
from reagent_lite.distributed.group import Group
from reagent_lite.errors import ConfigError, Problem, join_names
from reagent_lite.feature_ids import id_of
from reagent_lite.manifest import canonical
from reagent_lite.types import FeatureSpec, FeatureType, Image, NormalizationSpec, SourceSpec
from reagent_lite.whole_files import write_whole

Json = dict[str, str]
NormalizationFiles = dict[str, str | None]
"""Files by side, "state" and "action"; None for a normalization that is fitted."""
_COLUMNS = {"state": "state_features", "action": "action"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalization:
    """Normalization of states and, for candidates, of their features."""

    state: NormalizationSpec
    action: NormalizationSpec | None

    @property
    def sides(self) -> dict[str, NormalizationSpec]:
        """The normalization by side: "state" and, for candidates, "action"."""
        return {"state": self.state} if self.action is None else {"state": self.state, "action": self.action}

    def json(self) -> dict[str, Json]:
        """Returns both in the encoding of ReAgent 2019, by side."""
        return {side: normalization_json(spec) for side, spec in self.sides.items()}

    def spec(self, action_names: tuple[str, ...], metric_names: tuple[str, ...] = ()) -> SourceSpec:
        """Returns the numbers of columns and choices that a network is built for."""
        return SourceSpec(
            num_state_features=self.state.width,
            num_action_features=self.action.width if self.action else 0,
            action_names=action_names,
            metric_names=metric_names,
            state_embeddings=self.state.embeddings,
            action_embeddings=self.action.embeddings if self.action else (),
            history=self.state.history,
            image=self.state.image,
        )


def normalization_of(image: Image) -> NormalizationSpec:
    """Returns the normalization of states that are images, whose network scales their bytes."""
    return NormalizationSpec((FeatureSpec(feature_id=id_of("image"), feature_type=FeatureType.IMAGE, image=image),))


def normalization_files(config: WorkflowConfig, group: Group | None = None) -> NormalizationFiles:
    """Returns the files that give a run's normalization, as rank 0 sees them; every rank calls it.

    Not those in norm_params.output_dir that are not there yet: a logged run fits and writes them itself.
    """
    folder = config.norm_params.output_dir
    paths: NormalizationFiles = {"state": config.state_norm_data_path, "action": config.action_norm_data_path}
    missing = []
    for side, path in paths.items():
        if path and folder and config.training_data_path and _COLUMNS[side] in config.norm_params.cols_to_norm:
            file = Path(path).expanduser().absolute()
            fitted_file = Path(folder).expanduser().absolute() / f"{_COLUMNS[side]}_norm.json"
            if file == fitted_file and not file.exists():
                missing.append(side)
    if group is not None:
        missing = group.broadcast_text(" ".join(missing)).split()
    return paths | dict.fromkeys(missing)


def read_normalizations(files: NormalizationFiles) -> dict[str, NormalizationSpec]:
    """Returns the normalization of each side that a file gives.

    Raises:
        DataError: a file cannot be read.
    """
    return {side: read_normalization(path) for side, path in files.items() if path is not None}


def given_normalizations(config: WorkflowConfig, files: NormalizationFiles) -> dict[str, NormalizationSpec]:
    """Returns the normalization of each side that a file gives, and that of images, to which none is fitted.

    Raises:
        DataError: a file cannot be read.
    """
    given = read_normalizations(files)
    if config.data.image is not None:
        given["state"] = normalization_of(config.data.image.image)
    return given


def given_or_fitted(
    config: WorkflowConfig,
    train: TrainingCopy,
    agreement: Agreement,
    shards: Shards,
    given: Mapping[str, NormalizationSpec],
) -> Normalization:
    """Returns the run's normalization, the same on every rank; every rank calls it.

    Args:
        config: the run's config; norm_params says how to fit.
        train: this machine's rows.
        agreement: features and names of all machines' rows.
        shards: assigns rows to processes.
        given: normalization read from files; the other columns are fitted.

    Raises:
        ConfigError: on every rank, if no machine has the feature of an override.
        DataError: on rank 0, if a feature cannot be fitted.
    """
    ids = {"state": agreement.state_ids, **({"action": agreement.action_ids} if train.parametric else {})}
    all_ids = {feature_id for column in ids.values() for feature_id in column}
    check_overrides(config.norm_params, all_ids, "the training data")
    require_features(config.data.embeddings, all_ids, "data.embeddings")
    wanted = [name for name in ids if name not in given]
    specs = dict(given)
    if wanted:
        specs |= _cached_or_fitted(config, train, agreement, shards, wanted, codes_of_tables(given.values()))
    return Normalization(state=with_history(specs["state"], config), action=specs.get("action"))


def with_history(state: NormalizationSpec, config: WorkflowConfig) -> NormalizationSpec:
    """Returns the normalization of states of data.history steps.

    Raises:
        ConfigError: a feature has the name that another has at an earlier step, or is one of ids; states are images.
    """
    history = config.data.history
    if history == 1:
        return state
    if state.image is not None:
        todo = "Stack frames as channels of the image: gymnasium.wrappers.FrameStackObservation, or the rows of the log"
        raise ConfigError(Problem("data.history", "1 with images", f"{history}", todo))
    stacked = replace(state, history=history)
    ids = list(map(str, stacked.feature_ids))
    if same := sorted({name for name in ids if ids.count(name) > 1}) if len(set(ids)) < len(ids) else []:
        expected = "1 with features that are named as those of earlier steps"
        raise ConfigError(Problem("data.history", expected, f"{history} and {join_names(same)}", "Rename the features"))
    if state.embeddings:
        expected = "1 with features of ids in the normalization of states"
        raise ConfigError(Problem("data.history", expected, f"{history}", "Leave these features out"))
    return stacked


def _cached_or_fitted(
    config: WorkflowConfig,
    train: TrainingCopy,
    agreement: Agreement,
    shards: Shards,
    wanted: list[str],
    tables: Mapping[str, tuple[float, ...]],
) -> dict[str, NormalizationSpec]:
    group = shards.group
    settings = config.norm_params.model_dump(mode="json", exclude={"output_dir", "cols_to_norm"})
    if config.data.embeddings:
        settings |= {"embeddings": config.data.model_dump(mode="json")["embeddings"], "tables": tables}
    file = file_beside(train, "fitted", [VERSION, agreement.content, wanted, config.seed, settings], ".json")
    text = ""
    if group.is_first:
        with suppress(OSError):
            text = file.read_text(encoding="utf-8")
    text = group.broadcast_text(text)
    if text:
        logger.info(f"normalization of {_name_columns(wanted)}: fitted to the same rows by an earlier run")
    else:
        fitted = _fit(config, train, shards, wanted, tables)
        if group.is_first and len(train):
            with suppress(OSError):
                write_whole(file, canonical(fitted))
        text = group.broadcast_text(json.dumps(fitted))
    return {name: parse_normalization(tree, where=name) for name, tree in json.loads(text).items()}


def _name_columns(columns: Iterable[str]) -> str:
    return " and ".join(_COLUMNS[name] for name in columns)


def codes_of_tables(specs: Iterable[NormalizationSpec]) -> dict[str, tuple[float, ...]]:
    """Returns {table of embeddings: codes of its ids}, none if they are hashed."""
    features = [feature for spec in specs for feature in spec.features]
    return {f.embedding.table: f.possible_values for f in features if f.embedding is not None}


def _fit(
    config: WorkflowConfig,
    train: TrainingCopy,
    shards: Shards,
    wanted: list[str],
    tables: Mapping[str, tuple[float, ...]],
) -> dict[str, Json]:
    """Returns the fitted normalization of columns as JSON on rank 0, and nothing on other ranks."""
    settings = config.norm_params
    embeddings = config.data.embeddings
    counted = counted_ids(embeddings)
    columns = {}
    for name in wanted:
        part = (
            summarize_copy(train, _COLUMNS[name], settings, config.seed, counted).to_bytes() if shards.is_first else b""
        )
        merge = Merge(settings.num_samples, settings.max_unique_enum_values)
        for data in shards.group.gather_bytes(part):
            if data:
                merge.add(ColumnSummary.from_bytes(data))
        columns[_COLUMNS[name]] = merge.summary()
    if not shards.group.is_first:
        return {}
    where = show_paths(config.training_data_path)
    sections = {id_of(name): section for name, section in embeddings.items()}
    fitted = fit_columns(columns, settings, where=where, embeddings=sections, tables=tables)
    logger.info(f"normalization of {_name_columns(wanted)}: fitted")
    for note in (note for column in fitted.values() for note in column.notes):
        logger.warning(note)
    return {name: normalization_json(fitted[_COLUMNS[name]].spec) for name in wanted}


def file_beside(copy: TrainingCopy, name: str, settings: object, suffix: str) -> Path:
    """Returns the file in a training copy's folder that keeps results for later runs with the same settings.

    Args:
        copy: the training copy that the results are computed from.
        name: beginning of the file's name.
        settings: everything else that the results depend on, as JSON.
        suffix: end of the file's name.
    """
    key = json.dumps(settings, sort_keys=True)
    return copy.folder / f"{name}_{hashlib.sha256(key.encode()).hexdigest()[:16]}{suffix}"


def write_fitted(config: WorkflowConfig, normalization: Normalization, given: NormalizationFiles) -> None:
    """Writes the columns that no file gives to norm_params.output_dir, or next to the model; rank 0 calls it."""
    key = "norm_params.output_dir" if config.norm_params.output_dir else "model_output_path"
    folder = Path(config.norm_params.output_dir or config.model_output_path).expanduser()
    for side, spec in normalization.sides.items():
        if given[side] is None and spec.image is None:
            file = folder / f"{_COLUMNS[side]}_norm.json"
            write_normalization(file, spec, key)
            logger.info(f"normalization of {_COLUMNS[side]}: written to {file}")
