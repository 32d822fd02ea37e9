"""Small logs of decisions, timelines made of them, what came out, and what a timeline is in plain Python."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from helpers.logs import Row, write_lines

from reagent_lite.config.loader import check
from reagent_lite.config.timeline_config import TimelineConfig
from reagent_lite.data.timeline.stage import TimelineOutcome, run_timeline


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
    return [
        event("good", 0, 0.0, terminal=False, truncated=False),
        event("good", 1, 1.0),
        *(
            event(f"e{number}", step, 0.0, **(change if step == 1 else {}))
            for number, (change, _, _) in enumerate(BROKEN)
            for step in range(3)
        ),
    ]


NAMES = ("left", "right", 'it\'s \\ "${x}"')


def random_events(
    *, parametric: bool, seed: int = 0, episodes: int = 40, repeated: tuple[int, ...] = (3, 11, 30)
) -> list[Row]:
    """Random episodes of 1 to 8 rows with everything that may occur in a sound log, shuffled."""
    rng = np.random.default_rng(seed)

    def features() -> Row:
        return {key: float(np.float32(rng.normal())) for key in ("0", "3", "-12") if key == "0" or rng.random() > 0.2}

    def choices() -> list[Any]:
        if parametric:
            return [{"7": float(number), **features()} for number in range(int(rng.integers(1, 4)))]
        return [NAMES[i] for i in sorted(rng.choice(3, int(rng.integers(1, 4)), replace=False).tolist())]

    rows: list[Row] = []
    for episode in range(episodes):
        at, length = int(rng.integers(0, 50)), int(rng.integers(1, 9))
        for step in range(length):
            possible = choices()
            rows.append({
                "ds": f"2026-01-{1 + episode % 5:02}", "mdp_id": f"e{episode}", "sequence_number": at,
                "state_features": features(), "action": possible[int(rng.integers(len(possible)))],
                "reward": float(np.float32(rng.normal())),
                "possible_actions": [] if parametric and len(rows) % 9 == 4 else possible,
                "action_probability": 0.5 if rng.random() > 0.1 else None,
                "metrics": {"clicks": float(rng.integers(0, 9)), **({"money": 0.25} if step % 2 else {})},
                "terminal": False, "truncated": False, "next_state_features": None, "possible_next_actions": None,
                "cost": 0.5 * step if step != 1 else None, "visits": int(rng.integers(0, 9)),
                "city": f"ü {episode % 3}", "new": bool(step % 2),
            })  # fmt: skip
            at += int(rng.integers(1, 4))
        rows[-1] |= {"terminal": episode % 3 == 0, "truncated": episode % 3 == 1}
        if episode % 6 == 1:
            rows[-1] |= {"next_state_features": {"0": 1.5}, "possible_next_actions": choices()}
    doubled = [{**rows[i], "reward": 100.0} for i in repeated]
    return [(rows + doubled)[i] for i in rng.permutation(len(rows) + len(doubled))]


def timeline_config(folder: Path, source: Path, top: Row | None = None, **section: Any) -> TimelineConfig:
    timeline = {"inputTableName": str(source), "outputTableName": str(folder / "train"), **section}
    return check(TimelineConfig, json.loads(json.dumps({"timeline": timeline, **(top or {})})))


def make(folder: Path, rows: Sequence[Row] | Path, top: Row | None = None,
         **section: Any) -> TimelineOutcome:  # fmt: skip
    source = rows if isinstance(rows, Path) else write_lines(folder / "events.jsonl", rows)
    return run_timeline(timeline_config(folder, source, top, **section))


def read(folder: Path) -> list[Row]:
    """The transitions of a folder in the order of mdp_id and sequence_number; maps as dicts."""
    rows = [
        row
        for file in folder.glob("*.parquet")
        for row in pq.read_table(file, partitioning=None).to_pylist(maps_as_pydicts="strict")
    ]
    return sorted(rows, key=lambda row: (row["mdp_id"], row["sequence_number"]))


def report(folder: Path) -> Row:
    return json.loads((folder / "manifest.json").read_text())["report"]


def transitions(events: list[Row], *, add_terminal_state_row: bool = False) -> list[Row]:
    """The transitions of one step, ordered by mdp_id and sequence_number, from the documented rules alone: no SQL.

    The last row of an episode is kept where its own log says `terminal` (nothing follows), or `truncated` with the
    state that was seen when the limit cut it; one that says nothing is dropped, or with addTerminalStateRow a true end.
    """
    made = []
    order = sorted(events, key=lambda row: (row["mdp_id"].encode(), int(row["sequence_number"])))
    for row, after in zip(order, [*order[1:], {}], strict=True):
        is_last = after.get("mdp_id") != row["mdp_id"]
        beyond = {
            "state_features": row.get("next_state_features"),
            "possible_actions": row.get("possible_next_actions"),
        }
        if row.get("truncated"):
            if row.get("next_state_features") is not None:  # or nobody knows where the limit cut it
                made.append(_transition(row, beyond, 1))
        elif row.get("terminal") or (is_last and add_terminal_state_row):
            made.append(_transition(row, None, 0))
        elif not is_last:
            made.append(_transition(row, after, after["sequence_number"] - row["sequence_number"]))
    return made


def _transition(row: Row, after: Row | None, time_diff: int) -> Row:
    following = after or {}
    return {
        **{name: row.get(name) for name in ("mdp_id", "sequence_number", "state_features", "action", "reward")},
        **{name: row.get(name) for name in ("action_probability", "possible_actions", "truncated", "metrics")},
        "next_state_features": following.get("state_features"),
        "next_action": following.get("action"),
        "possible_next_actions": following.get("possible_actions") or None,  # an empty list is unknown
        "time_diff": time_diff,
        "terminal": after is None,
    }
