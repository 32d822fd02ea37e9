"""What a timeline is, from the contract's words alone: plain Python over lists of events, no SQL.

Partition by mdp_id, order by sequence_number; each row with what the following row holds. The last row of an episode is
kept where its own log says `terminal` (nothing follows), or `truncated` with the state that was seen when the limit cut
it; one that says nothing is dropped, or with addTerminalStateRow a true end.
"""

from collections import defaultdict
from typing import Any

Row = dict[str, Any]


def transitions(events: list[Row], *, add_terminal_state_row: bool = False) -> list[Row]:
    """Returns the transitions of one step, ordered by mdp_id and sequence_number, as a log of transitions has them."""
    episodes: dict[str, list[Row]] = defaultdict(list)
    for event in events:
        episodes[event["mdp_id"]].append(event)
    found = []
    for name in sorted(episodes, key=lambda text: text.encode()):
        rows = sorted(episodes[name], key=lambda row: int(row["sequence_number"]))
        for row, after in zip(rows, [*rows[1:], None], strict=True):
            beyond: Row | None = {"state_features": row.get("next_state_features"),
                                  "possible_actions": row.get("possible_next_actions")}  # fmt: skip
            if row.get("truncated"):
                if row.get("next_state_features") is not None:  # or nobody knows where the limit cut it
                    found.append(_transition(row, beyond, 1))
            elif row.get("terminal") or (after is None and add_terminal_state_row):
                found.append(_transition(row, None, 0))
            elif after is not None:
                found.append(_transition(row, after, after["sequence_number"] - row["sequence_number"]))
    return found


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
