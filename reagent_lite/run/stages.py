"""Events of a run: how the training copy pairs them, and the transitions that the config has written to a folder.

    training_data_path ─┬───────────────────────────────────────────────────────────────────────► this machine's rows
                        └─ events, with timeline.outputTableName or evalTableName ─► transitions ─► this machine's rows

Without these folders, the training copy is made directly from the events, by the same rules. With data.layout "split"
each machine keeps the rows of its own episodes while it makes the copy.
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from reagent_lite.config import DqnConfig, WorkflowConfig
from reagent_lite.config.column_names import ONLY_IF_NAMED
from reagent_lite.config.embedding_config import id_features
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.config.paths import DataPath, show_paths
from reagent_lite.config.timeline_config import QuerySection, TimelineConfig, TimelineSection
from reagent_lite.data.copy.location import parents_of
from reagent_lite.data.logs import Log
from reagent_lite.data.partition import Partition
from reagent_lite.data.rows.item_files import given_items
from reagent_lite.disk_room import is_writable
from reagent_lite.distributed.group import Group
from reagent_lite.errors import ConfigError, Problem
from reagent_lite.item_table import ItemTable

Paths = dict[str, DataPath | None]
"""training_data_path and eval_data_path."""


def partition_of(config: WorkflowConfig, node: int, num_nodes: int) -> Partition | None:
    """Returns the episodes that a machine keeps of the rows at a path; None for all of them."""
    if config.data.layout != "split" or num_nodes == 1:
        return None
    return Partition(num_nodes=num_nodes, node=node, seed=config.seed)


def items_of(config: WorkflowConfig) -> ItemTable | None:
    """Returns the item table of data.items; None without one. Raises the errors of `read_items`."""
    data = config.data
    return given_items(data.items, data.item_id, data.possible_items, id_features(data.embeddings))


def log_of(config: WorkflowConfig, path: DataPath, items: ItemTable | None, node: int, num_nodes: int) -> Log:
    """Returns the log at a path of the config, as a machine reads it for its training copy."""
    return Log(
        path,
        actions=config.actions or None,
        columns=config.data.columns,
        items=items,
        id_features=id_features(config.data.embeddings),
        image=None if config.data.image is None else config.data.image.image,
        timeline=pairing_of(config, path),
        directory=config.data.training_copy_dir,
        partition=partition_of(config, node, num_nodes),
        same_episodes=config.data.same_episodes,
    )


def logs_of_run(config: WorkflowConfig, group: Group, items: ItemTable | None) -> tuple[Log, Log | None]:
    """Returns the training and the eval data as this machine reads them, as events or as transitions made of them.

    The first process of each machine makes the transitions that the config asks for, and the others wait. Those of an
    earlier run with the same input and settings are used again.

    Raises:
        ConfigError: the config has keys of a timeline, but the data are not events.
        DataError: the events or the folders cannot be used.
    """
    section = config.timeline
    paths: Paths = {"training_data_path": config.training_data_path, "eval_data_path": config.eval_data_path}
    made = section is not None and bool(section.outputTableName or section.evalTableName is not None)
    if made:
        if group.is_first_on_node:
            paths = _transitions(config, group, paths)
        texts = group.gather_text(json.dumps([group.is_first_on_node, group.node, paths]))
        paths = next(paths for first, node, paths in map(json.loads, texts) if first and node == group.node)

    def read(path: DataPath, timeline: TimelineConfig | None) -> Log:
        log = log_of(config, path, items, group.node, group.num_nodes)
        return replace(log, timeline=None if made else timeline)

    training = read(paths["training_data_path"] or "", pairing_of(config, config.training_data_path))
    if training.timeline is not None and group.is_first_on_node and not training.holds_events:
        require_no_timeline(config, training)
    held_out = paths["eval_data_path"]
    return training, None if held_out is None else read(held_out, pairing_of(config, held_out))


def pairing_of(config: WorkflowConfig, path: DataPath | None) -> TimelineConfig | None:
    """Returns the settings by which the training copy pairs events at a path of the config; None means the defaults."""
    first = path == config.training_data_path
    section = config.timeline or TimelineSection()
    sample = config.query.tableSample if first else 100.0
    if config.timeline is None and sample == 100:
        return None
    changes = {"inputTableName": "", "gamma": config.rl.gamma if section.steps > 1 else None}
    return TimelineConfig(timeline=section.model_copy(update=changes), query=QuerySection(tableSample=sample))


def _transitions(config: WorkflowConfig, group: Group, paths: Paths) -> Paths:
    """Returns the paths of transitions: the given ones, or those of a timeline if the data are events."""
    made_paths = dict(paths)
    for key, path in paths.items():
        if path is None:
            continue
        first = key == "training_data_path"
        source = path
        if first and config.timeline is not None and path == config.timeline.outputTableName:
            source = config.timeline.inputTableName or path
        log = Log(source, columns=config.data.columns)
        if not log.holds_events:
            if first:
                require_no_timeline(config, log)
            continue
        from reagent_lite.data.timeline.stage import run_timeline

        made = run_timeline(_timeline(config, group, source, first=first))
        made_paths[key] = made.train
        if first and made.eval is not None:
            made_paths["eval_data_path"] = made.eval
    return made_paths


def require_no_timeline(config: WorkflowConfig | EvaluateConfig, log: Log) -> None:
    """Checks that the config has no keys of a timeline, as the rows of the log are transitions already.

    timeline.on_refused alone is allowed: it also applies to single decisions, which the training copy checks.

    Raises:
        ConfigError: the config has such keys; the error names the section.
    """
    pairs = config.timeline is not None and bool({*config.timeline.changed} - {"on_refused"})
    for key, given in (("timeline", pairs), ("query", bool(config.query.changed))):
        if given:
            raise ConfigError(
                Problem(
                    key,
                    f"absent, as {log.name} holds transitions",
                    "given",
                    "A timeline is made from events: rows without the columns of a next state",
                )
            )


def _timeline(config: WorkflowConfig, group: Group, path: DataPath, *, first: bool) -> TimelineConfig:
    """Returns the config of the timeline for the events at a path."""
    section = config.timeline or TimelineSection()
    output = section.outputTableName if first else ""
    further = (name for name in ONLY_IF_NAMED if name in config.data.columns)
    changes = {
        "inputTableName": path,
        "outputTableName": output
        or str(_stage_folder(config, group, f"timeline of {show_paths(path)}", path) / "transitions"),
        "evalTableName": section.evalTableName if first else None,
        "actionDiscrete": isinstance(config, DqnConfig),
        # columns of units and weights, which are read again from the transitions
        "extraFeatureColumns": tuple(dict.fromkeys((*section.extraFeatureColumns, *further))),
        "gamma": config.rl.gamma if section.steps > 1 else None,
    }
    if section.evalTableName is None or not first:
        changes["eval_percent"] = TimelineSection().eval_percent
    query = QuerySection(tableSample=config.query.tableSample if first else 100.0, actions=config.actions)
    return TimelineConfig(
        timeline=section.model_copy(update=changes),
        query=query,
        columns=config.data.columns,
        same_episodes=config.data.same_episodes,
        items=config.data.items,
        item_id=config.data.item_id,
        possible_items=config.data.possible_items,
        embeddings=config.data.embeddings,
    )


def _stage_folder(config: WorkflowConfig, group: Group, name: str, near: DataPath | None) -> Path:
    """Returns the folder for a stage's output; its name has the machine's number, as machines may share folders."""
    gamma = config.rl.gamma if config.timeline and config.timeline.steps > 1 else None
    settings = config.model_dump_json(include={"timeline", "query", "actions"})
    machine = f"-node-{group.node}" if group.num_nodes > 1 else ""
    inputs = f"{name} {settings} {gamma}"
    parents = parents_of(near, config.data.training_copy_dir)
    parent = next((parent for parent in parents if is_writable(parent)), parents[0])
    return parent / f"stage-{hashlib.sha256(inputs.encode()).hexdigest()[:16]}{machine}"
