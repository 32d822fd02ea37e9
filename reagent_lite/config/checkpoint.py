"""`checkpoint`: when a run is saved, and whether it continues."""

from typing import Annotated, ClassVar

from pydantic import Field

from reagent_lite.config.section import Count, NoEffect, Positive, Section


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
    keep_best: bool = False
    """Evaluate and export the policy of the best epoch instead of the last one.

    On logs: the lowest TD loss on about a tenth of the episodes, which are neither learned from nor scored. It needs
    rl.gamma 0 or rows without next states, an algorithm whose policy follows from its values, and 50 episodes besides
    the scored ones; otherwise a warning says that it has no effect. In simulation (simulation.share > 0): the highest
    mean return in the evaluations during the run, summed over types of agents if several learn.
    """
    patience: Count | None = None
    """End the run after so many epochs without a better one (evaluations, in simulation), or null; with keep_best."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            lambda config: not config.keep_best,
            ("patience",),
            "absent while keep_best is false",
            "Set keep_best to true",
        ),
    )

    @property
    def periodic(self) -> bool:
        """Whether checkpoints are written during the run."""
        return self.every_steps is not None or self.every_minutes is not None
