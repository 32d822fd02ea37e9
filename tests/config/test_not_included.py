"""What there is not: the page has a section for each wish, and keys that there are ask for none."""

import re

import pytest
from helpers.runs import ROOT

from reagent_lite.config.loader import _walk
from reagent_lite.config.not_included import NOT_INCLUDED, PAGE, advise
from reagent_lite.config.reference import _WORKFLOWS
from reagent_lite.errors import SimulationError
from reagent_lite.sim.kernel_sources import find_environment


def test_the_page_has_a_section_for_each_wish() -> None:
    page = (ROOT / PAGE).read_text()
    assert re.findall("^## (.+)$", page, re.MULTILINE) == [*NOT_INCLUDED]
    assert page.count("*Instead*:") == len(NOT_INCLUDED)
    assert PAGE in (ROOT / "README.md").read_text()


@pytest.mark.parametrize(
    ("text", "section"),
    [
        ("continuousActions", "Continuous actions"),
        ("sac_alpha", "Continuous actions"),
        ("TD3+BC", "Continuous actions"),
        ("PPO", "Policy gradients"),
        ("entropy_coef", "Policy gradients"),
        ("slate_size", "Slates and rankings"),
        ("pettingzoo:pistonball_v6", "Agents of PettingZoo"),
        ("R2D2", "Recurrent policies"),
        ("decision-transformer", "Models of the environment and of sequences"),
        *((word, "Continuous actions") for word in ("action_space", "action_dim", "target_entropy")),
        *((word, "Policy gradients") for word in ("actor_learning_rate", "num_critics", "clip_ratio", "gae_lambda")),
        *((word, "Slates and rankings") for word in ("listwise", "position_bias", "slateFeatures")),
        *((word, "Agents of PettingZoo") for word in ("n_agents", "parallel_env")),
        *((word, "Recurrent policies") for word in ("lstm_hidden_size", "unroll_length")),
        *((word, "") for word in ("gama", "sacred", "entropy", "world", "")),
    ],
)
def test_words_that_ask_for_what_there_is_not(text: str, section: str) -> None:
    assert advise(text) == (section and f"{section} are not included; {PAGE} says what to use instead")


def test_no_key_asks_for_what_there_is_not() -> None:
    keys = {key for model in _WORKFLOWS.values() for _, part in _walk(model) for key in part.model_fields}
    assert len(keys) > 200
    assert {key for key in keys if advise(key)} == set()


def test_an_environment_that_asks_for_it() -> None:
    with pytest.raises(SimulationError, match="Agents of PettingZoo are not included"):
        find_environment("pettingzoo:pistonball_v6")
