"""The whole JSON of `workflows.convert`: a log of any format, and the name of the same log in another."""

import re
from collections.abc import Iterator
from typing import ClassVar

from reagent_lite.config.columns import LogColumns
from reagent_lite.config.section import LocalPath, Names, NoEffect, Section
from reagent_lite.config.simulate import LOG_SUFFIXES, MINARI_SUFFIX, output_problems
from reagent_lite.errors import Problem

# What minari accepts as the name of a dataset.
_DATASET_ID = re.compile(r"(?:[-_\w][-_\w/]*[-_\w]+/)?[-_\w]+?-v\d+")


class ConvertConfig(Section):
    """`python -m workflows.convert`: writes a log in another format, row for row."""

    input_path: str = ""
    """The log: a file or folder of any format that training reads, a Minari dataset, or a URL."""
    columns: LogColumns = {}
    output_path: LocalPath = ""
    """.jsonl, .jsonl.gz, .jsonl.zst, .parquet, .arrow, .csv, or a folder .minari; replaced if it is there, and whole or
    not there at all."""
    actions: Names = ()
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

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            lambda config: not config.to_minari,
            ("actions", "dataset_id", "env_id"),
            f"absent unless output_path ends in {MINARI_SUFFIX}",
        ),
    )

    def rules(self) -> Iterator[Problem]:
        """Yields missing paths, unknown formats, and keys of Minari that another format has no place for."""
        if not self.input_path:
            yield self.wrong("input_path", "a path or a URL")
        yield from output_problems(self.output_path, (*LOG_SUFFIXES, MINARI_SUFFIX))
        if self.to_minari and not _DATASET_ID.fullmatch(self.minari_id):
            yield self.wrong("dataset_id", "(namespace/)name-vN, of letters, digits, - and _", got=repr(self.minari_id))
