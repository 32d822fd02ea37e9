"""Results in a notebook: the decision first, then a small table of figures with their intervals."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reagent_lite.evaluation.decision import ShipDecision
from reagent_lite.evaluation.document import ESTIMATE_COLUMNS
from reagent_lite.report.content import Report, Table
from reagent_lite.report.page import rendered

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
    """

    brief: Brief | None = field(default=None, repr=False, compare=False)
    estimate_rows: tuple[dict[str, Any], ...] = field(default=(), repr=False, compare=False)

    @property
    def estimates(self) -> "DataFrame":
        """The estimates from the log as a frame of pandas, with a row for each policy, outcome and estimator."""
        from reagent_lite.data.result_frames import frame_of

        return frame_of(self.estimate_rows, ESTIMATE_COLUMNS)

    def _repr_html_(self) -> str | None:
        return None if self.brief is None else rendered("brief.html.j2", self.brief.decision, brief=self.brief)
