"""Kernel sources: their files, the known environments, and the text that is compiled.

name or path ──find_environment──► file ┬─read_sources──────► all sources, for   the cache's key
                                        └─compilation_unit──► the few lines that the compiler gets
"""

import hashlib
import json
import math
import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy

from reagent_lite import __version__
from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.config.not_included import advise
from reagent_lite.errors import Problem, SimulationError, raise_any, suggest_nearest
from reagent_lite.sim.compiler import KERNELS
from reagent_lite.sim.spec import EnvSpec

MACHINERY = ("core/", "env.cuh", "philox.cuh", "port.cuh")
"""Headers that all environments are compiled with, in the folder of kernels."""

_PARAMETER = re.compile(r"([^\W\d]\w*)(\[\d{1,6}\])?")  # a constant, or an element of a list with its index
_LIBRARY = re.compile(r"^\s*#\s*include\s*(<[^>]+>)", re.MULTILINE)
_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def known_environments() -> tuple[str, ...]:
    """Returns the names of the environments that come with the package."""
    return tuple(sorted(file.stem for file in KERNELS.glob("*.cuh") if file.name not in MACHINERY))


def find_environment(name_or_path: str) -> Path:
    """Returns the file of an environment, given the name of one in this package or the path of a `.cuh` file.

    Raises:
        SimulationError: there is none; the error lists the environments of this package and suggests the nearest.
    """
    if "/" in name_or_path or name_or_path.endswith(".cuh"):
        file = Path(name_or_path).expanduser().resolve()
        if file.is_file():
            return file
        raise SimulationError(
            Problem("simulation.env", "a .cuh file", f"{name_or_path!r}, and there is no file {file}", "Check the path")
        )
    names = known_environments()
    if name_or_path in names:
        return KERNELS / f"{name_or_path}.cuh"
    advice = advise(name_or_path)
    hint = f"{advice}. " if advice else suggest_nearest(_plain(name_or_path), names, "Did you mean {!r}? ")
    raise SimulationError(
        Problem(
            "simulation.env",
            f"one of {', '.join(names)}",
            repr(name_or_path),
            f"{hint}For your own environment give the path of its .cuh file, or gymnasium:name if it is in Python",
        )
    )


def _plain(name: str) -> str:
    """Returns a name in our spelling: MountainCar-v0 -> mountain_car_v0, CartPole-v1 -> cartpole_v1."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().replace("-", "_")
    return words.replace("cart_pole", "cartpole")


def read_sources(environment: Path) -> dict[str, str]:
    """Returns {name: text} of every file that an environment is compiled from.

    Names are relative to the folder of kernels or to the environment's folder. An `#include "..."` is a file next to
    the including one or among the kernels.

    Raises:
        SimulationError: a file cannot be read as text.
    """
    texts: dict[str, str] = {}
    waiting = [KERNELS / "env.cuh", environment]
    while waiting:
        file = waiting.pop()
        ours = file.is_relative_to(KERNELS)
        name = str(file.relative_to(KERNELS)) if ours else f"./{os.path.relpath(file, environment.parent)}"
        if name in texts:
            continue
        try:
            texts[name] = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SimulationError(
                Problem(str(file), "readable source text", str(error), "Check the file's permissions and encoding")
            ) from error
        for included in _INCLUDE.findall(texts[name]):
            candidates = (file.parent / included, KERNELS / included)
            waiting += [path.resolve() for path in candidates if path.is_file()][:1]
    return texts


def include_advice(environment: Path) -> str:
    """Returns advice for an environment that does not compile: the library headers to remove; "" if it has none."""
    headers = [name for text in read_sources(environment).values() for name in _LIBRARY.findall(text)]
    return f"Remove {', '.join(headers)}: an environment may use only the functions of port.cuh" if headers else ""


def compilation_unit(environment: Path, parameters: dict[str, float]) -> str:
    """Returns the source text given to the compiler: overridden constants and the environment's file.

    Args:
        environment: its file; KERNELS must be among the compiler's include folders.
        parameters: constants of the dynamics that replace the file's own.

    Raises:
        SimulationError: a parameter is not a finite float32.
    """
    lines = []
    # other names cannot be constants; require_parameters refuses them once the environment is compiled
    overrides = sorted((name, value) for name, value in parameters.items() if _PARAMETER.fullmatch(name))
    if overrides:
        entries = "".join(f'{{"{name}", {_literal(name, value)}}}, ' for name, value in overrides)
        lines.append(f"#define PARAMETER_OVERRIDES {entries}")
    lines.append(f'#define ENVIRONMENT_FILE "{environment}"')
    lines.append('#include "env.cuh"\n')
    return "\n".join(lines)


def built_from(environment: Path, parameters: dict[str, float], *, machinery: bool = True) -> tuple[str, ...]:
    """Returns all texts that determine an environment's behavior; without paths, so that checkouts share a cache.

    Args:
        environment: its file.
        parameters: constants of the dynamics that replace the file's own.
        machinery: whether to include the headers that all environments are compiled with.

    Raises:
        SimulationError: a file cannot be read as text, or a parameter is not a finite float32.
    """
    constants = compilation_unit(environment, parameters).rpartition("#define ENVIRONMENT_FILE")[0]
    sources = sorted(read_sources(environment).items())
    kept = [pair for pair in sources if machinery or not pair[0].startswith(MACHINERY)]
    return (environment.name, constants, *(text for pair in kept for text in pair))


def identity(config: EnvironmentConfig, *more: str) -> str:
    """Returns the sha256 of an environment's sources, constants, time limit and similar settings.

    The headers that all environments share are not part of it: a change of them is not noticed within a release, even
    if environments then behave differently. For Gymnasium, its release is used instead of sources.

    Raises:
        SimulationError: the environment does not exist, a file of it cannot be read, or a parameter is not finite.
    """
    parts: tuple[str, ...]
    if config.in_python:
        parts = (config.env, json.dumps(config.env_parameters, sort_keys=True), version("gymnasium"))
    else:
        parts = built_from(find_environment(config.env), config.env_parameters, machinery=False)
    return hashlib.sha256(json.dumps([[config.time_limit, config.math, *more], parts]).encode()).hexdigest()


def origin(config: EnvironmentConfig, spec: EnvSpec, actions: tuple[str, ...]) -> dict[str, Any]:
    """Returns the origin of simulated episodes, as JSON for the file with their rows.

    Args:
        config: the config of the environment.
        spec: the spec of the environment.
        actions: names of the actions; () for candidates with features.
    """
    return {
        "environment": spec.name,
        "parameters": {name: config.env_parameters[name] for name in sorted(config.env_parameters)},
        "environment_sha256": identity(config),
        "state_features": list(range(spec.observation_size)),
        "actions": list(actions) or {"candidate_features": list(range(spec.action_feature_size))},
        "release": __version__,
    }


def _literal(name: str, value: float) -> str:
    with numpy.errstate(over="ignore"):
        number = float(numpy.float32(value))
    if not math.isfinite(number):
        raise SimulationError(Problem(f"simulation.env_parameters.{name}", "a finite number", str(value)))
    return f"{number!r}f"


def require_parameters(given: dict[str, float], spec: EnvSpec) -> None:
    """Checks that the environment has the given parameters.

    Raises:
        SimulationError: some are unknown; the error lists the environment's parameters.
    """
    lists = [f"{name} (a list of {size})" for name, size in spec.parameter_lists.items()]
    numbers = [name for name in spec.parameters if "[" not in name]
    names = [*numbers, *spec.parameter_lists]
    expected = f"parameters of {spec.name}: {', '.join([*numbers, *lists]) or 'it has none'}"
    unknown = sorted(set(given) - {*names, *spec.parameters})
    problems = [
        Problem("simulation.env_parameters", expected, repr(name), suggest_nearest(name, names)) for name in unknown
    ]
    raise_any(problems, SimulationError)
