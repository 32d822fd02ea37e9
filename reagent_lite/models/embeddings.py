"""Vectors of ids in front of a network: the last columns of its input are row numbers, which become vectors.

state      [dense | rows of an embedding | rows, scores of another | ...] ─► [dense | vector | vector | ...] ─┐
candidate  [dense | rows | ...] ─────────────────────────────► [dense | vector | ... | products of vectors] ─┴► network

Features of states and of candidates may share a table. A table is a parameter of its network: it is learned, followed
by the target network, and exported like its other weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor, nn

from reagent_lite.types import FIRST_ROW, NO_ID, Embedding, SourceSpec, parameter_of

_STD: Final = 0.1
"""Standard deviation of initial vectors, so that ids without data hardly change a decision."""
RATE_FACTOR: Final = "rate_factor"
"""Key of a group of parameters whose learning rate is a multiple of the others'."""
TABLE_RATE: Final = 10.0
"""Learning rate of tables, as a multiple of that of other parameters: a vector has a gradient in few steps only."""


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
    """Splits an input into dense columns and the vectors of its ids."""

    def __init__(self, width: int, embeddings: Sequence[Embedding]) -> None:
        super().__init__()
        self.widths = [width - sum(embedding.columns for embedding in embeddings)]
        self.widths += [embedding.columns for embedding in embeddings]
        self.names = [parameter_of(embedding.table) for embedding in embeddings]
        self.pooled = nn.ModuleList(map(Pooled, embeddings))

    def forward(self, x: Tensor, tables: nn.ParameterDict) -> list[Tensor]:
        """Returns the dense columns [N, D], and for each embedding the vectors [N, dim], of x [N, width]."""
        dense, *columns = x.split_with_sizes(self.widths, 1)
        pairs = zip(self.pooled, columns, self.names, strict=True)
        return [dense, *(pooled(part, tables[name]) for pooled, part, name in pairs)]


class EmbeddedNetwork(nn.Module):
    """A network behind tables of vectors.

    If features of a state and of a candidate share a table, the products of their vectors are further features of the
    candidate: a network learns sums of products, as of a matrix factorization, only from far more data by itself
    (Rendle et al., 2020, Neural collaborative filtering vs. matrix factorization revisited).

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
            if parameter_of(embedding.table) not in self.tables:
                self.tables[parameter_of(embedding.table)] = _initial_vectors(embedding)
        self.state = _WithVectors(spec.num_state_features, spec.state_embeddings)
        self.action = _WithVectors(spec.num_action_features, spec.action_embeddings)
        self.pairs = _sharing(spec)
        self.network = build(with_vectors(spec))
        self.needs_candidate_list: bool = self.network.needs_candidate_list  # type: ignore[assignment]

    def forward(self, state: Tensor, mask: Tensor, features: Tensor | None = None, **options: bool) -> Tensor:
        """Returns the network's result for state [B, S], mask [B, K] and features [B, K, F]."""
        of_state = self.state(state, self.tables)
        if features is not None:
            lists = features.shape[:2]
            of_action = self.action(features.flatten(0, 1), self.tables)
            # all parts at once, as a part may have no columns, which ONNX takes for an unknown number of them
            together = torch.cat(of_action, 1)
            parts = [together.view(*lists, together.shape[1])]
            for i, j in self.pairs:
                vectors = of_action[1 + j]
                parts.append(of_state[1 + i].unsqueeze(1) * vectors.view(*lists, vectors.shape[1]))
            features = torch.cat(parts, 2)
        return self.network(torch.cat(of_state, 1), mask, features, **options)  # type: ignore[no-any-return]


def with_vectors(spec: SourceSpec) -> SourceSpec:
    """Returns the counts of features that a network behind the tables sees."""
    products = sum(spec.state_embeddings[i].dim for i, _ in _sharing(spec))
    return replace(
        spec,
        num_state_features=spec.num_state_features + _wider(spec.state_embeddings),
        num_action_features=spec.num_action_features + _wider(spec.action_embeddings) + products,
        state_embeddings=(),
        action_embeddings=(),
    )


def _sharing(spec: SourceSpec) -> list[tuple[int, int]]:
    """Returns the pairs of a state's and a candidate's embedding, by number, that share a table."""
    return [
        (i, j)
        for i, of_state in enumerate(spec.state_embeddings)
        for j, of_action in enumerate(spec.action_embeddings)
        if of_state.table == of_action.table
    ]


def behind_tables(spec: SourceSpec, build: Callable[[SourceSpec], nn.Module]) -> nn.Module:
    """Returns a network, behind tables of vectors if features have embeddings."""
    return EmbeddedNetwork(spec, build) if spec.has_embeddings else build(spec)


def learned_tables(module: nn.Module) -> list[nn.Parameter]:
    """Returns the tables of all networks in a module that are learned."""
    networks = [part for part in module.modules() if isinstance(part, EmbeddedNetwork)]
    return [table for network in networks for table in network.tables.parameters() if table.requires_grad]


def by_learning_rate(parameters: Sequence[nn.Parameter], tables: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Returns parameters as groups of an optimizer, with RATE_FACTOR where they are tables; one group without any."""
    are_tables = {id(table) for table in tables}
    groups: list[dict[str, Any]] = [{"params": [p for p in parameters if id(p) not in are_tables]}]
    if of_tables := [p for p in parameters if id(p) in are_tables]:
        groups.append({"params": of_tables, RATE_FACTOR: TABLE_RATE})
    return groups


def innermost(network: nn.Module) -> nn.Module:
    """Returns the network behind the tables, or the network itself without tables."""
    return network.network if isinstance(network, EmbeddedNetwork) else network


def _wider(embeddings: Sequence[Embedding]) -> int:
    return sum(embedding.dim - embedding.columns for embedding in embeddings)


def _initial_vectors(embedding: Embedding) -> Tensor:
    vectors = torch.randn(embedding.rows, embedding.dim) * _STD
    vectors[:FIRST_ROW] = 0.0
    return vectors
