"""Settings that transitions depend on in addition to the events; the module does not import Arrow."""

from typing import Any

from reagent_lite.config.timeline_config import TimelineConfig
from reagent_lite.item_table import ItemTable

VERSION = 7
"""Version of the transformation; output of another version is made again."""


def pairing_settings(config: TimelineConfig) -> dict[str, Any]:
    """Returns the settings that a timeline's rows depend on, without the engine and the folders."""
    timeline = config.timeline.model_dump(mode="json")
    for key in ("inputTableName", "outputTableName"):
        del timeline[key]
    timeline["evalTableName"] = config.timeline.evalTableName is not None
    optional: dict[str, Any] = {"columns": config.columns} if config.columns else {}
    return {"version": VERSION, "timeline": timeline, "query": config.query.model_dump(mode="json"), **optional}


def items_setting(items: ItemTable | None) -> dict[str, Any]:
    """Returns the setting that stands for an item table, by its content; {} without a table."""
    if items is None:
        return {}
    return {"items": items.sha256} | ({"possible_items": "all"} if items.all_possible else {})
