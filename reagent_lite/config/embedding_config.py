"""`embeddings`: features whose values are ids, which have vectors that are learned."""

from collections.abc import Iterator, Mapping, Set
from typing import Annotated, Literal

from pydantic import Field

from reagent_lite.config.section import Section, checked_by
from reagent_lite.errors import ConfigError, Problem, raise_any, suggest_nearest
from reagent_lite.feature_ids import id_of
from reagent_lite.id_values import IdFeature
from reagent_lite.types import FIRST_ROW, Embedding, parameter_of

LARGEST_TABLE = 1 << 24
"""Most rows of a table: row numbers are float32 in the network's input."""


class EmbeddingConfig(Section):
    """A feature whose values are ids: strings or integers, or lists of them."""

    dim: Annotated[int, Field(ge=1, le=1024)] = 16
    """Numbers of each id's vector."""
    length: Annotated[int, Field(ge=1, le=1000)] = 1
    """Most ids of a value, the first ones of a list; others are left out and counted."""
    pooling: Literal["mean", "sum"] = "mean"
    """How the vectors of a list become one."""
    scores: bool = False
    """Whether values are maps {id: score}, or lists of {"key": id, "value": score}. A vector is multiplied by its
    score; pooling is sum."""
    table: Annotated[str, Field(min_length=1)] | None = None
    """Name of the table of vectors, for features that share one, such as a candidate's id and the ids of earlier
    choices. Absent: a table of its own."""
    buckets: Annotated[int, Field(ge=2, le=LARGEST_TABLE - 2)] | None = None
    """Hash ids to this number of vectors. Absent: the most frequent ids of the training data have a vector each."""
    max_ids: Annotated[int, Field(ge=1, le=LARGEST_TABLE - 2)] = 1_000_000
    """Without buckets: most ids that have a vector of their own. Others share one, and are counted."""

    def form(self, feature: str, listed: int) -> Embedding:
        """Returns the form of a feature's columns, with a table of its buckets or of so many listed ids."""
        return Embedding(
            table=self.table or feature,
            rows=FIRST_ROW + (self.buckets or listed),
            dim=self.dim,
            length=self.length,
            pooling=self.pooling,
            scores=self.scores,
        )

    def rules(self) -> Iterator[Problem]:
        """Yields Problems for scores with another pooling, and for a key without an effect."""
        if self.scores and self.pooling != "sum":
            yield self.wrong("pooling", '"sum" with scores', "The sum of vectors, each times its score, is learned")
        if self.buckets is not None and "max_ids" in self.changed:
            yield self.wrong("max_ids", "absent with buckets", "Hashed ids have no list")


def _problems(embeddings: Mapping[str, EmbeddingConfig]) -> Iterator[Problem]:
    """Yields Problems of single features, and of features that share a table."""
    first: dict[str, tuple[str, EmbeddingConfig]] = {}
    spellings: dict[str, str] = {}
    for feature, section in embeddings.items():
        try:
            id_of(feature)
        except ValueError as error:
            yield Problem(feature, f"{error} as key", repr(feature))
            continue
        yield from section.problems(feature)
        table = section.table or feature
        spelling = spellings.setdefault(parameter_of(table), table)
        if table != spelling:
            yield Problem(f"{feature}.table", f"a name that differs from {spelling} by more than points", table)
        other, shared = first.setdefault(table, (feature, section))
        for key in ("dim", "buckets", "max_ids"):
            if getattr(section, key) != getattr(shared, key):
                expected = f"{getattr(shared, key)}, as {other} has, which shares the table"
                yield Problem(f"{feature}.{key}", expected, str(getattr(section, key)))


Embeddings = Annotated[
    dict[str, EmbeddingConfig],
    checked_by(_problems),
    Field(
        description="{feature id or name: settings} of features whose values are ids or lists of ids, such as "
        '{"user_id": {"buckets": 100000}, "seen": {"length": 50, "table": "item"}}; see docs/embeddings.md.'
    ),
]


def id_features(embeddings: Mapping[str, EmbeddingConfig]) -> tuple[IdFeature, ...]:
    """Returns the form of the features' values, by which a log is read."""
    return tuple(IdFeature(id_of(name), section.length, section.scores) for name, section in embeddings.items())


def counted_ids(embeddings: Mapping[str, EmbeddingConfig]) -> dict[IdFeature, bool]:
    """Returns the features, and whether a table lists the ids of each, so that they have to be counted."""
    pairs = zip(id_features(embeddings), embeddings.values(), strict=True)
    return {feature: section.buckets is None for feature, section in pairs}


def require_features(embeddings: Mapping[str, EmbeddingConfig], ids: Set[int], where: str) -> None:
    """Raises ConfigError for embeddings, at the key `where`, of features that are not among those of a log."""
    problems = []
    for feature in id_features(embeddings):
        if ids.isdisjoint(feature.columns):
            todo = suggest_nearest(str(feature.feature), list(map(str, ids)), "Did you mean {}?", "")
            problems.append(Problem(f"{where}.{feature.feature}", "a feature of the log", str(feature.feature), todo))
    raise_any(problems, ConfigError)
