"""Several logs read as one: whose episodes are the same, whose rows are repeated, and how many rows each gives."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.cases import cases
from oracles.event_files import write_events
from oracles.events import event, make, read, report
from oracles.logs import Row, episode_code, write_lines
from oracles.shards import rows_of
from oracles.transitions import check_arrays

from reagent_lite.config.loader import check
from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.data.copy.first_look import first_rows, standing_copy
from reagent_lite.data.copy.training_copy import TrainingCopy, prepare_training_copy
from reagent_lite.data.log_shares import shares_of_counts
from reagent_lite.data.stage_folder import StageManifest, data_files, notes_of_input
from reagent_lite.errors import DataError
from reagent_lite.tasks.shard import shard

ACTIONS = ("l", "r")


def episode(name: str, *states: float, start: int = 0, **changes: Any) -> list[Row]:
    """An episode that ends with its last row; the reward is the state."""
    return [event(name, start + n, s, s, terminal=n == len(states) - 1, **changes) for n, s in enumerate(states)]


def logs(folder: Path, *rows: Sequence[Row]) -> tuple[str, ...]:
    """Writes each log to a folder of its own: the files have one name."""
    return tuple(str(write_lines(folder / f"{number}" / "log.jsonl", some)) for number, some in enumerate(rows, 1))


def transitions(rows: Sequence[Row]) -> list[Row]:
    """The rows as transitions that say what followed."""
    return [
        row if row["terminal"] or after is None
        else {**row, "next_state_features": after["state_features"], "next_action": after["action"]}
        for row, after in zip(rows, [*rows[1:], None], strict=True)
    ]  # fmt: skip


def copied(folder: Path, *rows: Sequence[Row]) -> tuple[TrainingCopy, list[str]]:
    """The copy of several logs, and its notes, whose paths begin below the folder."""
    copy = prepare_training_copy(logs(folder, *rows), actions=ACTIONS)
    return copy, [note.replace(f"{folder}/", "") for note in copy.notes]


def rows_in(copy: TrainingCopy) -> list[tuple[int, float, str, int]]:
    """The hash of each row's episode, its reward, where it comes from, and 1 if the episode goes on."""
    return [
        (int(copy.episode_hash[copy.episode[i]]), float(copy.reward[i]),
         "/".join(copy.source_line(i).split("/")[-2:]), int(copy.bootstrap[i]))
        for i in range(len(copy))
    ]  # fmt: skip


A = episode("a", 1, 2)
B = episode("b", 2)
ALIKE = episode("b", 1, 3)
TWO = [episode("0", 1, 2) + episode("1", 4), episode("0", 6, 7) + B]
CHANGED = {**A[0], "reward": 9.0}
REPEATED = "2/log.jsonl: repeats 2 rows of 1/log.jsonl, the first at 2/log.jsonl:1"
ROWS_OF_TWO = [("0", 1, "1/log.jsonl:1", 1), ("0", 2, "1/log.jsonl:2", 0), ("1", 4, "1/log.jsonl:3", 0),
               ("2/0", 6, "2/log.jsonl:1", 1), ("2/0", 7, "2/log.jsonl:2", 0),
               ("2/b", 2, "2/log.jsonl:3", 0)]  # fmt: skip
RENAMED = "2/log.jsonl: has 1 mdp_id of 1/log.jsonl for other episodes; its mdp_ids begin with '2/' from here on"


@cases("rows, expected, words", {
    # of the second log all episodes have a name that no other log has
    "an mdp_id of two logs is two episodes": (TWO, ROWS_OF_TWO, [RENAMED]),
    "of transitions as well": ([transitions(rows) for rows in TWO], ROWS_OF_TWO, [RENAMED]),
    "the second log has the first one, a later row of its episode b, and one more episode": (
        [A + episode("b", 3, 4)[:1], episode("c", 9) + A + episode("b", 3, 4)],
        # of events the first of each is kept
        [("a", 1, "1/log.jsonl:1", 1), ("a", 2, "1/log.jsonl:2", 0), ("b", 3, "1/log.jsonl:3", 1),
         ("b", 4, "2/log.jsonl:5", 0), ("c", 9, "2/log.jsonl:1", 0)],
        ["2/log.jsonl: repeats 3 rows of 1/log.jsonl, the first at 2/log.jsonl:2",
         "1/log.jsonl, 2/log.jsonl: of 8 events left out by the timeline: "
         "3 with the mdp_id and sequence_number of another"],
    ),
    "of transitions all are kept, and the run says how many": (
        [transitions(A), transitions(A)],
        [("a", 1, "1/log.jsonl:1", 1), ("a", 1, "2/log.jsonl:1", 1), ("a", 2, "1/log.jsonl:2", 0),
         ("a", 2, "2/log.jsonl:2", 0)], [REPEATED],
    ),
    "a row that the first log has twice is repeated": (
        [[*A, CHANGED], [CHANGED, A[1]]], [("a", 1, "1/log.jsonl:1", 1), ("a", 2, "1/log.jsonl:2", 0)], [REPEATED],
    ),
    "a row that the second log has twice is repeated": (
        [[CHANGED, A[1]], [*A, CHANGED]], [("a", 9, "1/log.jsonl:1", 1), ("a", 2, "1/log.jsonl:2", 0)], [REPEATED],
    ),
    # logs that number their episodes alike may have some rows alike by chance, as those of the same start
    **{f"one row that differs makes another numbering: {name}": (
        [[*A, *ALIKE], [A[0], {**A[1], name: value}, *ALIKE]],
        [("2/a", 1, "2/log.jsonl:1", 1), ("2/a", value if name == "reward" else 2, "2/log.jsonl:2", 0),
         ("2/b", 1, "2/log.jsonl:3", 1), ("2/b", 3, "2/log.jsonl:4", 0),
         ("a", 1, "1/log.jsonl:1", 1), ("a", 2, "1/log.jsonl:2", 0),
         ("b", 1, "1/log.jsonl:3", 1), ("b", 3, "1/log.jsonl:4", 0)],
        ["2/log.jsonl: has 2 mdp_ids of 1/log.jsonl for other episodes, 3 of 4 rows with the same sequence_number "
         "being the same; its mdp_ids begin with '2/' from here on"],
    ) for name, value in (
        ("reward", 7), ("action", "r"), ("action_probability", 0.25), ("state_features", {"1": 2.0}),
    )},
    # it is not known where the row of state 1 led
    "an episode that goes on in another log is another episode": (
        [[*A[:1], *episode("z", 5)], episode("a", 2, 3, start=1)],
        [("2/a", 2, "2/log.jsonl:1", 1), ("2/a", 3, "2/log.jsonl:2", 0), ("z", 5, "1/log.jsonl:2", 0)], [],
    ),
    "a log that contains two others numbers all three": (
        [episode("a", 1), B, episode("a", 1) + B, episode("a", 9), B],
        [("4/a", 9, "4/log.jsonl:1", 0), ("a", 1, "1/log.jsonl:1", 0), ("b", 2, "2/log.jsonl:1", 0)],
        ["3/log.jsonl: repeats 2 rows of 1/log.jsonl, 2/log.jsonl, the first at 3/log.jsonl:1",
         "4/log.jsonl: has 2 mdp_ids of 1/log.jsonl, 3/log.jsonl for other episodes; "
         "its mdp_ids begin with '4/' from here on",
         "5/log.jsonl: repeats 2 rows of 2/log.jsonl, 3/log.jsonl, the first at 5/log.jsonl:1"],
    ),
})  # fmt: skip
def test_episodes_of_several_logs(
    tmp_path: Path, rows: list[list[Row]], expected: list[tuple[str, float, str, int]], words: list[str]
) -> None:
    copy, notes = copied(tmp_path, *rows)
    assert rows_in(copy) == [(episode_code(name), *row) for name, *row in expected]
    assert notes[: len(words)] == words
    shares = shares_of_counts([""] * len(rows), copy.counts)
    assert [number for _, number, _ in shares] == np.bincount(copy.origin_file, minlength=len(rows)).tolist()


def test_logs_without_an_mdp_id_in_common_are_those_of_one_folder(tmp_path: Path) -> None:
    copy, notes = copied(tmp_path, episode("a", 1, 2), [*B, *episode("c", 3)])
    folder = write_events([*episode("a", 1, 2), *B, *episode("c", 3)], tmp_path / "together", "jsonl", files=2)
    together = prepare_training_copy(folder, actions=ACTIONS)
    columns = [
        (each.episode_hash, each.state, each.reward, each.origin_file, each.origin_line) for each in (copy, together)
    ]
    np.testing.assert_equal(*columns)
    assert (notes, together.notes, together.counts.items() < copy.counts.items()) == ([], (), True)


def test_names_of_a_timeline_of_several_logs_stay_apart_from_those_of_another(tmp_path: Path) -> None:
    """The timeline of two logs has episodes "2/0"; a second log of "0" beside it may not be called so."""
    outcome = make(tmp_path, tmp_path, inputTableName=logs(tmp_path, episode("0", 1), episode("0", 2)))
    made = write_lines(tmp_path / "third.jsonl", [{**row, "next_action": None} for row in episode("0", 3)])
    assert [row[:2] for row in rows_in(prepare_training_copy((outcome.train, str(made)), actions=ACTIONS))] == [
        (episode_code(name), at) for name, at in [("0", 1), ("2/0", 2), ("3/0", 3)]
    ]


def test_decisions_of_their_own_in_files_of_one_name(tmp_path: Path) -> None:
    rows = [event("", 0, s, s, mdp_id=None, sequence_number=None, possible_actions=None) for s in (1.0, 2.0)]
    names = ["1/log.jsonl:1", "1/log.jsonl:2", "2/log.jsonl:1"]
    copy, _ = copied(tmp_path, rows, rows[:1])
    make(tmp_path, tmp_path, inputTableName=copy.files)
    assert ([row["mdp_id"] for row in read(tmp_path / "train")], len(copy)) == (names, 3)


def test_the_timeline_of_several_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = logs(tmp_path, episode("0", 1, 2), episode("0", 3), episode("0", 1, 2) + episode("4", 5))
    caplog.set_level("INFO")
    outcome = make(tmp_path, tmp_path, inputTableName=paths)
    assert [(row["mdp_id"], row["state_features"], row["terminal"]) for row in read(tmp_path / "train")] == [
        ("0", {0: 1.0}, False), ("0", {0: 2.0}, True), ("2/0", {0: 3.0}, True), ("4", {0: 5.0}, True),
    ]  # fmt: skip
    for words in (
        f"events by log: {paths[0]}: 2 rows, 33.3%; {paths[1]}: 1 row, 16.7%; {paths[2]}: 3 rows, 50.0%",
        f"{paths[2]}: repeats 2 rows of {paths[0]}, the first at {paths[2]}:1",
        f"the first of each is kept. Left out: {paths[2]}:1, {paths[2]}:2",
    ):
        assert words in caplog.text
    made = report(tmp_path / "train")
    assert (made["logs"], made["duplicate_rows"]) == (dict(zip(paths, (2, 1, 3), strict=True)), 2)
    assert (outcome.train_rows, outcome.episodes, outcome.made) == (4, 3, True)
    assert not make(tmp_path, tmp_path, inputTableName=paths).made
    # in another order it is another timeline
    assert make(tmp_path, tmp_path, inputTableName=[paths[1], paths[0], paths[2]]).made
    assert {row["mdp_id"]: row["state_features"] for row in read(tmp_path / "train")}["0"] == {0: 3.0}


def test_shards_have_the_rows_of_all_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Numbers and texts as mdp_ids become texts where a log gets other names."""
    first = [{**row, "mdp_id": int(row["mdp_id"])} for row in episode("0", 1, 2) + episode("1", 3)]
    paths = logs(tmp_path, first, episode("0", 4) + episode("7", 5))
    caplog.set_level("INFO")
    rows: list[dict[str, Any]] = []
    for node in range(2):
        folder = tmp_path / "out" / str(node)
        tree = {"training_data_path": list(paths), "num_nodes": 2, "node_index": node, "local_path": str(folder)}
        assert shard(check(ShardConfig, tree)).made
        rows += rows_of(folder)
    report = StageManifest.read(str(folder)).report
    assert sorted((str(row["mdp_id"]).strip('"'), row["reward"]) for row in rows) == [
        ("0", 1), ("0", 2), ("1", 3), ("2/0", 4), ("2/7", 5),
    ]  # fmt: skip
    assert caplog.text.count(f"rows by log: {paths[0]}: ") == 2
    assert report["logs"].keys() == set(paths)
    assert "has 1 mdp_id of" in report["notes"][0]


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
    for read_logs in (first_rows, lambda path, actions: prepare_training_copy(path, actions=actions)):
        with pytest.raises(DataError, match=re.escape(message.format(first=paths[0], second=paths[1]))):
            read_logs(paths, ACTIONS)


def test_columns_that_only_one_log_has_are_as_in_files_of_one_folder(tmp_path: Path) -> None:
    first = episode("a", 1, metrics={"cost": 2.0}, extra="x")
    copy, _ = copied(
        tmp_path, first, episode("b", 2, action_probability=None, possible_actions=None, state_features={"7": 2.0})
    )
    check_arrays(copy, state=[[1, np.nan], [np.nan, 2]], metrics=[[2], [0]], mask=[[1, 1], [1, 1]])
    assert (copy.state_ids, copy.counts["propensity_absent_rows"]) == ((0, 7), 1)


def test_own_names_of_an_old_log_beside_the_contracts_names_of_a_new_one(tmp_path: Path) -> None:
    columns: dict[str, Any] = {"mdp_id": "who", "sequence_number": "at", "state_features": ["age"], "action": "did",
                               "reward": "won", "terminal": "last"}  # fmt: skip
    (tmp_path / "old.csv").write_text("who,at,age,did,won,last\na,0,1.0,l,0.0,False\na,1,2.0,r,1.0,True\n")
    new = [event("a", 0, 0.0, 5.0, state_features={"age": 3.0}, action_probability=None, terminal=True)]
    copy = prepare_training_copy((str(tmp_path / "old.csv"), *logs(tmp_path, new)), actions=ACTIONS, columns=columns)
    rows = [
        ("2/a", 5, "1/log.jsonl:1", 0),
        ("a", 0, f"{tmp_path.name}/old.csv:2", 1),
        ("a", 1, f"{tmp_path.name}/old.csv:3", 0),
    ]
    assert rows_in(copy) == [(episode_code(name), *row) for name, *row in rows]
    assert copy.state[:, 0].tolist() == [3, 1, 2]
    with pytest.raises(DataError, match=r"Drop data.columns"):
        prepare_training_copy(logs(tmp_path / "new", new, new), actions=ACTIONS, columns=columns)
    (served,) = logs(tmp_path / "served", [{**new[0], "decision_id": "1", "model": "m"}])
    assert len(prepare_training_copy(served, actions=ACTIONS, columns=columns)) == 1


def test_a_log_without_rows_yet(tmp_path: Path) -> None:
    (path,), served = logs(tmp_path, episode("a", 1)), str(tmp_path / "served")
    Path(served).mkdir()
    copy = prepare_training_copy((path, served), actions=ACTIONS)
    assert (len(copy), copy.notes) == (1, (f"{served}: no rows: an empty folder",))
    assert shares_of_counts((path, served), copy.counts) == [(path, 1, 1.0), (served, 0, 0.0)]


def test_a_file_is_of_one_log_and_logs_are_there(tmp_path: Path) -> None:
    first, second = logs(tmp_path, episode("a", 1), episode("b", 1))
    (tmp_path / "served").mkdir()
    for paths, words in (
        ((first, second, f"{tmp_path}/2"), f"2: expected files that {second} does not have, got {second}. List"),
        ((f"{tmp_path}/served", f"{tmp_path}/served"), "served: expected a folder"),
        ((first, f"{tmp_path}/nowhere"), "nothing at this path"),
    ):
        with pytest.raises(DataError, match=words):
            data_files(paths)
    (tmp_path / "1/notes.txt").touch()
    assert notes_of_input((f"{tmp_path}/1", f"{tmp_path}/2")) == (f"{tmp_path}/1: not read: 1 entry: notes.txt",)


def test_the_copy_is_that_of_the_list_and_its_order(tmp_path: Path) -> None:
    first, second = logs(tmp_path, episode("0", 1), episode("0", 2))
    folders = [prepare_training_copy((first, second), actions=ACTIONS).folder for _ in range(2)]
    assert folders == [standing_copy((first, second), ACTIONS, None)[0]] * 2
    assert standing_copy((second, first), ACTIONS, None) is None
    assert prepare_training_copy((second, first), actions=ACTIONS).state.tolist() == [[2], [1]]
    write_lines(Path(second), episode("0", 3, 4))
    assert prepare_training_copy((first, second), actions=ACTIONS).state.tolist() == [[1], [3], [4]]


def test_more_rows_than_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets on the disk: the same sentence and the same copy."""
    rewards = np.random.default_rng(0).normal(size=(400, 3)).tolist()
    rows = [row for name, states in enumerate(rewards) for row in episode(str(name), *states)]
    whole = rows, rows[300:], [{**row, "reward": row["reward"] + 1} for row in rows[:300]]
    copy, notes = copied(tmp_path, *whole)
    assert notes[0] == "2/log.jsonl: repeats 900 rows of 1/log.jsonl, the first at 2/log.jsonl:1"
    assert ("has 100 mdp_ids of" in notes[1], copy.counts["rows_of_log_3"]) == (True, 300)
    shutil.rmtree(copy.folder)
    monkeypatch.setattr("reagent_lite.data.logs._MEMORY_BYTES", 1 << 14)
    monkeypatch.setattr("reagent_lite.data.logs._GROUP_BYTES", 1 << 12)
    again, notes_again = copied(tmp_path, *whole)
    assert (again.folder.name, notes_again) == (copy.folder.name, notes)
