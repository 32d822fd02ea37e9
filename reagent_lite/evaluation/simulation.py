"""Exported models play: one environment, the same starts and the same luck for every policy.

1 open     environment compiled, every model checked against it: errors are found before anything takes long
2 play     an episode in each of E environments ─► returns, discounted returns, lengths
3 compare  means with percentile bootstrap intervals over episodes, and differences episode by episode

Percentile bootstrap, as for everything else here: no assumption of normal returns, and no interval reaches beyond what
episodes can earn. Actions are drawn by the same probabilities as in estimates from a log, given as logits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from reagent_lite.config.evaluate import EvaluateConfig, PlayedEnvironmentConfig
from reagent_lite.console import progress
from reagent_lite.errors import BundleError, Problem, SimulationError
from reagent_lite.evaluation.exported_model import ExportedModel, ExportedPolicy
from reagent_lite.evaluation.played import RANDOM, Played
from reagent_lite.evaluation.returns import play
from reagent_lite.export.choices import Choices, misfits, several_types
from reagent_lite.sim.backend import open_backend
from reagent_lite.sim.gymnasium_env import open_envs
from reagent_lite.sim.rollout import Player
from reagent_lite.sim.spec import EnvSpec

_STREAM = 18  # of random numbers, beside those of training runs and simulated logs, which may have the same seed


class Arena:
    """Environments in which the models can play.

    Args:
        config: the config of the workflow.
        settings: its `simulation`.
        models: the models to play.

    Raises:
        SimulationError, KernelBuildError: no such environment or constant, or one that does not compile.
        BundleError: a model that does not fit.
    """

    def __init__(
        self, config: EvaluateConfig, settings: PlayedEnvironmentConfig, models: Sequence[ExportedModel]
    ) -> None:
        device = torch.device("cuda", 0) if settings.backend == "cuda" else torch.device("cpu")
        backend = open_backend(
            settings.env,
            backend=settings.backend,
            device=device,
            parameters=settings.env_parameters,
            math=settings.math,
        )
        problems = several_types(backend.spec, "simulation.env")
        problems += [p for one in models for p in misfits(one.bundle, backend.spec, f"{one.key} {one.path}")]
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
        )

    def play(self, gamma: float) -> Played:
        """Plays every model, and uniformly random actions.

        Raises:
            BundleError: a model gives a value that is no number.
            SimulationError: the environment shows or pays what is no finite number.
        """
        env = self._env
        settings = self._config.evaluation
        tables = {one.key: self._table(one.key, _Drawn(one, self._config, env.spec), gamma) for one in self._models}
        tables[RANDOM] = self._table(RANDOM, None, gamma)
        return Played.of(
            env.spec,
            env.time_limit,
            tables,
            level=settings.confidence_level,
            resamples=settings.bootstrap_resamples,
            seed=self._config.seed,
        )

    def _table(self, key: str, policy: "_Drawn | None", gamma: float) -> Tensor:
        count = self._env.num_envs
        with progress(f"playing {key}", "episodes") as show:
            # a temperature of 1 draws from the softmax of logarithms, which are the probabilities
            player = Player(policy=policy, epsilon=torch.zeros(1, device=self._env.device), temperature=1.0)
            (played,) = play(self._env, (player,), gamma=gamma, on_step=lambda ended: show(ended, count))
        if not played.total.isfinite().all():
            raise _not_finite(f"rewards of {self._env.spec.name}")
        return played.table


class _Drawn:
    """Logarithms of a model's probabilities: what VectorEnv.act draws from."""

    def __init__(self, model: ExportedModel, config: EvaluateConfig, spec: EnvSpec) -> None:
        self._policy = ExportedPolicy(model, config, Choices.in_simulation(model.bundle, spec))
        self._name = spec.name

    def __call__(self, observation: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
        """Returns [N, K] of what environments show; -inf where a choice is never taken."""
        if not observation.isfinite().all():  # the model would read NaN as missing
            raise _not_finite(f"observations of {self._name}")
        return self._policy.probabilities(observation, mask, features).log().float().to(observation.device)


def _not_finite(where: str) -> SimulationError:
    advice = "Look at the environment's dynamics and constants"
    return SimulationError(Problem(where, "finite numbers", "others", advice))
