"""The whole JSON of `workflows.convert`: a log, and the name of a copy in another format."""

from collections.abc import Iterator
from typing import ClassVar

from reagent_lite.config.column_names import LogColumns
from reagent_lite.config.embedding_config import Embeddings
from reagent_lite.config.section import LocalPath, Section
from reagent_lite.config.simulate_config import LOG_SUFFIXES, output_problems
from reagent_lite.errors import Problem


class ConvertConfig(Section):
    """`python -m workflows.convert`: writes a log in another format, row by row."""

    data_path: str = ""
    """The log: a file or folder of any format that training reads, a Minari dataset, or a URL."""
    columns: LogColumns = {}
    embeddings: Embeddings = {}
    output_path: LocalPath = ""
    """Output file: .jsonl, .jsonl.gz, .jsonl.zst, .parquet, .arrow or .csv; an older file is replaced once the new one
    is complete."""

    required: ClassVar = {"data_path": ("a path or a URL",)}
    renamed: ClassVar = {"input_path": "data_path"}

    def rules(self) -> Iterator[Problem]:
        """Yields Problems if the output is missing or a format is unknown."""
        yield from output_problems(self.output_path, LOG_SUFFIXES)
