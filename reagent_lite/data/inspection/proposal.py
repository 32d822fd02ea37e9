"""A config for a log without a description, and the choices left to the user.

columns ─► fields ─► episodes or single decisions ─► actions, features ─► config ─► checked by loader and readers
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reagent_lite.config import DqnConfig, ParametricDqnConfig, check
from reagent_lite.config.columns import COLUMNS, EPISODE_COLUMNS, Columns
from reagent_lite.config.inspect import InspectConfig
from reagent_lite.config.norm_params import NormParams
from reagent_lite.data.copy.features import summarize_copy
from reagent_lite.data.copy.first_look import first_rows
from reagent_lite.data.copy.training_copy import prepare_training_copy
from reagent_lite.data.features.feature_types import MIN_PRESENT_VALUES
from reagent_lite.data.features.fitting import fit_columns
from reagent_lite.data.features.summary import ACTION, STATE
from reagent_lite.data.formats.frames import location
from reagent_lite.data.inspection.columns import LARGEST, LogColumn, finite, first_columns, text_of
from reagent_lite.data.inspection.fields import candidates_of, chosen
from reagent_lite.data.result_frames import frame_of
from reagent_lite.data.rows.items import given_items
from reagent_lite.data.stage import data_files
from reagent_lite.errors import ReagentLiteError, counted, listed
from reagent_lite.feature_ids import id_of

if TYPE_CHECKING:
    from reagent_lite.data.result_frames import DataFrame

MOST_ACTIONS = 200
"""Largest number of actions that are proposed by name."""
_IDS = ("id", "key", "uuid", "index", "hash", "unnamed")
_PEOPLE = ("user", "customer", "patient")
_NOT_FEATURES = ("reward", "action_probability", "action", "mdp_id", "sequence_number")
_ROUNDING = 0.01
_SHOWN = 5
Json = dict[str, Any]


class Inspected:
    """A log, described from its first rows.

    Attributes:
        path: the log.
        rows: number of rows read.
        whole: whether these are all.
        columns: those of the log.
        candidates: fields that columns may be and why, the strongest reasons first.
        fields: {field of the contract: the column that the config reads as it}; features are in the config.
        propensities: whether the probabilities of actions are plausible, in sentences.
        episodes: how long episodes are; "" without.
        config: a training config for the log; None if there is none, and `problems` say why.
        problems: reasons why there is no config.
        decide: choices left to the user.
    """

    def __init__(self, settings: InspectConfig) -> None:
        """Reads the first rows of a log.

        Raises:
            DataError: a file that cannot be read, with file and line.
            NoRowsError: no file has rows.
        """
        self._settings = settings
        self.path = settings.data_path
        self.columns, self.whole = first_columns(data_files(self.path), settings.rows)
        self._items = given_items(settings.items, settings.item_id)
        self.rows = len(self.columns[0].values) if self.columns else 0
        self.candidates = tuple(candidates_of(self.columns, settings.columns))
        self.fields = chosen(self.candidates)
        self._problems: list[str] = []
        self._decide: list[str] = []
        self.episodes = self._described_episodes()
        self._actions = self._names_of_actions()
        self._check_reward()
        self.propensities = tuple(self._plausibility())
        tree = self._tree(self._features())
        self.problems = tuple(self._problems) or self._faults(tree)
        self.decide = () if self.problems else tuple(self._decide)
        self.config = None if self.problems else tree

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    @property
    def workflow(self) -> str:
        """Name of the workflow that the config is for."""
        return "dqn" if self.config and "actions" in self.config else "parametric_dqn"

    def facts(self) -> dict[str, dict[str, str | float | int | None]]:
        """Returns {column: its kind, share present, distinct values, and the field that the config reads it as}."""
        features = (
            [] if self.config is None else self.config.get("data", {}).get("columns", {}).get("state_features", [])
        )
        read_as = {column: field for field, column in self.fields.items()}
        if isinstance(features, list):
            read_as |= dict.fromkeys(features, "state_features")
        return {
            column.name: {
                "kind": column.kind,
                "present": round(column.share_present, 4),
                "distinct": column.distinct,
                "read_as": read_as.get(column.name),
            }
            for column in self.columns
        }

    @property
    def table(self) -> DataFrame:
        """The columns of the log, a row for each, as a frame of pandas."""
        may_be = {
            column.name: "; ".join(f"{c.field}: {c.why}" for c in self.candidates if c.column == column.name)
            for column in self.columns
        }
        notes = {column.name: column.note for column in self.columns}
        return frame_of(
            [
                {"column": name, **facts, "may_be": may_be[name], "note": notes[name]}
                for name, facts in self.facts().items()
            ]
        )

    def lines(self) -> Iterator[str]:
        """Yields the description as text, one line for each column and sentence."""
        part = "all of them" if self.whole else "the first ones"
        yield f"{location(self.path)}: {counted(self.rows, 'row')} read, {part}; {counted(len(self.columns), 'column')}"
        for column in self.columns:
            facts = f"{column.kind}, present in {column.share_present:.1%}, {column.distinct:,} distinct"
            shown = [value if len(value) <= 40 else f"{value[:37]}..." for value in list(column.counts)[:_SHOWN]]
            yield f"{column.name}: {facts}" + (f": {listed(shown)}" if shown else "")
            for candidate in self.candidates:
                if candidate.column == column.name:
                    used = ", and read as it" if self.fields.get(candidate.field) == column.name else ""
                    yield f"  may be {candidate.field}: {candidate.why}{used}"
            if column.note and column.name not in self.fields.values():
                yield f"  {column.note}"
        yield from self.propensities
        if self.episodes:
            yield self.episodes
        yield from (f"to decide: {choice}" for choice in self.decide)
        yield from (f"no config: {problem}" for problem in self.problems)

    def _column(self, name: str) -> LogColumn | None:
        return next((column for column in self.columns if column.name == self.fields.get(name)), None)

    def _drop(self, fields: Sequence[str], why: str) -> None:
        """Leaves fields out whose columns have names of their own; those with the contract's names are read anyway."""
        dropped = [name for name in fields if name in self.fields and self.fields[name] not in COLUMNS]
        dropped = [name for name in dropped if name not in self._settings.columns]
        if dropped:
            self._decide.append(f"{listed(self.fields[name] for name in dropped)} left out: {why}")
        for name in dropped:
            del self.fields[name]

    def _described_episodes(self) -> str:
        """Returns how long episodes are; leaves out columns of episodes where there are none."""
        follows = {"next_state_features", "next_action", "possible_next_actions"}.intersection(self.fields)
        ids = self._column("mdp_id")
        order = self._column("sequence_number")
        lengths = sorted(Counter(map(text_of, ids.present)).values()) if ids is not None else []
        if not follows:
            if ids is None or order is None:
                lacking = "that says which rows are one episode" if ids is None else "that says their order"
                self._drop(EPISODE_COLUMNS, f"there is no column {lacking}, so each row is a decision of its own")
            elif lengths and lengths[-1] == 1:
                self._drop(
                    EPISODE_COLUMNS, f"no value of {ids.name} has two rows, so each row is a decision of its own"
                )
            elif "terminal" not in self.fields and ids.name.lower().startswith(_PEOPLE):
                self._drop(
                    EPISODE_COLUMNS,
                    f"rows of one {ids.name} are not known to depend on each other, so each is a decision of its own; "
                    "if their rewards resemble each other, keep mdp_id with rl.gamma 0, see DATA.md",
                )
        kept = {name for name in EPISODE_COLUMNS if name in self.fields}
        ends = {"terminal", "next_action", "possible_next_actions"} & kept
        others = [
            column.name
            for column in self.columns
            if column.name in EPISODE_COLUMNS and column.name not in self.fields.values()
        ]
        shown = [*(self.fields[name] for name in EPISODE_COLUMNS if name in kept), *others]
        if shown and not ends and not {"mdp_id", "sequence_number"} <= kept:
            self._problems.append(
                f"{listed(shown)} without a column that says where episodes end, such as terminal; "
                "if each row is a decision of its own, remove the column from the log"
            )
        if not shown:
            return "no episodes: each row is a decision of its own, rl.gamma has no effect"
        self._decide.append("rl.gamma: what a later reward counts, 0.9 for each row by default")
        if not ends:
            self._decide.append(
                "ends: no column says how an episode ended, so its last row is not learned from; "
                "log terminal, or set timeline.addTerminalStateRow if every last row is a true end"
            )
        if not lengths:
            return ""
        spread = f"{lengths[0]:,} to {lengths[-1]:,} rows, median {np.median(lengths):g}"
        return f"{counted(len(lengths), 'episode')} of {spread}"

    def _names_of_actions(self) -> tuple[str, ...] | None:
        """Returns the names of the actions; None if they are candidates with features."""
        column = self._column("action")
        if column is None or not column.present:
            some = [column.name for column in self.columns if column.kind == "text" and column.distinct <= MOST_ACTIONS]
            self._lacking("action", "what was decided", some)
            return ()
        if column.kind == "map" or self._items is not None:
            return None
        possible = self._column("possible_actions")
        names = set(column.counts)
        for some in [] if possible is None else possible.present:
            names |= {name for name in some if isinstance(name, str)} if isinstance(some, list) else set()
        numbers = column.kind == "integer"
        ordered = sorted(
            names, key=lambda name: (int(name), "") if numbers and name.lstrip("-").isdigit() else (0, name)
        )
        if len(ordered) > MOST_ACTIONS:
            self._problems.append(
                f"{column.name} has {len(ordered):,} values, more than {MOST_ACTIONS} actions by name: give "
                "the features of each in an item table, `items`, or name another column as action"
            )
        if len(ordered) < 2:
            self._problems.append(f"{column.name} has one value, {listed(ordered)}: there is nothing to choose from")
        self._decide.append(f"actions: {listed(ordered)}, as in the rows read; add what is missing")
        return tuple(ordered)

    def _lacking(self, name: str, what: str, some: Sequence[str]) -> None:
        maybe = f"; it may be {listed(some)}" if some else ""
        example = some[0] if some else "..."
        self._problems.append(
            f"no column is known to be the {name}, {what}{maybe}: say which, as by --set columns.{name}={example}"
        )

    def _check_reward(self) -> None:
        column = self._column("reward")
        if column is None:
            self._lacking("reward", "what is to be large", [column.name for column in self.columns if column.is_number])
            return
        if not column.is_number or len(column.present) < self.rows or not finite(column.present):
            self._problems.append(f"{column.name}, read as reward, is not a finite number in every row")
        others = [
            candidate.column
            for candidate in self.candidates
            if candidate.field == "reward" and candidate.column not in self.fields.values()
        ]
        if others:
            self._decide.append(f"reward: {column.name}; {listed(others)} may be a reward too and is left out")

    def _plausibility(self) -> Iterator[str]:
        """Yields whether probabilities are plausible; one that is not is left out."""
        column = self._column("action_probability")
        if column is None:
            self._decide.append(
                "action_probability: no column has it, so what the policy is worth cannot be estimated by weights"
            )
        else:
            values = [float(value) for value in column.present if abs(value) < LARGEST] if column.is_number else []
            outside = [value for value in values if not 0 < value <= 1]
            if outside or len(values) < self.rows:
                got = f"{len(outside):,} outside, {self.rows - len(values):,} absent"
                yield f"{column.name}: not a probability in (0, 1] in every row: {got}"
                self._drop(["action_probability"], "it is no probability in (0, 1] in every row")
            else:
                yield f"{column.name}: in (0, 1] in every row, from {min(values):.4g} to {max(values):.4g}"
                yield from self._inverse(column.name, values)
        for title, rows in self._by_action(self._actions or ()):
            sums = [sum(row) for row in rows]
            wrong = sum(abs(total - 1) > _ROUNDING or min(row) < 0 for total, row in zip(sums, rows, strict=True))
            sums_to_one = f"they do not add up to 1 in {wrong:,} of" if wrong else "they add up to 1 in all"
            yield f"{title}: a probability for each action; {sums_to_one} {counted(len(rows), 'row')}"

    def _inverse(self, name: str, values: Sequence[float]) -> Iterator[str]:
        """Yields a sentence if the mean of 1 / p is not near the number of actions, as it is for true probabilities."""
        if not self._actions or "possible_actions" in self.fields or len(values) < 2 or min(values) < 1e-38:
            return
        inverse = 1 / np.array(values)
        mean = float(inverse.mean())
        error = float(inverse.std(ddof=1)) / len(inverse) ** 0.5
        if abs(mean - len(self._actions)) > max(4 * error, _ROUNDING * len(self._actions)):
            expected = (
                f"for {len(self._actions)} actions that are always possible it would be near {len(self._actions)}"
            )
            yield f"{name}: the mean of 1 / probability is {mean:.3g}; {expected}: are these propensities?"
            self._decide.append(f"action_probability: {name} may not be the probability of the logged action")

    def _by_action(self, actions: Sequence[str]) -> Iterator[tuple[str, list[list[float]]]]:
        """Yields columns that hold a number for every action: maps, and columns whose names end in the action's."""
        for column in self.columns:
            maps = column.present if column.kind == "map" else []
            if maps and actions and all(set(mapping) == set(actions) for mapping in maps):
                rows = [list(mapping.values()) for mapping in maps]
                if all(isinstance(value, int | float) for row in rows for value in row):
                    yield column.name, rows
        for columns in self._per_action(actions):
            some = [list(row) for row in zip(*(column.values for column in columns), strict=True) if None not in row]
            yield listed(column.name for column in columns), some

    def _per_action(self, actions: Sequence[str]) -> Iterator[list[LogColumn]]:
        """Yields one column for each action, such as p_mail and p_call, with numbers of [0, 1]."""
        if not actions:
            return
        shares = [
            column for column in self.columns if column.is_number and all(0 <= value <= 1 for value in column.present)
        ]
        by_name = {column.name: column for column in shares}
        for name in by_name:
            if name.endswith(f"_{actions[0]}"):
                names = [f"{name.removesuffix(actions[0])}{action}" for action in actions]
                if all(name in by_name for name in names):
                    yield [by_name[name] for name in names]

    def _features(self) -> list[str]:
        """Returns the columns of single features; none if state_features is a column of maps."""
        given = self._settings.columns.get("state_features")
        if isinstance(given, list):
            return given
        if "state_features" in self.fields:
            return []
        used = {
            *self.fields.values(),
            *(column.name for some in self._per_action(self._actions or ()) for column in some),
            *(candidate.column for candidate in self.candidates if candidate.field in _NOT_FEATURES),
        }
        features = []
        left = dict[str, list[str]]()
        for column in self.columns:
            if column.name in used or column.name in COLUMNS:
                continue
            if why := self._no_feature(column):
                left.setdefault(why, []).append(column.name)
            else:
                features.append(column.name)
        for why, names in left.items():
            self._decide.append(f"features: {listed(names)} left out, {why}")
        if features:
            self._decide.append(f"features: {listed(features)}; leave out what is not known when the decision is made")
        else:
            self._problems.append("no column of numbers or categories is left to be a feature of the state")
        return features

    def _no_feature(self, column: LogColumn) -> str:
        """Returns why a column is no feature; "" if it may be one."""
        words = re.split(r"[^0-9a-z]+", column.name.lower())
        if not column.is_number and not column.is_category:
            return f"a column of {column.kind} values"
        if words[0] == "next":
            return "by their names what followed the decision"
        if column.kind == "integer" and ({words[-1], words[0]} & {*_IDS}):
            return "ids by their names"
        if column.is_number and not finite(column.present):
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

    def _tree(self, features: Sequence[str]) -> Json:
        """Returns the config."""
        words = re.sub(r"[^A-Za-z0-9_-]+", "_", Path(self.path).name.split(".")[0]).strip("_")
        tree: Json = {
            "training_data_path": self.path,
            "model_output_path": f"outputs/{words or 'model'}",
            "epochs": 10,
        }
        if self._actions is not None:
            tree["actions"] = list(self._actions)
        columns: Columns = {
            field: column for field, column in self.fields.items() if column not in (field, "propensity")
        }
        if features:
            columns["state_features"] = list(features)
        items = self._settings.model_dump(include={"items", "item_id"}, exclude_defaults=True)
        if columns or items:
            tree["data"] = {**({"columns": columns} if columns else {}), **items}
        return tree

    def _faults(self, tree: Json) -> tuple[str, ...]:
        """Returns why training would refuse the config or the rows."""
        try:
            config = check(ParametricDqnConfig if self._actions is None else DqnConfig, tree)
            first_rows(self.path, config.actions or None, config.data.columns, self._items)
            if self.whole:
                with tempfile.TemporaryDirectory() as folder:
                    copy = prepare_training_copy(
                        self.path,
                        actions=config.actions or None,
                        directory=folder,
                        columns=config.data.columns,
                        items=self._items,
                    )
                    names = (STATE, ACTION) if copy.parametric else (STATE,)
                    columns = {name: summarize_copy(copy, name, NormParams(), seed=0) for name in names}
                    fit_columns(columns, NormParams(), where=location(self.path))
        except ReagentLiteError as error:
            return tuple(map(str, error.problems))
        return ()
