"""The protocol of the sources that a run can learn from."""

from pathlib import Path
from typing import Protocol

from reagent_lite.algorithms.learners import Learner
from reagent_lite.config import WorkflowConfig
from reagent_lite.distributed.group import Group
from reagent_lite.export.bundle_content import SampleRows
from reagent_lite.item_table import ItemTable
from reagent_lite.report.run import DataFacts
from reagent_lite.run.evaluators import Evaluators
from reagent_lite.run.normalization import Normalization
from reagent_lite.run.sources.stream import Stream
from reagent_lite.run.value_bounds import ReturnBounds
from reagent_lite.sim.experience import ONLY
from reagent_lite.types import SourceSpec


class Source(Protocol):
    """Data or environments that a run learns from; every rank has one and calls its methods.

    Attributes:
        config: the resolved config of the run.
        group: the ranks.
        spec: numbers of features and choices that the network is built for.
        normalization: normalization of states and candidates.
        identity: sha256 of data and environment, which a resumed run must share; see History.require_same.
        types: names of the types of agents that learn; ("",) if all agents are of one type.
    """

    config: WorkflowConfig
    group: Group
    spec: SourceSpec
    normalization: Normalization
    identity: dict[str, str]
    types: tuple[str, ...] = (ONLY,)

    @property
    def items(self) -> ItemTable | None:
        """The item table with whose ids candidates may be named, or None."""
        return None

    @property
    def hash(self) -> str:
        """sha256 of the data, or without data of the environment; stored in the exported model."""
        return self.identity["data"] or self.identity["env"]

    def stream(self, learner: Learner) -> Stream:
        """Returns batches for the learner; a simulation acts by the learner's current policy."""
        ...

    def evaluators(self, learner: Learner) -> Evaluators:
        """Returns the evaluators of the learner."""
        ...

    def fit(self, learner: Learner) -> None:
        """Fits what is not learned by optimizer steps: BCQ's estimated logging policy, a model of the reward."""
        return

    def sample(self, count: int, kind: str = ONLY) -> SampleRows:
        """Returns at most `count` raw rows in the model's column order, on which the export is checked.

        Args:
            count: largest number of rows.
            kind: type of agents of the rows.
        """
        ...

    def return_bounds(self) -> ReturnBounds | None:
        """Returns the range of values that the rewards allow, or None if it is not known."""
        return None

    def write_fitted(self) -> None:
        """Writes the normalization that was fitted, if one was; rank 0 calls it."""
        return

    def facts(self) -> DataFacts:
        """Returns facts about the source for the report."""
        return DataFacts()

    def draw(self, folder: Path, learner: Learner) -> None:
        """Writes the pictures that simulation.pictures asks for into the run's folder."""
        return
