"""Small logs of decisions, timelines made of them, what came out, and what a timeline is in plain Python."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from oracles.logs import write_lines

from reagent_lite.config.loader import check
from reagent_lite.config.timeline import TimelineConfig
from reagent_lite.data.timeline.stage import TimelineOutcome, run_timeline

Row = dict[str, Any]


def event(mdp_id: str, number: int, state: float, reward: float = 0.0, /, **changes: Any) -> dict[str, Any]:
    """A decision for "l" of "l" and "r", in a state of one feature; a key given as None is left out."""
    row = {
        "mdp_id": mdp_id, "sequence_number": number, "state_features": {"0": state}, "action": "l", "reward": reward,
        "possible_actions": ["l", "r"], "action_probability": 0.5, **changes,
    }  # fmt: skip
    return {key: value for key, value in row.items() if value is not None}


BROKEN: list[tuple[Row, str, str]] = [
    ({"mdp_id": None}, "expected an mdp_id, got null", "mdp_id_absent"),
    ({"sequence_number": None}, "expected a sequence_number, got null", "sequence_number_absent"),
    ({"sequence_number": 1.5},
     "expected an integer or a time such as 2026-01-31T10:00:00 in sequence_number, got 1.5", "unreadable"),
    ({"state_features": None}, "expected state_features, got null", "state_features_absent"),
    ({"state_features": {}}, "expected at least one feature in state_features, got none", "state_features_empty"),
    ({"state_features": {"0": 1e39}}, "expected finite numbers in state_features, got inf for '0'",
     "state_features_infinite"),
    ({"reward": None}, "expected a finite number in reward, got null", "reward_not_finite"),
    ({"reward": "x"}, "expected a number in reward, got \"x\"", "unreadable"),
    ({"action_probability": 0.0}, "expected a propensity above 0 and at most 1, got 0.0", "propensity_outside"),
    ({"action": "x"}, 'expected one of the actions l, r, or an index below 2, got "x"', "action_unknown"),
    ({"action": 3}, "expected one of the actions l, r, or an index below 2, got 3", "action_unknown"),
    ({"action": {"0": 1.0}}, "expected one of the actions l, r, or an index below 2, got", "action_unknown"),
    ({"possible_actions": ["r"]}, "expected an action among possible_actions, got", "action_not_possible"),
    ({"possible_actions": [1, 0]}, "expected a list of action names in possible_actions, got", "unreadable"),
    ({"terminal": True, "truncated": True}, "expected terminal or truncated, not both, got both",
     "terminal_and_truncated"),
]  # fmt: skip
"""What makes a row a fault, its words, and the name of its rule."""


def broken_events() -> list[Row]:
    """Episodes of three rows: a good one, and for each fault one with it in the middle row."""
    rows = [event("good", 0, 0.0, terminal=False, truncated=False), event("good", 1, 1.0)]
    for number, (change, _, _) in enumerate(BROKEN):
        rows += [event(f"e{number}", 0, 0.0), event(f"e{number}", 1, 0.0, **change), event(f"e{number}", 2, 0.0)]
    return rows


def timeline_config(folder: Path, source: Path, top: Row | None = None, **section: Any) -> TimelineConfig:
    tree = {"timeline": {"inputTableName": str(source), "outputTableName": str(folder / "train"), **section},
            **(top or {})}  # fmt: skip
    return check(TimelineConfig, json.loads(json.dumps(tree)))


def make(folder: Path, rows: Sequence[Row] | Path, top: Row | None = None,
         **section: Any) -> TimelineOutcome:  # fmt: skip
    source = rows if isinstance(rows, Path) else write_lines(folder / "events.jsonl", rows)
    return run_timeline(timeline_config(folder, source, top, **section))


def read(folder: Path) -> list[Row]:
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
                row[key] = [dict(entry) if isinstance(entry, list) else entry for entry in row[key]]
    return sorted(rows, key=lambda row: (row["mdp_id"], row["sequence_number"]))


def report(folder: Path) -> Row:
    document: Row = json.loads((folder / "manifest.json").read_text())
    return document["report"]


def transitions(events: list[Row], *, add_terminal_state_row: bool = False) -> list[Row]:
    """The transitions of one step, ordered by mdp_id and sequence_number, from the contract's words alone: no SQL.

    The last row of an episode is kept where its own log says `terminal` (nothing follows), or `truncated` with the
    state that was seen when the limit cut it; one that says nothing is dropped, or with addTerminalStateRow a true end.
    """
    episodes: dict[str, list[Row]] = defaultdict(list)
    for event in events:
        episodes[event["mdp_id"]].append(event)
    made = []
    for name in sorted(episodes, key=lambda text: text.encode()):
        rows = sorted(episodes[name], key=lambda row: int(row["sequence_number"]))
        for row, after in zip(rows, [*rows[1:], None], strict=True):
            beyond: Row | None = {"state_features": row.get("next_state_features"),
                                  "possible_actions": row.get("possible_next_actions")}  # fmt: skip
            if row.get("truncated"):
                if row.get("next_state_features") is not None:  # or nobody knows where the limit cut it
                    made.append(_transition(row, beyond, 1))
            elif row.get("terminal") or (after is None and add_terminal_state_row):
                made.append(_transition(row, None, 0))
            elif after is not None:
                made.append(_transition(row, after, after["sequence_number"] - row["sequence_number"]))
    return made


def _transition(row: Row, after: Row | None, time_diff: int) -> Row:
    following = after or {}
    return {
        **{name: row.get(name) for name in ("mdp_id", "sequence_number", "state_features", "action", "reward")},
        **{name: row.get(name) for name in ("action_probability", "possible_actions", "truncated")},
        "next_state_features": following.get("state_features"),
        "next_action": following.get("action"),
        "possible_next_actions": following.get("possible_actions"),
        "time_diff": time_diff,
        "terminal": after is None,
    }
