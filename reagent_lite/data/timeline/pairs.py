"""Rows of an episode become transitions, in the SQL that DuckDB and Spark both run.

    taken     date partitions, sample of episodes
    kept      no row with a fault, one row per (mdp_id, sequence_number), no outlier episodes
    figures   what the episodes are like, from narrow columns
    led       each row beside those that follow it                 row t: LEAD 1 … LEAD n
    spanned   how many rows its transition spans                   step = n, or up to the episode's end
    result    what training reads

Row t is complete when it is known where it led: to the next row, to a true end, or, cut by a limit, to a state that the
row itself has. A transition spans complete rows only, and ends with the first that ends the episode.
Spark reads `x OVER w - y` as a name: a window function stands in parentheses wherever something follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reagent_lite.config.timeline import QuerySection, TimelineSection
from reagent_lite.data.rows.table import schema
from reagent_lite.data.timeline.engine import Dialect, EventColumns

_ALL = float(2**32)
SAMPLE, EVAL, PLACE = 0, 1, 2
"""Which four bytes of md5(mdp_id) say whether an episode is taken, where it goes, and its place there."""
_EPISODE = "WINDOW w AS (PARTITION BY mdp_id ORDER BY sequence_number)"
FIGURES = ("rows", "episodes", "one_row_episodes", "duplicate_rows", "gaps", "rows_after_an_end", "terminal_rows",
           "truncated_rows", "last_rows_without_an_end", "truncated_rows_without_next_state",
           "candidates_unknown_rows")  # fmt: skip
"""Names of what `Pairing.figures` counts, in the order of its columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """Writes the queries of one timeline.

    Attributes:
        dialect: of the engine.
        columns: of the events.
        timeline, query: sections of the config.
        metric_names: keys of all metrics, for spans of several rows.
    """

    dialect: Dialect
    columns: EventColumns
    timeline: TimelineSection
    query: QuerySection
    metric_names: tuple[str, ...] = ()

    def taken(self, relation: str) -> str:
        """Returns a query for the events of the date partitions and episodes that are asked for."""
        conditions = []
        # a row without a date is reported, not passed over
        for bound, than in ((self.timeline.startDs, ">="), (self.timeline.endDs, "<=")):
            if bound is not None:
                conditions.append(f"(ds IS NULL OR ds {than} {self.dialect.literal(bound)})")
        if self.query.tableSample < 100:
            limit = round(self.query.tableSample / 100 * _ALL)
            # a row without mdp_id is reported, not sampled
            conditions.append(f"(mdp_id IS NULL OR {self.dialect.hash32('mdp_id', SAMPLE)} < {limit})")
        names = schema(discrete=self.columns.discrete, extra=self.columns.extra).names
        columns = [self.dialect.quote(name) for name in names]
        return f"SELECT {', '.join(columns)} FROM {relation}" + (
            f" WHERE {' AND '.join(conditions)}" if conditions else ""
        )

    def without_faults(self, relation: str, *, any_faults: bool) -> str:
        """Returns a query for the rows of the episodes of which no row has a fault."""
        if not any_faults:
            return f"SELECT * FROM {relation}"
        broken = f"SELECT mdp_id FROM {relation} WHERE fault IS NOT NULL AND mdp_id IS NOT NULL"
        return f"SELECT * FROM {relation} WHERE mdp_id IS NOT NULL AND mdp_id NOT IN ({broken})"

    def unique(self, relation: str) -> str:
        """Returns a query for one row per (mdp_id, sequence_number): the first by file and line."""
        numbered = (
            f"SELECT *, ROW_NUMBER() OVER (PARTITION BY mdp_id, sequence_number ORDER BY {self.dialect.in_doubt()}) "
            f"AS seen FROM {relation}"
        )
        return f"SELECT * FROM ({numbered}) numbered WHERE seen = 1"

    def duplicates(self, relation: str, most: int) -> str:
        """Returns a query for (source_file, source_line) of the first rows that `unique` leaves out."""
        numbered = (
            "SELECT source_file, source_line, ROW_NUMBER() OVER (PARTITION BY mdp_id, sequence_number "
            f"ORDER BY {self.dialect.in_doubt()}) AS seen FROM {relation}"
        )
        where = "WHERE seen > 1 ORDER BY source_file, source_line"
        return f"SELECT source_file, source_line FROM ({numbered}) numbered {where} LIMIT {most}"

    def longest(self, relation: str) -> str:
        """Returns a query for the length, in rows, that episodes may have."""
        share = self.timeline.outlierEpisodeLengthPercentile
        kind = "PERCENTILE_CONT" if self.timeline.percentileFunction == "percentile" else "PERCENTILE_DISC"
        lengths = f"SELECT COUNT(*) AS length FROM {relation} GROUP BY mdp_id"
        return f"SELECT {kind}({share!r}) WITHIN GROUP (ORDER BY length) FROM ({lengths}) lengths"

    def longer(self, relation: str, longest: float) -> str:
        """Returns a query for (episodes, rows) of the episodes that are longer."""
        lengths = f"SELECT COUNT(*) AS length FROM {relation} GROUP BY mdp_id HAVING COUNT(*) > {longest!r}"
        return f"SELECT COUNT(*), COALESCE(SUM(length), 0) FROM ({lengths}) lengths"

    def not_longer(self, relation: str, longest: float) -> str:
        """Returns a query for the rows of the other episodes."""
        short = f"SELECT mdp_id FROM {relation} GROUP BY mdp_id HAVING COUNT(*) <= {longest!r}"
        return f"SELECT * FROM {relation} WHERE mdp_id IN ({short})"

    def figures(self, relation: str) -> str:
        """Returns a query for one row of FIGURES."""
        own_next = "next_state_features IS NOT NULL" if self._has("next_state_features") else "FALSE"
        seen = (
            "SELECT (LAG(sequence_number) OVER w) AS before, (LEAD(sequence_number) OVER w) AS after, sequence_number, "
            f"{self._candidates_unknown} AS no_candidates, "
            f"{self._terminal} AS is_terminal, {self._truncated} AS is_truncated, ({own_next}) AS has_own_next, "
            f"(LAG({self._terminal} OR {self._truncated}) OVER w) AS after_end FROM {relation} "
            f"WINDOW w AS (PARTITION BY mdp_id ORDER BY sequence_number, {self.dialect.in_doubt()})"
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

    def result(self, relation: str) -> str:
        """Returns the query for the transitions, with the columns `folder` and `place` of Engine.write."""
        led = f"SELECT {', '.join(self._led())} FROM {relation} {_EPISODE}"
        spanned = f"SELECT *, {self._step()} AS step FROM ({led}) led WHERE {self._complete(0)}"
        conditions = ""
        if self.timeline.timeWindowLimit is not None:
            conditions = f" WHERE time_since_first <= {self.timeline.timeWindowLimit}"
        columns = [f"{expression} AS {self.dialect.quote(name)}" for name, expression in self._result_columns()]
        columns += [f"{self._folder()} AS folder", f"{self.dialect.hash32('mdp_id', PLACE)} AS place"]
        return f"SELECT {', '.join(columns)} FROM ({spanned}) spanned{conditions}"

    def _has(self, name: str) -> bool:
        return name in self.columns.optional

    @property
    def _terminal(self) -> str:
        return "COALESCE(terminal, FALSE)" if self._has("terminal") else "FALSE"

    @property
    def _truncated(self) -> str:
        return "COALESCE(truncated, FALSE)" if self._has("truncated") else "FALSE"

    @property
    def _possible(self) -> bool:
        return self._has("possible_actions") and self.timeline.includePossibleActions

    @property
    def _candidates_unknown(self) -> str:
        """SQL: the row lists no candidates though an action was taken."""
        if self.columns.discrete or not self._has("possible_actions"):
            return "FALSE"
        return f"(({self.dialect.length('possible_actions')} = 0) AND (action IS NOT NULL))"

    @property
    def _choices(self) -> str:
        """SQL: the row's list; where candidates are unknown, the action alone."""
        if self.columns.discrete:
            return "possible_actions"
        alone = self.dialect.list_of("action")
        return f"(CASE WHEN {self._candidates_unknown} THEN {alone} ELSE possible_actions END)"

    @property
    def _next_possible(self) -> bool:
        return self._has("possible_next_actions") and self.timeline.includePossibleActions

    @property
    def _summed(self) -> dict[str, str]:
        """Columns of numbers that a span sums up, by the names they have in between: a user's may be any."""
        names = [name for name in self.timeline.rewardColumns if name != "metrics"]
        return {f"summed{number}": name for number, name in enumerate(names)}

    @property
    def _extra(self) -> dict[str, str]:
        return {f"extra{number}": name for number, name in enumerate(self.timeline.extraFeatureColumns)}

    def _led(self) -> Sequence[str]:
        """Columns of each row, and with suffix _k of the row k after it."""
        q, steps, extra = self.dialect.quote, self.timeline.steps, self._extra
        numbers = {alias: f"TRY_CAST({q(name)} AS {self.dialect.types['number']})" for alias, name in
                   self._summed.items()}  # fmt: skip
        own = ["mdp_id", "sequence_number", "state_features", "action"]
        own += [f"{number} AS {alias}" for alias, number in numbers.items()]
        own += [f"{q(name)} AS {alias}" for alias, name in extra.items()]
        own += [name for name in ("ds", "metrics") if self._has(name)]
        # beside its only candidate no other could have been taken
        probability = f"CASE WHEN {self._candidates_unknown} THEN 1 ELSE action_probability END"
        own += [f"{probability} AS action_probability"] if self._has("action_probability") else []
        own += [f"{self._choices} AS possible_actions"] if self._possible else []
        found = [*own, "ROW_NUMBER() OVER w AS sequence_number_ordinal",
                 "sequence_number - (FIRST_VALUE(sequence_number) OVER w) AS time_since_first"]  # fmt: skip
        next_state = self._has("next_state_features")
        for k in range(steps + 1):
            ends = {"terminal": self._terminal, "truncated": self._truncated}
            if next_state:
                ends["own_next_state"] = "next_state_features"
            if self._next_possible:
                ends["own_next_possible"] = "possible_next_actions"
            if k < steps:
                found += [_lead(expression, k, f"{name}_{k}") for name, expression in ends.items()]
            if not k:
                continue
            found += [_lead(name, k, f"{name}_{k}") for name in ("sequence_number", "state_features", "action")]
            found += [_lead(self._choices, k, f"possible_actions_{k}")] if self._possible else []
            found += [_lead(q(name), k, f"{alias}_{k}") for alias, name in extra.items()]
            if k < steps:
                found += [_lead(number, k, f"{alias}_{k}") for alias, number in numbers.items()]
                found += [_lead("metrics", k, f"metrics_{k}")] if self._has("metrics") else []
        return found

    def _ended(self, k: int) -> str:
        return f"(terminal_{k} OR truncated_{k})"

    def _complete(self, k: int) -> str:
        """SQL: it is known where row t + k led."""
        cut = f"truncated_{k} AND own_next_state_{k} IS NOT NULL" if self._has("next_state_features") else "FALSE"
        on = "TRUE" if self.timeline.addTerminalStateRow else f"sequence_number_{k + 1} IS NOT NULL"
        return f"(terminal_{k} OR ({cut}) OR ((NOT {self._ended(k)}) AND {on}))"

    def _step(self) -> str:
        """SQL: rows that the transition spans."""
        counts, going = ["1"], ""
        for k in range(1, self.timeline.steps):
            going += f"{' AND ' if going else ''}(NOT {self._ended(k - 1)}) AND (sequence_number_{k} IS NOT NULL)"
            going += f" AND {self._complete(k)}"
            counts.append(f"(CASE WHEN {going} THEN 1 ELSE 0 END)")
        return f"CAST({' + '.join(counts)} AS {self.dialect.types['integer']})"

    def _at_end(self, expressions: Sequence[str]) -> str:
        """SQL: the expression of the last row that the transition spans; expressions[k] is row t + k's."""
        if len(expressions) == 1:
            return expressions[0]
        cases = " ".join(f"WHEN {k + 1} THEN {expression}" for k, expression in enumerate(expressions))
        return f"CASE step {cases} END"

    def _last(self, k: int) -> str:
        """SQL: row t + k is a true end."""
        return f"(terminal_{k} OR ((NOT {self._ended(k)}) AND sequence_number_{k + 1} IS NULL))"

    def _result_columns(self) -> Sequence[tuple[str, str]]:
        types, ks = self.dialect.types, range(self.timeline.steps)
        found = [("mdp_id", "mdp_id"), ("sequence_number", "sequence_number"),
                 ("sequence_number_ordinal", f"CAST(sequence_number_ordinal AS {types['integer']})"),
                 ("time_since_first", "time_since_first"),
                 ("time_diff", self._at_end([self._time_diff(k) for k in ks]))]  # fmt: skip
        found += [("step", "step")] if self.timeline.steps > 1 else []
        found += [("ds", "ds")] if self._has("ds") else []
        found += [("state_features", "state_features"), ("action", "action")]
        steps = self.timeline.steps
        found += [(name, self._sum(*_beside(alias, steps))) for alias, name in self._summed.items()]
        found += [("action_probability", "action_probability")] if self._has("action_probability") else []
        found += [("metrics", self._metrics())] if self._has("metrics") else []
        nothing = ["NULL" for _ in ks]
        own = [f"own_next_state_{k}" for k in ks] if self._has("next_state_features") else nothing
        found.append(("next_state_features", self._after("state_features", own)))
        found.append(("next_action", self._after("action", nothing)))
        if self._possible:
            own = [f"own_next_possible_{k}" for k in ks] if self._next_possible else nothing
            empty = self.dialect.empty("possible_actions")
            found.append(("possible_actions", "possible_actions"))
            found.append(("possible_next_actions", self._after("possible_actions", own, empty)))
        elif self._next_possible:
            cut = [f"(CASE WHEN truncated_{k} AND (NOT {self._last(k)}) THEN own_next_possible_{k} END)" for k in ks]
            found.append(("possible_next_actions", self._at_end(cut)))
        for alias, name in self._extra.items():
            found += [(name, alias), (f"next_{name}", self._after(alias, nothing))]
        ends = [self._last(k) for k in ks]
        return [*found, ("terminal", self._at_end(ends)), ("truncated", self._at_end([f"truncated_{k}" for k in ks]))]

    def _time_diff(self, k: int) -> str:
        # nobody knows when a limit cut the episode: one unit after its last row
        return (
            f"(CASE WHEN {self._last(k)} THEN 0 WHEN truncated_{k} THEN "
            f"{'sequence_number' if k == 0 else f'sequence_number_{k}'} - sequence_number + 1 "
            f"ELSE sequence_number_{k + 1} - sequence_number END)"
        )

    def _after(self, name: str, own: Sequence[str], at_end: str = "NULL") -> str:
        """SQL: what follows the transition in a column; at a true end `at_end`, where a limit cut it own[k]."""
        expressions = [
            f"(CASE WHEN {self._last(k)} THEN {at_end} WHEN truncated_{k} THEN {own[k]} ELSE {name}_{k + 1} END)"
            for k in range(self.timeline.steps)
        ]
        return self._at_end(expressions)

    def _sum(self, *values: str) -> str:
        """SQL: Σ_k γ^k of values[k] over the rows that the transition spans; Sutton & Barto (2018), eq. 7.1."""
        if len(values) == 1:
            return values[0]
        parts = [f"COALESCE({values[0]}, 0)"]
        for k, value in enumerate(values[1:], start=1):
            discount = self.dialect.literal((self.timeline.gamma or 0.0) ** k)
            parts.append(f"(CASE WHEN step > {k} THEN {discount} * COALESCE({value}, 0) ELSE 0 END)")
        return " + ".join(parts)

    def _metrics(self) -> str:
        if self.timeline.steps == 1 or "metrics" not in self.timeline.rewardColumns:
            return "metrics"
        columns = _beside("metrics", self.timeline.steps)
        return self.dialect.map_of(
            {
                name: self._sum(*(self.dialect.value_of(column, name) for column in columns))
                for name in self.metric_names
            }
        )

    def _folder(self) -> str:
        if self.timeline.evalTableName is None:
            return "0"
        limit = round(self.timeline.eval_percent / 100 * _ALL)
        return f"CASE WHEN {self.dialect.hash32('mdp_id', EVAL)} < {limit} THEN 1 ELSE 0 END"


def _beside(name: str, steps: int) -> list[str]:
    """Names of a column of a row and of those that follow it."""
    return [name, *(f"{name}_{k}" for k in range(1, steps))]


def _lead(expression: str, k: int, name: str) -> str:
    return f"LEAD({expression}, {k}) OVER w AS {name}" if k else f"{expression} AS {name}"
