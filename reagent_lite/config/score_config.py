"""The whole JSON of `workflows.score`: an exported model, and rows to decide."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from reagent_lite.config.column_names import LogColumns, names_of
from reagent_lite.config.items import NewerItems
from reagent_lite.config.section import LocalPath, Names, NoEffect, Section, Seed
from reagent_lite.config.simulate_config import LOG_SUFFIXES, output_problems
from reagent_lite.errors import Problem

SCORE_COLUMNS = ("mdp_id", "sequence_number", "action", "index", "score", "action_probability", "scores")
"""Columns of a table of scores; `scores` only with all_scores."""


class ScoreConfig(Section):
    """`python -m workflows.score`: writes an exported model's action and score for every row."""

    model: str = ""
    """Folder of an exported model."""
    data_path: str = ""
    """The rows, in any format that training reads; actions and rewards are not needed."""
    columns: LogColumns = {}
    items: NewerItems = None
    keep: Names = ()
    """Columns of the log to copy to the scores, by the log's own names and as text, such as keys to join by; mdp_id and
    sequence_number are always copied."""
    output_path: LocalPath = ""
    """Output file: .parquet, or another format of a log; an older file is replaced once the new one is complete."""
    escape_formulas: bool = False
    """Whether strings in CSV that spreadsheets would take for formulas, as they begin with =, +, -, @, a tab or a
    carriage return, get an apostrophe before them."""
    policy: Literal["acting", "greedy"] = "acting"
    """acting: a draw from the policy that the model was exported with, as in `workflows.serve`; greedy: the largest
    score."""
    seed: Seed | None = None
    """Seed of the draws; absent: from the system, so that a second run draws differently."""
    all_scores: bool = False
    """Whether to write the scores of all actions, or of all candidates of a row."""

    required: ClassVar = {"model": ("a path", "Or give --model"), "data_path": ("a path", "Or give --data")}
    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(lambda config: config.policy == "greedy", ("seed",), "absent with policy greedy"),
    )

    def rules(self) -> Iterator[Problem]:
        """Yields Problems for an unknown format, and for columns that cannot be kept."""
        if self.output_path:
            yield from output_problems(self.output_path, LOG_SUFFIXES)
        if self.escape_formulas and not self.output_path.lower().endswith(".csv"):
            yield self.wrong("escape_formulas", "false unless output_path is CSV")
        features = {name for source in self.columns.values() if isinstance(source, list) for name in names_of(source)}
        for name in self.keep:
            if name in (*SCORE_COLUMNS, *features):
                yield self.wrong("keep", f"columns other than {', '.join(SCORE_COLUMNS)}, and no features")
