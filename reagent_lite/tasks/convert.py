"""Write a log in another format.

1 open     the input's files; a target among them is refused
2 survey   columns and their types, which every format but JSON lines needs before the first row
3 copy     rows in the order of the input ─► target, under a temporary name until it is complete
"""

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from reagent_lite.config.convert_config import ConvertConfig
from reagent_lite.config.embedding_config import id_features
from reagent_lite.console import logger
from reagent_lite.data.logs import Log
from reagent_lite.disk_room import require_writable
from reagent_lite.errors import needing, pluralize


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The written log; printed as the last line of standard output.

    Attributes:
        log: path of the file.
        rows: number of rows.
        columns: names of the columns with values.
        rows_per_second: speed of the whole run.
        seconds: total wall-clock time of the run.
    """

    log: str
    rows: int
    columns: list[str]
    rows_per_second: float
    seconds: float


def convert(config: ConvertConfig) -> Converted:
    """Writes the log in its new format and returns the results."""
    with needing("data", "data_path"):
        from reagent_lite.data.tables import survey, typed_tables, with_types
        from reagent_lite.data.writing.table_writers import encoding_of, table_writer
    start = time.monotonic()
    target = Path(config.output_path).expanduser().absolute()
    log = Log(config.data_path, columns=config.columns, id_features=id_features(config.embeddings) or None)
    for note in log.notes():
        logger.warning(note)
    log.require_apart({"output_path": target})
    require_writable(target.parent, "output_path")
    encoding = encoding_of(target)
    fields = {} if encoding.own_columns else survey(log.files)
    names: dict[str, None] = {}
    rows = 0
    with closing(typed_tables(log.files, "converting")) as tables, table_writer(target) as writer:
        for table, _ in tables:
            writer.write(table if encoding.own_columns else with_types(table, fields))
            rows += table.num_rows
            names |= {column.name: None for column in table.schema if str(column.type) != "null"}
    logger.info(f"{target}: {pluralize(rows, 'row')}")
    if encoding.cells and "action" in fields and str(fields["action"].type) == "int64":
        logger.info("actions are indices, which CSV stores as text: text is read as a name first if `actions` has it")
    seconds = time.monotonic() - start
    return Converted(
        log=str(target),
        rows=rows,
        columns=list(names),
        rows_per_second=round(rows / seconds, 1),
        seconds=round(seconds, 3),
    )
