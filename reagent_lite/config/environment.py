"""What every config that names an environment says of it."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from reagent_lite.config.section import Section
from reagent_lite.errors import Problem

Share = Annotated[float, Field(ge=0, le=1)]


class EnvironmentConfig(Section):
    """An environment, its constants, and where it runs."""

    env: str = ""
    """Name of an environment that comes with this package, or the path of a .cuh file."""
    env_parameters: dict[str, float] = {}
    """Constants of the environment's dynamics, by name, instead of its own."""
    time_limit: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Steps after which an episode is truncated; absent: the environment's own."""
    backend: Literal["auto", "cuda", "cpu"] = "auto"
    """Where environments run; auto: on the GPU that is used, where PyCUDA and a toolkit are, else on the CPU."""
    math: Literal["exact", "fast"] = "exact"
    """exact: the same bits on every machine; fast: fused multiply-adds allowed."""

    def problems(self, path: str) -> Iterator[Problem]:
        """Yields a missing environment."""
        if not self.env:
            where = f"{path}.env" if path else "env"
            yield Problem(where, "the name of an environment or the path of a .cuh file", "nothing")
