"""Results in a notebook: the decision first, then a small table of figures with their intervals."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reagent_lite.evaluation.decision import ShipDecision
from reagent_lite.evaluation.document import ESTIMATE_COLUMNS
from reagent_lite.report.content import Report, Table
from reagent_lite.report.html_page import render_template

SEGMENT_COLUMNS = (
    "policy", "rows_with", "share", "count", "effective", "logged", "new", "difference", "low", "high", "standing",
    "verdict", "reason",
)  # fmt: skip
"""Columns of `Result.segments`."""
ALL = "all segments"
Rows = Callable[[Mapping[str, Any]], Iterator[dict[str, Any]]]
"""Yields rows of a frame from a part of an explanation."""
CHOICE_COLUMNS = ("policy", "rows_with", "choice", "logged", "new")
LEAF_COLUMNS = ("policy", "rows_with", "share", "choice", "logged", "new")
IMPORTANCE_COLUMNS = ("policy", "feature", "change")

if TYPE_CHECKING:
    from reagent_lite.data.result_frames import DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class Brief:
    """The part of a report that a notebook shows below a cell.

    Attributes:
        decision: the decision, or None.
        tables: tables of figures.
    """

    decision: ShipDecision | None = None
    tables: tuple[Table, ...]

    @classmethod
    def of(cls, report: Report) -> "Brief":
        """Returns the decision and the first table of each section about the policy."""
        tables = (section.tables[0] for section in report.sections if section.in_brief and section.tables)
        return cls(decision=report.decision, tables=tuple(tables))


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The base of results that a notebook shows as a table.

    Attributes:
        brief: the displayed part; None if there is none, as on ranks other than 0. Left out of `repr`.
        estimate_rows: rows of `estimates`. Left out of `repr`.
        explanations: {policy: who gets what, who gains and who loses}, as in section "explanation" of the JSON report:
            missing parts are null, and "absent" has the reasons. Left out of `repr`.
    """

    brief: Brief | None = field(default=None, repr=False, compare=False)
    estimate_rows: tuple[dict[str, Any], ...] = field(default=(), repr=False, compare=False)
    explanations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def estimates(self) -> "DataFrame":
        """The estimates from the log as a frame of pandas, with a row for each policy, outcome and estimator."""
        from reagent_lite.data.result_frames import frame_of

        return frame_of(self.estimate_rows, ESTIMATE_COLUMNS)

    @property
    def segments(self) -> "DataFrame":
        """The effect of each policy by segment as a frame of pandas, with a row for each segment and one for all.

        Columns: `policy`; `rows_with`, the segment in words; `share` of rows, or of episodes if these are compared;
        `count` of these and their `effective` number; `logged` and `new`, mean reward of a row or mean discounted
        return of an episode; `difference`, `low`, `high`: new - logged, whose intervals hold together, also with that
        of the last row, the sum weighted by `share`; `standing`: gains, loses, or not enough to say; `verdict` and
        `reason`: whether to trust the interval. Empty if no effect was estimated.
        """
        return self._frame("effects", _segment_rows, SEGMENT_COLUMNS)

    @property
    def segment_choices(self) -> "DataFrame":
        """Shares of choices in each segment, in the log and under the policy, as a frame of pandas.

        Columns: `policy`, `rows_with`, `choice` (an action, or a kind of candidates in words), `logged`, `new`. The
        most frequent choices have a row.
        """
        return self._frame("effects", _choice_rows, CHOICE_COLUMNS)

    @property
    def policy_tree(self) -> "DataFrame":
        """Each policy as a small tree: a row for each leaf and choice, as a frame of pandas.

        Columns: `policy`; `rows_with`, the leaf in words; `share` of rows in it; `choice`; `logged` and `new`, share
        of the choice in the log and its mean probability under the policy, in rows that did not grow the tree. For
        candidates a leaf is a kind of candidates, and its share is that in the policy's choices. The fidelity of the
        tree is in `explanations`.
        """
        return self._frame("tree", _leaf_rows, LEAF_COLUMNS)

    @property
    def importance(self) -> "DataFrame":
        """Share of each policy's decisions that change if a feature's values are shuffled, as a frame of pandas.

        Columns: `policy`, `feature`, `change` from 0 to 1; the largest change first.
        """
        return self._frame("importance", _importance_rows, IMPORTANCE_COLUMNS)

    def _frame(
        self, part: str, rows_of: Callable[[Any], Iterator[dict[str, Any]]], columns: Sequence[str]
    ) -> "DataFrame":
        from reagent_lite.data.result_frames import frame_of

        parts = {policy: explanation[part] for policy, explanation in self.explanations.items()}
        rows = [{"policy": policy} | row for policy, tree in parts.items() if tree is not None for row in rows_of(tree)]
        return frame_of(rows, columns)

    def _repr_html_(self) -> str | None:
        return None if self.brief is None else render_template("brief.html.j2", self.brief.decision, brief=self.brief)


def _segment_rows(effects: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for segment in effects["segments"]:
        yield {
            **{name: segment[name] for name in ("rows_with", "share", "count", "effective")},
            "logged": segment["logged"]["value"],
            "new": segment["policy"]["value"],
            **_ends(segment["difference"]),
            **{name: segment[name] for name in ("standing", "verdict", "reason")},
        }
    count = sum(segment["count"] for segment in effects["segments"])
    yield {"rows_with": ALL, "share": 1.0, "count": count, **_ends(effects["total"])}


def _ends(difference: Mapping[str, float | None]) -> dict[str, float | None]:
    return {"difference": difference["value"], "low": difference["low"], "high": difference["high"]}


def _choice_rows(effects: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for segment in effects["segments"]:
        for choice, shares in segment.get("choices", {}).items():
            yield {"rows_with": segment["rows_with"], "choice": choice, **_shares(shares)}


def _leaf_rows(tree: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for leaf in tree["leaves"]:
        for choice, shares in leaf["choices"].items():
            yield {"rows_with": leaf["rows_with"], "share": leaf["share"], "choice": choice, **_shares(shares)}


def _shares(shares: Mapping[str, float]) -> dict[str, float]:
    return {"logged": shares["logged"], "new": shares["policy"]}


def _importance_rows(importance: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for feature, change in importance["changes"].items():
        yield {"feature": feature, "change": change}
