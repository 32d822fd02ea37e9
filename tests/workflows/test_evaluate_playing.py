"""Playing an exported model: a user's environment, the page, and every fault of models and configs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles.bundles import linear_bundle
from oracles.played import played
from oracles.reports import Page
from oracles.simulated import skip_without_gpu

from reagent_lite.errors import ReagentLiteError
from reagent_lite.evaluation.interval import Interval

LOUD = """
#define NUM_ACTIONS 2
#define OBSERVATION_SIZE 2
#define TIME_LIMIT 3
#define PARAMETERS(P) P(shown, 1.0f) P(paid, 1.0f)
#define STATE(FIELD, ARRAY) FIELD(int, left)
DECLARE_ENVIRONMENT
DEVICE void reset(State &s, Random &random) { s.left = 3; }
DEVICE void observe(const State &s, float *observation) {
  observation[0] = observation[1] = shown * float(s.left) * 1e30f;
}
DEVICE float step(State &s, int action, Random &random, bool &terminated) {
  s.left -= 1;
  terminated = false;
  return paid * 1e30f * (action == 1 ? 1e-30f : 2e-30f);
}
"""


@pytest.fixture(scope="module")
def loud(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's environment, whose actions have no names: 0 pays 2, 1 pays 1; its observations are huge."""
    file = tmp_path_factory.mktemp("own") / "loud.cuh"
    file.write_text(LOUD)
    return file


def test_a_user_s_environment(tmp_path: Path, loud: Path) -> None:
    """Action 1 leads by 1e30 times a positive state, and always is what a softmax takes."""
    model = linear_bundle(tmp_path / "model", np.array([[0.0, 0.0], [1.0, 0.0]]), ("0", "1"), (0, 1))
    _, report = played(tmp_path, model, str(loud), 10)
    assert report["model"]["simulated"]["return"]["value"] == 3
    assert report["simulation"]["env"] == "loud"


@pytest.mark.parametrize(
    ("policy", "parameters", "said"),
    [
        # 10 times 3e38 is infinite
        ("softmax", {"shown": 1e8}, "probabilities of every choice"),
        ("greedy", {"shown": 1e8}, "probabilities of every choice"),
        ("softmax", {"shown": 1e20}, "observations of loud: expected finite"),
        ("greedy", {"paid": 1e30}, "rewards of loud: expected finite"),
    ],
)
def test_values_that_are_not_finite(
    tmp_path: Path, loud: Path, policy: str, parameters: dict[str, float], said: str
) -> None:
    scale = 10.0 if said.startswith("prob") else 1e-30
    weight = scale * np.array([[1.0, -1.0], [1.0, -1.0]])
    model = linear_bundle(tmp_path / "model", weight, ("0", "1"), (0, 1))
    with pytest.raises(ReagentLiteError, match=said):
        played(tmp_path, model, str(loud), 10, policy=policy, simulation={"env_parameters": parameters})


@pytest.fixture(scope="module")
def cart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pushes right where the pole leans right."""
    weight = np.array([[0.0, 0.0, -8.0, -2.0], [0.0, 0.0, 8.0, 2.0]])
    return linear_bundle(tmp_path_factory.mktemp("cart") / "model", weight, ("left", "right"), (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("env", "settings", "said"),
    [
        ("no/such.cuh", {}, r"simulation\.env: expected a \.cuh file"),
        ("cartpole_v0", {"env_parameters": {"gravty": 1}}, r"simulation\.env_parameters: .* 'gravity'"),
        ("gridworld", {}, "actions L, R, U, D of gridworld, got left, right"),
        ("mountain_car", {}, "features among 0 to 1 of mountain_car, got 2, 3"),
        ("recommend", {}, "expected a model of candidates"),
        ("cartpole_v0", {"backend": "cuda"}, "."),
        ("cartpole_v0", {"against": True},
         "against .*more: .* features among 0 to 3 of cartpole_v0, got 4"),
    ],
)  # fmt: skip
def test_what_does_not_fit(tmp_path: Path, cart: Path, env: str, settings: dict[str, Any], said: str) -> None:
    if settings.get("backend") == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    keys = {"simulation": settings}
    if settings.get("against"):
        more = linear_bundle(tmp_path / "more", np.zeros((2, 5)), ("right", "left"), (0, 1, 2, 3, 4))
        keys = {"against": str(more)}
    with pytest.raises(ReagentLiteError, match=said) as raised:
        played(tmp_path, cart, env, **keys)
    assert raised.value.exit_code == 2
    assert not (tmp_path / "report" / "e.json").exists()


def test_the_same_seed_is_the_same_game(tmp_path: Path, cart: Path) -> None:
    def scores(**keys: Any) -> dict[str, float | None]:
        return played(tmp_path, cart, "cartpole_v0", 50, **keys)[0].scores

    assert scores() == scores()
    assert scores() != scores(seed=1)


@pytest.mark.gpu
def test_a_gpu_plays_the_same_episodes(tmp_path: Path, cart: Path) -> None:
    skip_without_gpu()
    cpu, other = (played(tmp_path, cart, "cartpole_v0", 100, simulation={"backend": name})[0].scores
                  for name in ("cpu", "cuda"))  # fmt: skip
    assert cpu == pytest.approx(other)


def test_log_and_page_of_two_models_without_a_log(tmp_path: Path, cart: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One decision, one section, and no estimates."""
    idle = linear_bundle(tmp_path / "idle", np.zeros((2, 4)), ("left", "right"), (0, 1, 2, 3))
    outcome, report = played(tmp_path, cart, "cartpole_v0", 200, against=str(idle), gamma=0.99)
    assert outcome.decision["choice"] == report["decision"]["choice"] == "ship"
    for words in ("  Random actions  ", "  The model, softmax of q at temp", "playing model: 200 of 200 episodes"):
        assert words in caplog.text
    page = Page(Path(outcome.page).read_text())
    assert page.text["h2"] == ["Simulation", "Data lineage", "Config"]
    text = " ".join(" ".join(page.text["html"]).split())
    assert "Ship: its return in simulation is " in text
    assert "200 episodes of cartpole_v0 for each policy" in text
    rows = [row.split("\n")[0] for row in page.text["tr"]]
    for name in ("The model, softmax of q at temperature 1", "The other model", "Random actions"):
        assert sum(row.startswith(name) for row in rows) == 1
    assert str(Interval(**report["simulation"]["difference"]["return"])) in text
