"""Vectors of ids in front of a network: the last columns of its input are row numbers, which become vectors.

state      [dense | rows of an embedding | rows, scores of another | ...] ─► [dense | vector | vector | ...] ─┐
candidate  [dense | rows | ...] ───────────────────────────────────────────► [dense | vector | ...] ─────────┴► network

Features of states and of candidates may share a table. A table is a parameter of its network: it is learned, followed
by the target network, and exported like its other weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor, nn

from reagent_lite.types import FIRST_ROW, NO_ID, Embedding, SourceSpec

_STD: Final = 0.1
"""Standard deviation of initial vectors, so that ids without data hardly change a decision."""


class Pooled(nn.Module):
    """The pooled vector of the ids in some columns, as torch.nn.EmbeddingBag has it; NO_ID counts for nothing.

    Args:
        embedding: form of the columns.
    """

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding

    def forward(self, x: Tensor, vectors: Tensor) -> Tensor:
        """Returns [N, dim] for row numbers and scores [N, columns], and the vectors of the table [rows, dim]."""
        length = self.embedding.length
        rows = x[:, :length].to(torch.int64)
        scores = x[:, length:] if self.embedding.scores else None
        return nn.functional.embedding_bag(
            rows, vectors, mode=self.embedding.pooling, per_sample_weights=scores, padding_idx=NO_ID
        )


class GatheredVectors(Pooled):
    """The same as `Pooled` by operations that ONNX has."""

    def forward(self, x: Tensor, vectors: Tensor) -> Tensor:
        """Returns [N, dim] for row numbers and scores [N, columns], and the vectors of the table [rows, dim]."""
        length = self.embedding.length
        rows = x[:, :length].to(torch.int64)
        weight = (rows != NO_ID).to(x.dtype)
        if self.embedding.pooling == "mean":
            weight = weight / weight.sum(1, keepdim=True).clamp(min=1)
        if self.embedding.scores:
            weight = weight * x[:, length:]
        return torch.matmul(weight.unsqueeze(1), nn.functional.embedding(rows, vectors)).squeeze(1)


class _WithVectors(nn.Module):
    """Replaces the last columns of an input by vectors."""

    def __init__(self, width: int, embeddings: Sequence[Embedding]) -> None:
        super().__init__()
        self.widths = [width - sum(embedding.columns for embedding in embeddings)]
        self.widths += [embedding.columns for embedding in embeddings]
        self.width = self.widths[0] + sum(embedding.dim for embedding in embeddings)
        self.names = [_key(embedding.table) for embedding in embeddings]
        self.pooled = nn.ModuleList(map(Pooled, embeddings))

    def forward(self, x: Tensor, tables: nn.ParameterDict) -> Tensor:
        """Returns [..., W] for [..., width]."""
        if not self.names:
            return x
        dense, *columns = x.flatten(0, -2).split_with_sizes(self.widths, 1)
        pairs = zip(self.pooled, columns, self.names, strict=True)
        vectors = [pooled(part, tables[name]) for pooled, part, name in pairs]
        return torch.cat((dense, *vectors), 1).view(*x.shape[:-1], self.width)


class EmbeddedNetwork(nn.Module):
    """A network behind tables of vectors.

    Args:
        spec: counts of features, and the embeddings among them.
        build: returns the network for the counts of features that it sees.

    Attributes:
        tables: the vectors by `table_<name>`, before the network, so that its parameters are the last.
        network: forward(state, mask, features).
    """

    def __init__(self, spec: SourceSpec, build: Callable[[SourceSpec], nn.Module]) -> None:
        super().__init__()
        self.tables = nn.ParameterDict()
        for embedding in (*spec.state_embeddings, *spec.action_embeddings):
            if _key(embedding.table) not in self.tables:
                self.tables[_key(embedding.table)] = _initial_vectors(embedding)
        self.state = _WithVectors(spec.num_state_features, spec.state_embeddings)
        self.action = _WithVectors(spec.num_action_features, spec.action_embeddings)
        self.network = build(with_vectors(spec))
        self.needs_candidate_list: bool = self.network.needs_candidate_list  # type: ignore[assignment]

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None, **options: bool) -> Tensor:
        """Returns the network's result for state [B, S], mask [B, K] and features [B, K, F]."""
        features = None if features is None else self.action(features, self.tables)
        return self.network(self.state(state, self.tables), mask, features, **options)  # type: ignore[no-any-return]


def with_vectors(spec: SourceSpec) -> SourceSpec:
    """Returns the counts of features that a network behind the tables sees."""
    return replace(
        spec,
        num_state_features=spec.num_state_features + _wider(spec.state_embeddings),
        num_action_features=spec.num_action_features + _wider(spec.action_embeddings),
        state_embeddings=(),
        action_embeddings=(),
    )


def behind_tables(spec: SourceSpec, build: Callable[[SourceSpec], nn.Module]) -> nn.Module:
    """Returns a network, behind tables of vectors if features have embeddings."""
    return EmbeddedNetwork(spec, build) if spec.has_embeddings else build(spec)


def innermost(network: nn.Module) -> nn.Module:
    """Returns the network behind the tables, or the network itself without tables."""
    return network.network if isinstance(network, EmbeddedNetwork) else network


def _wider(embeddings: Sequence[Embedding]) -> int:
    return sum(embedding.dim - embedding.columns for embedding in embeddings)


def _key(table: str) -> str:
    """Returns the name of a table's parameter, which has no points and is no attribute of ParameterDict."""
    return f"table_{table.replace('.', '_')}"


def _initial_vectors(embedding: Embedding) -> Tensor:
    vectors = torch.randn(embedding.rows, embedding.dim) * _STD
    vectors[:FIRST_ROW] = 0.0
    return vectors
