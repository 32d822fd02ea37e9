"""The base of every section: strict types, no unknown keys, and rules that report instead of raising."""

from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict

from reagent_lite.errors import Problem


class Section(BaseModel):
    """One JSON object of the config. Field docstrings are the schema's descriptions."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @property
    def changed(self) -> tuple[str, ...]:
        """Keys whose value is not their default; being given does not count, so that a resolved config reads back."""
        return tuple(
            name for name, field in type(self).model_fields.items() if getattr(self, name) != field.get_default()
        )

    def problems(self, path: str) -> Iterator[Problem]:
        """Yields what is wrong beyond the type of a single key; `path` is where this section stands."""
        yield from ()


def local_problems(where: str, path: str | None) -> Iterator[Problem]:
    """Yields what is wrong with a path that is written to: it is a URL."""
    if "://" in (path or ""):
        yield Problem(where, "a local path", repr(path), "Name a folder of this machine, or of a mounted share")


def refused(path: str, key: str, value: object, reason: str) -> Problem:
    """Returns the problem of a 2019 key whose value has no effect here and is therefore not accepted."""
    return Problem(f"{path}.{key}", "its default", repr(value), reason)
