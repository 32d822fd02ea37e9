"""Normalization files: round trips and every bad input."""

import json
import os
from collections.abc import Callable
from math import nan
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from helpers.logs import written
from helpers.summaries import spec_of
from helpers.transitions import code_of_text
from hypothesis import given, settings
from hypothesis import strategies as st

from reagent_lite.data.features.normalization_files import (
    check_covers,
    left_out_features,
    normalization_json,
    parse_normalization,
    read_normalization,
    write_normalization,
)
from reagent_lite.errors import DataError
from reagent_lite.models.preprocessor import Preprocessor
from reagent_lite.types import FeatureSpec, FeatureType, NormalizationSpec

REAL_FILE = Path(__file__).parents[3] / "../shared/data/reagent2019/cartpole_norm.json"


def read(folder: Path, document: object) -> NormalizationSpec:
    """Writes norm.json, of a text or as JSON, and reads it."""
    return read_normalization(
        str(written(folder / "norm.json", document if isinstance(document, str) else json.dumps(document)))
    )


@pytest.mark.parametrize("encode", [json.dumps, lambda parameters: parameters], ids=["string", "object"])
@pytest.mark.parametrize("absent", [{}, {"quantiles": None, "boxcox_lambda": None, "possible_values": None}])
def test_contract_file_in_both_encodings(tmp_path: Path, encode: Callable[[object], object], absent: Any) -> None:
    features = {
        **{
            key: {"feature_type": "ENUM", "possible_values": values}
            for key, values in {"1": [12, 4, 2], "3": [15, 3]}.items()
        },
        "2": {"feature_type": "CONTINUOUS", "mean": 0, "stddev": 1},
    }
    spec = read(tmp_path, {key: encode(absent | parameters) for key, parameters in features.items()})
    assert spec.feature_ids == (2, 1, 3)
    assert [feature.possible_values for feature in spec.features[1:]] == [(12.0, 4.0, 2.0), (15.0, 3.0)]
    # columns in the order of the file's values; what is absent is zero
    assert Preprocessor(spec).dense(torch.tensor([[1.0, 12.0, 15.0], [3.0, 2.0, nan]])).tolist() == [
        [1, 1, 0, 0, 1, 0],
        [3, 0, 0, 1, 0, 0],
    ]


@pytest.mark.skipif(not REAL_FILE.exists(), reason="the 2019 files are not beside this checkout")
def test_file_of_2019() -> None:
    spec = read_normalization(str(REAL_FILE))
    assert [(f.feature_id, str(f.feature_type), len(f.quantiles)) for f in spec.features] == [
        (2, "CONTINUOUS", 0), (3, "CONTINUOUS", 0), (0, "QUANTILE", 21), (1, "QUANTILE", 21),
    ]  # fmt: skip
    assert (spec.features[0].mean, spec.features[1].stddev) == (0.00898619182407856, 0.33846569061279297)
    again, document = (
        {key: json.loads(text) for key, text in texts.items()}
        for texts in (normalization_json(spec), json.loads(REAL_FILE.read_text()))
    )
    assert again == document


CONTINUOUS = {"feature_type": "CONTINUOUS", "mean": 0, "stddev": 1}
ENUM, QUANTILE, RANGE = ({"feature_type": name} for name in ("ENUM", "QUANTILE", "CONTINUOUS_ACTION"))


@pytest.mark.parametrize(("document", "message"), [
    ("  \n", "an empty file"),
    ("{}", "expected a JSON object with at least one feature, got an empty object"),
    ("[1]", "got a list"),
    ('{"1": ', "expected JSON, got Expecting value: line 1 column 7"),
    ("[" * 100_000, "expected JSON, got "),
    ('{"1": {"feature_type": "BINARY"}, "1": {"feature_type": "BINARY"}}', "the key '1' twice"),
    ({"1": CONTINUOUS, "01": CONTINUOUS}, "a name that begins with a letter as key, got '01'"),
    *(({"7": parameters}, message) for parameters, message in [
        ("{broken", "feature 7: expected JSON, got Expecting property name"),
        ("[]", r"feature 7: expected an object of parameters, or a JSON string of one, got \[\]"),
        ({}, "feature 7: feature_type: expected a feature type, got nothing"),
        ({"feature_type": "enum"}, "got 'enum'. Did you mean ENUM?"),
        ({"feature_type": "xyz"}, "Known: BINARY, PROBABILITY"),
        (CONTINUOUS | {"std_dev": 5},
         "std_dev: expected a known key, got unknown key 'std_dev'. Did you mean 'stddev'?"),
        (CONTINUOUS | {"mean": "0x"}, 'feature 7: mean: expected a valid number, got "0x"'),
        (CONTINUOUS | {"mean": True}, "mean: expected a valid number, got true"),
        (CONTINUOUS | {"mean": nan}, "mean: expected a finite number, got NaN"),
        (CONTINUOUS | {"mean": 10**400}, "mean: expected an integer of 64 bits, got one of 1330 bits"),
        (CONTINUOUS | {"mean": None}, "mean: expected a value, which CONTINUOUS needs, got nothing"),
        (CONTINUOUS | {"stddev": 0}, "stddev: expected a positive number of float32, got 0.0. A constant"),
        (CONTINUOUS | {"stddev": 1e-60}, "stddev: expected a positive number of float32, got 1e-60"),
        (ENUM | {"possible_values": []}, "possible_values: expected a value, which ENUM needs"),
        (ENUM | {"possible_values": 3}, "possible_values: expected a valid array, got 3"),
        (ENUM | {"possible_values": [1, "a"]}, 'possible_values.1: expected a valid number, got "a"'),
        (ENUM | {"possible_values": [1, 2, 1]}, "got 1 of them repeated. List each once"),
        (ENUM | {"possible_values": [2**24, 2**24 + 1]},
         "expected values that differ in float32, got 1 of them repeated"),
        (QUANTILE, "quantiles: expected a value, which QUANTILE needs"),
        (QUANTILE | {"quantiles": [1]}, "expected at least 2 strictly increasing numbers"),
        (QUANTILE | {"quantiles": [1, 1, 2]}, "Sort them and list each once"),
        (CONTINUOUS | {"feature_type": "BOXCOX"}, "boxcox_shift: expected a value, which BOXCOX needs"),
        (RANGE | {"max_value": 1}, "min_value: expected a value, which"),
        ({"feature_type": "BINARY", "levels": ["a"]}, "expected levels of ENUM alone, got levels of BINARY"),
        (ENUM | {"levels": ["a", "b", "a"]}, "expected strings of different codes, got 'a' and another"),
        (ENUM | {"levels": ["x" * 201]}, "expected strings of at most 200 characters, got 201"),
        (ENUM | {"levels": ["a"], "possible_values": [1]}, "expected the codes of levels"),
        (ENUM | {"levels": [3]}, "levels"),
        (RANGE | {"min_value": 1, "max_value": 1},
         "min_value, max_value: expected min_value below max_value, got 1.0, 1"),
    ]),
])  # fmt: skip
def test_bad_file_names_file_and_feature(tmp_path: Path, document: object, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path, document)
    assert all(problem.where.startswith(f"{tmp_path}/norm.json") for problem in caught.value.problems)


def test_every_problem_of_a_file_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, {"1": {"feature_type": "X", "mean": "a", "stddev": "b"}, "?z": CONTINUOUS, "3": CONTINUOUS})
    assert [problem.where.partition(": feature ")[2] for problem in caught.value.problems] == [
        "1: feature_type", "1: mean", "1: stddev", "?z"
    ]  # fmt: skip
    with pytest.raises(DataError, match="30 more") as caught:
        read(tmp_path, {f"?{i}": CONTINUOUS for i in range(50)})
    assert len(caught.value.problems) == 21


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{folder}/none.json", "expected a readable normalization file, got FileNotFoundError"),
        ("{folder}", "not a regular file"),
        ("{folder}/fifo.json", "not a regular file"),
        ("{folder}/latin.json", "got UnicodeDecodeError"),
        ("http://example.org/norm.json", "protocol 'http'"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "latin.json").write_bytes(b'{"1": "\xe9"}')
    os.mkfifo(tmp_path / "fifo.json")
    with pytest.raises(DataError, match=message):
        read_normalization(name.format(folder=tmp_path))


def test_unused_parameters_are_not_judged(tmp_path: Path) -> None:
    document = {"1": {"feature_type": "BINARY", "mean": 1, "stddev": 0, "quantiles": [2, 1]}}
    assert read(tmp_path, document).features[0].quantiles == (2.0, 1.0)


def test_written_in_the_encoding_of_2019() -> None:
    assert normalization_json(
        spec_of(FeatureSpec(feature_id=2, feature_type=FeatureType.CONTINUOUS, mean=0.5, stddev=2.0))
    ) == {
        "2": '{"feature_type": "CONTINUOUS", "boxcox_lambda": null, "boxcox_shift": null, "mean": 0.5, "stddev": 2.0, '
        '"possible_values": null, "quantiles": null, "min_value": 0.0, "max_value": 1.0}'
    }


FINITE = st.floats(allow_nan=False, allow_infinity=False)
LISTS = st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=5, unique=True).map(lambda v: tuple(sorted(v)))


FEATURES = st.floats(-1e300, 1e300).flatmap(
    lambda low: st.builds(
        FeatureSpec,
        feature_id=st.integers(-(10**17), 10**17),
        feature_type=st.sampled_from(
            [name for name in FeatureType if name not in (FeatureType.EMBEDDING, FeatureType.IMAGE)]
        ),
        mean=FINITE,
        stddev=st.floats(1e-30, 1e300),
        boxcox_lambda=FINITE,
        boxcox_shift=FINITE,
        possible_values=LISTS,
        quantiles=LISTS,
        min_value=st.just(low),
        max_value=st.just(low + abs(low) + 1),
        levels=st.just(()),
    )
)


@settings(max_examples=60, deadline=None)
@given(st.lists(FEATURES, min_size=1, max_size=4))
def test_round_trip_is_exact(many: list[FeatureSpec]) -> None:
    fsspec.filesystem("memory").pipe("/norms/hypothesis.json", json.dumps(normalization_json(spec_of(*many))).encode())
    assert read_normalization("memory://norms/hypothesis.json") == spec_of(*many)


def test_check_covers() -> None:
    spec = spec_of(*(FeatureSpec(feature_id=i, feature_type=FeatureType.BINARY) for i in (1, 2, 3)))
    check_covers(spec, (3, 1), where="norm.json")
    with pytest.raises(DataError, match=r"norm.json: expected parameters of every feature.*for 2 of 3: 4, 9\."):
        check_covers(spec, (9, 1, 4), where="norm.json")


def test_left_out_features() -> None:
    spec = spec_of(*(FeatureSpec(feature_id=i, feature_type=FeatureType.BINARY) for i in (1, 2, 3)))
    assert not left_out_features(spec, (3, 1), where="norm.json")
    expected = "norm.json: no parameters for 2 of 3 features, left out: 4, 9"
    assert left_out_features(spec, (9, 1, 4), where="norm.json") == expected
    with pytest.raises(DataError, match=r"norm.json: expected parameters of every feature.*for 2 of 2: 4, 9\."):
        left_out_features(spec, (9, 4), where="norm.json")


CATEGORY = FeatureSpec(
    feature_id=1,
    feature_type=FeatureType.ENUM,
    possible_values=(float(code_of_text("é")), float(code_of_text("Z"))),
    levels=("é", "Z"),
)


def test_levels_are_kept_in_their_order_and_say_the_possible_values(tmp_path: Path) -> None:
    write_normalization(tmp_path / "norm.json", spec_of(CATEGORY))
    assert read_normalization(str(tmp_path / "norm.json")) == spec_of(CATEGORY)
    with pytest.raises(DataError, match="a path that can be written"):
        write_normalization(tmp_path / "norm.json" / "below", spec_of(CATEGORY))
    assert parse_normalization({"1": {"feature_type": "ENUM", "levels": ["é", "Z"]}}, where="norm") == spec_of(CATEGORY)
