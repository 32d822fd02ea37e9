"""The whole JSON of `workflows.convert`: a log of any format, and the name of the same log in another."""

from collections.abc import Iterator

from reagent_lite.config.columns import LogColumns
from reagent_lite.config.section import LocalPath, Section
from reagent_lite.config.simulate import LOG_SUFFIXES, output_problems
from reagent_lite.errors import Problem


class ConvertConfig(Section):
    """`python -m workflows.convert`: writes a log in another format, row for row."""

    input_path: str = ""
    """The log: a file or folder of any format that training reads, a Minari dataset, or a URL."""
    columns: LogColumns = {}
    output_path: LocalPath = ""
    """.jsonl, .jsonl.gz, .jsonl.zst, .parquet, .arrow or .csv; replaced if it is there, whole or not there at all."""

    def rules(self) -> Iterator[Problem]:
        """Yields missing paths and unknown formats."""
        if not self.input_path:
            yield self.wrong("input_path", "a path or a URL")
        yield from output_problems(self.output_path, LOG_SUFFIXES)
