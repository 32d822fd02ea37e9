"""The allowed difference between an exported q and the live network's q; numpy only, as `bundle.py` uses it too.

A q differs if |other − live| > atol + rtol · scale; scale is the largest |q| of the live network over the whole check.
The check of ReAgent 2019 multiplied rtol by each |q|. With its defaults (atol 0, rtol 5e-5) a q near 0 failed by
float32 noise, because rounding errors are proportional to the terms that cancel, not to their sum. For every q of
ordinary size, a common scale is as strict.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from reagent_lite.errors import BundleError, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Bounds of a comparison.

    Attributes:
        atol: absolute bound (`rl.predictor_atol_check`).
        rtol: bound relative to the largest |q| of the check (`rl.predictor_rtol_check`).
        ratio_different: share of q that may differ by more (`rl.ratio_different_predictions_tolerance`).
    """

    atol: float
    rtol: float
    ratio_different: float

    def compare(self, where: str, live: NDArray[np.float32], other: NDArray[np.float32], todo: str) -> float:
        """Compares two arrays of q of the same shape.

        Returns:
            The largest difference.

        Raises:
            BundleError: more q differ than allowed; NaN differs.
        """
        difference = np.abs(other.astype(np.float64) - live)
        limit = self.atol + self.rtol * float(np.abs(live).max(initial=0))
        num_different = int((~(difference <= limit)).sum())
        largest = float(difference.max(initial=0))
        if num_different > self.ratio_different * live.size:
            expected = f"at most a share of {self.ratio_different} of q to differ from the live network by {limit:.3g}"
            raise BundleError(
                Problem(where, expected, f"{num_different} of {live.size}, the furthest by {largest:.3g}", todo)
            )
        return largest


def compare_choices(where: str, live: NDArray[np.bool_], other: NDArray[np.bool_]) -> None:
    """Compares the choices that a restriction leaves, two arrays of the same shape.

    Float noise may move a choice over the restriction's threshold: one choice, or one in a thousand, may differ.

    Raises:
        BundleError: more choices differ.
    """
    num_different = int((other != live).sum())
    if num_different > max(1, live.size // 1000):
        raise BundleError(
            Problem.stating(f"{where}, choices", f"{num_different} of {live.size} differ from the live network's")
        )
