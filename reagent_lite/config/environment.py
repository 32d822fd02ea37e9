"""The keys of an environment, shared by all configs that name one."""

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
"""The longest episode: a step's place in the counter of random numbers has 24 bits."""


def too_long(where: str, most: int, steps: int) -> Problem:
    """Returns the problem of a time limit at which an episode's random numbers would begin again."""
    return Problem(where, f"at most {most} steps, after which random numbers would repeat", str(steps), "Lower it")


def _time_limit(steps: int) -> Iterator[Problem]:
    if steps > MOST_STEPS:
        yield too_long("", MOST_STEPS, steps)


class EnvironmentConfig(Section):
    """An environment, its constants, and where it runs."""

    env: str = ""
    """Name of an environment that comes with this package, the path of a .cuh file, or gymnasium: and what
    gymnasium.make takes, as in gymnasium:CartPole-v1 and gymnasium:my_module:MyEnv-v0."""
    env_parameters: dict[str, Any] = {}
    """Constants of the environment's dynamics, numbers by name, instead of its own; where it takes a list, that stands
    for name[0], name[1] and so on. For Gymnasium: further arguments of gymnasium.make."""
    time_limit: Annotated[Count, checked_by(_time_limit)] | None = None
    """Steps after which an episode is truncated, at most 2^24; absent: the environment's own."""
    backend: Literal["auto", "cuda", "cpu"] = "auto"
    """Where environments run; auto: on the GPU that is used, where PyCUDA and a toolkit are, else on the CPU."""
    math: Literal["exact", "fast"] = "exact"
    """exact: the same bits on every machine; fast: fused multiply-adds, and TF32 in networks trained on a GPU."""

    no_effect: ClassVar[tuple[NoEffect, ...]] = (
        NoEffect(lambda config: config.in_python, ("math",), "its default with {0.env}", "It steps in Python"),
    )

    @field_validator("env_parameters", mode="before")
    @classmethod
    def _numbers(cls, given: Any, info: ValidationInfo) -> Any:
        """Returns a kernel's constants as floats, lists by place."""
        if not isinstance(given, dict) or str(info.data.get("env")).startswith(GYMNASIUM):
            return given
        lists = {name: values for name, values in given.items() if isinstance(values, list) and values}
        places = {f"{name}[{k}]": value for name, values in lists.items() for k, value in enumerate(values)}
        every = {name: value for name, value in given.items() if name not in lists} | places
        return {name: float(value) if type(value) is int else value for name, value in every.items()}

    @property
    def in_python(self) -> bool:
        """Whether it is one of Gymnasium."""
        return self.env.startswith(GYMNASIUM)

    def rules(self) -> Iterator[Problem]:
        """Yields a missing environment, constants that are no numbers, and what Python does not have."""
        if not self.env:
            yield self.wrong("env", "the name of an environment or the path of a .cuh file")
        if self.in_python:
            if self.backend == "cuda":
                yield self.wrong("backend", f"auto or cpu with {self.env}", "It steps in Python")
            return
        for name, value in self.env_parameters.items():
            if not isinstance(value, float) or not math.isfinite(value):
                yield Problem(f"env_parameters.{name}", "a finite number", json.dumps(value))
