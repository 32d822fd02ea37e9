"""The keys of an environment, shared by all configs that name one."""

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal

from pydantic import field_validator

from reagent_lite.config.section import Count, Section, checked_by
from reagent_lite.errors import Problem

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
    """Name of an environment that comes with this package, or the path of a .cuh file."""
    env_parameters: dict[str, float] = {}
    """Constants of the environment's dynamics, by name, instead of its own; where it takes a list, that stands for
    name[0], name[1] and so on."""
    time_limit: Annotated[Count, checked_by(_time_limit)] | None = None
    """Steps after which an episode is truncated, at most 2^24; absent: the environment's own."""
    backend: Literal["auto", "cuda", "cpu"] = "auto"
    """Where environments run; auto: on the GPU that is used, where PyCUDA and a toolkit are, else on the CPU."""
    math: Literal["exact", "fast"] = "exact"
    """exact: the same bits on every machine; fast: fused multiply-adds allowed."""

    @field_validator("env_parameters", mode="before")
    @classmethod
    def _lists_by_place(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        lists = {name: values for name, values in given.items() if isinstance(values, list)}
        places = {f"{name}[{k}]": value for name, values in lists.items() for k, value in enumerate(values)}
        return {name: value for name, value in given.items() if name not in lists} | places

    def rules(self) -> Iterator[Problem]:
        """Yields a missing environment."""
        if not self.env:
            yield self.wrong("env", "the name of an environment or the path of a .cuh file")
