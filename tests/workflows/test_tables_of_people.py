"""Tables as people keep them: one table written in several ways is read as the same rows, from inspect to scores."""

import csv
import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.bundles import linear_bundle
from helpers.commands import scored

import reagent_lite
from reagent_lite.config.column_names import features_of
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.errors import ConfigError, DataError
from reagent_lite.feature_ids import FeatureId
from reagent_lite.raw_values import RawColumn

ROWS = 300
ACTIONS = ("call", "mail")


@dataclass(frozen=True)
class Style:
    """How a file is written."""

    delimiter: str = ","
    decimal: str = "."
    group: str = ","
    null: str = "NA"
    encoding: str = "utf-8"
    day: str = "%Y-%m-%d %H:%M"
    amount: str = "${}"
    percent: str = "{}%"

    def number(self, value: float) -> str:
        text = f"{value:,.2f}".replace(",", "_").replace(".", self.decimal)
        return text.replace("_", self.group)


STYLES = {
    "american": Style(),
    "german": Style(";", ",", ".", "k.A.", "cp1252", "%d.%m.%Y %H:%M", "{} €", "{} %"),
    "french": Style(";", ",", "\u202f", "-", "utf-8", "%d/%m/%Y %H:%M", "{} EUR", "{}\u202f%"),
    "swiss": Style(";", ".", "'", "keine Angabe", "utf-8", "%d-%b-%Y %H:%M", "CHF {}", "{}%"),
    "AM and PM": Style(null="#DIV/0!", day="%m/%d/%Y %I:%M:%S %p", amount="{} USD"),
    "Excel's Unicode text": Style("\t", ",", ".", "n/a", "utf-16", "%d.%m.%Y %H:%M:%S", "{} €", "{} %"),
}


def people() -> list[dict[str, Any]]:
    rng = np.random.default_rng(5)
    start = np.datetime64("2026-01-15T08:30")
    return [
        {
            "age": int(rng.integers(18, 90)),
            "debt": None if rng.random() < 0.2 else round(float(rng.normal(0, 5000)), 2),
            "income": round(float(rng.lognormal(8, 1)), 2),
            "quota": round(float(rng.integers(0, 400)) / 4, 2),
            "joined": pd.Timestamp(start + np.timedelta64(int(rng.integers(0, 90_000)), "m")).to_pydatetime(),
            "tags": [tag for tag in ("düsseldorf", "new", "vip") if rng.random() < 0.5] or ["new"],
            "plan": str(rng.choice(["Basic", "Basic", "basic ", "Pro"])),
            "action": str(rng.choice(ACTIONS)),
            "bought": str(rng.choice(["Yes", "No"])),
            "p": 0.5,
        }
        for _ in range(ROWS)
    ]


def write(rows: list[dict[str, Any]], style: Style, file: Path) -> Path:
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "wt", encoding=style.encoding, newline="") as stream:
        writer = csv.writer(stream, delimiter=style.delimiter)
        writer.writerow(rows[0])
        for row in rows:
            cells = row | {
                "debt": style.null if row["debt"] is None else style.number(row["debt"]),
                "income": style.amount.format(style.number(row["income"])),
                "quota": style.percent.format(style.number(row["quota"])),
                "joined": row["joined"].strftime(style.day),
                "tags": "|".join(row["tags"]),
                "p": str(row["p"]).replace(".", style.decimal),
            }
            writer.writerow(cells.values())
    return file


@pytest.mark.parametrize(("style", "suffix"), [(name, ".csv") for name in STYLES] + [("german", ".csv.gz")])
def test_one_table_in_several_styles(style: str, suffix: str, tmp_path: Path) -> None:
    rows = people()
    written = STYLES[style]
    log = write(rows, written, tmp_path / f"people{suffix}")
    inspected = reagent_lite.inspect(log, columns={"reward": "bought"})
    assert inspected.problems == ()
    columns = inspected.config["data"]["columns"]
    defaults = {"delimiter": ",", "decimal": ".", "encoding": "utf-8"}
    expected = {key: getattr(written, key) for key in defaults if getattr(written, key) != defaults[key]}
    expected |= {"null": [written.null]} | ({"decimal": "."} if written.decimal == "." else {})
    assert columns["csv"] == expected
    copy = prepare_training_copy(Log(str(log), actions=ACTIONS, columns=columns, directory=str(tmp_path / "copies")))
    order = np.argsort(copy.origin_line[:])
    values = dict(zip(map(str, copy.state_ids), copy.state[:][order].T, strict=True))
    by_hand = {
        "age": [row["age"] for row in rows],
        "debt": [np.nan if row["debt"] is None else row["debt"] for row in rows],
        "income": [row["income"] for row in rows],
        "quota": [row["quota"] / 100 for row in rows],
        "joined_weekday": [row["joined"].weekday() for row in rows],
        "joined_hour": [row["joined"].hour for row in rows],
        **{f"tags={tag}": [tag in row["tags"] for row in rows] for tag in ("düsseldorf", "new", "vip")},
    }
    for name, column in by_hand.items():
        np.testing.assert_allclose(values[name], column, rtol=1e-6, err_msg=name)
    plans = [row["plan"] == "Pro" for row in rows]
    assert len(np.unique(values["plan"])) == 2
    assert len({*zip(values["plan"].tolist(), plans, strict=True)}) == 2
    np.testing.assert_array_equal(copy.reward[:][order], [row["bought"] == "Yes" for row in rows])


def test_a_model_scores_the_file_it_was_trained_on(tmp_path: Path) -> None:
    """The model remembers delimiter, decimal mark, absent values and encoding."""
    rows = people()
    log = write(rows, STYLES["german"], tmp_path / "people.csv")
    columns = reagent_lite.inspect(log, columns={"reward": "bought"}).config["data"]["columns"]
    columns["state_features"] = [part for part in columns["state_features"] if "plan" not in str(part)]
    first, *others = features_of(columns["state_features"])
    ids = (FeatureId(first), *sorted(map(FeatureId, others)))
    weight = np.zeros((2, len(ids)))
    weight[0, ids.index(FeatureId("debt"))] = 1
    model = linear_bundle(tmp_path / "model", weight, ACTIONS, ids, columns=columns)
    _, table = scored(model, log, tmp_path / "scores.parquet", policy="greedy", all_scores=True)
    q = [row["call"] for row in table["scores"].to_pylist()]
    np.testing.assert_allclose(q, [row["debt"] or 0.0 for row in rows], rtol=1e-6)


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["red,blue", "blue", "blue, green", "green", "red"], {"levels": ["blue", "green", "red"], "separator": ","}),
        (["red;blue", "blue", "blue;green", "green", "red"], {"levels": ["blue", "green", "red"], "separator": ";"}),
        (["['red', 'blue']", "[]", "['blue']", "['red']"], {"levels": ["blue", "red"]}),
        (["20260131", "20260201", "20251231"], {"kind": "date", "format": "%Y%m%d"}),
        (["31 January 2026", "1 February 2026", "24 December 2025"], {"kind": "date", "format": "%d %B %Y"}),
        (["01/31/26", "12/24/25"], {"kind": "date", "format": "%m/%d/%y"}),
        (["Berlin, Germany", "Paris, France"], None),
        (["20260131", "20260199"], None),
    ],
)  # fmt: skip
def test_further_spellings_of_lists_and_dates(
    cells: list[str], expected: dict[str, Any] | None, tmp_path: Path
) -> None:
    frame = pd.DataFrame(people())[["age", "action", "p", "bought"]].assign(
        c=np.random.default_rng(0).permutation(np.resize(cells, ROWS))
    )
    frame.to_csv(tmp_path / "log.csv", index=False)
    features = reagent_lite.inspect(tmp_path / "log.csv", columns={"reward": "bought"}).config["data"]["columns"]
    raw = [part for part in features["state_features"] if isinstance(part, dict)]
    assert raw == ([] if expected is None else [{"column": "c", "kind": "list"} | expected])


def test_a_list_as_python_writes_it_is_read_as_one_of_json() -> None:
    column = RawColumn(column="tags", kind="list", levels=("new", "vip"))
    for text in ("['vip']", '["vip"]', "[ 'vip' ]", "vip"):
        assert column.read(text) == (0, 1)
    for text in ("['vip'", "[__import__('os')]", "[[1]]"):
        with pytest.raises(ValueError, match="a list, as"):
            column.read(text)


def test_a_word_is_absent_only_where_it_stands_among_numbers(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(people())[["age", "action", "p", "bought"]].assign(
        score=rng.choice(["1.5", "2.5", "unbekannt", "(leer)"], ROWS, p=[0.4, 0.4, 0.1, 0.1]),
        plan=rng.choice(["Basic", "unbekannt"], ROWS),
        width=rng.choice(["12", "wide", "narrow"], ROWS),
        age=lambda frame: frame["age"].where(rng.random(ROWS) > 0.1, -999),
    )
    frame.to_csv(tmp_path / "log.csv", index=False)
    inspected = reagent_lite.inspect(tmp_path / "log.csv", columns={"reward": "bought"})
    # a level of plan is no absent value, and two words of three are none either
    assert inspected.config["data"]["columns"]["csv"] == {"null": ["(leer)"]}
    assert any(choice.startswith("age: -999 in") and '"map": {"-999": null}' in choice for choice in inspected.decide)


@pytest.mark.parametrize(("yes", "no"), [("Ja", "nein"), ("oui", "non"), ("on", "OFF"), ("да", "нет")])
def test_answers_in_other_languages(yes: str, no: str, tmp_path: Path) -> None:
    answers = np.random.default_rng(0).choice([yes, no], ROWS)
    pd.DataFrame(people())[["age", "action", "p"]].assign(bought=answers).to_csv(tmp_path / "log.csv", index=False)
    inspected = reagent_lite.inspect(tmp_path / "log.csv")
    assert inspected.fields["reward"] == "bought"
    columns = inspected.config["data"]["columns"]
    copy = prepare_training_copy(
        Log(str(tmp_path / "log.csv"), actions=ACTIONS, columns=columns, directory=str(tmp_path / "copies"))
    )
    np.testing.assert_array_equal(copy.reward[:][np.argsort(copy.origin_line[:])], answers == yes)


def test_days_and_months_that_may_be_swapped_are_not_guessed(tmp_path: Path) -> None:
    rows = [{**row, "joined": row["joined"].replace(day=1 + row["joined"].day % 12)} for row in people()]
    log = write(rows, STYLES["french"], tmp_path / "people.csv")
    inspected = reagent_lite.inspect(log, columns={"reward": "bought"})
    assert "joined" not in str(inspected.config["data"]["columns"]["state_features"])
    given = {"column": "joined", "kind": "date", "format": "%d/%m/%Y %H:%M"}
    columns = {"reward": "bought", "state_features": ["age", given]}
    assert reagent_lite.inspect(log, columns=columns).config["data"]["columns"]["state_features"] == ["age", given]


def test_numbers_with_units_are_amounts_and_codes_are_categories(tmp_path: Path) -> None:
    cells = {
        "weight": ["70 kg", "81.5 kg", "64kg"],
        "speed": ["5 km/h", "12 km/h", "7 km/h"],
        "code": ["v1", "v2", "v3"],
        "size": ["S", "M", "XL"],
        "range": ["18-25", "26-35", "36-45"],
        "price": ["5 USD", "6 EUR", "7 USD"],
        "mass": ["70 kg", "154 lb", "81 kg"],
        "views": ["5k", "12k", "7k"],
        "paid": ["$5k", "$12k", "$7k"],
    }
    frame = pd.DataFrame(people())[["action", "p", "bought"]]
    frame.assign(**{name: of_column * 100 for name, of_column in cells.items()}).to_csv(
        tmp_path / "log.csv", index=False
    )
    inspected = reagent_lite.inspect(tmp_path / "log.csv", columns={"reward": "bought"})
    columns = inspected.config["data"]["columns"]
    amounts = [{"column": "weight", "kind": "currency", "unit": "kg"},
               {"column": "speed", "kind": "currency", "unit": "km/h"}]  # fmt: skip
    assert columns["state_features"] == [*amounts, "code", "size", "range"]
    left_out = "\n".join(inspected.decide)
    for words in (
        "price left out, numbers in several units, EUR, USD",
        "mass left out, numbers in several units, kg, lb",
        "views left out, numbers with k, which may stand for",
        "paid left out, numbers with $k",
    ):
        assert words in left_out
    copy = prepare_training_copy(
        Log(str(tmp_path / "log.csv"), actions=ACTIONS, columns=columns, directory=str(tmp_path / "copies"))
    )
    weight = copy.state[:][np.argsort(copy.origin_line[:]), [str(name) for name in copy.state_ids].index("weight")]
    np.testing.assert_array_equal(weight[:3], [70, 81.5, 64])


@pytest.mark.parametrize(
    ("encoding", "cities", "is_known"),
    [
        ("cp1252", ("Zürich", "Málaga", "Graz"), True),
        ("cp1252", ("Tromsø €", "5 °C", "“Åre”"), True),
        ("cp1251", ("Москва", "Казань", "Perm"), False),
        ("cp1250", ("Łódź", "Kraków", "Gdańsk", "Wałbrzych"), False),
        ("shift_jis", ("東京", "大阪", "Nara"), False),
    ],
)
def test_an_encoding_that_shows_other_letters_is_not_guessed(
    encoding: str, cities: tuple[str, ...], is_known: bool, tmp_path: Path
) -> None:
    """Categories would have other names than those that a server is sent."""
    frame = pd.DataFrame(people())[["age", "action", "p", "bought"]].assign(city=np.resize(cities, ROWS))
    frame.to_csv(tmp_path / "log.csv", index=False, encoding=encoding)
    if is_known:
        inspected = reagent_lite.inspect(tmp_path / "log.csv", columns={"reward": "bought"})
        assert inspected.config["data"]["columns"]["csv"]["encoding"] == encoding
    else:
        with pytest.raises(DataError, match="name its encoding"):
            reagent_lite.inspect(tmp_path / "log.csv", columns={"reward": "bought"})
        given = {"reward": "bought", "csv": {"encoding": encoding}}
        assert reagent_lite.inspect(tmp_path / "log.csv", columns=given).problems == ()


def test_texts_of_rewards_are_mapped_on_request(tmp_path: Path) -> None:
    frame = pd.DataFrame(people())[["age", "action", "bought", "p"]].replace({"Yes": "paid", "No": "open"})
    frame.to_csv(tmp_path / "log.csv", index=False)
    refused = reagent_lite.inspect(tmp_path / "log.csv", columns={"reward": "bought"})
    assert '{"reward": {"column": "bought", "map": {' in " ".join(refused.problems)
    given = {"reward": {"column": "bought", "map": {"paid": 1, "open": 0}}}
    config = reagent_lite.inspect(tmp_path / "log.csv", columns=given).config
    columns = config["data"]["columns"]
    assert columns["reward"] == given["reward"]
    copy = prepare_training_copy(
        Log(str(tmp_path / "log.csv"), actions=ACTIONS, columns=columns, directory=str(tmp_path / "copies"))
    )
    assert copy.reward[:].sum() == (frame["bought"] == "paid").sum()


def test_another_encoding_is_answered_with_the_key(tmp_path: Path) -> None:
    log = write(people(), STYLES["german"], tmp_path / "people.csv")
    with pytest.raises(DataError, match="name its encoding in columns"):
        reagent_lite.read_log(log, {"reward": "bought", "state_features": ["age"]})
    with pytest.raises(DataError, match="text in utf-16, as csv"):
        reagent_lite.read_log(log, {"csv": {"encoding": "utf-16"}, "reward": "bought", "state_features": ["age"]})


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"csv": {"delimiter": ":"}}, "columns.csv.delimiter: expected"),
        ({"csv": {"encoding": "rot13"}}, "columns.csv.encoding: expected an encoding of text"),
        ({"csv": {"delimiter": ",", "decimal": ","}}, "columns.csv.decimal: expected another sign"),
        ({"state_features": [{"column": "a", "kind": "tme"}]}, "columns.state_features.0.kind: expected"),
        ({"state_features": [{"column": "a"}]}, "columns.state_features.0.kind: expected a kind, or a map"),
        ({"state_features": [{"column": "a", "kind": "list"}]}, "levels: expected the elements"),
        ({"state_features": ["a_hour", {"column": "a", "kind": "time"}]}, "expected each feature once"),
        ({"state_features": [{"column": "a", "map": {"x": "y", "y": "z"}}]}, "not both"),
        ({"reward": {"column": "a", "kind": "time"}}, "columns.reward: expected a kind with one value"),
        ({"reward": {"column": "a", "kind": "percent", "unit": "$"}}, "columns.reward.unit: expected absent"),
    ],
)
def test_objects_in_columns_are_checked(columns: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        reagent_lite.inspect("log.csv", columns=columns)
    assert expected in str(error.value)
