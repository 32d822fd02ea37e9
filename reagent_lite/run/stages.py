"""Events of a run: how the training copy pairs them, and the transitions that the config has written to a folder.

    training_data_path ─┬───────────────────────────────────────────────────────────────────────► this machine's rows
                        └─ events, with timeline.outputTableName or evalTableName ─► transitions ─► this machine's rows

Without these folders, the training copy is made directly from the events, by the same rules. With data.layout "split"
each machine keeps the rows of its own episodes while it makes the copy.
"""

import hashlib
import json
from pathlib import Path

from reagent_lite.config import DqnConfig, WorkflowConfig
from reagent_lite.config.column_names import ONLY_IF_NAMED
from reagent_lite.config.evaluate_config import EvaluateConfig
from reagent_lite.config.paths import DataPath, show_paths
from reagent_lite.config.timeline_config import QuerySection, TimelineConfig, TimelineSection
from reagent_lite.data.copy.first_look import holds_events
from reagent_lite.data.copy.location import parents_of
from reagent_lite.data.partition import Partition
from reagent_lite.disk_room import is_writable
from reagent_lite.distributed.group import Group
from reagent_lite.errors import ConfigError, Problem

Paths = dict[str, DataPath | None]
"""training_data_path and eval_data_path."""


def partition_of(config: WorkflowConfig, node: int, num_nodes: int) -> Partition | None:
    """Returns the episodes that a machine keeps of the rows at a path; None for all of them."""
    if config.data.layout != "split" or num_nodes == 1:
        return None
    return Partition(num_nodes=num_nodes, node=node, seed=config.seed)


def run_stages(config: WorkflowConfig, group: Group) -> WorkflowConfig:
    """Returns the config with the paths of this machine's rows; if a stage was performed, without a timeline's keys.

    The first process of each machine does the work and the others wait. Transitions of an earlier run with the same
    input and settings are used again.

    Raises:
        ConfigError: the config has keys of a timeline, but the data are not events.
        DataError: the events or the folders cannot be used.
    """
    section = config.timeline
    if section is None or not (section.outputTableName or section.evalTableName is not None):
        has_settings = pairing_of(config, config.training_data_path) is not None
        if has_settings and group.is_first_on_node and not holds_events(config.training_data_path, config.data.columns):
            require_no_timeline(config, config.training_data_path)
        return config
    paths: Paths = {"training_data_path": config.training_data_path, "eval_data_path": config.eval_data_path}
    if group.is_first_on_node:
        paths = _transitions(config, group, paths)
    texts = group.gather_text(json.dumps([group.is_first_on_node, group.node, paths]))
    paths_here = next(paths for first, node, paths in map(json.loads, texts) if first and node == group.node)
    lists = {key: tuple(path) if isinstance(path, list) else path for key, path in paths_here.items()}
    return config.model_copy(update={**lists, "timeline": None, "query": QuerySection()})


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
        if not holds_events(source, config.data.columns):
            if first:
                require_no_timeline(config, path)
            continue
        from reagent_lite.data.timeline.stage import run_timeline

        made = run_timeline(_timeline(config, group, source, first=first))
        made_paths[key] = made.train
        if first and made.eval is not None:
            made_paths["eval_data_path"] = made.eval
    return made_paths


def require_no_timeline(config: WorkflowConfig | EvaluateConfig, path: DataPath) -> None:
    """Checks that the config has no keys of a timeline, as the rows at the path are transitions already.

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
                    f"absent, as {show_paths(path)} holds transitions",
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
