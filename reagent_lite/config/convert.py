"""The whole JSON of `workflows.convert`: a log of any format, and the name of the same log in another."""

import re
from collections.abc import Iterator
from typing import Final

from reagent_lite.config.columns import Columns, column_problems
from reagent_lite.config.section import Section, local_problems
from reagent_lite.config.simulate import LOG_SUFFIXES
from reagent_lite.errors import Problem

MINARI_SUFFIX: Final = ".minari"
# What minari accepts as the name of a dataset.
_DATASET_ID = re.compile(r"(?:[-_\w][-_\w/]*[-_\w]+/)?[-_\w]+?-v\d+")


class ConvertConfig(Section):
    """`python -m workflows.convert`: a log, row for row, in another format."""

    input_path: str = ""
    """The log: a file or folder of any format that training reads, a Minari dataset, or a URL."""
    columns: Columns = {}
    """The log's own names for columns of the contract, as data.columns of training."""
    output_path: str = ""
    """.jsonl, .jsonl.gz, .jsonl.zst, .parquet, .arrow, .csv, or a folder .minari; replaced if it is there, and whole or
    not there at all."""
    actions: list[str] = []
    """Minari: names in the order of its Discrete space; required there unless actions are feature maps."""
    dataset_id: str = ""
    """Minari: (namespace/)name-vN of the dataset; empty takes the folder's name with -v0."""
    env_id: str = ""
    """Minari: the Gymnasium environment the log is of, if it is installed; empty for none."""

    @property
    def to_minari(self) -> bool:
        """Whether the target is a Minari dataset."""
        return self.output_path.rstrip("/").endswith(MINARI_SUFFIX)

    @property
    def minari_id(self) -> str:
        """The dataset's name: as given, else of the folder's."""
        stem = self.output_path.rstrip("/").rsplit("/", 1)[-1].removesuffix(MINARI_SUFFIX)
        return self.dataset_id or re.sub(r"[^-\w]", "-", stem) + "-v0"

    def problems(self, path: str = "") -> Iterator[Problem]:
        """Yields everything wrong beyond single keys."""
        if not self.input_path:
            yield Problem("input_path", "a path or a URL", "nothing")
        yield from column_problems("columns", self.columns)
        yield from self._output_problems()
        for key in () if self.to_minari else ("actions", "dataset_id", "env_id"):
            if key in self.changed:
                yield Problem(key, f"absent unless output_path ends in {MINARI_SUFFIX}", repr(getattr(self, key)))
        if len(set(self.actions)) != len(self.actions):
            yield Problem("actions", "each name once", repr(self.actions))
        if self.to_minari and not _DATASET_ID.fullmatch(self.minari_id):
            yield Problem("dataset_id", "(namespace/)name-vN, of letters, digits, - and _", repr(self.minari_id))

    def _output_problems(self) -> Iterator[Problem]:
        if not self.output_path:
            yield Problem("output_path", "a path", "nothing")
            return
        suffixes = (*LOG_SUFFIXES, MINARI_SUFFIX)
        name = self.output_path.rstrip("/").rsplit("/", 1)[-1]
        if not any(name.endswith(suffix) and name != suffix for suffix in suffixes):
            yield Problem("output_path", f"a name that ends in {', '.join(suffixes)}", repr(self.output_path))
        yield from local_problems("output_path", self.output_path)
