"""Small trees over raw features: conditions by hand, and trees whose splits are known."""

import numpy as np
import pytest

from reagent_lite.evaluation.segment import StateFeatures
from reagent_lite.evaluation.small_tree import Condition, grow_tree

NAN = np.nan
INF = np.inf


def named(*names: str, texts: dict[int, dict[float, str]] | None = None) -> StateFeatures:
    return StateFeatures(names=names, values=np.zeros((0, len(names)), np.float32), texts=texts or {})


VALUES = np.array([1, 2, 3, NAN], np.float32)


@pytest.mark.parametrize(
    ("condition", "holds", "words"),
    [
        (Condition(column=0, high=2.0), [1, 1, 0, 1], "age at most 2 or absent"),
        (Condition(column=0, low=2.0, absent=False), [0, 0, 1, 0], "age above 2"),
        (Condition(column=0, low=1.0, high=2.5, absent=False), [0, 1, 0, 0], "age above 1 and at most 2.5"),
        (Condition(column=0, absent=False), [1, 1, 1, 0], "age present"),
        (Condition(column=0, low=INF), [0, 0, 0, 1], "age absent"),
        (Condition(column=0, levels=frozenset({1.0, 3.0}), absent=False), [1, 0, 1, 0], "age DE or IT"),
        (Condition(column=0, levels=frozenset({1.0}), other=True), [0, 1, 1, 1], "age other than DE or absent"),
        (Condition(column=0, levels=frozenset()), [0, 0, 0, 1], "age absent"),
    ],
)
def test_a_condition_holds_for_what_its_words_say(condition: Condition, holds: list[int], words: str) -> None:
    assert condition.holds(VALUES).astype(int).tolist() == holds
    features = named("age", texts={0: {1.0: "DE", 2.0: "FR", 3.0: "IT"}})
    assert condition.words(features, has_absent=True) == words


def test_conditions_on_one_feature_become_one() -> None:
    first = Condition(column=0, low=1.0, high=9.0)
    assert first.meet(Condition(column=0, high=4.0, absent=False)) == Condition(
        column=0, low=1.0, high=4.0, absent=False
    )
    among = {name: frozenset(map(float, values)) for name, values in {"ab": (1, 2), "bc": (2, 3)}.items()}
    for others, expected in (
        ((False, False), Condition(column=0, levels=frozenset({2.0}))),
        ((True, True), Condition(column=0, levels=frozenset({1.0, 2.0, 3.0}), other=True)),
        ((False, True), Condition(column=0, levels=frozenset({1.0}))),
        ((True, False), Condition(column=0, levels=frozenset({3.0}))),
    ):
        ab, bc = (Condition(column=0, levels=among[key], other=flag) for key, flag in zip(among, others, strict=True))
        assert ab.meet(bc) == expected
        assert (ab.holds(VALUES) & bc.holds(VALUES)).tolist() == expected.holds(VALUES).tolist()


def test_a_tree_of_several_targets_divides_at_the_true_limits() -> None:
    rng = np.random.default_rng(0)
    age = rng.integers(18, 80, 4000)
    score = np.where(rng.random(4000) < 0.3, NAN, rng.normal(size=4000))
    country = rng.integers(0, 6, 4000)
    values = np.stack((age, score, country, np.ones(4000)), 1).astype(np.float32)
    features = named("age", "score", "country", "constant", texts={2: {float(k): f"c{k}" for k in range(6)}})
    action = np.where(age > 45, 0, np.where(np.isnan(score), 1, np.where(country < 2, 2, 3)))
    tree = grow_tree(features, values, np.eye(4)[action], leaves=7, fewest=20, least_gain=0.01)
    assert set(tree.words) == {
        "age above 45",
        "age at most 45; score absent",
        "age at most 45; score present; country c0 or c1",
        "age at most 45; score present; country other than c0 or c1",
    }
    leaf = tree.leaf_of(values)
    assert [len(set(action[leaf == number])) for number in range(4)] == [1] * 4
    assert tree.leaf_of(np.array([[45, 0, 0, 1], [46, 0, 0, 1]], np.float32)).tolist() != [0, 0]


def test_absent_values_are_split_from_numbers_of_any_size() -> None:
    """In each part numbers differ, and absent values are as many."""
    rng = np.random.default_rng(0)
    number = rng.integers(0, 2, 4000)
    score = np.where(number == 1, rng.integers(4, 9, 4000), rng.integers(1, 4, 4000)).astype(np.float32)
    score[rng.random(4000) < 0.4] = NAN
    values = np.stack((number, score), 1).astype(np.float32)
    target = 10.0 * number + np.isnan(score)
    tree = grow_tree(named("number", "score"), values, target[:, None], leaves=4, fewest=20)
    assert set(tree.words) == {
        f"number {limit}; score {there}" for limit in ("at most 0", "above 0") for there in ("present", "absent")
    }


def test_neighbors_in_float32_are_told_apart() -> None:
    low = np.float32(16_777_216)
    values = np.where(np.arange(200) < 100, low, np.nextafter(low, np.float32(np.inf)))[:, None].astype(np.float32)
    tree = grow_tree(named("x"), values, (np.arange(200) < 100).astype(float)[:, None], leaves=2, fewest=10)
    assert tree.words == ("x at most 16,777,216", "x above 16,777,216")


@pytest.mark.parametrize(
    ("values", "targets"),
    [
        (np.zeros((100, 0), np.float32), np.arange(100.0)),
        (np.ones((100, 2), np.float32), np.arange(100.0)),
        (np.arange(200, dtype=np.float32).reshape(100, 2), np.ones(100)),
        (np.arange(20, dtype=np.float32).reshape(10, 2), np.arange(10.0)),
        (np.full((100, 2), NAN, np.float32), np.arange(100.0)),
    ],
    ids=["no features", "constant features", "equal targets", "few rows", "absent features"],
)
def test_nothing_to_split(values: np.ndarray, targets: np.ndarray) -> None:
    tree = grow_tree(named(*"ab"[: values.shape[1]]), values, targets[:, None], leaves=4, fewest=10)
    assert tree.words == ("all rows",)
    assert tree.leaf_of(values).tolist() == [0] * len(values)


def test_rare_levels_are_named_by_number_and_not_split_off_one_by_one() -> None:
    rng = np.random.default_rng(1)
    level = rng.integers(0, 1000, 20_000).astype(np.float32)
    target = (level < 100) + rng.normal(size=20_000)
    texts = {0: {float(k): f"c{k:03}" for k in range(1000)}}
    tree = grow_tree(named("shop", texts=texts), level[:, None], target[:, None], leaves=2, fewest=1000)
    assert tree.words == ("all rows",)  # a level has 20 rows: no segment of a tenth of the shops can be told
    tree = grow_tree(named("shop", texts=texts), level[:, None], target[:, None], leaves=2, fewest=50)
    assert tree.words[0].startswith("shop c0")
    assert "other values" in tree.words[0]
    first = set(level[tree.leaf_of(level[:, None]) == 0])
    assert len(first & set(range(100))) > 0.8 * len(first)
