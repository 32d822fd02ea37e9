"""The part of a log that one of several machines keeps: whole episodes, chosen while the rows are read.

    files of whole episodes (a timeline's) ─► whole, to the machine with the fewest rows; the others do not read them
    all other files ─► read by every machine ─► rows whose hash of mdp_id and seed is this machine's

Every machine computes the same division from the same files, so that none has to wait for another one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np
import pyarrow as pa

from reagent_lite.data.formats.blocks import Block, InputFile
from reagent_lite.data.rows.block_columns import column_of, strings
from reagent_lite.data.rows.faults import Faults
from reagent_lite.data.rows.hashes import Hashes, hashes_of_codes, mix, name_hashes, row_hashes
from reagent_lite.data.stage_folder import StageManifest

_KINDS_OF_WHOLE_EPISODES = ("timeline",)
"""Kinds of stages in whose folders no two files share an episode."""
_SLACK = 0.1
"""Largest excess of whole files over an equal share: a machine with more rows makes the others wait at every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The episodes of one machine.

    Attributes:
        num_nodes: number of machines.
        node: number of this machine, from 0.
        seed: seed of the division.
    """

    num_nodes: int
    node: int
    seed: int

    @property
    def settings(self) -> dict[str, int]:
        """The settings that files made of this part depend on."""
        return asdict(self)

    def files_of(self, files: tuple[InputFile, ...], manifest: StageManifest | None) -> tuple[InputFile, ...]:
        """Returns the files that this machine reads; their readers yield the rows of its episodes only.

        Args:
            files: the files of a log.
            manifest: that of the log's folder if a stage made it.
        """
        if manifest is not None and manifest.kind in _KINDS_OF_WHOLE_EPISODES:
            machines = self._whole_files(files, {file: int(manifest.files[file.name]["rows"]) for file in files})
            if machines is not None:
                return tuple(machines[self.node])
        return tuple(replace(file, selection=self) for file in files)

    def _whole_files(self, files: tuple[InputFile, ...], rows: dict[InputFile, int]) -> list[list[InputFile]] | None:
        """Returns the files of each machine, or None if one would get clearly more than an equal share of the rows."""
        ties = dict(zip(files, mix(name_hashes(file.sha256 for file in files) ^ self._salt).tolist(), strict=True))
        machines: list[list[InputFile]] = [[] for _ in range(self.num_nodes)]
        held = [0] * self.num_nodes
        for file in sorted(files, key=lambda file: (-rows[file], ties[file])):
            number = held.index(min(held))
            held[number] += rows[file]
            machines[number].append(file)
        if max(held) > (1 + _SLACK) * sum(held) / self.num_nodes:
            return None
        return [sorted(some, key=files.index) for some in machines]

    def select(self, block: Block) -> Block:
        """Returns the rows of a block that are of this machine's episodes; see RowSelection."""
        rows = mix(episode_hashes(block) ^ self._salt) % np.uint64(self.num_nodes) == self.node
        if rows.all():
            return block
        return replace(block, table=block.table.filter(pa.array(rows)), lines=block.lines[rows])

    @property
    def _salt(self) -> Hashes:
        """[1] a number to combine with hashes, which depends on the seed."""
        return mix(np.array([self.seed << 32], np.uint64))


def episode_hashes(block: Block) -> Hashes:
    """Returns [n] a hash of each row's episode; a row without a legal mdp_id is an episode of its own."""
    codes, names = strings(column_of(block, "mdp_id"), Faults(block))
    alone = row_hashes(np.array([block.file_number], np.uint64), block.lines, 0)
    return np.where(codes < 0, alone, hashes_of_codes(codes, names.to_pylist()))
