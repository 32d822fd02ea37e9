"""Several logs read as one: whose episodes are the same, whose rows are repeated, and how many rows each gives."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cases import cases
from helpers.event_files import write_events
from helpers.events import event, make, read, report
from helpers.logs import Row, episode_code, write_lines
from helpers.shards import rows_of
from helpers.transitions import check_arrays

from reagent_lite.config.loader import check
from reagent_lite.config.shard_config import ShardConfig
from reagent_lite.data.copy.first_look import first_rows, standing_copy
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.copy.training_copy import TrainingCopy
from reagent_lite.data.log_shares import shares_of_counts
from reagent_lite.data.logs import Log
from reagent_lite.data.stage_folder import StageManifest
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


def copied(folder: Path, *rows: Sequence[Row], **settings: Any) -> tuple[TrainingCopy, list[str]]:
    """The copy of several logs, and its notes, whose paths begin below the folder."""
    copy = prepare_training_copy(Log(logs(folder, *rows), actions=ACTIONS, **settings))
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
TWO = [episode("0", 1, 2) + episode("1", 4), episode("0", 6, 7) + B]
ROWS_OF_TWO = [("0", 1, "1/log.jsonl:1", 1), ("0", 2, "1/log.jsonl:2", 0), ("1", 4, "1/log.jsonl:3", 0),
               ("2/0", 6, "2/log.jsonl:1", 1), ("2/0", 7, "2/log.jsonl:2", 0),
               ("2/b", 2, "2/log.jsonl:3", 0)]  # fmt: skip
A_TWICE = [("2/a", 1, "2/log.jsonl:1", 1), ("2/a", 2, "2/log.jsonl:2", 0),
           ("a", 1, "1/log.jsonl:1", 1), ("a", 2, "1/log.jsonl:2", 0)]  # fmt: skip


def shared(count: int, paths: str = "1/log.jsonl, 2/log.jsonl") -> list[str]:
    """What is said of pairs that several logs have."""
    pairs = "pair of mdp_id and sequence_number is" if count == 1 else "pairs of mdp_id and sequence_number are"
    return [
        f"{paths}: {count} {pairs} in more than one log, and belong to different episodes. Set same_episodes, in "
        "training data.same_episodes, to true if they are the same decisions, which then count once, else to false"
    ]


@cases("rows, same_episodes, expected, words", {
    "each log has its own episodes": (TWO, None, ROWS_OF_TWO, shared(2)),
    "of transitions as well": ([transitions(rows) for rows in TWO], None, ROWS_OF_TWO, shared(2)),
    "also if no other log has the mdp_id": ([A, B], None, [("2/b", 2, "2/log.jsonl:1", 0), *A_TWICE[2:]], []),
    "also if a log repeats another one": ([A, A], None, A_TWICE, shared(2)),
    "whoever knows it is not warned": ([A, A], False, A_TWICE, []),
    # the timeline of two logs has names like these
    "names that begin with a number stay apart": (
        [[*A, *episode("2/a", 3)], [*A, *episode("1/2/a", 4)]], None,
        [("1/2/a", 3, "1/log.jsonl:3", 0), ("2/1/2/a", 4, "2/log.jsonl:3", 0), *A_TWICE], shared(2),
    ),
    "a row of one log with another order is no such pair": (
        [A, episode("a", 3, start=7)], None, [("2/a", 3, "2/log.jsonl:1", 0), *A_TWICE[2:]], [],
    ),
    "a pair of three logs counts once": (
        [B, B, [*B, *episode("b", 5, start=1)]], None,
        [("2/b", 2, "2/log.jsonl:1", 0), ("3/b", 2, "3/log.jsonl:1", 0), ("3/b", 5, "3/log.jsonl:2", 0),
         ("b", 2, "1/log.jsonl:1", 0)], shared(1, "1/log.jsonl, 2/log.jsonl, 3/log.jsonl"),
    ),
    # the second log has the first one, a later row of its episode b, and one more episode: of events the first is kept
    "the same events count once": (
        [A + episode("b", 3, 4)[:1], episode("c", 9) + A + episode("b", 3, 4)], True,
        [("a", 1, "1/log.jsonl:1", 1), ("a", 2, "1/log.jsonl:2", 0), ("b", 3, "1/log.jsonl:3", 1),
         ("b", 4, "2/log.jsonl:5", 0), ("c", 9, "2/log.jsonl:1", 0)],
        ["1/log.jsonl, 2/log.jsonl: of 8 events left out by the timeline: "
         "3 with the mdp_id and sequence_number of another"],
    ),
    "the same transitions count once": (
        [transitions(A), [*transitions(A), *transitions(B)]], True,
        [("a", 1, "1/log.jsonl:1", 1), ("a", 2, "1/log.jsonl:2", 0), ("b", 2, "2/log.jsonl:3", 0)],
        ["2 rows repeat the mdp_id and sequence_number of an earlier row, which counts alone, as the logs have the "
         "same episodes"],
    ),
    "an episode goes on in another log": (
        [[*A[:1], *episode("z", 5)], episode("a", 2, 3, start=1)], True,
        [("a", 1, "1/log.jsonl:1", 1), ("a", 2, "2/log.jsonl:1", 1), ("a", 3, "2/log.jsonl:2", 0),
         ("z", 5, "1/log.jsonl:2", 0)], [],
    ),
    "a log that starts in the middle of an episode does not end it": (
        [transitions(episode("a", 1, 2, 3))[1:], transitions(episode("a", 1, 2, 3))[:2]], True,
        [("a", 1, "2/log.jsonl:1", 1), ("a", 2, "1/log.jsonl:1", 1), ("a", 3, "1/log.jsonl:2", 0)],
        ["1 row repeats the mdp_id and sequence_number of an earlier row, which counts alone, as the logs have the "
         "same episodes"],
    ),
})  # fmt: skip
def test_episodes_of_several_logs(
    tmp_path: Path,
    rows: list[list[Row]],
    same_episodes: bool | None,
    expected: list[tuple[str, float, str, int]],
    words: list[str],
) -> None:
    copy, notes = copied(tmp_path, *rows, same_episodes=same_episodes)
    assert rows_in(copy) == [(episode_code(name), *row) for name, *row in expected]
    assert notes[: len(words)] == words
    assert bool(words) or not any("pair" in note for note in notes)
    shares = shares_of_counts([""] * len(rows), copy.counts)
    assert [number for _, number, _ in shares] == np.bincount(copy.origin_file, minlength=len(rows)).tolist()


def test_the_next_state_of_a_repeated_row(tmp_path: Path) -> None:
    """Row 1 of the second log leads to the state of row 2, which is in both logs: no state is stored twice."""
    whole = transitions(episode("a", 1, 2, 3))
    copy, _ = copied(tmp_path, whole[1:], whole[:2], same_episodes=True)
    assert (copy.state.tolist(), copy.next_index.tolist(), copy.follows.tolist()) == (
        [[1.0], [2.0], [3.0]],
        [1, 2, 2],
        [True, True, False],
    )


def test_logs_of_the_same_episodes_are_files_of_one_folder(tmp_path: Path) -> None:
    copy, notes = copied(tmp_path, episode("a", 1, 2), [*B, *episode("c", 3)], same_episodes=True)
    folder = write_events([*episode("a", 1, 2), *B, *episode("c", 3)], tmp_path / "together", "jsonl", files=2)
    together = prepare_training_copy(Log(folder, actions=ACTIONS))
    columns = [
        (each.episode_hash, each.state, each.reward, each.origin_file, each.origin_line) for each in (copy, together)
    ]
    np.testing.assert_equal(*columns)
    assert (notes, together.notes, together.counts.items() < copy.counts.items()) == ([], (), True)


def test_names_of_a_timeline_of_several_logs_stay_apart_from_those_of_another(tmp_path: Path) -> None:
    """The timeline of two logs has episodes "2/0", and so has a second log of "0" beside it."""
    outcome = make(tmp_path, tmp_path, inputTableName=logs(tmp_path, episode("0", 1), episode("0", 2)))
    made = write_lines(tmp_path / "third.jsonl", [{**row, "next_action": None} for row in episode("0", 3)])
    assert [row[:2] for row in rows_in(prepare_training_copy(Log((outcome.train, str(made)), actions=ACTIONS)))] == [
        (episode_code(name), at) for name, at in [("0", 1), ("1/2/0", 2), ("2/0", 3)]
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
    own = [("0", {0: 1.0}, False), ("0", {0: 2.0}, True), ("2/0", {0: 3.0}, True), ("3/0", {0: 1.0}, False),
           ("3/0", {0: 2.0}, True), ("3/4", {0: 5.0}, True)]  # fmt: skip
    rows = [(row["mdp_id"], row["state_features"], row["terminal"]) for row in read(tmp_path / "train")]
    assert sorted(rows, key=str) == sorted(own, key=str)
    assert (
        f"events by log: {paths[0]}: 2 rows, 33.3%; {paths[1]}: 1 row, 16.7%; {paths[2]}: 3 rows, 50.0%" in caplog.text
    )
    made = report(tmp_path / "train")
    assert (made["logs"], made["duplicate_rows"]) == (dict(zip(paths, (2, 1, 3), strict=True)), 0)
    assert (outcome.train_rows, outcome.episodes, outcome.made) == (6, 4, True)
    assert not make(tmp_path, tmp_path, inputTableName=paths).made
    # in another order it is another timeline
    assert make(tmp_path, tmp_path, inputTableName=[paths[1], paths[0], paths[2]]).made
    assert {row["mdp_id"]: row["state_features"] for row in read(tmp_path / "train")}["0"] == {0: 3.0}
    # of the same episodes the first rows count
    assert make(tmp_path, tmp_path, {"same_episodes": True}, inputTableName=paths).made
    assert [(row["mdp_id"], row["state_features"]) for row in read(tmp_path / "train")] == [
        ("0", {0: 1.0}), ("0", {0: 2.0}), ("4", {0: 5.0}),
    ]  # fmt: skip
    assert report(tmp_path / "train")["duplicate_rows"] == 3


def test_shards_have_the_rows_of_all_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Numbers and texts as mdp_ids become texts where a log gets other names."""
    first = [{**row, "mdp_id": int(row["mdp_id"])} for row in episode("0", 1, 2) + episode("1", 3)]
    paths = logs(tmp_path, first, episode("0", 4) + episode("7", 5))
    caplog.set_level("INFO")
    rows: list[dict[str, Any]] = []
    for node in range(2):
        folder = tmp_path / "out" / str(node)
        tree = {"data_path": list(paths), "num_nodes": 2, "node_index": node, "output_path": str(folder)}
        assert shard(check(ShardConfig, tree)).made
        rows += rows_of(folder)
    report = StageManifest.read(str(folder)).report
    assert sorted((str(row["mdp_id"]).strip('"'), row["reward"]) for row in rows) == [
        ("0", 1), ("0", 2), ("1", 3), ("2/0", 4), ("2/7", 5),
    ]  # fmt: skip
    assert caplog.text.count(f"rows by log: {paths[0]}: ") == 2
    assert report["logs"].keys() == set(paths)


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
    for read_logs in (first_rows, prepare_training_copy):
        with pytest.raises(DataError, match=re.escape(message.format(first=paths[0], second=paths[1]))):
            read_logs(Log(paths, actions=ACTIONS))


def test_columns_that_only_one_log_has_are_as_in_files_of_one_folder(tmp_path: Path) -> None:
    first = episode("a", 1, metrics={"cost": 2.0}, extra="x")
    second = episode("b", 2, action_probability=None, possible_actions=None, state_features={"7": 2.0})
    copy, _ = copied(tmp_path, first, second, same_episodes=True)
    check_arrays(copy, state=[[1, np.nan], [np.nan, 2]], metrics=[[2], [0]], mask=[[1, 1], [1, 1]])
    assert (copy.state_ids, copy.counts["propensity_absent_rows"]) == ((0, 7), 1)


def test_own_names_of_an_old_log_beside_the_contracts_names_of_a_new_one(tmp_path: Path) -> None:
    columns: dict[str, Any] = {"mdp_id": "who", "sequence_number": "at", "state_features": ["age"], "action": "did",
                               "reward": "won", "terminal": "last"}  # fmt: skip
    (tmp_path / "old.csv").write_text("who,at,age,did,won,last\na,0,1.0,l,0.0,False\na,1,2.0,r,1.0,True\n")
    new = [event("a", 0, 0.0, 5.0, state_features={"age": 3.0}, action_probability=None, terminal=True)]
    copy = prepare_training_copy(
        Log((str(tmp_path / "old.csv"), *logs(tmp_path, new)), actions=ACTIONS, columns=columns)
    )
    rows = [
        ("2/a", 5, "1/log.jsonl:1", 0),
        ("a", 0, f"{tmp_path.name}/old.csv:2", 1),
        ("a", 1, f"{tmp_path.name}/old.csv:3", 0),
    ]
    assert rows_in(copy) == [(episode_code(name), *row) for name, *row in rows]
    assert copy.state[:, 0].tolist() == [3, 1, 2]
    with pytest.raises(DataError, match=r"Drop data.columns"):
        prepare_training_copy(Log(logs(tmp_path / "new", new, new), actions=ACTIONS, columns=columns))
    (served,) = logs(tmp_path / "served", [{**new[0], "decision_id": "1", "model": "m"}])
    assert len(prepare_training_copy(Log(served, actions=ACTIONS, columns=columns))) == 1


def test_a_log_without_rows_yet(tmp_path: Path) -> None:
    (path,), served = logs(tmp_path, episode("a", 1)), str(tmp_path / "served")
    Path(served).mkdir()
    copy = prepare_training_copy(Log((path, served), actions=ACTIONS))
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
            _ = Log(paths).files
    (tmp_path / "1/notes.txt").touch()
    assert Log((f"{tmp_path}/1", f"{tmp_path}/2")).notes() == (f"{tmp_path}/1: not read: 1 entry: notes.txt",)


def test_the_copy_is_that_of_the_list_and_its_order(tmp_path: Path) -> None:
    first, second = logs(tmp_path, episode("0", 1), episode("0", 2))
    folders = [prepare_training_copy(Log((first, second), actions=ACTIONS)).folder for _ in range(2)]
    assert folders == [standing_copy(Log((first, second), actions=ACTIONS))[0]] * 2
    assert standing_copy(Log((second, first), actions=ACTIONS)) is None
    assert prepare_training_copy(Log((second, first), actions=ACTIONS)).state.tolist() == [[2], [1]]
    write_lines(Path(second), episode("0", 3, 4))
    assert prepare_training_copy(Log((first, second), actions=ACTIONS)).state.tolist() == [[1], [3], [4]]
