"""Play a policy in an environment and write its log.

1 open     environment compiled, models loaded and checked against it; reports every error of the config
2 play     episodes in the order of their starts ─► blocks ─► log, under a temporary name
3 value    another policy plays the configured number of episodes ─► output_path.truth.json
4 rename   the complete log gets its name
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from reagent_lite.config import expand_config
from reagent_lite.config.simulate_config import PlayConfig, SimulateConfig, ValueOfConfig
from reagent_lite.config.simulation import RANDOM
from reagent_lite.console import logger, progress
from reagent_lite.data.episode_folder import stamp_origin
from reagent_lite.disk_room import require_writable
from reagent_lite.errors import BundleError, ConfigError, Problem, SimulationError, needing, pluralize
from reagent_lite.evaluation.interval import Interval, none_if_infinite
from reagent_lite.evaluation.played import MODEL, Played, mean_returns
from reagent_lite.evaluation.returns import play
from reagent_lite.export.bundle import load_bundle
from reagent_lite.export.choices import Choices, compare_with_environment, kind_of_model, several_types
from reagent_lite.manifest import canonical
from reagent_lite.report.content import Table
from reagent_lite.report.result import Brief, Result
from reagent_lite.run.agents import AgentType, agent_type, unknown_types
from reagent_lite.sim.backend import Backend, open_backend
from reagent_lite.sim.env import VectorEnv
from reagent_lite.sim.experience import Actor
from reagent_lite.sim.gymnasium_env import open_envs
from reagent_lite.sim.kernel_sources import origin
from reagent_lite.sim.played_episodes import Amount, play_episodes
from reagent_lite.sim.spec import EnvSpec
from reagent_lite.whole_files import write_whole

if TYPE_CHECKING:
    from reagent_lite.data.writing.episode_rows import LogSchema
    from reagent_lite.data.writing.table_writers import TableWriter

LEVEL = 0.95  # of the interval of the log's mean return
# streams of random numbers, different from those of training runs with the same seed
LOG = 16
TRUTH = 17

Returns = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedLog(Result):
    """The results; printed as the last line of standard output.

    Attributes:
        log: path of the log.
        rows, episodes: numbers of rows and episodes in the log; each agent's part of an episode counts as one.
        mean_return: mean undiscounted return of the log's episodes. With several agents it is their mean.
        lower, upper: 95 % interval of mean_return by empirical likelihood; None if all episodes have the same return.
            It is over episodes of the environment, as returns of agents in one episode are correlated.
        mean_return_of: mean return by agent type; empty with one agent.
        rows_per_second: rows played and written per second.
        seconds: total wall-clock time of the run.
        value_of: content of the truth file; None without value_of.
    """

    log: str
    rows: int
    episodes: int
    mean_return: float
    lower: float | None
    upper: float | None
    mean_return_of: dict[str, float]
    rows_per_second: float
    seconds: float
    value_of: dict[str, Any] | None


def simulate(config: SimulateConfig) -> SimulatedLog:
    """Writes the log and returns its results."""
    with needing("data", "output_path"):
        from reagent_lite.data.writing.table_writers import table_writer
    start = time.monotonic()
    target = Path(config.output_path).expanduser()
    with _keys_without_section():
        backend = open_backend(config, _device(config))
    spec = backend.spec
    schema = _schema(config, spec)
    others = _others(config, spec)
    policy = _policy(config.policy, "policy", spec, parametric=config.parametric)
    evaluated = _policy(config.value_of, "value_of", spec, parametric=config.parametric)
    history = max([1 if policy is None else policy.history, *(other.history for other in others.values())])
    require_writable(target.parent, "output_path")
    with table_writer(target) as writer:
        playing = time.monotonic()
        rows, returns = _write(config, backend, partial(_actors, config, policy, others), schema, writer, history)
        seconds = time.monotonic() - playing
        value = None if config.value_of is None else _value(config, config.value_of, backend, evaluated)
        truth = target.with_name(f"{target.name}.truth.json")
        truth.unlink(missing_ok=True)  # that of an earlier log with this name
        if value is not None:
            write_whole(truth, canonical(value))
    by_episode = torch.from_numpy(returns.mean(1)).unsqueeze(0)
    (mean,) = mean_returns(by_episode, by_episode.amin(1), by_episode.amax(1), LEVEL)
    by_type = {name: returns[:, spec.agents_of(number)] for number, name in enumerate(spec.agent_type_names)}
    means = {name: float(earned.mean()) for name, earned in by_type.items()} if spec.agents > 1 else {}
    means_text = "".join(f", of a {name} {value:.4g}" for name, value in means.items())
    count = returns.size
    logger.info(f"{target}: {pluralize(rows, 'row')}, {pluralize(count, 'episode')}, mean return {mean}{means_text}")
    return SimulatedLog(
        log=str(target),
        rows=rows,
        episodes=count,
        mean_return=mean.value,
        lower=none_if_infinite(mean.low),
        upper=none_if_infinite(mean.high),
        mean_return_of=means,
        rows_per_second=round(rows / seconds, 1),
        seconds=round(time.monotonic() - start, 3),
        value_of=value,
        brief=Brief(tables=(_table(target, rows, count, mean),)),
    )


def _table(target: Path, rows: int, episodes: int, mean: Interval) -> Table:
    return Table(
        title=f"{target}",
        columns=(("Rows", "number"), ("Episodes", "number"), (f"Mean return ({LEVEL:.0%} interval)", "number")),
        rows=((rows, episodes, mean),),
    )


def _write(
    config: SimulateConfig,
    backend: Backend,
    actors_in: Callable[[VectorEnv], tuple[Actor, ...]],
    schema: "LogSchema",
    writer: "TableWriter",
    history: int,
) -> tuple[int, Returns]:
    """Plays and writes the log; `actors_in` returns the actors of an environment, which see the last `history` steps.

    Returns:
        The number of rows, and the returns [E, A] of the environments' episodes.
    """
    from reagent_lite.data.writing.episode_rows import episode_rows
    from reagent_lite.run.roles.collect import named_block

    amount = Amount(config.rows, "rows") if config.rows else Amount(config.episodes or 0, "episodes")
    with _keys_without_section():
        env = _envs(config, backend, min(config.num_envs, amount.number), LOG, history)
    logger.info(
        f"{env.spec.name}: {pluralize(env.num_envs, 'environment')} on {env.device.type}, "
        f"at most {pluralize(env.time_limit, 'step')}, policy {config.policy.kind}"
        f"{''.join(f', {name}: {plays}' for name, plays in config.policies.items())}"
    )
    returns = []
    rows = 0
    prefix = _prefix(config)
    log_origin = origin(config, env.spec, schema.action_names)
    with progress("simulating", "rows") as show:
        for episodes in play_episodes(env, actors_in(env), amount):
            table = episode_rows(named_block(episodes, prefix), schema)
            writer.write(stamp_origin(table, log_origin) if schema.transitions else table)
            returns.append(episodes.returns)
            rows += len(episodes.state)
            show(rows, max(config.rows or 0, rows))
        writer.flush()
    return rows, np.concatenate(returns).reshape(-1, env.spec.agents)


def _device(config: SimulateConfig) -> torch.device:
    if not config.use_gpu or config.backend == "cpu":
        return torch.device("cpu")
    if config.backend == "auto" and not torch.cuda.is_available():
        logger.info("use_gpu is true, but no GPU was found: playing on the CPU")
        return torch.device("cpu")
    return torch.device("cuda", 0)  # without CUDA, open_backend raises an error


def _schema(config: SimulateConfig, spec: EnvSpec) -> "LogSchema":
    """Returns the columns of the log.

    Raises:
        ConfigError: the config asks for action names, but the environment has candidates.
    """
    from reagent_lite.data.writing.episode_rows import LogSchema

    transitions = config.format == "transitions"
    if not config.parametric:
        if spec.candidates:
            raise ConfigError(
                Problem(
                    "parametric",
                    f"true with {spec.name}, whose candidates differ from step to step",
                    "false",
                    "Candidates have features but no names",
                )
            )
        return LogSchema(transitions=transitions, action_names=spec.action_names, ds=config.ds)
    features = None if spec.candidates else spec.action_features.numpy()
    return LogSchema(transitions=transitions, action_features=features, ds=config.ds)


def _envs(config: SimulateConfig, backend: Backend, count: int, stream: int, history: int) -> VectorEnv:
    return open_envs(
        backend,
        num_envs=count,
        seed=config.seed,
        stream=stream,
        time_limit=config.time_limit,
        parametric=config.parametric,
        history=history,
    )


def _policy(config: PlayConfig | None, where: str, spec: EnvSpec, *, parametric: bool) -> Choices | None:
    """Returns a model's choices; None for the random policy or without a config.

    Raises:
        ConfigError: agents have several types, so that value_of is not defined.
        BundleError: the model is missing or altered, or has other features or actions.
    """
    if config is None:
        return None
    if where == "value_of" and (problems := several_types(spec, f"env, with {where}")):
        raise ConfigError(problems)
    if config.model is None:
        return None
    path = Path(config.model).expanduser()
    bundle = load_bundle(path)
    where = f"{where}.model {path}"
    problems = compare_with_environment(bundle, spec, where)
    if bundle.parametric != parametric:
        expected = kind_of_model(parametric=parametric)
        problems = [
            Problem(
                where, expected, kind_of_model(parametric=bundle.parametric), "Use such a model, or change `parametric`"
            )
        ]
    if problems:
        raise BundleError(problems)
    return Choices.in_simulation(bundle, spec)


def _others(config: SimulateConfig, spec: EnvSpec) -> dict[str, AgentType]:
    """Returns the agent types that `policy` does not play, by name.

    Raises:
        ConfigError: an unknown type, or several types for the one model of `policy`.
        BundleError: see _policy.
    """
    problems = unknown_types(config.policies, spec, "policies")
    shared = [name for name in spec.agent_type_names if name not in config.policies]
    if config.policy.model is not None and len(shared) > 1:
        problems.append(
            Problem(
                "policy.model",
                f"a model for one type of agents of {spec.name}",
                f"one for {' and '.join(shared)}",
                "Name a model for each type in `policies`",
            )
        )
    if problems:
        raise ConfigError(problems)
    return {
        name: agent_type(name, plays, spec, key="policies", words=(RANDOM,), parametric=config.parametric)
        for name, plays in config.policies.items()
    }


def _actors(
    config: SimulateConfig, policy: Choices | None, others: dict[str, AgentType], env: VectorEnv
) -> tuple[Actor, ...]:
    """Returns the actors of all agent types in an environment."""
    if not others:
        return (_actor(config.policy, policy, env),)
    spec = env.spec
    actors = []
    for number, name in enumerate(spec.agent_type_names):
        if agents := spec.agents_of(number):
            if name in others:
                actors.append(others[name].fixed_actor(env))
            else:
                actors.append(_actor(config.policy, policy, env, AgentType(name=name, agents=agents).rows(env)))
    return tuple(actors)


def _actor(config: PlayConfig, policy: Choices | None, env: VectorEnv, rows: torch.Tensor | None = None) -> Actor:
    drawing = _drawing(config)
    epsilon = torch.tensor([drawing["epsilon"]], device=env.device)
    values = None if policy is None else policy.values
    return Actor(policy=values, epsilon=epsilon, temperature=drawing["temperature"], rows=rows)


def _drawing(config: PlayConfig) -> dict[str, float]:
    """Returns epsilon and temperature for drawing actions from values; both are unused by the random policy."""
    return {
        "epsilon": config.epsilon if config.kind == "epsilon_greedy" else 0.0,
        "temperature": config.temperature if config.kind == "softmax" else 0.0,
    }


@contextmanager
def _keys_without_section() -> Iterator[None]:
    """Names keys as in this workflow's config, without the section of the training workflows."""
    try:
        yield
    except SimulationError as error:
        problems = [replace(problem, where=problem.where.removeprefix("simulation.")) for problem in error.problems]
        raise SimulationError(problems) from error


def _prefix(config: SimulateConfig) -> str:
    """Returns the prefix of this log's episode names, a hash: episodes of the same name are equal in any log."""
    keys = ("env", "env_parameters", "time_limit", "math", "seed", "policy")
    playing = {
        key: value for key, value in expand_config(config).items() if key in keys or (key == "policies" and value)
    }
    return hashlib.sha256(json.dumps(playing, sort_keys=True).encode()).hexdigest()[:8]


def _value(config: SimulateConfig, settings: ValueOfConfig, backend: Backend, policy: Choices | None) -> dict[str, Any]:
    """Returns the true value of a policy, the content of the truth file."""
    env = _envs(config, backend, settings.episodes, TRUTH, 1 if policy is None else policy.history)
    with progress("valuing", "episodes") as show:
        (table,) = play(
            env, (_actor(settings, policy, env),), gamma=settings.gamma, on_step=lambda ended: show(ended, env.num_envs)
        )
    played = Played.of(backend.spec, env.time_limit, {MODEL: table}, level=settings.confidence_level)
    earned = played.policies[MODEL]
    logger.info(
        f"true value of {settings.kind} over {pluralize(settings.episodes, 'episode')}: "
        f"return {earned.total}, discounted by {settings.gamma:g} {earned.discounted}"
    )
    both = {"return": earned.total, "discounted_return": earned.discounted}
    return {
        "env": config.env,
        "env_parameters": played.parameters,
        "time_limit": played.time_limit,
        "seed": config.seed,
        "policy": {"kind": settings.kind, "model": settings.model, **_drawing(settings)},
        "episodes": settings.episodes,
        "gamma": settings.gamma,
        "confidence_level": settings.confidence_level,
        **{
            name: {"mean": mean.value, "lower": none_if_infinite(mean.low), "upper": none_if_infinite(mean.high)}
            for name, mean in both.items()
        },
        "mean_length": earned.length,
        "terminated_share": 1 - earned.cut_share,
    }
