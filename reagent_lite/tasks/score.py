"""Score rows with an exported model.

1 check    the model's hashes, the files of the input, features in `columns`
2 predict  rows of any format ─► checked as in training ─► onnxruntime, block by block in threads
3 choose   in the order of the rows: a draw from the model's policy, or the largest score
4 write    under a temporary name until it is complete
"""

import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from reagent_lite.config.score_config import ScoreConfig
from reagent_lite.config.simulate_config import LOG_SUFFIXES, output_problems
from reagent_lite.console import logger
from reagent_lite.disk_room import require_writable
from reagent_lite.errors import ConfigError, needing, pluralize


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredFile:
    """The written scores; printed as the last line of standard output.

    Attributes:
        scores: path of the file.
        rows: number of rows, in the order of the input.
        undecided_rows: number of rows without an action, because none is possible or no score is a number.
        other_values: {feature: number of values without a column in the model} of one-hot features.
        rows_per_second: speed of the whole run.
        seconds: total wall-clock time of the run.
    """

    scores: str
    rows: int
    undecided_rows: int
    other_values: dict[str, int]
    rows_per_second: float
    seconds: float


def score(config: ScoreConfig) -> ScoredFile:
    """Writes the action and the score of every row.

    Raises:
        BundleError: the model fails its check.
        DataError: rows have faults, or no row has a feature that the model reads.
    """
    with needing("data", "data_path"):
        from reagent_lite.data.writing.table_writers import table_writer, without_formulas
        from reagent_lite.tasks.scoring import open_scoring, scored_tables
    start = time.monotonic()
    if problems := list(output_problems(config.output_path, LOG_SUFFIXES)):
        raise ConfigError(problems)
    target = Path(config.output_path).expanduser().absolute()
    bundle, config, log = open_scoring(config)
    log.require_apart({"output_path": target})
    require_writable(target.parent, "output_path")
    for note in log.notes():
        logger.warning(note)
    rows = undecided = 0
    others = Counter[str]()
    with closing(scored_tables(config, log.files, bundle, others)) as tables, table_writer(target) as writer:
        for table in tables:
            writer.write(without_formulas(table) if config.escape_formulas else table)
            rows += table.num_rows
            undecided += table["index"].null_count
    logger.info(f"{target}: {pluralize(rows, 'row')}")
    if undecided:
        logger.warning(f"no action in {pluralize(undecided, 'row')}, as none is possible or no score is a number")
    seconds = time.monotonic() - start
    return ScoredFile(
        scores=str(target),
        rows=rows,
        undecided_rows=undecided,
        other_values=dict(others),
        rows_per_second=round(rows / seconds, 1),
        seconds=round(seconds, 3),
    )
