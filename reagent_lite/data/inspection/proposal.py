"""A config for a log without a description, and the choices left to the user.

columns ─► fields ─► episodes or single decisions ─► actions, features ─► config ─► checked by loader and readers
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from reagent_lite.config import DqnConfig, ParametricDqnConfig, check
from reagent_lite.config.column_names import COLUMNS, CSV, EPISODE_COLUMNS, ONLY_IF_NAMED, Columns, names_of
from reagent_lite.config.defaults import MOST_LEVELS
from reagent_lite.config.embedding_config import counted_ids, id_features
from reagent_lite.config.inspect_config import InspectConfig
from reagent_lite.config.rl import RLConfig
from reagent_lite.config.timeline_config import TimelineConfig
from reagent_lite.data.copy.feature_summaries import summarize_copy
from reagent_lite.data.copy.first_look import first_rows
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.features.column_fits import fit_columns
from reagent_lite.data.features.feature_types import FEW_LEVELS, MIN_PRESENT_VALUES
from reagent_lite.data.features.summary import ACTION, STATE
from reagent_lite.data.formats.frames import location
from reagent_lite.data.inspection.csv_format import csv_format_of
from reagent_lite.data.inspection.fields import Guess, choose_fields, fits, guesses_of, names_part_of_episode
from reagent_lite.data.inspection.id_features import IdColumn, columns_of_maps, embeddings_of, id_column_of, share_ids
from reagent_lite.data.inspection.inspected import Inspected
from reagent_lite.data.inspection.log_columns import LARGEST, LogColumn, are_finite, first_columns, write_value
from reagent_lite.data.inspection.raw_columns import Raw
from reagent_lite.data.logs import Log
from reagent_lite.data.rows.block_columns import ANSWERS
from reagent_lite.data.rows.item_files import ROW_LABELS, given_items
from reagent_lite.errors import ReagentLiteError, join_names, pluralize, suggest_nearest
from reagent_lite.feature_ids import id_of
from reagent_lite.raw_values import RawColumn

MOST_ACTIONS = 200
"""Largest number of actions that are proposed by name."""
_IDS = ("id", "key", "uuid", "index", "hash")
_NAMES_OF_IDS = ("id", "key", "uuid", "hash")
_LAST_OF_IDS = ("nr", "no", "number")
_WEIGHTS = re.compile(
    r"(samp|import|ip[sw]$|ipw_|row_|case_|survey_|freq|design_|expansion|inverse).*"
    r"(weight|wt|wgt|rate|ratio|frac|fraction|factor|sampling)s?$"
    r"|^(ips|ipw|iptw|importance|inverse_propensity|(down|up|sub|over|under)_?sampl(e|ed|ing))$"
)
_COUNTS_OF_ROWS = re.compile(r"((samp[a-z]*|import[a-z]*|row|case|survey)_?)?(weights?|wts?|wgts?|w)$|importance$")
_LOSSES = (
    "churn", "churned", "fraud", "unsubscribed", "refunded", "cancelled", "canceled", "defaulted", "bounced", "died",
    "readmitted",
)  # fmt: skip
"""Outcomes that are to be small."""
_WHOLE = re.compile("-?[0-9]+")
_LEADING_ZERO = re.compile(r"-?0[0-9]+")
_PEOPLE = ("user", "customer", "patient")
_INDICES = (
    "state",
    "cell",
    "tile",
    "node",
    "room",
    "zone",
    "category",
    "code",
    "kind",
    "type",
    "class",
    "group",
    "cluster",
    *("zip", "zipcode", "postcode", "plz", "store", "shop", "branch", "region", "district", "status", "brand"),
)
_MOST_INDICES = 1000
_ROWS_OF_INDEX = 5  # on average, of each value
_NOT_FEATURES = (
    *("reward", "action_probability", "action", "mdp_id", "sequence_number"),
    *("terminal", "truncated"),
)
_ROUNDING = 0.01
_BY_CHANCE = 1e-4
_NEARLY_ALL = 0.9
Json = dict[str, Any]


def inspect_log(settings: InspectConfig) -> Inspected:
    """Returns the description of a log and a config for it, from its first rows.

    Raises:
        DataError: a file that cannot be read, with file and line.
        NoRowsError: no file has rows.
    """
    files = Log(settings.data_path).files
    if CSV not in settings.columns and files[0].cells and (written := csv_format_of(files[0])):
        settings = settings.model_copy(update={"columns": {**settings.columns, CSV: written}})
    columns, whole = first_columns(files, settings.rows, settings.columns)
    guesses = tuple(guesses_of(columns, settings.columns))
    proposal = _Proposal(settings, columns, guesses)
    proposal.check_given()
    proposal.describe_csv()
    episodes = proposal.describe_episodes()
    actions = proposal.names_of_actions()
    proposal.check_reward()
    propensities = tuple(proposal.plausibility(actions or ()))
    tree = proposal.tree(actions, proposal.features(actions or ()))
    problems = tuple(proposal.problems) or proposal.faults(tree, whole=whole)
    return Inspected(
        path=settings.data_path,
        whole=whole,
        columns=columns,
        guesses=guesses,
        fields=proposal.fields,
        propensities=propensities,
        episodes=episodes,
        config=None if problems else tree,
        problems=problems,
        decide=tuple(proposal.decide),
    )


def _inverse_mean(probabilities: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of 1 / p and its standard error."""
    inverse = 1 / np.array(probabilities, float)
    return float(inverse.mean()), float(inverse.std(ddof=1)) / len(inverse) ** 0.5


def _counts_of(ids: LogColumn) -> dict[str, int]:
    """Returns {id: number of its rows}; 7, 7.0 and 7 with spaces around it are one id, 007 is another."""
    if not ids.is_whole or any(map(_LEADING_ZERO.fullmatch, ids.counts)):
        return ids.counts
    return Counter(str(int(value)) for value in ids.present)


def _may_have_ids(column: LogColumn) -> bool:
    """Whether a column has lists, maps or strings, or whole numbers with the name of an id."""
    words = re.split(r"[^0-9a-z]+", column.name.lower())
    is_text = column.kind == "text" and not (column.is_numerals or column.is_answers or column.unlike_amounts)
    is_whole = column.is_whole and not {words[0], words[-1]}.isdisjoint(_NAMES_OF_IDS)
    return column.kind in ("list", "map") or is_text or is_whole


def _too_rare(ids: IdColumn) -> str:
    return (
        f"{ids.describe()}, of which {1 - ids.recurring:.0%} of the values are too rare in the rows read to learn a "
        "vector from; if the whole log has more of each, name it in data.embeddings"
    )


class _Proposal:
    """A config for a log, proposed part by part; parts note problems and choices.

    Attributes:
        fields: {standard column: the column that is read as it}.
        problems: reasons why there is no config.
        decide: choices left to the user.
    """

    def __init__(self, settings: InspectConfig, columns: Sequence[LogColumn], guesses: Sequence[Guess]) -> None:
        self.fields = choose_fields(guesses)
        self.problems: list[str] = []
        self.decide: list[str] = []
        self._left_out: list[str] = []
        self._alone = False
        self._without_reward = False
        self._maps: dict[str, dict[str, str]] = {}
        self._id_columns: list[IdColumn] = []
        self._probabilities: list[str] = []
        self._settings = settings
        self._columns = columns
        self._rows = len(columns[0].values) if columns else 0
        self._guesses = guesses
        self._take_choices()
        self._offers_all = settings.items is not None and "possible_actions" not in self.fields
        self._items = given_items(settings.items, settings.item_id, "all" if self._offers_all else None)

    def _column(self, name: str) -> LogColumn | None:
        return next((column for column in self._columns if column.name == self.fields.get(name)), None)

    def _take_choices(self) -> None:
        """Reads a column as possible actions whose lists have the action of every row, whatever its name is."""
        action = self._column("action")
        if action is None or "possible_actions" in self.fields:
            return
        used = {
            *self.fields.values(),
            *(name for raw in self._settings.columns.values() for name in names_of(raw)),
        }
        for column in self._columns:
            if column.kind != "list" or column.name in used or len(column.present) < MIN_PRESENT_VALUES:
                continue
            pairs = zip(column.values, action.values, strict=True)
            if all(write_value(name) in map(write_value, choices) for choices, name in pairs if choices is not None):
                self.fields["possible_actions"] = column.name
                self.decide.append(f"possible_actions: {column.name}, whose lists have the action of every row")
                return

    def _drop(self, fields: Sequence[str], why: str) -> None:
        """Leaves out fields by the names of their columns; columns with a standard name are read in any case."""
        dropped = [name for name in fields if name in self.fields and self.fields[name] not in COLUMNS]
        dropped = [name for name in dropped if name not in self._settings.columns]
        if dropped:
            self.decide.append(f"{join_names(self.fields[name] for name in dropped)} left out: {why}")
        for name in dropped:
            self._left_out.append(self.fields.pop(name))

    def check_given(self) -> None:
        """Notes columns that the user names and the log lacks."""
        names = [column.name for column in self._columns]
        for field, source in self._settings.columns.items():
            for name in names_of(source):
                if name not in names:
                    self.problems.append(
                        f"columns.{field}: the log has no column {name!r}. {suggest_nearest(name, names)}"
                    )

    def describe_csv(self) -> None:
        """Notes how CSV files are written."""
        written = self._settings.columns.get(CSV)
        if isinstance(written, dict):
            keys = join_names(
                f"{key} {value if isinstance(value, str) else join_names(value)!s}" for key, value in written.items()
            )
            self.decide.append(f"columns.csv: {keys}, as the first rows suggest; null are strings of absent values")

    def _note_near_equal(self, column: LogColumn) -> None:
        alike = join_names(f"{text!r} as {other!r}" for text, other in column.near_equal.items())
        self.decide.append(f"{column.name}: {alike} by map, as they differ in case and spaces only; else drop the map")

    def describe_episodes(self) -> str:
        """Returns a sentence about the lengths of episodes; leaves out columns of episodes if there are none."""
        follows = {"next_state_features", "next_action", "possible_next_actions"}.intersection(self.fields)
        ids = self._column("mdp_id")
        order = self._column("sequence_number")
        lengths = sorted(_counts_of(ids).values()) if ids is not None else []
        if not follows:
            if ids is None or order is None:
                lacking = "that says which rows are one episode" if ids is None else "that says their order"
                self._drop(EPISODE_COLUMNS, f"there is no column {lacking}, so each row is an independent decision")
            elif lengths and lengths[-1] == 1:
                self._drop(
                    EPISODE_COLUMNS, f"no value of {ids.name} has two rows, so each row is an independent decision"
                )
            elif "terminal" not in self.fields and ids.name.lower().startswith(_PEOPLE):
                self._drop(
                    EPISODE_COLUMNS,
                    f"rows of one {ids.name} are not known to depend on each other, so each is an independent "
                    "decision; if their rewards resemble each other, keep mdp_id with rl.gamma 0, see docs/data.md",
                )
        kept = {name for name in EPISODE_COLUMNS if name in self.fields}
        ends = {"terminal", "next_action", "possible_next_actions"} & kept
        others = [
            column.name
            for column in self._columns
            if column.name in EPISODE_COLUMNS and column.name not in self.fields.values()
        ]
        shown = [*(self.fields[name] for name in EPISODE_COLUMNS if name in kept), *others]
        if shown and not ends and not {"mdp_id", "sequence_number"} <= kept:
            self.problems.append(
                f"{join_names(shown)} without a column that says where episodes end, such as terminal; "
                "if each row is an independent decision, remove the column from the log"
            )
        elif ids is not None and order is None and ends and not follows:
            free = [column for column in self._columns if column.name not in self.fields.values()]
            orders = [column.name for column in free if fits("sequence_number", column)]
            self._lacking("sequence_number", "the order of decisions", orders)
        self.decide.append(
            "rl.epsilon: a tenth of the policy's decisions is drawn among all actions, so that the next log can "
            "evaluate another policy; 0 is greedy"
        )
        if not shown:
            self._alone = True
            return "no episodes: each row is an independent decision"
        self.decide.append("rl.gamma: what a later reward counts, 0.99 for each row by default")
        if not ends:
            self.decide.append(
                "ends: no column says how an episode ended, so its last row is not learned from; "
                "log terminal, or set timeline.addTerminalStateRow if every last row is a true end"
            )
        if not lengths:
            return ""
        if ids is not None and order is not None and not follows:
            rows = set(zip(map(write_value, ids.values), map(write_value, order.values), strict=True))
            if len(rows) < self._rows:
                self.decide.append(
                    f"{order.name}: {pluralize(self._rows - len(rows), 'row')} with the {ids.name} and {order.name} of "
                    "another; only the first of each is learned from: give a finer order, unless the others are copies"
                )
        spread = f"{lengths[0]:,} to {lengths[-1]:,} rows, median {np.median(lengths):g}"
        return f"{pluralize(len(lengths), 'episode')} of {spread}"

    def names_of_actions(self) -> tuple[str, ...] | None:
        """Returns the names of the actions; None if they are candidates with features."""
        column = self._column("action")
        if column is None or not column.present:
            used = self.fields.values()
            few = [each for each in self._columns if each.distinct <= MOST_ACTIONS and each.name not in used]
            some = [column.name for column in few if column.kind == "text"]
            some = some or [column.name for column in few if column.is_number]
            self._lacking("action", "what was decided", some)
            return ()
        if column.kind == "map" or self._items is not None:
            self._describe_choices()
            return None
        possible = self._column("possible_actions")
        if column.near_equal and possible is None:
            self._note_near_equal(column)
            self._maps[column.name] = column.near_equal
        # pandas writes an integer as 7.0 in a column with gaps
        names = {name.removesuffix(".0") if column.is_number else name for name in column.counts}
        names -= self._maps.get(column.name, {}).keys()
        for choices in [] if possible is None else possible.present:
            if isinstance(choices, list):
                names |= {name for name in choices if isinstance(name, str)}
        numbers = column.is_number
        ordered = sorted(names, key=lambda name: (int(name), "") if numbers and _WHOLE.fullmatch(name) else (0, name))
        if len(ordered) > MOST_ACTIONS:
            self.problems.append(
                f"{column.name} has {len(ordered):,} values, more than {MOST_ACTIONS} actions by name: give "
                "the features of each in an item table, `items`, or name another column as action"
            )
        if len(ordered) < 2:
            self.problems.append(f"{column.name} has one value, {join_names(ordered)}: there is nothing to choose from")
        self.decide.append(f"actions: {join_names(ordered)}, as in the rows read; add what is missing")
        return tuple(ordered)

    def _describe_choices(self) -> None:
        """Notes how many candidates rows offer."""
        column = self._column("possible_actions")
        if column is None and self._items is None:
            self.decide.append(
                "possible_actions: no column lists the candidates, so that each row offers its action alone, and there "
                "is nothing to choose: log the features of all that were possible"
            )
        elif column is None:
            assert self._items is not None
            self.decide.append(
                f"possible_items: no column lists what was possible, so that each row offers all "
                f"{pluralize(len(self._items), 'item')}; if fewer were, log their ids in a column possible_actions"
            )
        else:
            sizes = [len(choices) for choices in column.present if isinstance(choices, list)]
            if sizes:
                spread = f"{min(sizes):,} to {max(sizes):,} candidates in a row, {np.mean(sizes):.3g} on average"
                self.decide.append(f"possible_actions: {spread}, a single one in {pluralize(sizes.count(1), 'row')}")

    def _lacking(self, name: str, what: str, some: Sequence[str]) -> None:
        maybe = f"; it may be {join_names(some)}" if some else ""
        example = shlex.quote(f"columns.{name}={some[0] if some else '...'}")
        self.problems.append(f"no column is known to be the {name}, {what}{maybe}: say which, as by --set {example}")

    def check_reward(self) -> None:
        column = self._column("reward")
        if column is None:
            answers = [column.name for column in self._columns if column.is_answers]
            numbers = [
                column.name
                for column in self._columns
                if column.is_number
                and column.name not in self.fields.values()
                and not self._may_be_propensity(column, 2)
            ]
            self._lacking("reward", "what is to be large", [*answers, *numbers])
            return
        if not column.is_answers and not (column.is_number and are_finite(column.present)):
            some = ", ".join(f"{json.dumps(text, ensure_ascii=False)}: NUMBER" for text in list(column.counts)[:2])
            example = f'{{"reward": {{"column": {json.dumps(column.name)}, "map": {{{some}}}}}}}'
            self.problems.append(
                f"{column.name}, read as reward, is not a finite number in every row, or yes or no; columns can say "
                f"what each of its strings stands for, as in {example}"
            )
        if column.is_answers:
            counted = {f"{text} counts as {ANSWERS[text.strip().lower()]:g}" for text in column.counts}
            self.decide.append(f"reward: {column.name}: {join_names(sorted(counted, reverse=True))}")
        if missing := self._rows - len(column.present):
            self._without_reward = True
            self.decide.append(
                f"{column.name}: {pluralize(missing, 'row')} without a reward left out with their episodes by "
                "timeline.on_refused; if absent means that nothing was earned, write 0"
            )
        others = [
            guess.column
            for guess in self._guesses
            if guess.field == "reward" and guess.column not in self.fields.values()
        ]
        self._left_out += others
        if others:
            self.decide.append(f"reward: {column.name}; {join_names(others)} may be a reward too and is left out")

    def plausibility(self, actions: Sequence[str]) -> Iterator[str]:
        """Yields sentences about the plausibility of probabilities; leaves out propensities that are not plausible."""
        column = self._column("action_probability")
        if column is None:
            maybe = [column.name for column in self._columns if self._may_be_propensity(column, len(actions))]
            self._left_out += maybe
            hint = f"; by their values it may be {join_names(maybe)}, left out: say which in columns" if maybe else ""
            why = "so what the policy is worth cannot be estimated by weights"
            self.decide.append(f"action_probability: no column has it, {why}{hint}")
        else:
            values = [float(value) for value in column.present if abs(value) < LARGEST] if column.is_number else []
            outside = [value for value in values if not 0 < value <= 1]
            if outside or len(values) < self._rows:
                got = f"{len(outside):,} outside, {self._rows - len(values):,} absent"
                yield f"{column.name}: not a probability in (0, 1] in every row: {got}"
                self._drop(
                    ["action_probability"], "it is no probability in (0, 1] in every row: divide per cent by 100"
                )
            else:
                yield f"{column.name}: in (0, 1] in every row, from {min(values):.4g} to {max(values):.4g}"
                yield from self._inverse(column.name, values, actions)
        for title, rows in self._by_action(actions):
            self._probabilities.append(title)
            sums = [sum(row) for row in rows]
            wrong = sum(abs(total - 1) > _ROUNDING or min(row) < 0 for total, row in zip(sums, rows, strict=True))
            sums_to_one = f"they do not add up to 1 in {wrong:,} of" if wrong else "they add up to 1 in all"
            yield f"{title}: a probability for each action; {sums_to_one} {pluralize(len(rows), 'row')}"

    def _may_be_propensity(self, column: LogColumn, num_actions: int) -> bool:
        """Whether a column has true probabilities by their values: the mean of 1 / p is the number of actions."""
        if column.kind != "number" or column.name in self.fields.values() or len(column.present) < max(self._rows, 2):
            return False
        if not all(0.001 <= value <= 1 for value in column.present):
            return False
        mean, error = _inverse_mean(column.present)
        return 4 * error <= 0.2 * num_actions and abs(mean - num_actions) <= max(4 * error, _ROUNDING * num_actions)

    def _inverse(self, name: str, values: Sequence[float], actions: Sequence[str]) -> Iterator[str]:
        """Yields a sentence if the mean of 1 / p is not near the number of actions, as it is for true probabilities."""
        if not actions or "possible_actions" in self.fields or len(values) < 2 or min(values) < 1e-38:
            return
        mean, error = _inverse_mean(values)
        if abs(mean - len(actions)) > max(4 * error, _ROUNDING * len(actions)):
            expected = f"for {len(actions)} actions that are always possible it would be near {len(actions)}"
            yield f"{name}: the mean of 1 / probability is {mean:.3g}; {expected}: are these propensities?"
            self.decide.append(f"action_probability: {name} may not be the probability of the logged action")

    def _by_action(self, actions: Sequence[str]) -> Iterator[tuple[str, list[list[float]]]]:
        """Yields (title, rows) of columns that have a number for every action: maps, or a column for each action."""
        for column in self._columns:
            maps = column.present if column.kind == "map" else []
            if maps and actions and all(set(mapping) == set(actions) for mapping in maps):
                rows = [list(mapping.values()) for mapping in maps]
                if all(isinstance(value, int | float) for row in rows for value in row):
                    yield column.name, rows
        for columns in self._per_action(actions):
            some = [list(row) for row in zip(*(column.values for column in columns), strict=True) if None not in row]
            yield join_names(column.name for column in columns), some

    def _per_action(self, actions: Sequence[str]) -> Iterator[list[LogColumn]]:
        """Yields groups of a column for each action, such as p_mail and p_call, that are its probabilities.

        They are from 0 to 1, add up to 1 in nearly all rows, and that of the logged action is never 0.
        """
        logged = self._column("action")
        if not actions or logged is None:
            return
        index = {name: number for number, name in enumerate(actions)}
        of_rows = [
            None if value is None else index.get(write_value(value).removesuffix(".0")) for value in logged.values
        ]
        shares = [
            column for column in self._columns if column.is_number and all(0 <= value <= 1 for value in column.present)
        ]
        by_name = {column.name: column for column in shares}
        for name in by_name:
            if name.endswith(f"_{actions[0]}"):
                names = [f"{name.removesuffix(actions[0])}{action}" for action in actions]
                columns = [by_name[name] for name in names if name in by_name]
                if len(columns) == len(actions) and self._are_probabilities(columns, of_rows):
                    yield columns

    def _are_probabilities(self, columns: Sequence[LogColumn], actions: Sequence[int | None]) -> bool:
        rows = zip(zip(*(column.values for column in columns), strict=True), actions, strict=True)
        whole = [(row, action) for row, action in rows if None not in row]
        sums = [abs(sum(row) - 1) <= _ROUNDING for row, _ in whole]
        possible = all(action is None or row[action] > 0 for row, action in whole)
        return possible and sum(sums) > _NEARLY_ALL * len(whole)

    def features(self, actions: Sequence[str]) -> list[str | Raw]:
        """Returns the columns of single features, as in `columns`; none if state_features is a column of maps."""
        given = self._settings.columns.get("state_features")
        if isinstance(given, list):
            return given
        if "state_features" in self.fields:
            return []
        used = {
            *self.fields.values(),
            *self._left_out,
            *(column.name for some in self._per_action(actions) for column in some),
        }
        may_be = {
            guess.column: f"by their names they may be {guess.field}"
            for guess in reversed(self._guesses)
            if guess.field in _NOT_FEATURES
        }
        features: list[str | Raw] = []
        left = dict[str, list[str]]()
        for column in self._columns:
            if column.name in self._left_out and column.name.lower().startswith(_PEOPLE):
                self._take_people(column)
            if column.name in used or column.name in COLUMNS.keys() - {*ONLY_IF_NAMED}:
                continue
            self._note_weight(column)
            why = may_be.get(column.name) or self._no_feature(column)
            if ids := self._ids_of(column, why):
                if ids.is_learnable:
                    features.append(column.name)
                    if not (column.is_category and ids.has_few):
                        self._id_columns.append(ids)
                else:
                    left.setdefault(_too_rare(ids), []).append(column.name)
            elif why:
                left.setdefault(why, []).append(column.name)
            elif column.raw is not None:
                features.append(column.raw)
                of_column = join_names(RawColumn.of(column.raw).features)
                unit = f" in {column.raw['unit']}" if "unit" in column.raw else ""
                self.decide.append(f"{column.name}: read as {column.raw['kind']}{unit}, with the features {of_column}")
            elif column.near_equal:
                features.append({"column": column.name, "map": column.near_equal})
                self._note_near_equal(column)
            else:
                features.append(column.name)
                self._note_sentinel(column)
        features += [column.name for column in self._id_columns if column.name not in features]
        for why, names in left.items():
            self.decide.append(f"features: {join_names(names)} left out, {why}")
        if features:
            self.decide.append(
                f"features: {join_names(names_of(features))}; leave out what is not known when the decision is made"
            )
        else:
            self.problems.append("no column of numbers or categories is left to be a feature of the state")
        return features

    def _take_people(self, column: LogColumn) -> None:
        """Notes the ids of people whose rows are independent decisions, if most of them have several rows."""
        ids = id_column_of(column, range(self._rows))
        if ids is not None and ids.is_learnable and not ids.has_few:
            self._id_columns.append(ids)

    def _ids_of(self, column: LogColumn, why: str) -> IdColumn | None:
        """Returns the ids of a column that is no feature otherwise, for the reason `why`; None if it has none."""
        words = re.split(r"[^0-9a-z]+", column.name.lower())
        maybe = [guess.field for guess in self._guesses if guess.column == column.name]
        not_known = {*maybe} & {*_NOT_FEATURES} - {"mdp_id"}
        if not why or not_known or words[0] == "next" or column.name.startswith(ROW_LABELS) or column.raw is not None:
            return None
        if column.name in self._probabilities or column.distinct < 2 or not _may_have_ids(column):
            return None
        return id_column_of(column, self._episodes)

    @cached_property
    def _episodes(self) -> Sequence[Any]:
        """[n] the episode of each row; its number if rows are independent decisions."""
        ids = self._column("mdp_id")
        return range(self._rows) if ids is None else list(map(write_value, ids.values))

    def _take_ids_in_maps(self) -> None:
        """Notes the ids in maps, and those of items: features of states first, then of candidates."""
        for field in ("state_features", "action"):
            column = self._column(field)
            if column is None or (column.kind != "map" and (field != "action" or self._items is None)):
                continue
            parts = columns_of_maps(column.values) if column.kind == "map" else [column]
            for part in parts:
                ids = id_column_of(part, self._episodes) if part is column or _may_have_ids(part) else None
                if ids is None:
                    continue
                if part is column:
                    ids = replace(ids, name=self._settings.item_id)
                is_needed = part.kind in ("list", "map")  # which cannot be read otherwise
                is_shared = any(share_ids(ids, other) for other in self._id_columns)
                is_alone = part is not column and ids.is_learnable and not ids.has_few
                if is_needed or is_shared or is_alone:
                    self._id_columns.append(ids)

    def _embeddings(self) -> Json:
        """Returns `data.embeddings`, and notes its features and what else could be done."""
        self._take_ids_in_maps()
        sections = embeddings_of(self._id_columns)
        for column in self._id_columns:
            shared = sections[column.name].get("table", column.name)
            table = f", in the table of {shared}" if shared != column.name else ""
            self.decide.append(f"data.embeddings: {column.name}: a vector for each id{table}: {column.describe()}")
        if sections and self._alone:
            self.decide.append(
                "algorithm: dqn with rl.gamma 0, which learns vectors of ids; boosting has none and learns from the "
                "other features alone"
            )
        return sections

    def _note_sentinel(self, column: LogColumn) -> None:
        if (value := column.sentinel) is not None:
            example = json.dumps({"column": column.name, "map": {f"{value:g}": None}})
            self.decide.append(
                f"{column.name}: {value:g} in {pluralize(column.present.count(value), 'row')} is far from all others; "
                f"if it means absent, name the column as {example} in columns.state_features"
            )

    def _note_weight(self, column: LogColumn) -> None:
        """Notes a column that may say how many decisions each row stands for."""
        if not _COUNTS_OF_ROWS.match(column.name.lower()) or not column.is_number or column.distinct < 2:
            return
        if are_finite(column.present) and min(column.present) > 0 and not self._inverts_propensities(column):
            self.decide.append(
                f"{column.name}: if it says how many decisions each row stands for, as some rows were dropped by their "
                f"outcome, it is no feature: name it in columns.weight of workflows.evaluate"
            )

    def _no_feature(self, column: LogColumn) -> str:
        """Returns the reason why a column is not a feature; "" if it may be one."""
        words = re.split(r"[^0-9a-z]+", column.name.lower())
        if column.name.startswith(ROW_LABELS):
            return "row labels of a frame"
        if column.raw is not None:
            return self._no_raw_feature(column, words)
        if column.kind == "mixed":
            examples = {type(value): write_value(value) for value in reversed(column.present)}
            return f"values of several kinds: {join_names(examples.values())}; an absent value is an empty cell or null"
        if column.is_numerals:
            return "strings that look like numbers or times; write numbers as 1234.5"
        if column.unlike_amounts:
            return column.unlike_amounts
        if not column.is_number and not column.is_category:
            return f"a column of {column.kind} values"
        if words[0] == "next":
            return "by their names what followed the decision"
        if words[-1] in _LOSSES:
            return "by their names what came of the decision; as a reward, say by map in columns what they cost"
        if names_part_of_episode(column.name) or self._marks_last_rows(column):
            return (
                "they say where episodes begin or end; a flag that is 1 at ends may be named in columns.terminal, or "
                "in columns.truncated if a limit ended them"
            )
        if column.kind == "integer" and ({words[-1], words[0]} & {*_IDS} or words[-1] in _LAST_OF_IDS):
            return "ids by their names"
        if column.kind == "integer" and any(map(_LEADING_ZERO.fullmatch, column.counts)):
            return "ids by their leading zeros"
        if column.is_whole and column.distinct == len(column.present) >= MIN_PRESENT_VALUES:
            return "another whole number in every row, as ids are; an amount may be named in columns.state_features"
        counts_rows = _COUNTS_OF_ROWS.match(column.name.lower()) and column.distinct <= FEW_LEVELS
        if column.is_number and (
            _WEIGHTS.search(column.name.lower())
            or (counts_rows and min(column.present) > 0)
            or self._inverts_propensities(column)
        ):
            return "weights or sampling rates of rows, which are not known when a decision is made"
        if column.is_number and not are_finite(column.present):
            return "values that float32 does not hold"
        if column.distinct < 2:
            return "one value in all rows"
        if len(column.present) < MIN_PRESENT_VALUES:
            return f"fewer than {MIN_PRESENT_VALUES} values"
        try:
            id_of(column.name)
        except ValueError as error:
            return f"expected {error}"
        return ""

    @cached_property
    def _is_last(self) -> list[bool] | None:
        """[n] whether each row is the last of its episode; None if rows have no episodes."""
        ids = self._column("mdp_id")
        order = self._column("sequence_number")
        if ids is None or order is None or not self._rows:
            return None
        last: dict[str, tuple[Any, int]] = {}
        for row, (name, number) in enumerate(zip(map(write_value, ids.values), order.values, strict=True)):
            if number is not None and (name not in last or number >= last[name][0]):
                last[name] = (number, row)
        rows = {row for _, row in last.values()}
        return [row in rows for row in range(self._rows)]

    def _marks_last_rows(self, column: LogColumn) -> bool:
        """Whether one of two values, 0 and 1 or yes and no, is in last rows of episodes only, as flags of ends are."""
        if self._is_last is None or column.distinct != 2 or not (column.is_answers or fits("terminal", column)):
            return False
        share = sum(self._is_last) / self._rows
        for value in {*column.present}:
            at = [row for row, other in enumerate(column.values) if other == value]
            if share ** len(at) < _BY_CHANCE and all(self._is_last[row] for row in at):
                return True
        return False

    def _no_raw_feature(self, column: LogColumn, words: Sequence[str]) -> str:
        if words[0] == "next":
            return "by their names what followed the decision"
        if column.kind != "list" and column.distinct < 2:
            return "one value in all rows"
        return f"fewer than {MIN_PRESENT_VALUES} values" if len(column.present) < MIN_PRESENT_VALUES else ""

    def _inverts_propensities(self, column: LogColumn) -> bool:
        """Whether the values of a column are 1 / p of the propensities."""
        propensity = self._column("action_probability")
        if propensity is None or not propensity.is_number or column.distinct < 2:
            return False
        if not are_finite(propensity.present) or not are_finite(column.present):
            return False
        pairs = [pair for pair in zip(column.values, propensity.values, strict=True) if None not in pair]
        return bool(pairs) and all(abs(float(value) * float(p) - 1) <= _ROUNDING for value, p in pairs)

    def tree(self, actions: Sequence[str] | None, features: Sequence[str | Raw]) -> Json:
        """Returns the config."""
        words = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(self._settings.data_path).name.split(".")[0]).strip("_")
        embeddings = self._embeddings()
        tree: Json = {
            "training_data_path": self._settings.data_path,
            "model_output_path": f"outputs/{words or 'model'}",
            "defaults": "2026",
        }
        if self._alone and not embeddings:
            tree["algorithm"] = "boosting"
        else:
            tree["rl"] = {**({"gamma": 0.0} if self._alone else {}), "epsilon": RLConfig().epsilon}
        if actions is not None:
            tree["actions"] = list(actions)
        columns: Columns = {CSV: self._settings.columns[CSV]} if CSV in self._settings.columns else {}
        columns |= {
            field: source
            for field, name in self.fields.items()
            if not isinstance(source := self._source(field, name), str) or source not in (field, "propensity")
        }
        if features:
            columns["state_features"] = list(features)
        items = self._settings.model_dump(include={"items", "item_id"}, exclude_defaults=True)
        if self._offers_all:
            items["possible_items"] = "all"
        if indices := self._indices(features):
            most = max(MOST_LEVELS, *indices.values())
            overrides = {name: "ENUM" for name in indices}
            tree["norm_params"] = {"feature_overrides": overrides}
            if most > MOST_LEVELS:
                tree["norm_params"] |= {"max_unique_enum_values": most, "whole_numbers": "continuous"}
            self.decide.append(
                f"{join_names(indices)}: by their names names of states or kinds, so one-hot; else drop the override"
            )
        if self._without_reward:
            tree["timeline"] = {"on_refused": "drop_episode"}
        if columns or items or embeddings:
            vectors = {"embeddings": embeddings} if embeddings else {}
            tree["data"] = {**({"columns": columns} if columns else {}), **items, **vectors}
        return tree

    def _source(self, field: str, name: str) -> str | Raw:
        """Returns how `columns` gives the column of a field."""
        if isinstance(given := self._settings.columns.get(field), dict):
            return given
        column = next(column for column in self._columns if column.name == name)
        if column.raw is not None and COLUMNS[field].kind == "number":
            return column.raw
        return {"column": name, "map": self._maps[name]} if name in self._maps else name

    def _indices(self, features: Sequence[str | Raw]) -> dict[str, int]:
        """Returns {column: number of its values} of whole numbers that are names and not amounts, by their names."""
        return {
            column.name: column.distinct
            for column in self._columns
            if column.name in features
            and column.is_whole
            and FEW_LEVELS < column.distinct <= _MOST_INDICES
            and _ROWS_OF_INDEX * column.distinct <= len(column.present)
            and min(column.present) >= 0
            and {*re.split(r"[^a-z]+", column.name.lower())} & {*_INDICES}
        }

    def faults(self, tree: Json, *, whole: bool) -> tuple[str, ...]:
        """Returns the reasons why training would refuse the config or the rows; `whole`: whether all rows were read."""
        path = self._settings.data_path
        try:
            config = check(ParametricDqnConfig if "actions" not in tree else DqnConfig, tree)
            timeline = None
            if config.timeline is not None:
                timeline = TimelineConfig(timeline=config.timeline.model_copy(update={"inputTableName": ""}))
            data = config.data
            ids = id_features(data.embeddings)
            log = Log(
                path,
                actions=config.actions or None,
                columns=data.columns,
                items=given_items(data.items, data.item_id, data.possible_items, ids),
                id_features=ids,
                timeline=timeline,
            )
            first_rows(log, refuses=timeline is None)
            if whole:
                with tempfile.TemporaryDirectory() as folder:
                    copy = prepare_training_copy(replace(log, directory=folder))
                    names = (STATE, ACTION) if copy.parametric else (STATE,)
                    settings = config.norm_params
                    sections = data.embeddings
                    counted = counted_ids(sections)
                    columns = {name: summarize_copy(copy, name, settings, 0, counted) for name in names}
                    by_id = {id_of(name): section for name, section in sections.items()}
                    fit_columns(columns, settings, where=location(path), embeddings=by_id)
        except ReagentLiteError as error:
            return tuple(map(str, error.problems))
        return ()
