"""Rows of an episode become transitions, in SQL that DuckDB and Spark both run.

    taken     date partitions, sample of episodes
    kept      no refused episode, one row per (mdp_id, sequence_number), no outlier episodes
    figures   what the episodes are like, from narrow columns
    led       each row beside those that follow it                 row t: LEAD 1 … LEAD n
    spanned   how many rows its transition spans                   step = n, or up to the episode's end
    result    what training reads

Row t is complete when it is known where it led: to the next row, to a true end, or, cut by a limit, to a state that the
row itself has. A transition spans complete rows only, and ends with the first that ends the episode.

The functions are Spark's; DuckDB gets those it lacks as macros. A window function stands in parentheses wherever
something follows it: Spark reads `x OVER w - y` as a name. Columns whose names a user chose are called extra0, extra1
and so on in SQL: first timeline.rewardColumns but reward and metrics, then timeline.extraFeatureColumns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from reagent_lite.config.timeline import TimelineConfig
from reagent_lite.data.rows.table import schema, type_of
from reagent_lite.data.timeline.engine import CheckedEvents

_ALL = 2**32
SAMPLE, EVAL, PLACE = 0, 1, 2
"""Which four bytes of md5(mdp_id) say whether an episode is taken, where it goes, and its place there."""
FIGURES = (
    "rows",
    "episodes",
    "one_row_episodes",
    "duplicate_rows",
    "gaps",
    "rows_after_an_end",
    "terminal_rows",
    "truncated_rows",
    "last_rows_without_an_end",
    "truncated_rows_without_next_state",
    "candidates_unknown_rows",
)
"""Names of what `Pairing.figures` counts, in the order of its columns."""
_SQL_TYPES = {"flag": "BOOLEAN", "integer": "BIGINT", "number": "DOUBLE", "text": "STRING"}
_TERMINAL, _TRUNCATED = "COALESCE(terminal, FALSE)", "COALESCE(truncated, FALSE)"


def hash32(number: int) -> str:
    """Returns SQL for the bytes 4·number to 4·number + 3 of md5(mdp_id) as an integer below 2^32; number 0 to 3."""
    return f"CAST(CONV(SUBSTR(MD5(TO_BINARY(mdp_id, 'utf-8')), {8 * number + 1}, 8), 16, 10) AS BIGINT)"


def literal(value: str | float) -> str:
    """Returns a text or a number as SQL; engines differ in how they escape quotes and backslashes."""
    if not isinstance(value, str):
        return f"CAST('{value!r}' AS DOUBLE)"
    pieces = re.split(r"(['\\])", value)
    parts = [f"CHR({ord(piece)})" if piece in ("'", "\\") else f"'{piece}'" for piece in pieces]
    return f"CONCAT({', '.join(parts)})"


def further_columns(config: TimelineConfig) -> tuple[str, ...]:
    """Returns the columns of the user's own that are carried along, in the order of their numbers in SQL."""
    return (*reward_columns(config), *config.timeline.extraFeatureColumns)


def reward_columns(config: TimelineConfig) -> tuple[str, ...]:
    """Returns the columns of the user's own that are summed up as the reward is."""
    return tuple(name for name in config.timeline.rewardColumns if name not in ("reward", "metrics"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """Writes the queries of one timeline.

    Attributes:
        config: what is made.
        array: name of the engine's function that makes a list.
        events: what reading them has found.
        metric_names: keys of all metrics, for spans of several rows.
    """

    config: TimelineConfig
    array: str
    events: CheckedEvents
    metric_names: tuple[str, ...] = ()

    def taken(self, relation: str) -> str:
        """Returns a query for the events of the dates and episodes that are asked for, further columns by type."""
        conditions = []
        # a row that cannot be placed is reported, not passed over
        for bound, than in ((self.config.timeline.startDs, ">="), (self.config.timeline.endDs, "<=")):
            if bound is not None:
                conditions.append(f"(ds IS NULL OR ds {than} {literal(bound)})")
        if self.config.query.tableSample < 100:
            limit = round(self.config.query.tableSample / 100 * _ALL)
            conditions.append(f"(mdp_id IS NULL OR {hash32(SAMPLE)} < {limit})")
        columns = schema(discrete=self._discrete, extra=()).names
        for at, name in enumerate(further_columns(self.config)):
            kinds = self.events.kinds.get(name, set())
            kind = "DOUBLE" if name in reward_columns(self.config) else _SQL_TYPES[type_of(kinds)]
            columns.append(f"TRY_CAST(extra{at} AS {kind}) AS extra{at}")
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        return f"SELECT {', '.join(columns)} FROM {relation}{where}"

    def figures(self, relation: str) -> str:
        """Returns a query for one row of FIGURES."""
        seen = (
            "SELECT (LAG(sequence_number) OVER w) AS before, (LEAD(sequence_number) OVER w) AS after, sequence_number, "
            f"{self._candidates_unknown} AS no_candidates, {_TERMINAL} AS is_terminal, {_TRUNCATED} AS is_truncated, "
            f"(next_state_features IS NOT NULL) AS has_own_next, "
            f"(LAG({_TERMINAL} OR {_TRUNCATED}) OVER w) AS after_end FROM {relation} "
            f"WINDOW w AS (PARTITION BY mdp_id ORDER BY sequence_number, source_file, source_line)"
        )
        counted = (
            "TRUE",
            "before IS NULL",
            "before IS NULL AND after IS NULL",
            "before = sequence_number",
            "sequence_number - before > 1",
            "after_end AND before < sequence_number",
            "is_terminal",
            "is_truncated",
            "after IS NULL AND NOT is_terminal AND NOT is_truncated",
            "is_truncated AND NOT has_own_next",
            "no_candidates",
        )
        sums = ", ".join(f"COALESCE(SUM(CASE WHEN {one} THEN 1 ELSE 0 END), 0)" for one in counted)
        return f"SELECT {sums} FROM ({seen}) seen"

    def result(self, relation: str, files: int) -> tuple[str, list[str]]:
        """Returns the query for the transitions, as Engine.write takes it for so many files, and its columns' names."""
        window = "WINDOW w AS (PARTITION BY mdp_id ORDER BY sequence_number)"
        led = f"SELECT {', '.join(self._led())} FROM {relation} {window}"
        spanned = (
            f"SELECT *, {self._step()} AS step, {hash32(PLACE)} AS place FROM ({led}) led WHERE {self._complete(0)}"
        )
        limit = self.config.timeline.timeWindowLimit
        conditions = "" if limit is None else f" WHERE time_since_first <= {limit}"
        columns = self._result_columns()
        # names of the user's own stay out of SQL; mdp_id and sequence_number, by which rows are ordered, are the first
        selected = [f"{expression} AS {alias}" for alias, _, expression in columns]
        selected += [f"{self._folder()} AS folder", f"CAST(FLOOR(place * {files} / {_ALL}) AS INT) AS part", "place"]
        query = f"SELECT {', '.join(selected)} FROM ({spanned}) spanned{conditions}"
        return query, [name for _, name, _ in columns]

    @property
    def _discrete(self) -> bool:
        return self.config.timeline.actionDiscrete

    @property
    def _steps(self) -> int:
        return self.config.timeline.steps

    @property
    def _candidates_unknown(self) -> str:
        """SQL: the row lists no candidates though an action was taken."""
        return "FALSE" if self._discrete else "((ARRAY_SIZE(possible_actions) = 0) AND (action IS NOT NULL))"

    def _led(self) -> list[str]:
        """Columns of each row; with suffix _k those of the row k after it, which of row 0 are its own."""
        unknown, choices = self._candidates_unknown, "possible_actions"
        if not self._discrete:  # where candidates are unknown, the action alone, beside which none could be taken
            choices = f"(CASE WHEN {unknown} THEN ARRAY_APPEND({choices}, action) ELSE {choices} END)"
        num_rewards = len(reward_columns(self.config))
        further = [f"extra{number}" for number in range(len(further_columns(self.config)))]
        after = {name: name for name in ("sequence_number", "state_features", "action", *further[num_rewards:])}
        after["possible_actions"] = choices
        own = {name: name for name in ("next_state_features", "possible_next_actions", "reward", "metrics")}
        own |= {"terminal": _TERMINAL, "truncated": _TRUNCATED} | {name: name for name in further[:num_rewards]}
        found = [
            "mdp_id",
            "ds",
            f"CASE WHEN {unknown} THEN 1 ELSE action_probability END AS action_probability",
            "ROW_NUMBER() OVER w AS sequence_number_ordinal",
            "sequence_number - (FIRST_VALUE(sequence_number) OVER w) AS time_since_first",
        ]
        found += [f"{expression} AS {name}_0" for name, expression in (after | own).items()]
        for k in range(1, self._steps + 1):
            there = after | own if k < self._steps else after
            found += [f"LEAD({expression}, {k}) OVER w AS {name}_{k}" for name, expression in there.items()]
        return found

    def _complete(self, k: int) -> str:
        """SQL: it is known where row t + k led."""
        cut = f"truncated_{k} AND next_state_features_{k} IS NOT NULL"
        goes_on = "TRUE" if self.config.timeline.addTerminalStateRow else f"sequence_number_{k + 1} IS NOT NULL"
        return f"(terminal_{k} OR ({cut}) OR ((NOT (terminal_{k} OR truncated_{k})) AND {goes_on}))"

    def _step(self) -> str:
        """SQL: rows that the transition spans."""
        counts, going = ["1"], "TRUE"
        for k in range(1, self._steps):
            going += f" AND (NOT (terminal_{k - 1} OR truncated_{k - 1})) AND (sequence_number_{k} IS NOT NULL)"
            going += f" AND {self._complete(k)}"
            counts.append(f"(CASE WHEN {going} THEN 1 ELSE 0 END)")
        return f"CAST({' + '.join(counts)} AS BIGINT)"

    def _at_end(self, expression: str) -> str:
        """SQL: the expression of the last row that the transition spans; of row t + k it has {k}, and {next} k + 1."""
        cases = [expression.format(k=k, next=k + 1, last=_last(k)) for k in range(self._steps)]
        if len(cases) == 1:
            return cases[0]
        return f"CASE step {' '.join(f'WHEN {k + 1} THEN {case}' for k, case in enumerate(cases))} END"

    def _result_columns(self) -> list[tuple[str, str, str]]:
        """Columns of the transitions: name in SQL, name in files, SQL."""
        timeline, rewards = self.config.timeline, reward_columns(self.config)
        # nobody knows when a limit cut the episode: one unit after its last row
        time_diff = "(CASE WHEN {last} THEN 0 WHEN truncated_{k} THEN sequence_number_{k} - sequence_number_0 + 1 "
        time_diff += "ELSE sequence_number_{next} - sequence_number_0 END)"
        found = {
            "mdp_id": "mdp_id",
            "sequence_number": "sequence_number_0",
            "sequence_number_ordinal": "CAST(sequence_number_ordinal AS BIGINT)",
            "time_since_first": "time_since_first",
            "time_diff": self._at_end(time_diff),
        }
        found |= {"step": "step"} if self._steps > 1 else {}
        found |= {"ds": "ds"} if "ds" in self.events.seen else {}
        found |= {"state_features": "state_features_0", "action": "action_0"}
        for name in timeline.rewardColumns:
            if name != "metrics":
                alias = f"extra{rewards.index(name)}" if name in rewards else name
                found[alias] = self._sum([f"{alias}_{k}" for k in range(self._steps)])
        found |= {"action_probability": "action_probability"} if "action_probability" in self.events.seen else {}
        found |= {"metrics": self._metrics()} if "metrics" in self.events.seen else {}
        found["next_state_features"] = self._after("state_features", "next_state_features_{k}")
        found["next_action"] = self._after("action")
        if timeline.includePossibleActions and "possible_actions" in self.events.seen:
            found["possible_actions"] = "possible_actions_0"
        if timeline.includePossibleActions and self.events.seen & {"possible_actions", "possible_next_actions"}:
            none = "SLICE(possible_actions_0, 1, 0)"
            found["possible_next_actions"] = self._after("possible_actions", "possible_next_actions_{k}", none)
        names = {f"extra{at}": name for at, name in enumerate(further_columns(self.config))}
        for alias in list(names)[len(rewards) :]:
            found |= {alias: f"{alias}_0", f"next_{alias}": self._after(alias)}
            names[f"next_{alias}"] = f"next_{names[alias]}"
        found |= {"terminal": self._at_end("{last}"), "truncated": self._at_end("truncated_{k}")}
        return [(alias, names.get(alias, alias), expression) for alias, expression in found.items()]

    def _after(self, name: str, cut: str = "NULL", at_end: str = "NULL") -> str:
        """SQL: what follows the transition in a column; at a true end `at_end`, where a limit cut it `cut`."""
        return self._at_end(
            f"(CASE WHEN {{last}} THEN {at_end} WHEN truncated_{{k}} THEN {cut} ELSE {name}_{{next}} END)"
        )

    def _sum(self, values: Sequence[str]) -> str:
        """SQL: Σ_k γ^k of values[k] over the rows that the transition spans; Sutton & Barto (2018), eq. 7.1."""
        if len(values) == 1:
            return values[0]
        parts = [f"COALESCE({values[0]}, 0)"]
        for k, value in enumerate(values[1:], start=1):
            discount = literal((self.config.timeline.gamma or 0.0) ** k)
            parts.append(f"(CASE WHEN step > {k} THEN {discount} * COALESCE({value}, 0) ELSE 0 END)")
        return " + ".join(parts)

    def _metrics(self) -> str:
        if self._steps == 1 or "metrics" not in self.config.timeline.rewardColumns or not self.metric_names:
            return "metrics_0"
        keys = [literal(name) for name in self.metric_names]
        sums = [self._sum([f"TRY_ELEMENT_AT(metrics_{k}, {key})" for k in range(self._steps)]) for key in keys]
        return f"MAP_FROM_ARRAYS({self.array}({', '.join(keys)}), {self.array}({', '.join(sums)}))"

    def _folder(self) -> str:
        if self.config.timeline.evalTableName is None:
            return "0"
        limit = round(self.config.timeline.eval_percent / 100 * _ALL)
        return f"CASE WHEN {hash32(EVAL)} < {limit} THEN 1 ELSE 0 END"


def _last(k: int) -> str:
    """SQL: row t + k is a true end."""
    return f"(terminal_{k} OR ((NOT (terminal_{k} OR truncated_{k})) AND sequence_number_{k + 1} IS NULL))"
