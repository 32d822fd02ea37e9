"""`rainbow`: extensions of DQN."""

from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from reagent_lite.config.section import NoEffect, NotNegative, Section, Share
from reagent_lite.errors import Problem


class RainbowConfig(Section):
    """Double Q-learning, dueling networks, BCQ and the two distributional heads."""

    double_q_learning: bool = True
    """The online network chooses the next action, and the target network gives its value."""
    dueling_architecture: bool = True
    """Q = V(s) + A(s, a) - mean of A over the allowed actions."""
    bcq: bool = False
    """Use only actions that are likely enough in the log, by behavior cloning, in targets, evaluation, simulation and
    export. With evaluation.propensities "estimate" the estimated logging policy replaces behavior cloning."""
    bcq_drop_threshold: Share = 0.1
    """Smallest probability of an action, as a share of the most likely action's."""
    categorical: bool = False
    """C51: a distribution over num_atoms fixed returns between qmin and qmax."""
    num_atoms: Annotated[int, Field(ge=2)] = 51
    """Atoms of C51, quantiles of QR-DQN."""
    qmin: float = -100.0
    """Lowest return of C51."""
    qmax: float = 200.0
    """Highest return of C51."""
    c51_l2_decay: NotNegative = 0.0
    """Weight decay in place of training.l2_decay when categorical is true."""
    quantile: bool = False
    """QR-DQN: num_atoms quantiles of the return."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(
            lambda rainbow: rainbow.categorical,
            ("quantile",),
            "false while categorical is true",
            "Choose C51 or QR-DQN",
        ),
    )

    def rules(self) -> Iterator[Problem]:
        """Yields a Problem if the support is empty."""
        if self.qmin >= self.qmax:
            yield self.wrong("qmin", f"less than qmax ({self.qmax})")
