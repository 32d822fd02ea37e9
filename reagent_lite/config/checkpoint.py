"""`checkpoint`: when a run is saved, and whether it continues."""

from typing import Annotated

from pydantic import Field

from reagent_lite.config.section import Count, Positive, Section


class CheckpointConfig(Section):
    """Checkpoints in model_output_path/checkpoints; the end of a run always writes one."""

    every_steps: Count | None = None
    """Optimizer steps between two checkpoints, or null."""
    every_minutes: Positive | None = None
    """Minutes between two checkpoints, or null; both may be given."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Number of newest checkpoints to keep; at least two, in case one is damaged."""
    resume: bool = True
    """Continue an unfinished run found in model_output_path; false starts over and removes it."""

    @property
    def periodic(self) -> bool:
        """Whether checkpoints are written during the run."""
        return self.every_steps is not None or self.every_minutes is not None
