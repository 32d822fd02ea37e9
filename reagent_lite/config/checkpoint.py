"""`checkpoint`: how often a run is saved, and whether it continues."""

from typing import Annotated

from pydantic import Field

from reagent_lite.config.section import Count, Positive, Section


class CheckpointConfig(Section):
    """Checkpoints under model_output_path/checkpoints; one is written at the end in any case."""

    every_steps: Count | None = None
    """Optimizer steps between two checkpoints, or null."""
    every_minutes: Positive | None = None
    """Minutes between two checkpoints, or null; both may be given."""
    keep: Annotated[int, Field(ge=2)] = 2
    """How many of the newest stay; two, so that a damaged one has another behind it."""
    resume: bool = True
    """Continue an unfinished run found in model_output_path; false starts over and removes it."""

    @property
    def periodic(self) -> bool:
        """Whether checkpoints are written during the run."""
        return self.every_steps is not None or self.every_minutes is not None
