"""Catch of configs/images/catch.py, and the exact value of a policy in it, by recursion over all positions."""

import importlib.util

import numpy as np
from helpers.runs import ROOT

_SPEC = importlib.util.spec_from_file_location("catch_environment", ROOT / "configs" / "images" / "catch.py")
assert _SPEC is not None
assert _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_MODULE)
Catch = _MODULE.Catch
BALL = _MODULE.BALL
PADDLE = _MODULE.PADDLE


def value(cells: int, *, epsilon: float, gamma: float = 1.0) -> float:
    """Returns the exact value of moving towards the ball, uniformly with probability epsilon, over all starts.

    Without epsilon every ball is caught, and the value is gamma^(cells - 2): the ball takes as many steps as the
    longest way.
    """
    total = 0.0
    for ball in range(cells):
        worth = np.where(np.arange(cells) == ball, 1.0, -1.0)
        for step in range(cells - 1):
            moved = [worth[np.clip(np.arange(cells) + move, 0, cells - 1)] for move in (-1, 0, 1)]
            best = np.array([moved[int(np.sign(ball - paddle)) + 1][paddle] for paddle in range(cells)])
            worth = (gamma if step else 1.0) * (epsilon * np.mean(moved, axis=0) + (1 - epsilon) * best)
        total += float(worth.mean())
    return total / cells
