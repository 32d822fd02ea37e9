"""The whole JSON of `workflows.score`: an exported model, and the rows that it decides."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from reagent_lite.config.columns import LogColumns
from reagent_lite.config.items import NewerItems
from reagent_lite.config.section import LocalPath, Names, NoEffect, Section, Seed
from reagent_lite.config.simulate import LOG_SUFFIXES, output_problems
from reagent_lite.errors import Problem

SCORE_COLUMNS = ("mdp_id", "sequence_number", "action", "index", "score", "action_probability", "scores")
"""Columns of every table of scores; `scores` if it is asked for."""


class ScoreConfig(Section):
    """`python -m workflows.score`: writes the action that an exported model chooses for every row, with its score."""

    model: str = ""
    """Folder of an exported model."""
    data_path: str = ""
    """The rows, in any format that training reads; a log need not have actions or rewards here."""
    columns: LogColumns = {}
    items: NewerItems = None
    keep: Names = ()
    """Further columns of the log that the scores have as well, by the log's own names and as text, such as keys to join
    by; mdp_id and sequence_number are always there."""
    output_path: LocalPath = ""
    """.parquet, or another format that a log may have; replaced if it is there, and whole or not there at all."""
    policy: Literal["acting", "greedy"] = "acting"
    """acting: drawn from the policy that the model was exported with, as `workflows.serve` does; greedy: the largest
    score."""
    seed: Seed | None = None
    """Seed of the draws; absent: from the system, so that a second run does not repeat them."""
    all_scores: bool = False
    """Whether the scores of all actions, or of all candidates of a row, are written as well."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(lambda config: config.policy == "greedy", ("seed",), "absent with policy greedy"),
    )

    def rules(self) -> Iterator[Problem]:
        """Yields missing paths, unknown formats."""
        for key in ("model", "data_path"):
            if not getattr(self, key):
                yield self.wrong(key, "a path", f"Or give --{key.removesuffix('_path')}")
        if self.output_path:
            yield from output_problems(self.output_path, LOG_SUFFIXES)
        features = {name for source in self.columns.values() if isinstance(source, list) for name in source}
        for name in self.keep:
            if name in (*SCORE_COLUMNS, *features):
                yield self.wrong("keep", f"columns other than {', '.join(SCORE_COLUMNS)}, and no features")
