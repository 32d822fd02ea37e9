"""Policies that do not explore: found by their propensities, and named by model card and bundle."""

from pathlib import Path

import numpy as np
import pytest
from helpers.bundles import linear_bundle

from reagent_lite.export import load_bundle
from reagent_lite.export.exploration import certain_share, lack_of_exploration
from reagent_lite.rl.policies import EpsilonGreedy, Softmax, TargetPolicy

LACK = "takes one action with propensity 1.0 in 100% of its decisions"


def test_decisions_among_several_choices_count() -> None:
    propensities = np.array([[1.0, 0.0], [1.0, 0.0], [0.9985, 0.0015], [0.9995, 0.0005]])
    choices = np.array([[True, True], [True, False], [True, True], [True, True]])
    assert certain_share(propensities, choices) == pytest.approx(2 / 3)
    assert certain_share(propensities[1:2], choices[1:2]) == 0.0
    assert (lack_of_exploration(0.5), lack_of_exploration(1.0).startswith(LACK)) == ("", True)


@pytest.mark.parametrize(
    ("policy", "explores"),
    [
        (EpsilonGreedy(0.1), True),
        (EpsilonGreedy(0.0), False),
        (Softmax(0.01), False),  # of rewards in euro
        (Softmax(30.0), True),
    ],
    ids=str,
)
def test_card_and_bundle_agree(tmp_path: Path, policy: TargetPolicy, explores: bool) -> None:
    weight = np.array([[30.0, 0.0], [0.0, 40.0], [5.0, 5.0]])
    folder = linear_bundle(tmp_path / "model", weight, ("a", "b", "c"), (1, 2), policy=policy)
    assert (LACK in (folder / "MODEL_CARD.md").read_text()) == (not explores)
    assert bool(lack_of_exploration(load_bundle(folder).certain_share)) == (not explores)
