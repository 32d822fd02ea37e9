"""Rows and vectors of ids: against torch.nn.EmbeddingBag, numpy and hand arithmetic, in TorchScript and ONNX."""

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from reagent_lite.categories import code_of
from reagent_lite.export.onnx_graph import write_onnx
from reagent_lite.feature_ids import FeatureId
from reagent_lite.id_values import IdFeature
from reagent_lite.models.embeddings import (
    TABLE_RATE,
    EmbeddedNetwork,
    GatheredVectors,
    Pooled,
    by_learning_rate,
    learned_tables,
)
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.models.q_networks import NetworkSettings, build_q_network
from reagent_lite.types import Embedding, FeatureSpec, FeatureType, NormalizationSpec, SourceSpec

SETTINGS = NetworkSettings(hidden=(8,), activations=("relu",))
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")


def ids_spec(name: str, ids: list[str], buckets: int = 0, **form: object) -> FeatureSpec:
    codes = () if buckets else tuple(sorted(code_of(text) for text in ids))
    table = Embedding(table=name, rows=2 + (buckets or len(codes)), dim=2, **form)  # type: ignore[arg-type]
    return FeatureSpec(
        feature_id=FeatureId(name), feature_type=FeatureType.EMBEDDING, possible_values=codes, embedding=table
    )


def spec_of(*features: FeatureSpec) -> NormalizationSpec:
    return NormalizationSpec.from_features({feature.feature_id: feature for feature in features})


def test_listed_ids_have_rows_in_the_order_of_their_codes_and_others_row_1() -> None:
    names = [f"id{number}" for number in range(37)]
    module = Preprocessor(spec_of(ids_spec("user", names)))
    given = [*names, "stranger", ""]
    codes = torch.tensor([[code_of(text)] for text in given] + [[torch.nan]])
    ordered = sorted(names, key=code_of)
    expected = [2 + ordered.index(name) for name in names] + [1, 1, 0]
    assert module.dense(codes).flatten().tolist() == expected


@pytest.mark.parametrize("buckets", [2, 7, 1000, 16_000_001])
def test_hashed_ids_have_the_remainder_of_their_codes_bits(buckets: int) -> None:
    codes = np.array([code_of(f"x{number}") for number in range(5000)], np.float32)
    # the bits of a code above those of 2^-63, read by numpy from memory
    bits = codes.view(np.uint32).astype(np.int64) - (64 << 23)
    module = Preprocessor(spec_of(ids_spec("user", [], buckets)))
    rows = module.dense(torch.from_numpy(codes[:, None])).flatten().long()
    assert rows.tolist() == (bits % buckets + 2).tolist()


def test_a_list_has_rows_then_scores_and_zero_where_it_ends() -> None:
    feature = ids_spec("seen", ["a", "b"], length=3, scores=True, pooling="sum")
    module = Preprocessor(spec_of(feature))
    first, second = sorted(("a", "b"), key=code_of)
    nan = torch.nan
    raw = torch.tensor([[code_of(second), code_of("c"), nan, 0.5, -2.0, nan], [nan] * 6])
    assert module.dense(raw).tolist() == [[3, 1, 0, 0.5, -2.0, 0.0], [0.0] * 6]
    assert first != second
    assert [str(name) for name in feature.raw_ids] == [
        *("seen[0]", "seen[1]", "seen[2]", "seen[0] score", "seen[1] score", "seen[2] score")
    ]


def test_missing_values_as_zero_leave_absent_ids_absent() -> None:
    number = FeatureSpec(feature_id=1, feature_type=FeatureType.CONTINUOUS, mean=1.0)
    module = Preprocessor(spec_of(number, ids_spec("user", ["a"])), missing_as_zero=True)
    assert module.dense(torch.full((1, 2), torch.nan)).tolist() == [[-1.0, 0.0]]


@pytest.mark.parametrize("buckets", [0, 11])
def test_scripted_and_exported_rows_are_the_same(buckets: int, tmp_path) -> None:  # type: ignore[no-untyped-def]
    names = [f"id{number}" for number in range(9)]
    module = Preprocessor(spec_of(ids_spec("seen", names, buckets, length=2)))
    codes = [code_of(text) for text in [*names, "other"]]
    raw = torch.tensor([[code, codes[number - 3]] for number, code in enumerate(codes)])
    raw[3, 1] = torch.nan
    expected = module.dense(raw)
    assert torch.equal(torch.jit.script(module).dense(raw), expected)
    file = tmp_path / "rows.onnx"
    axes = {"values": ("rows", 2), "presence": ("rows", 2)}
    write_onnx(module, (raw[:3], ~raw[:3].isnan()), file, inputs=axes, outputs={"y": ("rows", 2)})
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (rows,) = session.run(None, {"values": raw.numpy(), "presence": ~raw.isnan().numpy()})
    assert np.array_equal(rows, expected.numpy())


@pytest.mark.parametrize(("pooling", "scores"), [("mean", False), ("sum", False), ("sum", True)])
def test_vectors_are_those_of_an_embedding_bag(pooling: str, scores: bool) -> None:
    torch.manual_seed(0)
    lists = [[2, 5, 5], [], [4], [3, 1, 2]]
    embedding = Embedding(table="t", rows=6, dim=4, length=3, pooling=pooling, scores=scores)
    table = torch.randn(6, 4)
    weights = torch.randn(7)
    bag = nn.EmbeddingBag(6, 4, mode=pooling, _weight=table, include_last_offset=True)
    flat = torch.tensor([row for rows in lists for row in rows])
    offsets = torch.tensor([0, 3, 3, 4, 7])
    expected = bag(flat, offsets, weights if scores else None)
    x = torch.zeros(4, embedding.columns)
    for number, (rows, start) in enumerate(zip(lists, offsets.tolist(), strict=False)):
        x[number, : len(rows)] = torch.tensor(rows, dtype=torch.float32)
        if scores:
            x[number, 3 : 3 + len(rows)] = weights[start : start + len(rows)]
    for module in (Pooled(embedding), GatheredVectors(embedding)):
        torch.testing.assert_close(module(x, table), expected)


def shared_spec() -> SourceSpec:
    return SourceSpec(
        num_state_features=1 + 3,
        num_action_features=1 + 1,
        state_embeddings=(Embedding(table="item", rows=5, dim=2, length=3),),
        action_embeddings=(Embedding(table="item", rows=5, dim=2),),
    )


def test_features_that_share_a_table_give_its_vectors_and_their_products() -> None:
    seen: list[torch.Tensor] = []

    class Inner(nn.Module):
        needs_candidate_list = False

        def __init__(self, spec: SourceSpec) -> None:
            super().__init__()
            assert (spec.num_state_features, spec.num_action_features) == (3, 5)
            assert not spec.has_embeddings

        def forward(self, state: torch.Tensor, mask: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
            seen.extend((state, features))
            return features[..., :1]

    network = EmbeddedNetwork(shared_spec(), Inner)
    with torch.no_grad():
        network.tables["table_item"].copy_(torch.tensor([[9.0, 9], [0, 0], [1, 2], [3, 4], [5, 6]]))
    network(torch.tensor([[7.0, 2, 3, 0]]), torch.ones(1, 2, dtype=torch.bool), torch.tensor([[[8.0, 4], [8.5, 1]]]))
    state, features = seen
    assert state.tolist() == [[7, 2, 3]]  # the mean of [1, 2] and [3, 4]; row 0 counts for nothing
    assert features.tolist() == [[[8, 5, 6, 10, 18], [8.5, 0, 0, 0, 0]]]
    assert [name for name, _ in network.named_parameters()] == ["tables.table_item"]


def test_only_the_vectors_of_a_batch_have_a_gradient() -> None:
    network = build_q_network(shared_spec(), SETTINGS)
    values = network(torch.tensor([[7.0, 2, 0, 0]]), torch.ones(1, 1, dtype=torch.bool), torch.tensor([[[1.0, 4.0]]]))
    values.sum().backward()
    gradient = network.tables["table_item"].grad
    assert (gradient != 0).any(1).tolist() == [False, False, True, False, True]


def test_tables_learn_faster() -> None:
    network = build_q_network(shared_spec(), SETTINGS)
    plain, tables = by_learning_rate(list(network.parameters()), learned_tables(network))
    assert [tuple(table.shape) for table in tables["params"]] == [(5, 2)]
    assert tables["rate_factor"] == TABLE_RATE
    assert len(plain["params"]) == 4
    alone = build_q_network(SourceSpec(num_state_features=2, action_names=("a", "b")), SETTINGS)
    assert by_learning_rate(list(alone.parameters()), learned_tables(alone)) == [{"params": list(alone.parameters())}]


@pytest.mark.parametrize(
    ("pooling", "value", "expected"),
    [
        ("mean", ["a", "b"], [2.0, 3.0]),  # (1, 2) and (3, 4)
        ("mean", ["a", "a", "b"], [5 / 3, 8 / 3]),  # an id counts as often as it is there
        ("mean", ["a", "stranger"], [5.5, 6.0]),  # others, (10, 10), count like any id
        ("mean", ["a", "b", "b", "a"], [7 / 3, 10 / 3]),  # the first three
        ("mean", [], [0.0, 0.0]),
        ("mean", None, [0.0, 0.0]),
        ("sum", ["a", "b"], [4.0, 6.0]),
        ("sum", ["stranger", "foreigner"], [20.0, 20.0]),
        ("scores", {"a": 0.5, "b": -2.0}, [-5.5, -7.0]),
        ("scores", {"a": 0.0}, [0.0, 0.0]),
        ("scores", {"stranger": 0.1, "a": 2.0}, [3.0, 5.0]),
        ("scores", {}, [0.0, 0.0]),
        ("hashed", ["id0", "id2"], [2.0, 3.0]),  # of another vector each
        ("hashed", ["id0", "id1"], [1.0, 2.0]),  # both have the first vector
    ],
)
def test_the_vector_of_a_value_by_hand(pooling: str, value: object, expected: list[float]) -> None:
    """From a value of a log to its vector; a is the smaller code, with the first row."""
    first, second = sorted(("left", "right"), key=code_of)
    names = {"a": first, "b": second}
    if pooling == "hashed":
        in_bucket = {bucket: [name for name in map(str, range(40)) if _bucket(name) == bucket] for bucket in (0, 1)}
        names = {"id0": in_bucket[0][0], "id1": in_bucket[0][1], "id2": in_bucket[1][0]}
    scores = pooling == "scores"
    form = {"length": 3, "scores": scores, "pooling": "sum" if scores else pooling.replace("hashed", "mean")}
    feature = ids_spec("seen", [first, second], buckets=2 if pooling == "hashed" else 0, **form)
    assert feature.embedding is not None
    table = torch.tensor([[0.0, 0.0], [10.0, 10.0], [1.0, 2.0], [3.0, 4.0]])
    if isinstance(value, dict):
        value = {names.get(name, name): score for name, score in value.items()}
    elif value is not None:
        value = [names.get(name, name) for name in value]  # type: ignore[attr-defined]
    raw = torch.tensor([IdFeature(FeatureId("seen"), 3, scores).numbers(value)])
    rows = Preprocessor(spec_of(feature)).dense(raw)
    assert Pooled(feature.embedding)(rows, table)[0].tolist() == pytest.approx(expected)


def _bucket(name: str) -> int:
    return int(np.float32(code_of(name)).view(np.uint32) - (64 << 23)) % 2
