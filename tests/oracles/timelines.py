"""What a timeline is, from the contract's words alone: plain Python over lists of events, no SQL.

Partition by mdp_id, order by sequence_number; each row with what the following row holds. The last row of an episode is
kept where its own log says `terminal` (nothing follows), or `truncated` with the state that was seen when the limit cut
it; one that says nothing is dropped, or with addTerminalStateRow a true end.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Transition:
    """One decision and where it led.

    Attributes:
        state, next_state: {feature id: value}; next_state is None at a true end.
        action: taken, as logged; next_action is None where none is known.
        possible, next_possible: choices as logged; None where none are logged.
    """

    mdp_id: str
    sequence_number: int
    state: dict[int, float]
    action: Any
    reward: float
    propensity: float | None
    possible: list[Any] | None
    next_state: dict[int, float] | None
    next_action: Any
    next_possible: list[Any] | None
    time_diff: int
    terminal: bool
    truncated: bool


def transitions(events: list[Row], *, add_terminal_state_row: bool = False) -> list[Transition]:
    """Returns the transitions of one step, ordered by mdp_id and sequence_number."""
    episodes: dict[str, list[Row]] = defaultdict(list)
    for event in events:
        episodes[event["mdp_id"]].append(event)
    found = []
    for name in sorted(episodes, key=lambda text: text.encode()):
        rows = sorted(episodes[name], key=lambda row: int(row["sequence_number"]))
        followers: list[Row | None] = [*rows[1:], None]
        for row, after in zip(rows, followers, strict=True):
            one = _transition(row, after, add_terminal_state_row)
            if one is not None:
                found.append(one)
    return found


def _transition(row: Row, after: Row | None, add_terminal_state_row: bool) -> Transition | None:
    terminal, truncated = bool(row.get("terminal")), bool(row.get("truncated"))
    if truncated:
        if row.get("next_state_features") is None:
            return None  # nobody knows where the limit cut it
        beyond = {"state_features": row["next_state_features"], "action": None,
                  "possible_actions": row.get("possible_next_actions")}  # fmt: skip
        return _made(row, beyond, 1, truncated=True)
    if terminal:
        return _made(row, None, 0, truncated=False)
    if after is None:
        return _made(row, None, 0, truncated=False) if add_terminal_state_row else None
    return _made(row, after, int(after["sequence_number"]) - int(row["sequence_number"]), truncated=False)


def _made(row: Row, after: Row | None, time_diff: int, *, truncated: bool) -> Transition:
    return Transition(
        mdp_id=row["mdp_id"],
        sequence_number=row["sequence_number"],
        state=features(row["state_features"]),
        action=row["action"],
        reward=row["reward"],
        propensity=row.get("action_probability"),
        possible=row.get("possible_actions"),
        next_state=None if after is None else features(after["state_features"]),
        next_action=None if after is None else after["action"],
        next_possible=None if after is None else after.get("possible_actions"),
        time_diff=time_diff,
        terminal=after is None,
        truncated=truncated,
    )


def features(logged: Row) -> dict[int, float]:
    """Returns a feature map with integer ids, without those that are null."""
    return {int(key): float(value) for key, value in logged.items() if value is not None}
