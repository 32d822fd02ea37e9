"""Items by id from a log to a model: the same as with repeated features, in the report, scores and evaluation."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers import commands
from helpers.events import timeline_config
from helpers.items import ITEMS, NAMES, events, features_of, repeated, transitions, write_items
from helpers.logs import write_lines
from helpers.runs import merged, quick, trained

import reagent_lite
from reagent_lite.config import check
from reagent_lite.config.inspect_config import InspectConfig
from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.data.inspection.proposal import inspect_log
from reagent_lite.data.timeline.stage import run_timeline
from reagent_lite.errors import DataError
from reagent_lite.export import load_bundle
from reagent_lite.item_table import ITEMS_FILE
from reagent_lite.tasks.shard import shard


def config(log: Path, out: Path, **sections: Any) -> dict[str, Any]:
    return merged(quick(log, out, epochs=2, actions=None), {"training": {"layers": [-1, 8, 1]}, **sections})


def model_of(log: Path, out: Path, **sections: Any) -> Path:
    return Path(str(trained(config(log, out, **sections)).model))


def assert_same(model: Path, other: Path, *files: str) -> None:
    assert [file for file in files if (model / file).read_bytes() != (other / file).read_bytes()] == []


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Files of the events and of their items."""
    folder = tmp_path_factory.mktemp("inputs")
    return write_lines(folder / "log.jsonl", events()), str(write_items(folder))


@pytest.fixture(scope="module")
def model(inputs: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_of(inputs[0], tmp_path_factory.mktemp("model") / "out", data={"items": inputs[1]})


def test_ids_and_repeated_features_train_the_same_model(model: Path, tmp_path: Path) -> None:
    other = model_of(write_lines(tmp_path / "features.jsonl", repeated(events())), tmp_path / "out")
    assert_same(model, other, "weights.safetensors", "normalization.json", "golden.json", "model.onnx")
    of_ids, of_features = (json.loads((path / "evaluation.json").read_text())["scores"] for path in (model, other))
    assert of_ids == of_features
    assert [(path / ITEMS_FILE).exists() for path in (model, other)] == [True, False]


def test_card_and_report_name_the_items(model: Path) -> None:
    digest = hashlib.sha256((model / ITEMS_FILE).read_bytes()).hexdigest()
    words = f"5 items in `items.json`, hash `{digest}`, such as tea, milk, bread, 12, jam."
    assert words in (model / "MODEL_CARD.md").read_text()
    page = (model.parent / "report.html").read_text()
    assert ("Shares of items on evaluated rows" in page, digest[:16] in page) == (True, True)


def test_shares_of_logged_items_are_those_of_the_log(inputs: tuple[Path, str], tmp_path: Path) -> None:
    log, items = inputs
    _, document = commands.evaluated(
        "uniform", str(log), tmp_path / "out.json", items=items, gamma=0.9, write_scored_rows=True
    )
    scored = [events()[line - 1] for line in document["log"]["scored_lines"][str(log)]]
    shares = document["model"]["candidates"]["items"]
    for name in NAMES:
        logged = sum(str(row["action"]) == name for row in scored) / len(scored)
        uniform = sum((name in map(str, row["possible_actions"])) / len(row["possible_actions"]) for row in scored)
        assert shares[name] == pytest.approx({"logged": logged, "policy": uniform / len(scored)}, rel=1e-6)


def scored(model: Path, data: Path, **keys: Any) -> list[dict[str, Any]]:
    return commands.scored(model, data, data.with_suffix(".scores.parquet"), policy="greedy", **keys)[1].to_pylist()


def test_scores_name_items_and_are_those_of_their_features(model: Path, tmp_path: Path) -> None:
    rows = [{"state_features": row["state_features"], "possible_actions": row["possible_actions"]} for row in events()]
    without = [{"state_features": row["state_features"]} for row in rows]
    mixed = [row if number % 3 else other for number, (row, other) in enumerate(zip(rows, without, strict=True))]
    plain = [{**row, "possible_actions": [features_of(name) for name in row["possible_actions"]]} for row in rows]
    by_features, by_id, of_all, some = (
        scored(model, write_lines(tmp_path / f"{number}.jsonl", given), all_scores=True)
        for number, given in enumerate((plain, rows, without, mixed))
    )
    for number, (row, result, other, every) in enumerate(zip(rows, by_id, by_features, of_all, strict=True)):
        assert result["action"] == str(row["possible_actions"][result["index"]])
        assert dict(other["action"]) == pytest.approx(features_of(result["action"]))
        assert (result["index"], result["score"], result["scores"]) == (other["index"], other["score"], other["scores"])
        assert (every["action"], len(every["scores"])) == (NAMES[every["index"]], 5)
        assert some[number]["action"] == (result if number % 3 else every)["action"]


def test_scores_with_a_newer_table_and_with_unknown_items(model: Path, tmp_path: Path) -> None:
    rows = [{"state_features": {"0": 1.0, "1": 0.2}, "possible_actions": ["beer", "tea"]}]
    data = write_lines(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .* the 5 items"):
        scored(model, data)
    newer = write_items(tmp_path, {"item_id": "beer", "price": 1.0, "7": 0.1}, name="newer.jsonl")
    assert scored(model, data, items=str(newer))[0]["action"] in ("beer", "tea")


def test_a_model_is_evaluated_on_ids_with_its_own_items(model: Path, tmp_path: Path) -> None:
    by_id, by_features = (
        commands.evaluated(model, str(write_lines(tmp_path / f"{name}.jsonl", rows)), tmp_path / f"{name}.json",
                           evaluation={"bootstrap_resamples": 100})
        for name, rows in (("ids", events(seed=1)), ("features", repeated(events(seed=1))))
    )  # fmt: skip
    assert by_id[0].scores == by_features[0].scores
    assert by_id[1]["model"]["candidates"]["items"]


def test_timelines_take_items(inputs: tuple[Path, str], model: Path, tmp_path: Path) -> None:
    timeline = timeline_config(tmp_path, inputs[0], {"items": str(write_items(tmp_path))}, actionDiscrete=False)
    by_timeline = model_of(Path(run_timeline(timeline).train), tmp_path / "out")
    assert_same(by_timeline, model, "weights.safetensors", "normalization.json")
    assert not run_timeline(timeline).made
    write_items(tmp_path, {"item_id": "beer", "price": 1.0, "7": 0.1})
    assert run_timeline(timeline).made


def test_normalization_takes_items(inputs: tuple[Path, str], tmp_path: Path) -> None:
    norm = {"cols_to_norm": ["state_features", "action"]}
    outcome = commands.normalized(str(inputs[0]), tmp_path, norm=norm, items=inputs[1])
    assert (outcome.parametric, outcome.features) == (True, {"state_features": 2, "action": 2})
    assert json.loads((tmp_path / "action_norm.json").read_text()).keys() == {"7", "price"}


def test_shards_of_ids_train_with_the_table(inputs: tuple[Path, str], model: Path, tmp_path: Path) -> None:
    log = write_lines(tmp_path / "log.jsonl", transitions(events()))
    shard(ShardConfig(data_path=str(log), output_path=str(tmp_path / "local")))
    data = {"items": inputs[1]}
    assert_same(model_of(tmp_path / "local", tmp_path / "out", data=data), model, "normalization.json")


@pytest.mark.usefixtures("caches")
def test_frames_of_rows_and_items(model: Path, tmp_path: Path) -> None:
    frame = pd.DataFrame(ITEMS).astype({"item_id": str}).rename(columns={"item_id": "sku"})
    rows = pd.DataFrame([{**row, "action": str(row["action"]), "possible_actions": [*map(str, row["possible_actions"])]}
                         for row in events()])  # fmt: skip
    tree = config(Path(), tmp_path / "out", data={"item_id": "sku"}) | {"training_data_path": ""}
    trained_model = Path(str(reagent_lite.train(tree, rows, items=frame).model))
    assert_same(trained_model, model, "weights.safetensors")
    assert load_bundle(trained_model).item_id == "sku"
    assert reagent_lite.inspect(rows, items=frame, item_id="sku").config["data"]["item_id"] == "sku"
    table = reagent_lite.score(trained_model, rows[["state_features"]], items=frame, config={"policy": "greedy"})
    assert set(table["action"].to_pylist()) <= set(NAMES)


def of_all_items(*, listed: bool) -> list[dict[str, Any]]:
    """Decisions among all items, with the list in each row or without any."""
    rows = [{**row, "possible_actions": list(NAMES), "action_probability": 0.2} for row in events()]
    return rows if listed else [{key: row[key] for key in row if key != "possible_actions"} for row in rows]


@pytest.mark.parametrize("shape", [list, transitions], ids=["events", "transitions"])
def test_all_items_are_possible_without_lists(shape: Any, tmp_path: Path) -> None:
    items = str(write_items(tmp_path))
    listed = write_lines(tmp_path / "listed.jsonl", shape(of_all_items(listed=True)))
    plain = shape(of_all_items(listed=True))
    for row in plain:
        row.pop("possible_actions")
        if row.get("possible_next_actions"):
            del row["possible_next_actions"]
    log = write_lines(tmp_path / "plain.jsonl", plain)
    one, other = (
        model_of(path, tmp_path / path.stem, data={"items": items, **keys})
        for path, keys in ((listed, {}), (log, {"possible_items": "all"}))
    )
    assert_same(one, other, "weights.safetensors", "normalization.json", "golden.json")
    assert load_bundle(other).possible_items == "all"
    evaluation = {"evaluation": {"bootstrap_resamples": 100}}
    values = [
        commands.evaluated(model, str(path), tmp_path / f"{path.stem}.json", **evaluation)[0].scores
        for model, path in ((one, listed), (other, log))
    ]
    assert values[0] == values[1]


def test_a_single_item_in_each_row_is_refused_with_what_to_do(tmp_path: Path) -> None:
    items = str(write_items(tmp_path))
    log = write_lines(tmp_path / "log.jsonl", of_all_items(listed=False))
    with pytest.raises(DataError, match=r"a single one in \d+ of \d+ rows. Set possible_items, .* any of the 5 items"):
        model_of(log, tmp_path / "out", data={"items": items})
    inspected = inspect_log(check(InspectConfig, {"data_path": str(log), "items": items}))
    assert inspected.config["data"] == {"items": items, "possible_items": "all"}
    assert any("each row offers all 5 items" in choice for choice in inspected.decide)


def test_inspect_finds_the_lists_of_what_was_possible_by_their_values(tmp_path: Path) -> None:
    """A column of lists that have the action of every row, and one that lacks it in a row."""
    items = str(write_items(tmp_path))
    rows = [{"age": row % 7 + 0.5, "item": NAMES[row % 5], "p": 0.5, "click": row % 2} for row in range(60)]
    for row, event in enumerate(rows):
        event["seen"] = [event["item"], NAMES[(row + 1) % 5]] if row else ["tea"]
        event["slate"] = sorted({event["item"], NAMES[(row + 2) % 5]}) if row % 9 else None
    rows[0]["item"] = "milk"
    log = write_lines(tmp_path / "log.jsonl", rows)
    inspected = inspect_log(check(InspectConfig, {"data_path": str(log), "items": items}))
    assert inspected.fields["possible_actions"] == "slate"
    assert "possible_items" not in inspected.config["data"]
    assert "possible_actions: slate, whose lists have the action of every row" in inspected.decide
    given = check(
        InspectConfig, {"data_path": str(log), "items": items, "columns": {"state_features": ["age", "slate"]}}
    )
    assert "possible_actions" not in inspect_log(given).fields


def test_inspect_proposes_candidates_of_an_item_table(inputs: tuple[Path, str], tmp_path: Path) -> None:
    items = write_items(tmp_path)
    tree = check(InspectConfig, {"data_path": str(inputs[0]), "items": str(items)})
    inspected = inspect_log(tree)
    assert (inspected.workflow, inspected.problems) == ("parametric_dqn", ())
    assert inspected.config["data"] == {"items": str(items)}
    assert trained(merged(inspected.config, config(inputs[0], tmp_path / "out"))).model is not None
    write_lines(items, [*ITEMS[1:]])
    assert "expected an id of the 4 items" in inspect_log(tree).problems[0]
