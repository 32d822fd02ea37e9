"""Exported models play: one environment, the same starts and the same luck for every policy.

1 open     environment compiled, every model held against it: what can be wrong is found before anything takes long
2 play     an episode in each of E environments ─► returns, discounted returns, lengths
3 compare  means with percentile bootstrap intervals over episodes, and differences episode by episode

Percentile bootstrap, as for everything else here: no assumption of normal returns, and no interval reaches beyond what
episodes can earn. What is drawn are the very probabilities that a log's estimates are made of, as logits.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from reagent_lite.config.evaluate import EvaluateConfig, PlayedEnvironmentConfig
from reagent_lite.console import progress
from reagent_lite.errors import BundleError, Problem, SimulationError
from reagent_lite.evaluation.exported_model import ChoicesInSimulation, ExportedModel, misfits, probabilities_of
from reagent_lite.evaluation.returns import RANDOM, Pair, Played, PlayedPolicy, Returns, estimates, parameters_of, play
from reagent_lite.sim.backend import open_backend
from reagent_lite.sim.env import VectorEnv

_STREAM = 18  # of random numbers, beside those of training runs and simulated logs, which may have the same seed


class Arena:
    """Environments in which the models can play.

    Args:
        config: of the workflow.
        settings: its `simulation`.
        models: to play.

    Raises:
        SimulationError, KernelBuildError: no such environment or constant, or one that does not compile.
        BundleError: a model that does not fit.
    """

    def __init__(
        self, config: EvaluateConfig, settings: PlayedEnvironmentConfig, models: Sequence[ExportedModel]
    ) -> None:
        device = torch.device("cuda", 0) if settings.backend == "cuda" else torch.device("cpu")
        backend = open_backend(
            settings.env, backend=settings.backend, device=device, parameters=settings.env_parameters,
            math=settings.math,
        )  # fmt: skip
        problems = [p for one in models for p in misfits(one.bundle, backend.spec, f"{one.key} {one.path}")]
        if problems:
            raise BundleError(problems)
        self._config, self._models = config, models
        self._env = VectorEnv(
            backend, num_envs=settings.evaluation_episodes, seed=config.seed, stream=_STREAM,
            time_limit=settings.time_limit, parametric=models[0].bundle.parametric,
        )  # fmt: skip

    def play(self, gamma: float) -> Played:
        """Plays every model, and uniformly random actions.

        Raises:
            BundleError: a model gives a value that is no number.
            SimulationError: the environment shows or pays what is no finite number.
        """
        env = self._env
        returns = {one.key: self._returns(one.key, _Drawn(one, self._config, env), gamma) for one in self._models}
        models = tuple(returns.values())
        returns[RANDOM] = self._returns(RANDOM, None, gamma)
        means, differences = self._means(returns)
        return Played(
            env=env.spec.name,
            parameters=parameters_of(env.spec),
            time_limit=env.time_limit,
            episodes=env.num_envs,
            longest=max(int(one.length.max()) for one in models),
            policies=tuple(
                PlayedPolicy(
                    key=key,
                    total=means[key][0],
                    discounted=means[key][1],
                    length=float(one.length.double().mean()),
                    cut_share=float((~one.terminated).double().mean()),
                )
                for key, one in returns.items()
            ),
            differences=differences,
        )

    def _returns(self, key: str, policy: "_Drawn | None", gamma: float) -> Returns:
        count = self._env.num_envs
        with progress(f"playing {key}", "episodes") as show:
            # a temperature of 1 draws from the softmax of logarithms, which are the probabilities
            played = play(self._env, policy, gamma=gamma, temperature=1.0, on_step=lambda ended: show(ended, count))
        if not played.total.isfinite().all():
            raise SimulationError(Problem(f"rewards of {self._env.spec.name}", "finite numbers", "others",
                                          "Look at the environment's dynamics and constants"))  # fmt: skip
        return played

    def _means(self, returns: dict[str, Returns]) -> tuple[dict[str, Pair], dict[str, Pair]]:
        """Returns (return, discounted return) of each policy, and of the first minus each other one."""
        earned = {key: torch.stack((one.total, one.discounted), 1) for key, one in returns.items()}
        first, *others = earned
        columns = [*earned.values(), *(earned[first] - earned[key] for key in others)]
        settings = self._config.evaluation
        found = estimates(torch.cat(columns, 1), level=settings.confidence_level,
                          resamples=settings.bootstrap_resamples, seed=self._config.seed)  # fmt: skip
        pairs = list(zip(found[::2], found[1::2], strict=True))
        return dict(zip(earned, pairs, strict=False)), dict(zip(others, pairs[len(earned) :], strict=True))


class _Drawn:
    """Logarithms of a model's probabilities: what VectorEnv.act draws from."""

    def __init__(self, model: ExportedModel, config: EvaluateConfig, env: VectorEnv) -> None:
        self._model, self._config, self._name = model, config, env.spec.name
        self._choices = ChoicesInSimulation(model.bundle, env.spec)

    def __call__(self, observation: Tensor, mask: Tensor | None, features: Tensor | None) -> Tensor:
        """Returns [N, K] of what environments show; -inf where a choice is never taken."""
        if not observation.isfinite().all():  # the model would read NaN as missing
            raise SimulationError(Problem(f"observations of {self._name}", "finite numbers", "others",
                                          "Look at the environment's dynamics and constants"))  # fmt: skip
        prediction = self._choices(observation, mask, features)
        decides = np.ones(len(observation), bool) if mask is None else mask.any(1).cpu().numpy()
        chances = probabilities_of(self._model, prediction, self._config, decides=decides)
        return torch.from_numpy(chances).log().float().to(observation.device)
