"""Images in a log: every form that writers give them is the same bytes, and what is no image is a fault of its row."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from helpers.logs import write_lines

from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.logs import Log
from reagent_lite.errors import DataError
from reagent_lite.types import Image

IMAGE = Image(shape=(2, 3, 1))
EPISODES = (3, 2, 1)


def pictures() -> np.ndarray:
    """[rows + episodes, 2, 3, 1]: states, each episode with the state after its last row."""
    return np.random.default_rng(0).integers(0, 256, (sum(EPISODES) + len(EPISODES), *IMAGE.shape)).astype(np.uint8)


def rows(*, transitions: bool = False) -> list[dict[str, Any]]:
    """Episodes of 3, 2 and 1 rows; a limit cuts the second one."""
    states = iter(pictures().tolist())
    result = []
    for episode, length in enumerate(EPISODES):
        after = [next(states) for _ in range(length + 1)]
        for step in range(length):
            last = step + 1 == length
            row = {
                "mdp_id": f"e{episode}", "sequence_number": step, "state_features": after[step], "action": "L",
                "reward": 1.0, "action_probability": 0.5, "terminal": last and episode != 1,
                "truncated": last and episode == 1,
            }  # fmt: skip
            row["next_state_features"] = after[step + 1] if transitions or (last and episode == 1) else None
            result.append({**row, "next_action": "L"} if transitions else row)
    return result


def copied(path: Path, **settings: Any) -> TrainingCopy:
    return prepare_training_copy(Log(str(path), actions=("L", "R"), image=IMAGE, **settings))


def require_whole(copy: TrainingCopy, *, further: int) -> None:
    """Checks states, next states, and that only `further` states are stored besides those of rows."""
    every = pictures().reshape(-1, 6)
    first, second, third = every[:4], every[4:7], every[7:]
    assert copy.state.dtype == np.uint8
    assert copy.state.shape == (6 + further, 6)
    assert np.array_equal(copy.state[:6], np.concatenate((first[:3], second[:2], third[:1])))
    following = np.asarray(copy.state)[copy.next_index]
    goes_on = np.asarray(copy.bootstrap) > 0
    assert goes_on.tolist() == [True, True, False, True, True, False]
    assert np.array_equal(following[goes_on], np.stack((first[1], first[2], second[1], second[2])))


FORMS: dict[str, Any] = {
    "nested": (lambda array: array.tolist(), None),
    "flat": (lambda array: array.reshape(-1).tolist(), None),
    "uint8": (lambda array: array.reshape(-1), pa.list_(pa.uint8())),
    "large": (lambda array: array.reshape(-1), pa.large_list(pa.int16())),
    "fixed": (lambda array: array.reshape(-1), pa.list_(pa.uint8(), 6)),
    "fixed nested": (lambda array: array.tolist(), pa.list_(pa.list_(pa.list_(pa.uint8(), 1), 3), 2)),
    "floats": (lambda array: array.reshape(-1).astype(np.float32), pa.list_(pa.float32())),
    "bytes": (lambda array: array.tobytes(), pa.binary()),
    "large bytes": (lambda array: array.tobytes(), pa.large_binary()),
    "fixed bytes": (lambda array: array.tobytes(), pa.binary(6)),
}


@pytest.mark.parametrize("transitions", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_arrow_form_is_the_same_bytes(tmp_path: Path, form: str, transitions: bool) -> None:
    write, kind = FORMS[form]
    table = pa.Table.from_pylist(rows(transitions=transitions))
    for name in ("state_features", "next_state_features"):
        values = [None if value is None else write(np.array(value, np.uint8)) for value in table[name].to_pylist()]
        index = table.schema.get_field_index(name)
        table = table.set_column(index, name, pa.array(values, kind))
    pa.parquet.write_table(table, tmp_path / "log.parquet")
    require_whole(copied(tmp_path / "log.parquet"), further=1)


def test_json_lines_and_csv(tmp_path: Path) -> None:
    require_whole(copied(write_lines(tmp_path / "log.jsonl", rows())), further=1)
    events = [{name: json.dumps(v) if isinstance(v, list) else v for name, v in row.items()} for row in rows()]
    pa.csv.write_csv(pa.Table.from_pylist(events), tmp_path / "log.csv")
    require_whole(copied(tmp_path / "log.csv"), further=1)


def test_an_array_of_images_in_python() -> None:
    """A dict of arrays, such as those of a .npz file, with images [n, 2, 3, 1]."""
    events = rows()
    names = [name for name in events[0] if name not in ("next_state_features", "truncated")]
    columns: dict[str, Any] = {name: np.array([row[name] for row in events]) for name in names}
    columns["state_features"] = columns["state_features"].astype(np.uint8)
    copy = prepare_training_copy(Log(columns, actions=("L", "R"), image=IMAGE))  # type: ignore[arg-type]
    assert copy.state.dtype == np.uint8
    # the second episode has no end, so that its last row leads nowhere and is a next state only
    assert len(copy) == 5
    assert np.array_equal(copy.state, pictures()[[0, 1, 2, 4, 7, 5]].reshape(-1, 6))


def test_what_is_no_image_is_a_fault_of_its_row(tmp_path: Path) -> None:
    expected = r"an image of 2 x 3 x 1 integers from 0 to 255 in state_features, as nested lists"
    picture = pictures()[0].tolist()
    for wrong in (
        picture[:1],
        [1, 2, 3, 4, 5],
        [[[1], [2], [256]], picture[1]],
        [[[1], [2], [-1]], picture[1]],
        [[[1], [2], [0.5]], picture[1]],
        [[[1], [2], [None]], picture[1]],
        [[[1], [2]], picture[1]],
        {"0": 1.0},
        "AAAA",
        7,
    ):
        events = rows()
        events[1]["state_features"] = wrong
        with pytest.raises(DataError, match=rf"log\.jsonl:2: expected {expected}"):
            copied(write_lines(tmp_path / "log.jsonl", events))
    events = rows()
    events[1]["state_features"] = None
    with pytest.raises(DataError, match=r"log\.jsonl:2: expected state_features, got null"):
        copied(write_lines(tmp_path / "log.jsonl", events))


def test_without_the_key_the_message_names_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"If states are images, give their shape as data\.image"):
        prepare_training_copy(Log(str(write_lines(tmp_path / "log.jsonl", rows())), actions=("L", "R")))
