"""Several logs read as one: whose episodes are the same, whose rows are repeated, and how many rows each gives."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from oracles.events import event, make, read, report
from oracles.logs import episode_code, write_lines
from oracles.shards import rows_of

from reagent_lite.config.loader import check
from reagent_lite.config.shard import ShardConfig
from reagent_lite.data.copy.first_look import first_rows, standing_copy
from reagent_lite.data.copy.training_copy import TrainingCopy, prepare_training_copy
from reagent_lite.data.log_shares import shares_of_counts
from reagent_lite.data.shards.partition import make_shards
from reagent_lite.data.stage import data_files, left_out
from reagent_lite.errors import DataError, NoRowsError

Row = dict[str, Any]
ACTIONS = ("l", "r")


def episode(name: str, *states: float, start: int = 0, **changes: Any) -> list[Row]:
    """An episode that ends with its last row; the reward is the state."""
    last = len(states) - 1
    return [event(name, start + n, s, s, terminal=n == last, **changes) for n, s in enumerate(states)]


def logs(folder: Path, *rows: Sequence[Row]) -> tuple[str, ...]:
    """Writes each log to a folder of its own: the files have one name."""
    return tuple(str(write_lines(folder / f"{number}" / "log.jsonl", some)) for number, some in enumerate(rows, 1))


def transitions(rows: Sequence[Row]) -> list[Row]:
    """The rows as transitions that say what followed."""
    followed = [*rows[1:], None]
    return [
        row if row["terminal"] or after is None
        else {**row, "next_state_features": after["state_features"], "next_action": after["action"]}
        for row, after in zip(rows, followed, strict=True)
    ]  # fmt: skip


def episodes_of(copy: TrainingCopy) -> list[tuple[int, list[float]]]:
    """The hash of each episode and the states of its rows."""
    return [(int(code), copy.state[: len(copy)][copy.episode == number, 0].tolist())
            for number, code in enumerate(copy.episode_hash)]  # fmt: skip


@pytest.mark.parametrize("as_transitions", [False, True])
def test_an_mdp_id_of_two_logs_is_two_episodes(tmp_path: Path, as_transitions: bool) -> None:
    rows = [episode("0", 1, 2, 3) + episode("1", 4, 5), episode("0", 6, 7) + episode("2", 8)]
    paths = logs(tmp_path, *map(transitions, rows)) if as_transitions else logs(tmp_path, *rows)
    copy = prepare_training_copy(paths, actions=ACTIONS)
    # of the second log all episodes have a name that no other log has
    assert episodes_of(copy) == [
        (episode_code("0"), [1, 2, 3]), (episode_code("1"), [4, 5]),
        (episode_code("2/0"), [6, 7]), (episode_code("2/2"), [8]),
    ]  # fmt: skip
    assert (copy.bootstrap == 0).tolist() == [False, False, True, False, True, False, True, True]
    assert copy.origin_file.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert copy.origin_line.tolist() == [1, 2, 3, 4, 5, 1, 2, 3]
    assert shares_of_counts(paths, copy.counts) == [(paths[0], 5, 5 / 8), (paths[1], 3, 3 / 8)]
    assert copy.notes[0] == (
        f"{paths[1]}: has 1 mdp_id of {paths[0]} for other episodes; its mdp_ids begin with '2/' from here on"
    )


def test_logs_without_an_mdp_id_in_common_are_those_of_one_folder(tmp_path: Path) -> None:
    rows = [episode("a", 1, 2), episode("b", 3)]
    copy = prepare_training_copy(logs(tmp_path, *rows), actions=ACTIONS)
    for number, some in enumerate(rows):
        write_lines(tmp_path / "together" / f"{number}.jsonl", some)
    together = prepare_training_copy(tmp_path / "together", actions=ACTIONS)
    for name in ("episode_hash", "state", "reward", "origin_file", "origin_line"):
        np.testing.assert_array_equal(getattr(copy, name), getattr(together, name))
    assert copy.notes == together.notes == ()
    assert together.counts.items() < copy.counts.items()


def test_rows_that_a_log_repeats_are_treated_as_those_that_one_log_repeats(tmp_path: Path) -> None:
    """The second log has the first one, a later row of its episode b, and one more episode."""
    first = episode("a", 1, 2) + episode("b", 3, 4)[:1]
    second = episode("c", 9) + episode("a", 1, 2) + episode("b", 3, 4)
    paths = logs(tmp_path, first, second)
    copy = prepare_training_copy(paths, actions=ACTIONS)
    assert [states for _, states in episodes_of(copy)] == [[1, 2], [3, 4], [9]]
    assert copy.origin_file.tolist() == [0, 0, 0, 1, 1]  # of events the first of each is kept
    assert [rows for _, rows, _ in shares_of_counts(paths, copy.counts)] == [3, 2]
    assert copy.notes == (
        f"{paths[1]}: repeats 3 rows of {paths[0]}, the first at {paths[1]}:2",
        f"{paths[0]}, {paths[1]}: of 8 events left out by the timeline: "
        "3 with the mdp_id and sequence_number of another",
    )
    # of transitions all are kept, and the run says how many
    paths = logs(tmp_path / "transitions", transitions(episode("a", 1, 2)), transitions(episode("a", 1, 2)))
    copy = prepare_training_copy(paths, actions=ACTIONS)
    assert copy.state[: len(copy), 0].tolist() == [1, 1, 2, 2]
    assert copy.counts["duplicate_rows"] == 2
    assert copy.notes[0] == f"{paths[1]}: repeats 2 rows of {paths[0]}, the first at {paths[1]}:1"


@pytest.mark.parametrize(
    "change", [{"reward": 7.0}, {"action": "r"}, {"action_probability": 0.25}, {"state_features": {"1": 2.0}}]
)
def test_one_row_that_differs_makes_another_numbering(tmp_path: Path, change: Row) -> None:
    """Logs that number their episodes alike may have some rows alike by chance, as those of the same start."""
    rows = episode("a", 1, 2) + episode("b", 1, 3)
    paths = logs(tmp_path, rows, [*rows[:1], {**rows[1], **change}, *rows[2:]])
    copy = prepare_training_copy(paths, actions=ACTIONS)
    assert copy.counts["episodes"] == 4
    assert copy.notes[0] == (
        f"{paths[1]}: has 2 mdp_ids of {paths[0]} for other episodes, 3 of 4 rows with the same sequence_number being "
        "the same; its mdp_ids begin with '2/' from here on"
    )


def test_an_episode_that_goes_on_in_another_log_is_another_episode(tmp_path: Path) -> None:
    paths = logs(tmp_path, [*episode("a", 1, 2)[:1], *episode("z", 5)], episode("a", 2, 3, start=1))
    copy = prepare_training_copy(paths, actions=ACTIONS)
    # it is not known where the row of state 1 led
    assert [states for _, states in episodes_of(copy)] == [[2, 3], [5]]
    assert episodes_of(copy)[0][0] == episode_code("2/a")


def test_a_log_that_contains_two_others_numbers_all_three(tmp_path: Path) -> None:
    both = episode("a", 1) + episode("b", 2)
    paths = logs(tmp_path, episode("a", 1), episode("b", 2), both, episode("a", 9), episode("b", 2))
    copy = prepare_training_copy(paths, actions=ACTIONS)
    assert episodes_of(copy) == [(episode_code("4/a"), [9]), (episode_code("a"), [1]), (episode_code("b"), [2])]
    assert [note.split(": ", 1)[1] for note in copy.notes[:3]] == [
        f"repeats 2 rows of {paths[0]}, {paths[1]}, the first at {paths[2]}:1",
        f"has 2 mdp_ids of {paths[0]}, {paths[2]} for other episodes; its mdp_ids begin with '4/' from here on",
        f"repeats 2 rows of {paths[1]}, {paths[2]}, the first at {paths[4]}:1",
    ]


def test_names_of_a_timeline_of_several_logs_stay_apart_from_those_of_another(tmp_path: Path) -> None:
    """The timeline of two logs has episodes "2/0"; a second log of "0" beside it may not be called so."""
    paths = logs(tmp_path, episode("0", 1), episode("0", 2), episode("0", 3))
    outcome = make(tmp_path, tmp_path, inputTableName=paths[:2])
    assert [row["mdp_id"] for row in read(tmp_path / "train")] == ["0", "2/0"]
    made = write_lines(tmp_path / "third.jsonl", [{**row, "next_action": None} for row in episode("0", 3)])
    copy = prepare_training_copy((outcome.train, str(made)), actions=ACTIONS)
    assert episodes_of(copy) == [(episode_code("0"), [1]), (episode_code("2/0"), [2]), (episode_code("3/0"), [3])]


def test_decisions_of_their_own_in_files_of_one_name(tmp_path: Path) -> None:
    rows = [event("", 0, s, s, mdp_id=None, sequence_number=None, possible_actions=None) for s in (1.0, 2.0)]
    paths = logs(tmp_path, rows, rows[:1])
    make(tmp_path, tmp_path, inputTableName=paths)
    assert [row["mdp_id"] for row in read(tmp_path / "train")] == [
        "1/log.jsonl:1", "1/log.jsonl:2", "2/log.jsonl:1",
    ]  # fmt: skip
    assert len(prepare_training_copy(paths, actions=ACTIONS)) == 3


def test_the_timeline_of_several_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = logs(tmp_path, episode("0", 1, 2), episode("0", 3), episode("0", 1, 2) + episode("4", 5))
    caplog.set_level("INFO")
    outcome = make(tmp_path, tmp_path, inputTableName=paths)
    said = caplog.text
    assert [(row["mdp_id"], row["state_features"], row["terminal"]) for row in read(tmp_path / "train")] == [
        ("0", {0: 1.0}, False), ("0", {0: 2.0}, True), ("2/0", {0: 3.0}, True), ("4", {0: 5.0}, True),
    ]  # fmt: skip
    assert f"events by log: {paths[0]}: 2 rows, 33.3%; {paths[1]}: 1 row, 16.7%; {paths[2]}: 3 rows, 50.0%" in said
    assert f"{paths[2]}: repeats 2 rows of {paths[0]}, the first at {paths[2]}:1" in said
    assert f"the first of each is kept. Left out: {paths[2]}:1, {paths[2]}:2" in said
    assert report(tmp_path / "train")["logs"] == dict(zip(paths, (2, 1, 3), strict=True))
    assert report(tmp_path / "train")["duplicate_rows"] == 2
    assert (outcome.train_rows, outcome.episodes, outcome.made) == (4, 3, True)
    assert not make(tmp_path, tmp_path, inputTableName=paths).made
    # in another order it is another timeline
    assert make(tmp_path, tmp_path, inputTableName=[paths[1], paths[0], paths[2]]).made
    assert {row["mdp_id"]: row["state_features"] for row in read(tmp_path / "train")}["0"] == {0: 3.0}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_shards_have_the_rows_of_all_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Numbers and texts as mdp_ids become texts where a log gets other names."""
    first = [{**row, "mdp_id": int(row["mdp_id"])} for row in episode("0", 1, 2) + episode("1", 3)]
    second = episode("0", 4) + episode("7", 5)
    paths = logs(tmp_path, first, second)
    (tmp_path / "out").mkdir()
    config = check(ShardConfig, {"training_data_path": list(paths), "num_nodes": 2, "shards_path": str(tmp_path / "s")})
    caplog.set_level("INFO")
    manifests = make_shards(config, tmp_path / "out")
    shards = [rows_of(tmp_path / "out" / f"shard-0000{number}") for number in range(2)]
    rewards = sorted((str(json.loads(row["mdp_id"])), row["reward"]) for shard in shards for row in shard)
    assert rewards == [("0", 1), ("0", 2), ("1", 3), ("2/0", 4), ("2/7", 5)]
    assert f"rows by log: {paths[0]}: 3 rows, 60.0%; {paths[1]}: 2 rows, 40.0%" in caplog.text
    assert manifests[0].report["logs"] == {paths[0]: 3, paths[1]: 2}
    assert manifests[0].report["notes"] == [
        f"{paths[1]}: has 1 mdp_id of {paths[0]} for other episodes; its mdp_ids begin with '2/' from here on"
    ]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ([event("", 0, 1.0, mdp_id=None)], "2/log.jsonl: expected a column 'mdp_id', as {first} has, got none. Give "),
        ([event("", 0, 1.0, sequence_number=None, terminal=True)],
         "2/log.jsonl: expected a column 'sequence_number', as {first} has, got none. Give logs of one kind "),
        (transitions(episode("a", 1, 2)), "1/log.jsonl: expected transitions, with a column 'next_state_features' or "
         "'next_action' as {second} has, got events. Make transitions of the events first, with workflows.timeline"),
        (episode("a", 1, action={"0": 1.0}, possible_actions=[{"0": 1.0}]),
         "2/log.jsonl: expected names or indices in action, as {first} has, got maps of features"),
    ],
)  # fmt: skip
def test_logs_of_two_kinds_are_refused_with_both_names(tmp_path: Path, second: list[Row], message: str) -> None:
    paths = logs(tmp_path, episode("a", 1), second)
    expected = message.format(first=paths[0], second=paths[1])
    for read_logs in (first_rows, lambda path, actions: prepare_training_copy(path, actions=actions)):
        with pytest.raises(DataError) as caught:
            read_logs(paths, ACTIONS)
        assert expected in str(caught.value)


def test_columns_that_only_one_log_has_are_as_in_files_of_one_folder(tmp_path: Path) -> None:
    first = episode("a", 1, metrics={"cost": 2.0}, extra="x")
    second = episode("b", 2, action_probability=None, possible_actions=None, state_features={"7": 2.0})
    copy = prepare_training_copy(logs(tmp_path, first, second), actions=ACTIONS)
    np.testing.assert_array_equal(copy.state, [[1, np.nan], [np.nan, 2]])
    assert (copy.state_ids, copy.metrics.tolist(), copy.mask.tolist()) == ((0, 7), [[2], [0]], [[1, 1], [1, 1]])
    assert copy.counts["propensity_absent_rows"] == 1


def test_own_names_of_an_old_log_beside_the_contracts_names_of_a_new_one(tmp_path: Path) -> None:
    columns: dict[str, Any] = {"mdp_id": "who", "sequence_number": "at", "state_features": ["age"], "action": "did",
                               "reward": "won", "terminal": "last"}  # fmt: skip
    old = pd.DataFrame({"who": ["a", "a"], "at": [0, 1], "age": [1.0, 2.0], "did": ["l", "r"], "won": [0.0, 1.0],
                        "last": [False, True]})  # fmt: skip
    old.to_csv(tmp_path / "old.csv", index=False)
    new = [event("a", 0, 0.0, 5.0, state_features={"age": 3.0}, action_probability=None, terminal=True)]
    paths = (str(tmp_path / "old.csv"), *logs(tmp_path, new))
    copy = prepare_training_copy(paths, actions=ACTIONS, columns=columns)
    assert episodes_of(copy) == [(episode_code("2/a"), [3]), (episode_code("a"), [1, 2])]
    assert copy.reward.tolist() == [5, 0, 1]
    with pytest.raises(DataError, match=r"Drop data.columns"):
        prepare_training_copy(logs(tmp_path / "new", new, new), actions=ACTIONS, columns=columns)


def test_a_log_without_rows_yet(tmp_path: Path) -> None:
    (path,) = logs(tmp_path, episode("a", 1))
    served = tmp_path / "served"
    served.mkdir()
    paths = (path, str(served))
    copy = prepare_training_copy(paths, actions=ACTIONS)
    assert (len(copy), copy.notes) == (1, (f"{served}: no rows: an empty folder",))
    assert shares_of_counts(paths, copy.counts) == [(path, 1, 1.0), (str(served), 0, 0.0)]
    with pytest.raises(NoRowsError, match="served: expected a folder"):
        data_files([str(served)] * 2)
    with pytest.raises(DataError, match="nothing at this path"):
        data_files((path, str(tmp_path / "nowhere")))


def test_a_file_is_of_one_log(tmp_path: Path) -> None:
    first, second = logs(tmp_path, episode("a", 1), episode("b", 1))
    folder = str(Path(second).parent)
    with pytest.raises(DataError, match=rf"{folder}: expected files that {second} does not have, got {second}. Give"):
        data_files((first, second, folder))
    (Path(first).parent / "notes.txt").write_text("x")
    assert left_out((str(Path(first).parent), folder)) == (f"{Path(first).parent}: not read: 1 entry: notes.txt",)


def test_the_copy_is_that_of_the_list_and_its_order(tmp_path: Path) -> None:
    first, second = logs(tmp_path, episode("0", 1), episode("0", 2))
    copy = prepare_training_copy((first, second), actions=ACTIONS)
    assert prepare_training_copy((first, second), actions=ACTIONS).folder == copy.folder
    standing = standing_copy((first, second), ACTIONS, None)
    assert standing is not None
    assert standing[0] == copy.folder
    assert standing_copy((second, first), ACTIONS, None) is None
    assert prepare_training_copy((second, first), actions=ACTIONS).state.tolist() == [[2], [1]]
    write_lines(Path(second), episode("0", 3, 4))
    assert prepare_training_copy((first, second), actions=ACTIONS).state.tolist() == [[1], [3], [4]]


def test_more_rows_than_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets on the disk: the same sentence and the same copy."""
    rng = np.random.default_rng(0)
    rows = [row for name in range(400) for row in episode(str(name), *rng.normal(size=3).tolist())]
    others = [{**row, "reward": row["reward"] + 1} for row in rows[:300]]
    paths = logs(tmp_path, rows, rows[300:], others)
    copy = prepare_training_copy(paths, actions=ACTIONS)
    folder, notes = copy.folder, copy.notes
    assert notes[0] == f"{paths[1]}: repeats 900 rows of {paths[0]}, the first at {paths[1]}:1"
    assert "has 100 mdp_ids of" in notes[1]
    shutil.rmtree(folder)
    monkeypatch.setattr("reagent_lite.data.logs._MEMORY_BYTES", 1 << 14)
    monkeypatch.setattr("reagent_lite.data.logs._GROUP_BYTES", 1 << 12)
    again = prepare_training_copy(paths, actions=ACTIONS)
    assert (again.folder.name, again.notes) == (folder.name, notes)
    assert json.loads((again.folder / "manifest.json").read_text())["counts"]["rows_of_log_3"] == 300


def test_a_row_that_one_log_has_twice_is_repeated_by_either(tmp_path: Path) -> None:
    rows = episode("a", 1, 2)
    changed = {**rows[0], "reward": 9.0}
    twice, once = [*rows, changed], [changed, rows[1]]
    for number, (first, second) in enumerate(((twice, once), (once, twice))):
        paths = logs(tmp_path / str(number), first, second)
        copy = prepare_training_copy(paths, actions=ACTIONS)
        assert (copy.reward.tolist(), copy.counts["episodes"]) == ([first[0]["reward"], 2], 1)
        assert copy.notes[0] == f"{paths[1]}: repeats 2 rows of {paths[0]}, the first at {paths[1]}:1"
