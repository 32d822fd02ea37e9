import copy
import pickle
from typing import Any

import pytest

from reagent_lite.feature_ids import FeatureId, id_of, read, write_ids


def test_a_name_stands_for_one_id() -> None:
    age = id_of("age")
    assert age == 0x013F54400C82DA  # printf age | sha256sum | cut -c1-14
    assert f"{age}" == str(age) == str(copy.deepcopy(age)) == str(pickle.loads(pickle.dumps(age))) == "age"
    assert id_of(age) is age


@pytest.mark.parametrize(("key", "number"), [("3", 3), ("-7", -7), ("0", 0), (12, 12), ("9" * 18, 10**18 - 1)])
def test_integers_are_ids_without_a_name(key: str | int, number: int) -> None:
    assert (id_of(key), isinstance(id_of(key), FeatureId)) == (number, False)


@pytest.mark.parametrize("key", ["", "01", "1.5", "9" * 19, "3 apples", "a\nb", "x" * 101, "-", "+1"])
def test_what_is_neither_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="a feature id an integer"):
        id_of(key)


def test_ids_go_through_json_by_their_names() -> None:
    keys: list[Any] = [3, "age", "Größe [cm]"]
    assert write_ids(read(keys)) == keys
