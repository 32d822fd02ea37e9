"""Tables of ids: fitted to counts, and their entries of normalization files."""

import json
from typing import Any

import numpy as np
import pytest

from reagent_lite.categories import code_of
from reagent_lite.config.embedding_config import EmbeddingConfig, counted_ids
from reagent_lite.config.norm_params import NormParams
from reagent_lite.data.features.column_fits import fit_columns
from reagent_lite.data.features.normalization_files import normalization_json, parse_normalization
from reagent_lite.data.features.summary import ColumnSummary, Merge
from reagent_lite.data.rows.matrices import FeatureMatrix
from reagent_lite.errors import DataError
from reagent_lite.feature_ids import id_of

EMBEDDINGS = {
    "seen": EmbeddingConfig(length=2, table="item", max_ids=2, dim=3),
    "item": EmbeddingConfig(table="item", max_ids=2, dim=3),
    "user": EmbeddingConfig(buckets=7, dim=4),
}
SECTIONS = {id_of(name): section for name, section in EMBEDDINGS.items()}
A, B, C, D = map(code_of, "abcd")
NAN = np.nan


def summary_of(columns: dict[str, list[float]]) -> ColumnSummary:
    matrix = FeatureMatrix(tuple(map(id_of, columns)), np.array(list(columns.values()), np.float32).T)
    rows = len(matrix.values)
    return ColumnSummary.of(matrix, np.arange(rows, dtype=np.uint64), 100, {}, counted_ids(EMBEDDINGS))


STATES = summary_of(
    {"age": [1.0, 2.0] * 10, "seen[0]": [A, NAN, B, D] * 5, "seen[1]": [A, NAN, C, NAN] * 5, "user": [D] * 20}
)
CANDIDATES = summary_of({"item": [B, C, B] * 4})


def test_a_table_has_the_most_frequent_ids_of_all_features_that_share_it() -> None:
    # a: 10 in lists; b: 5 and 8; c: 5 and 4; d: 5
    fitted = fit_columns(
        {"state_features": STATES, "action": CANDIDATES}, NormParams(), where="log", embeddings=SECTIONS
    )
    state, action = (fitted[name].spec for name in ("state_features", "action"))
    seen, user = state.features[-2:] if str(state.features[-1].feature_id) == "user" else state.features[:-3:-1]
    assert seen.possible_values == action.features[0].possible_values == tuple(sorted((A, B)))
    assert seen.embedding is not None
    assert (seen.embedding.rows, seen.embedding.dim, seen.embedding.length) == (4, 3, 2)
    assert user.possible_values == ()
    assert user.embedding is not None
    assert user.embedding.rows == 9
    assert [str(feature.feature_id) for feature in state.features[:1]] == ["age"]
    notes = " ".join((*fitted["state_features"].notes, *fitted["action"].notes))
    assert "feature seen: 2 of 4 ids share a vector (max_ids): 40.0% of 25 values" in notes
    assert "feature item: 1 of 2 ids share a vector (max_ids): 33.3% of 12 values" in notes


def test_summaries_of_machines_add_up() -> None:
    merge = Merge(100, 100)
    for _ in range(3):
        merge.add(ColumnSummary.from_bytes(STATES.to_bytes()))
    counts = merge.summary().ids[id_of("seen")]
    assert dict(zip(counts.codes.tolist(), counts.counts.tolist(), strict=True)) == {A: 30, B: 15, C: 15, D: 15}
    assert merge.summary().features.keys() == {id_of("age")}


def test_entries_of_files_are_read_as_they_were_written() -> None:
    fitted = fit_columns({"state_features": STATES}, NormParams(), where="log", embeddings=SECTIONS)
    spec = fitted["state_features"].spec
    document = normalization_json(spec)
    assert parse_normalization(document, where="file") == spec
    assert json.loads(document["user"])["embedding"]["table"] == "user"
    assert "embedding" not in json.loads(document["age"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding": None}, "expected a table of EMBEDDING, got nothing"),
        ({"feature_type": "CLIP_LOG"}, "expected a table of EMBEDDING, got one of CLIP_LOG"),
        ({"possible_values": [B, A] if B > A else [A, B]}, "codes of ids, ascending"),
        ({"possible_values": [min(A, B)]}, "embedding.rows: expected 3, two more than possible_values, got 4"),
        ({"embedding": {"table": "t", "rows": 2}}, "rows"),
        ({"embedding": {"rows": 4}}, "table"),
    ],
)
def test_wrong_entries_are_refused(changes: dict[str, Any], message: str) -> None:
    entry = {"feature_type": "EMBEDDING", "possible_values": sorted((A, B)), "embedding": {"table": "t", "rows": 4}}
    with pytest.raises(DataError) as caught:
        parse_normalization({"seen": {**entry, **changes}}, where="file")
    assert message in str(caught.value)
