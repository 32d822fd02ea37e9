"""Small logs of decisions, timelines made of them, and what came out."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from oracles.logs import write_lines

from reagent_lite.config.loader import check
from reagent_lite.config.timeline import TimelineConfig
from reagent_lite.data.timeline.stage import TimelineOutcome, run_timeline


def event(mdp_id: str, number: int, state: float, reward: float = 0.0, /, **changes: Any) -> dict[str, Any]:
    """A decision for "l" of "l" and "r", in a state of one feature; a key given as None is left out."""
    row = {
        "mdp_id": mdp_id, "sequence_number": number, "state_features": {"0": state}, "action": "l", "reward": reward,
        "possible_actions": ["l", "r"], "action_probability": 0.5, **changes,
    }  # fmt: skip
    return {key: value for key, value in row.items() if value is not None}


def timeline_config(folder: Path, source: Path, top: dict[str, Any] | None = None, **section: Any) -> TimelineConfig:
    tree = {"timeline": {"inputTableName": str(source), "outputTableName": str(folder / "train"), **section},
            **(top or {})}  # fmt: skip
    return check(TimelineConfig, json.loads(json.dumps(tree)))


def make(folder: Path, rows: Sequence[dict[str, Any]] | Path, top: dict[str, Any] | None = None,
         **section: Any) -> TimelineOutcome:  # fmt: skip
    source = rows if isinstance(rows, Path) else write_lines(folder / "events.jsonl", rows)
    return run_timeline(timeline_config(folder, source, top, **section))


def read(folder: Path) -> list[dict[str, Any]]:
    """The transitions of a folder in the order of mdp_id and sequence_number; maps as dicts."""
    rows = [
        row for file in sorted(folder.glob("*.parquet")) for row in pq.read_table(file, partitioning=None).to_pylist()
    ]
    for row in rows:
        for key in ("state_features", "next_state_features", "metrics", "action", "next_action"):
            if isinstance(row.get(key), list):
                row[key] = dict(row[key])
        for key in ("possible_actions", "possible_next_actions"):
            if row.get(key):
                row[key] = [dict(one) if isinstance(one, list) else one for one in row[key]]
    return sorted(rows, key=lambda row: (row["mdp_id"], row["sequence_number"]))


def report(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return document["report"]
