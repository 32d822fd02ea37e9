"""Exported models in an environment, with the same starts and random numbers for every policy.

1 open     the environment is compiled and every model checked against it, so that errors come before long work
2 play     an episode in each of E environments ─► returns, discounted returns, lengths
3 compare  means with intervals by empirical likelihood, and differences episode by episode

Actions are drawn with the probabilities that estimates from a log use as well, given as logits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from reagent_lite.config.evaluate_config import EvaluateConfig, PlayedEnvironmentConfig
from reagent_lite.console import progress
from reagent_lite.errors import BundleError, Problem, SimulationError
from reagent_lite.evaluation.exported_model import ExportedModel, ExportedPolicy
from reagent_lite.evaluation.played import RANDOM, Played
from reagent_lite.evaluation.returns import play
from reagent_lite.export.choices import Choices, compare_with_environment, several_types
from reagent_lite.sim.backend import open_backend
from reagent_lite.sim.experience import Actor
from reagent_lite.sim.gymnasium_env import open_envs
from reagent_lite.sim.spec import EnvSpec

_STREAM = 18  # of random numbers; training runs and simulated logs with the same seed use other streams


class Arena:
    """Environments for the evaluation of models.

    Args:
        config: config of the workflow.
        settings: its `simulation`.
        models: the models to play.

    Raises:
        SimulationError, KernelBuildError: no such environment or constant, or the environment does not compile.
        BundleError: a model does not fit the environment.
    """

    def __init__(
        self, config: EvaluateConfig, settings: PlayedEnvironmentConfig, models: Sequence[ExportedModel]
    ) -> None:
        device = torch.device("cuda", 0) if settings.backend == "cuda" else torch.device("cpu")
        backend = open_backend(settings, device)
        problems = several_types(backend.spec, "simulation.env")
        for model in models:
            problems += compare_with_environment(model.bundle, backend.spec, f"{model.key} {model.path}")
        if problems:
            raise BundleError(problems)
        self._config = config
        self._models = models
        self._env = open_envs(
            backend,
            num_envs=settings.evaluation_episodes,
            seed=config.seed,
            stream=_STREAM,
            time_limit=settings.time_limit,
            parametric=models[0].bundle.parametric,
            history=max(model.bundle.history for model in models),
        )

    def play(self, gamma: float) -> Played:
        """Plays every model, and uniformly random actions.

        Raises:
            BundleError: a model returns a value that is not a number.
            SimulationError: an observation or reward of the environment is not finite.
        """
        env = self._env
        tables = {}
        for model in self._models:
            tables[model.key] = self._table(model.key, _LogProbabilities(model, self._config, env.spec), gamma)
        tables[RANDOM] = self._table(RANDOM, None, gamma)
        return Played.of(env.spec, env.time_limit, tables, level=self._config.evaluation.confidence_level)

    def _table(self, key: str, policy: "_LogProbabilities | None", gamma: float) -> Tensor:
        count = self._env.num_envs
        with progress(f"playing {key}", "episodes") as show:
            # at temperature 1, the softmax of log probabilities is the probabilities
            actor = Actor(policy=policy, epsilon=torch.zeros(1, device=self._env.device), temperature=1.0)
            (table,) = play(self._env, (actor,), gamma=gamma, on_step=lambda ended: show(ended, count))
        return table


class _LogProbabilities:
    """Logarithms of a model's probabilities, from which VectorEnv.act draws."""

    def __init__(self, model: ExportedModel, config: EvaluateConfig, spec: EnvSpec) -> None:
        self._policy = ExportedPolicy(model, config, Choices.in_simulation(model.bundle, spec))
        self._name = spec.name

    def __call__(self, observation: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
        """Returns log probabilities [N, K] for observations; -inf for a choice that is never taken."""
        if not observation.isfinite().all():  # the model would read NaN as missing
            todo = "Look at the environment's dynamics and constants"
            raise SimulationError(Problem(f"observations of {self._name}", "finite numbers", "others", todo))
        return self._policy.probabilities(observation, mask, features).log().float().to(observation.device)
