"""Timelines of this machine's engine: pairs, ends, spans of several rows, what is left out, what is refused."""

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.disks import small_disk
from helpers.event_files import write_events
from helpers.events import BROKEN, broken_events, event, make, read, report
from helpers.logs import Row, write_lines
from helpers.runs import absent, with_config

from reagent_lite.cli import main_alone
from reagent_lite.data.timeline import buckets, local_engine, stage
from reagent_lite.data.timeline.local_engine import LocalEngine
from reagent_lite.data.writing import part_files
from reagent_lite.data.writing.part_files import PartFiles
from reagent_lite.errors import ConfigError, DataError, NoRowsError
from reagent_lite.tasks.timeline import timeline
from workflows.timeline import COMMAND

# states 0, 1, 4, 5 with rewards of the same size, in steps of 1, 3 and 1
FOUR = [event("a", number, number, number) for number in (0, 1, 4, 5)]
DATED = [event("a", n, n, ds=f"2026-01-0{n + 1}", where=f"p{n}") for n in range(5)]
CANDIDATES = [{"0": 1.0, "4": 0.5}, {"0": 2.0}]


# rows, keys of the config, columns of the transitions, and figures of the report
BY_HAND: dict[str, tuple[list[Row], Row, Row, Row]] = {
    "a step": (FOUR, {}, {
        "sequence_number": [0, 1, 4], "sequence_number_ordinal": [1, 2, 3], "time_since_first": [0, 1, 4],
        "time_diff": [1, 3, 1], "next_state_features": [{0: 1.0}, {0: 4.0}, {0: 5.0}], "terminal": [False] * 3,
        "next_action": ["l"] * 3, "possible_next_actions": [["l", "r"]] * 3}, {"episodes": 1}),
    "a window, which cuts after pairing": (FOUR, {"timeWindowLimit": 1}, {
        "sequence_number": [0, 1], "next_state_features": [{0: 1.0}, {0: 4.0}]}, {"rows_beyond_time_window": 1}),
    "the documented figures": (FOUR, {"addTerminalStateRow": True, "steps": 2, "gamma": 0.9}, {
        "reward": pytest.approx([0 + 0.9 * 1, 1 + 0.9 * 4, 4 + 0.9 * 5, 5]), "step": [2, 2, 2, 1],
        "terminal": [False, False, True, True], "next_state_features": [{0: 4.0}, {0: 5.0}, None, None],
        "time_diff": [4, 4, 0, 0], "next_action": ["l", "l", None, None],
        "possible_next_actions": [["l", "r"], ["l", "r"], [], []]}, {"rows_beyond_time_window": 0}),
    "without an end the fourth row is no transition, the third spans itself alone, the second itself and the third": (
        FOUR, {"steps": 3, "gamma": 0.5}, {
            "reward": pytest.approx([0 + 0.5 * 1 + 0.25 * 4, 1 + 0.5 * 4, 4]), "step": [3, 2, 1],
            "next_state_features": [{0: 5.0}] * 3}, {"paired_rows": 4}),
    "ends inside an mdp_id": (
        [event("a", n, n, 1, terminal=n in (1, 3), metrics={"m": float(n)}) for n in range(4)],
        {"steps": 3, "gamma": 1.0},
        {"step": [2, 1, 2, 1], "terminal": [True] * 4, "metrics": [{"m": 1.0}, {"m": 1.0}, {"m": 5.0}, {"m": 3.0}]},
        {"rows_after_an_end": 1}),
    "candidates that are unknown are the action alone": (
        [event("a", 0, 0.0, action=CANDIDATES[0], possible_actions=CANDIDATES),
         event("a", 1, 1.0, action=CANDIDATES[1], possible_actions=[]),
         event("a", 2, 2.0, action=CANDIDATES[0], possible_actions=[], terminal=True)],
        {"actionDiscrete": False, "steps": 2, "gamma": 0.5},
        {"possible_actions": [[{0: 1.0, 4: 0.5}, {0: 2.0}], [{0: 2.0}], [{0: 1.0, 4: 0.5}]],
         "action_probability": [0.5, 1.0, 1.0], "possible_next_actions": [[{0: 1.0, 4: 0.5}], [], []],
         "terminal": [False, True, True]}, {"candidates_unknown_rows": 2}),
    "of rows with the same number the first": (
        [event("a", 0, 0.0), event("a", 1, 1.0), event("a", 1, 7.0), event("a", 2, 2.0), event("b", 1, 3.0)], {},
        {"next_state_features": [{0: 1.0}, {0: 2.0}]},
        {"rows": 5, "duplicate_rows": 1, "paired_rows": 4, "one_row_episodes": 1}),
    "dates, of which row 3 is the last": (
        DATED, {"startDs": "2026-01-02", "endDs": "2026-01-04"}, {"sequence_number": [1, 2]}, {"paired_rows": 3}),
    "columns of the log's own, one of which differs in case alone from one of ours": (
        [event("a", n, n, 1, clicks=n, where=f"p{n}", Reward=999.0, terminal=n == 2, **{'we"; DROP--': n / 2})
         for n in range(3)],
        {"rewardColumns": ["reward", "clicks"], "extraFeatureColumns": ["where", 'we"; DROP--'], "steps": 2,
         "gamma": 0.5, "includePossibleActions": False},
        {"reward": [1.5, 1.5, 1.0], "clicks": [0 + 0.5, 1 + 0.5 * 2, 2], "where": ["p0", "p1", "p2"],
         "next_where": ["p2", None, None], 'next_we"; DROP--': [1.0, None, None]}, {"terminal_rows": 1}),
}  # fmt: skip


@pytest.mark.parametrize(("rows", "section", "expected", "figures"), BY_HAND.values(), ids=BY_HAND.keys())
def test_timelines_by_hand(tmp_path: Path, rows: list[Row], section: Row, expected: Row, figures: Row) -> None:
    outcome = make(tmp_path, rows, **section)
    made = read(tmp_path / "train")
    assert (outcome.train_rows, outcome.eval, outcome.made) == (len(made), None, True)
    assert {name: [row[name] for row in made] for name in expected} == expected
    assert ("possible_actions" in made[0]) == section.get("includePossibleActions", True)
    assert {name: report(tmp_path / "train")[name] for name in figures} == figures


@pytest.mark.parametrize(("sample", "fewest", "most"), [(100, 400, 400), (30, 75, 165)])  # 120 expected, sd 9.2
def test_episodes_are_whole_apart_and_none_is_lost(tmp_path: Path, sample: int, fewest: int, most: int) -> None:
    rows = [event(f"e{n}", k, k, terminal=k == 2) for n in range(400) for k in range(3)]
    section = {"evalTableName": str(tmp_path / "eval"), "eval_percent": 25.0, "numOutputShards": 3}
    outcome = make(tmp_path, rows, {"query": {"tableSample": sample}}, **section)
    train, held_out = ({row["mdp_id"] for row in read(tmp_path / name)} for name in ("train", "eval"))
    assert train & held_out == set()
    assert fewest <= len(train | held_out) <= most
    assert 0.1 < len(held_out) / len(train | held_out) < 0.4  # 0.25 expected, sd 0.04 of 120
    assert (outcome.train_rows, outcome.eval_rows) == (3 * len(train), 3 * len(held_out))
    files = [set(pq.read_table(file)["mdp_id"].to_pylist()) for file in (tmp_path / "train").glob("*.parquet")]
    assert (len(files), sum(map(len, files))) == (3, len(train))  # no episode in two files
    assert min(map(len, files)) > len(train) / 6


def test_outlier_episodes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Lengths 1 to 10: the 0.8 percentile that occurs is 8, the interpolated one 1 + 0.8 · 9 = 8.2."""
    rows = [event(f"e{n}", k, k, terminal=k == n) for n in range(10) for k in range(n + 1)]
    for function, longest in (("percentile_approx", 8.0), ("percentile", 8.2)):
        make(tmp_path, rows, outlierEpisodeLengthPercentile=0.8, percentileFunction=function)
        assert {row["mdp_id"] for row in read(tmp_path / "train")} == {f"e{n}" for n in range(8)}
        expected = {"longest_rows": pytest.approx(longest), "episodes": 2, "rows": 9 + 10}
        assert report(tmp_path / "train")["outliers"] == expected
    same = [event(f"e{n}", k, k, terminal=k == 1) for n in range(10) for k in range(2)]
    make(tmp_path, same, outlierEpisodeLengthPercentile=0.5)
    assert "leaves out 0.0% of the episodes, not 50.0%" in caplog.text


def test_own_rewards_in_csv_are_numbers(tmp_path: Path) -> None:
    rows = "".join(f"a,{at},1,l,0,{paid}\n" for at, paid in enumerate(["7.61", "", "-.5e1", "TRUE", "false"]))
    log = f"mdp_id,sequence_number,state_features.0,action,reward,paid\n{rows}"
    source = tmp_path / "events.csv"
    source.write_text(log)
    section: Row = {"addTerminalStateRow": True, "rewardColumns": ["reward", "paid"]}
    make(tmp_path, source, **section)
    assert [row["paid"] for row in read(tmp_path / "train")] == [7.61, None, -5.0, 1.0, 0.0]
    source.write_text(log.replace("7.61", '"7,61"'))
    with pytest.raises(DataError, match='number in paid, got "7,61"'):
        make(tmp_path, source, **section)


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize(
    ("rows", "top", "section", "error", "message"),
    [
        (FOUR, {"query": {"tableSample": 1e-6}}, {}, NoRowsError,
         r"none of 4 rows\. query.tableSample may be too small"),
        (DATED, {"query": {"tableSample": 1e-6}}, {"startDs": "2026-01-01"}, NoRowsError,
         r"events from 2026-01-01 to 2026-01-05\. query.tableSample may be"),
        (FOUR, {"query": {"actions": ["r"]}}, {"on_refused": "drop_episode"}, NoRowsError,
         "(?s)1: .* actions r, .* got none of 4 rows: 4 action_unknown$"),
        (DATED, {}, {"startDs": "2027-01-01"}, NoRowsError, r"2027-01-01 .* 2026-01-01 to 2026-01-05"),
        (FOUR, {}, {"startDs": "2026-01-01"}, DataError, "expected a column 'ds'"),
        (DATED, {}, {"startDs": "2026-02-01", "endDs": "2026-01-01"}, ConfigError, r"endDs: .* \(2026-02-01\)"),
        *((DATED, {}, {"endDs": text}, ConfigError, f"timeline.endDs: .* got '{text}'")
          for text in ("yesterday", "20260131")),
        ([event("a", 0, 0.0, action={"0": 3.0}, possible_actions=CANDIDATES)], {}, {"actionDiscrete": False},
         DataError, r'got \{"0": 3.0\}'),
        (DATED, {}, {"extraFeatureColumns": ["wher"]}, DataError, r"column 'wher', .* 'where'"),
        (DATED, {}, {"rewardColumns": ["reward", "where"]}, DataError, r"events.jsonl:1: .* number in where"),
        (DATED, {}, {"extraFeatureColumns": ["next_action"]}, ConfigError, "a timeline does not compute"),
        *((FOUR, {}, {"extraFeatureColumns": names}, ConfigError, "timeline.extraFeatureColumns")
          for names in (["REWARD"], ["Action"], ["folder"], ["place"], ["x", "X"], ["x", "next_x"])),
        *((FOUR, {}, {"evalTableName": path}, ConfigError, "timeline.evalTableName: .* apart from")
          for path in ("train/eval", "train/../train", ".")),
        *((FOUR, {}, {"inputTableName": source, "outputTableName": path}, ConfigError, "outputTableName: .* apart from")
          for source, path in (("in/log.jsonl", "in"), ("link", "in"), ("link", "in/inside"))),
        (FOUR, {}, {"outputTableName": "in"}, ConfigError, r"got .*/in with log\.jsonl"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_is_refused(
    tmp_path: Path, rows: list[Row], top: Row, section: Row, error: Any, message: str
) -> None:
    log = write_lines(Path("in/log.jsonl"), FOUR).read_text()
    Path("link").symlink_to("in")
    with pytest.raises(error, match=message):
        make(tmp_path, rows, top, **section)
    assert {path.name for path in tmp_path.iterdir()} <= {"in", "link", "events.jsonl"}
    assert [path.read_text() for path in Path("in").iterdir()] == [log]


def test_the_log_says_what_was_paired_and_what_is_odd(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """20 pairs: steps of 7, and a last one of 1; then the steps of 1, 3 and 1."""
    rows = [event("a", 7 * n, n, terminal=n == 3) for n in range(20)] + [event("a", 134, 0.0), event("a", 7, 1.0)]
    make(tmp_path, rows, addTerminalStateRow=True)
    make(tmp_path / "four", FOUR)
    assert not absent(
        caplog.text,
        "4 rows in 1 episode, 0 true ends, 0 cut by a limit, 1 gap",
        "21 rows in 1 episode, 1 true end, 0 cut by a limit, gaps not counted",
        "1 last row has neither terminal nor truncated: addTerminalStateRow",
        "1 row follows an end inside an mdp_id",
        f"1 row has the mdp_id and sequence_number of another; the first of each is kept. Left out: {tmp_path}/events",
    )


def test_broken_rows_are_named_or_their_episodes_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows, top = broken_events(), {"query": {"actions": ["l", "r"]}}
    with pytest.raises(DataError) as caught:
        make(tmp_path, rows, top)
    *problems, total = caught.value.problems
    # of three values that are no action the first has its line
    assert {f"expected {problem.expected}": problem.where for problem in problems} == {
        message.partition(", got")[0]: f"{tmp_path}/events.jsonl:{3 * number + 4}"
        for number, (_, message, _) in reversed([*enumerate(BROKEN)])
    }
    assert f"{len(BROKEN)} that do not: 3 action_unknown, 3 unreadable, 1 action_not_possible" in total.got
    assert not (tmp_path / "train").exists()
    make(tmp_path, rows, top, on_refused="drop_episode")
    # a row without mdp_id belongs to no episode
    assert {row["mdp_id"] for row in read(tmp_path / "train")} == {"good", "e0"}
    refused = report(tmp_path / "train")["refused"]
    assert {entry["rule"]: entry["rows"] for entry in refused} == Counter(rule for _, _, rule in BROKEN)
    assert "their episodes are left out" in caplog.text
    assert list(tmp_path.glob(".*")) == []  # nothing temporary stays


def test_files_of_different_columns(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    table, later = (
        pq.read_table(write_events(rows, tmp_path / name, "map.parquet") / "events-0.map.parquet")
        for rows, name in ((FOUR[:2], "events"), (FOUR[2:], "later"))
    )
    pq.write_table(later.drop_columns(["action_probability"]), folder / "two.parquet")
    make(tmp_path, folder)
    assert [row["action_probability"] for row in read(tmp_path / "train")] == [0.5, 0.5, None]
    texts = table.set_column(table.schema.get_field_index("reward"), "reward", pa.array(["1", "none"]))
    for wrong, words in (
        (texts, ":1: expected a number in reward"),
        (table.drop_columns(["action"]), ".*: expected a column 'action'"),
    ):
        pq.write_table(wrong, folder / "two.parquet")
        with pytest.raises(DataError, match=rf"events/two\.parquet{words}"):
            make(tmp_path, folder)


def test_what_stands_is_kept_and_the_same_events_give_the_same_bytes(tmp_path: Path) -> None:
    rows = [event(f"e{n}", k, n + k, terminal=k == 2) for n in range(300) for k in range(3)]
    assert make(tmp_path, rows).made
    file = tmp_path / "train/part-00000.parquet"
    first, stamp = file.read_bytes(), file.stat().st_mtime_ns
    again = make(tmp_path, rows, {"engine": "duckdb"})  # the former name
    assert (again.made, again.train_rows, again.episodes) == (False, 900, 300)
    assert file.stat().st_mtime_ns == stamp
    assert make(tmp_path, [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]).made  # other files
    assert file.read_bytes() == first
    assert make(tmp_path, rows, steps=2, gamma=0.5).made  # other settings
    with pytest.raises(ConfigError, match=r"inputTableName: .* got transitions"):
        make(tmp_path / "again", tmp_path / "train")


@pytest.fixture
def scarce_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the engine a thousandth of its memory, so that small events go to the disk and are sorted in groups."""
    monkeypatch.setattr(local_engine, "GROUP_BYTES", 1 << 14)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1 << 12)
    monkeypatch.setattr(stage, "LocalEngine", lambda folder, memory: LocalEngine(folder, memory // 1000))


def test_little_memory_gives_the_same_bytes(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    order = np.random.default_rng(0).permutation(3000)
    rows = [event(f"e{at // 20}", at % 20, at, 0.0 if at % 7 else 1.0, terminal=at % 20 == 19) for at in order.tolist()]
    doubled = [event("e3", 4, -1.0), event("long", 0, -2.0), *(event("long", at, at) for at in range(1000))]
    source = write_lines(tmp_path / "events.jsonl", [*rows, *doubled])
    section: Row = {"numOutputShards": 2, "outlierEpisodeLengthPercentile": 0.999}
    make(tmp_path / "much", source, {"memory_limit_mb": 300}, **section)
    request.getfixturevalue("scarce_memory")
    make(tmp_path / "little", source, {"memory_limit_mb": 300}, **section)
    much, little = (
        {file.name: file.read_bytes() for file in (tmp_path / name / "train").iterdir()} for name in ("much", "little")
    )
    assert much == little


@pytest.fixture(scope="module")
def many_events(tmp_path_factory: pytest.TempPathFactory) -> Path:
    states = np.random.default_rng(0).normal(size=(2000, 5, 20)).tolist()
    rows = [event(f"e{n}", k, 0.0, state_features={str(i): x for i, x in enumerate(states[n][k])})
            for n in range(2000) for k in range(5)]  # fmt: skip
    return write_lines(tmp_path_factory.mktemp("many") / "events.jsonl", rows)


@pytest.mark.parametrize(
    ("size", "rows", "key"),
    [("4k", 1 << 16, "output"), ("500k", 1 << 16, "output"), ("500k", 1000, "output"), ("500k", 1000, "eval")],
)
def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many_events: Path, size: str, rows: int, key: str
) -> None:
    """It fills up at the end of a file or before, when a row group is written."""
    monkeypatch.setattr(part_files, "ROW_GROUP_ROWS", rows)
    with small_disk(tmp_path / "disk", size=size, files=64) as disk:
        with pytest.raises(ConfigError, match=rf"timeline.{key}TableName: .* {disk}, got No space left"):
            make(tmp_path, many_events, **{"evalTableName": str(tmp_path / "eval"), "eval_percent": 50.0,
                                           f"{key}TableName": str(disk / "out")})  # fmt: skip
        assert list(disk.iterdir()) == []


@pytest.mark.usefixtures("scarce_memory")
def test_a_full_temporary_directory_is_named(tmp_path: Path, many_events: Path) -> None:
    with small_disk(tmp_path / "disk", size="1500k", files=2000) as disk:
        with pytest.raises(ConfigError, match=r"temporary_directory: .* No space left"):
            make(tmp_path, many_events, {"temporary_directory": str(disk), "memory_limit_mb": 1000})
        assert list(disk.iterdir()) == []
    assert not (tmp_path / "train").exists()


@pytest.mark.parametrize("name", ["reward=7/mdp_id=z/ds=2026-01-02", "g[1] a*b w? it's"])
def test_names_of_folders_and_files_mean_themselves(tmp_path: Path, name: str) -> None:
    folder = write_events(FOUR, tmp_path / name, "map.parquet")
    (folder / "events-0.map.parquet").rename(folder / "part[1].parquet")
    (folder / "part1.parquet").write_bytes(b"of another log")
    make(folder / "out", folder / "part[1].parquet")
    assert [row["reward"] for row in read(folder / "out/train")] == [0.0, 1.0, 4.0]


def test_events_that_change_while_they_are_read(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "events.jsonl", FOUR)
    touch = patch.object(PartFiles, "write", side_effect=lambda batch: os.utime(source, ns=(1, 1)))
    with touch, pytest.raises(DataError, match=r"events.jsonl: .* while it is read"):
        make(tmp_path, source)
    assert not (tmp_path / "train").exists()


@pytest.mark.parametrize("number", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: str
) -> None:
    """Nor an error in the destructor of Parquet's writer, which would be pytest's warning and so an error."""

    def interrupted(*_: object) -> None:
        assert len(list(tmp_path.glob(".train.*"))) == 2  # what is sorted, and what would be written
        os.kill(os.getpid(), signal.Signals[number])

    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    monkeypatch.setattr(LocalEngine, "write", interrupted)
    source = write_lines(tmp_path / "in/events.jsonl", FOUR)
    section = {"inputTableName": str(source), "outputTableName": str(tmp_path / "train")}
    assert main_alone(COMMAND, timeline, with_config(tmp_path / "in", {"timeline": section})) == 75
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert f"{number}: no incomplete output is left" in capsys.readouterr().err
