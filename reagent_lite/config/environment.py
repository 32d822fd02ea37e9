"""The keys of an environment, for all configs that name one."""

import json
import math
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import ValidationInfo, field_validator

from reagent_lite.config.section import Count, NoEffect, Section, checked_by
from reagent_lite.errors import Problem

GYMNASIUM: Final = "gymnasium:"
"""Prefix of the names of environments in Python."""
MOST_STEPS: Final = 2**24
"""The longest episode: the counter of random numbers has 24 bits for the step."""


def too_long(where: str, most: int, steps: int) -> Problem:
    """Returns the problem of a time limit after which an episode's random numbers would repeat."""
    return Problem(where, f"at most {most} steps, after which random numbers repeat", str(steps), "Lower it")


def _time_limit(steps: int) -> Iterator[Problem]:
    if steps > MOST_STEPS:
        yield too_long("", MOST_STEPS, steps)


class EnvironmentConfig(Section):
    """An environment, its constants, and where it runs."""

    env: str = ""
    """Name of an environment of this package, path of a .cuh file, or "gymnasium:" and the argument of gymnasium.make,
    as in gymnasium:CartPole-v1 and gymnasium:my_module:MyEnv-v0."""
    env_parameters: dict[str, Any] = {}
    """Constants of the environment's dynamics by name, in place of its defaults; a list sets name[0], name[1] and so
    on. For Gymnasium: further arguments of gymnasium.make."""
    time_limit: Annotated[Count, checked_by(_time_limit)] | None = None
    """Steps after which an episode is truncated, at most 2^24; absent: the environment's limit."""
    backend: Literal["auto", "cuda", "cpu"] = "auto"
    """Device of the environments. auto: the GPU in use if PyCUDA and a CUDA toolkit are installed, else the CPU."""
    math: Literal["exact", "fast"] = "exact"
    """exact: the same bits on every machine; fast: fused multiply-adds, and TF32 in networks trained on a GPU."""

    required: ClassVar = {"env": ("the name of an environment or the path of a .cuh file",)}
    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(lambda config: config.in_python, ("math",), "its default with {0.env}", "It steps in Python"),
    )

    @field_validator("env_parameters", mode="before")
    @classmethod
    def _numbers(cls, given: Any, info: ValidationInfo) -> Any:
        """Returns a kernel's constants as floats; lists become name[0], name[1] and so on."""
        if not isinstance(given, dict) or str(info.data.get("env")).startswith(GYMNASIUM):
            return given
        lists = {name: values for name, values in given.items() if isinstance(values, list) and values}
        elements = {f"{name}[{k}]": value for name, values in lists.items() for k, value in enumerate(values)}
        constants = {name: value for name, value in given.items() if name not in lists} | elements
        return {name: float(value) if type(value) is int else value for name, value in constants.items()}

    @property
    def in_python(self) -> bool:
        """Whether it is an environment of Gymnasium."""
        return self.env.startswith(GYMNASIUM)

    def rules(self) -> Iterator[Problem]:
        """Yields Problems for constants that are no numbers, and for CUDA with an environment in Python."""
        if self.in_python:
            if self.backend == "cuda":
                yield self.wrong("backend", f"auto or cpu with {self.env}", "It steps in Python")
            return
        for name, value in self.env_parameters.items():
            if not isinstance(value, float) or not math.isfinite(value):
                yield Problem(f"env_parameters.{name}", "a finite number", json.dumps(value))
