"""workflows.rollout: two policies compared by a log; the command, the function, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.rollouts import Episodes, log_of, play
from helpers.runs import Runner

import reagent_lite
from reagent_lite.errors import ConfigError, DataError

COMPARISON = {"reward_range": [0, 4], "guardrails": {"views": {"at_most_worse_by": 0.5, "range": [0, 5]}}}


def episodes() -> Episodes:
    return play(np.repeat([0.2, 0.5], [150, 250]), 4, np.random.default_rng(0))


def write(folder: Path, rows: list[dict[str, Any]], *, files: int = 3) -> Path:
    folder.mkdir()
    schema = pa.Table.from_pylist([row | {"metrics": None} for row in rows]).schema
    for name in ("state_features", "metrics"):
        schema = schema.set(schema.get_field_index(name), pa.field(name, pa.map_(pa.string(), pa.float64())))
    for number, part in enumerate(np.array_split(np.arange(len(rows)), files)):
        table = pa.Table.from_pylist([rows[row] for row in part], schema)
        pq.write_table(table, folder / f"{number}.parquet")
    return folder


def mean_difference(played: Episodes) -> float:
    """The mean of Z by loops over units, from probabilities and not their logs."""
    total = earned = 0.0
    for unit in range(len(played.share)):
        share = played.share[unit]
        of_new, of_current = np.prod(played.new[unit]), np.prod(played.current[unit])
        outcome = played.reward[unit].sum()
        center = earned / unit if unit else 0.0
        total += (of_new - of_current) / (share * of_new + (1 - share) * of_current) * (outcome - center)
        earned += outcome
    return float(total / len(played.share))


def test_the_command_and_the_function_say_the_same(tmp_path: Path, run: Runner) -> None:
    played = episodes()
    log = write(tmp_path / "log", log_of(played))
    compared = reagent_lite.rollout(log, config={"comparison": COMPARISON})
    command = run("rollout", {"comparison": COMPARISON}, "--log", str(log)).ok.outcome
    comparison = compared.comparison
    assert command["comparison"]["sentence"] == comparison.sentence
    assert [each["low"] for each in command["comparison"]["differences"]] == [d.low for d in comparison.differences]
    reward, views = comparison.differences
    assert reward.value == pytest.approx(mean_difference(played), rel=1e-12)
    assert views.value == pytest.approx(0, abs=0.3)
    assert reward.new == pytest.approx(played.reward[played.is_new].sum(1).mean())
    assert (comparison.units, comparison.units_new, compared.rows) == (400, played.is_new.sum(), 1600)
    assert comparison.expected_new == pytest.approx(played.share.sum())
    assert (compared.wrong_propensities, compared.late_rows, compared.waiting_units) == (0, 0, 0)
    history = compared.history
    assert set(history.columns) == {"units", "name", "value", "low", "high"}
    assert history[history.name == "reward"].iloc[-1].value == reward.value


def test_a_frame_is_compared_like_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = log_of(episodes())
    log = write(tmp_path / "log", rows, files=1)
    config = {"comparison": COMPARISON}
    frame = pd.DataFrame(rows).drop(columns=["state_features"])
    assert reagent_lite.rollout(frame, config=config).comparison == reagent_lite.rollout(log, config=config).comparison


def test_the_recorded_settings_and_events_are_audited(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [row | {"rollout": "r2" if number else "r1"} for number, row in enumerate(log_of(episodes()))]
    log = write(tmp_path / "log", rows)
    begin = {"event": "begin", "rollout": "r2", "comparison": COMPARISON}
    (log / ".rollout.jsonl").write_text(json.dumps(begin))
    config = {"comparison": COMPARISON, "rollout": "r2"}
    compared = reagent_lite.rollout(log)
    assert compared.rollout == "r2"
    assert compared.comparison == reagent_lite.rollout(log, config=config).comparison
    assert [d.name for d in compared.comparison.differences] == ["reward", "views"]
    figures = reagent_lite.rollout(write(tmp_path / "part", rows[:901]), config=config).comparison.figures()
    changed = figures | {"units": figures["units"] + 1}
    lines = [begin, *({"event": "share", "rollout": "r2", "figures": each} for each in (figures, changed))]
    (log / ".rollout.jsonl").write_text("\n".join(map(json.dumps, lines)))
    audited = reagent_lite.rollout(log)
    assert (audited.events, audited.different_events) == (3, 1)
    other = reagent_lite.rollout(log, config={"comparison": {"guardrails": {"view": {"at_most_worse_by": 1}}}})
    assert other.different_events is None
    assert "no row has the metric view: its limit cannot be exceeded; check its name" in caplog.text


def test_guesses_of_propensities_are_counted(tmp_path: Path) -> None:
    played = episodes()
    for name in ("own", "stepwise"):
        rows = log_of(played)
        for row in rows:
            row["action_probability"] = getattr(played, name)[int(row["mdp_id"][1:]), row["sequence_number"]]
        assert reagent_lite.rollout(write(tmp_path / name, rows)).wrong_propensities > 250


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("policy", "old", "policy current or new"),
        ("share", 1.0, "share above 0 and below 1"),
        ("probability_new", 1.5, "probability_new from 0 to 1"),
        ("probability_current", 0.0, "the policy's probability above 0"),
        ("policy", None, "rows with columns policy, share"),
    ],
)
def test_faults_are_named(tmp_path: Path, column: str, value: object, message: str) -> None:
    rows = log_of(episodes())
    for row in rows if value is None else [row for row in rows if row["policy"] == "current"][:1]:
        row[column] = value
    with pytest.raises(DataError, match=message):
        reagent_lite.rollout(write(tmp_path / "log", rows))


def test_one_of_several_rollouts_is_named(tmp_path: Path) -> None:
    rows = [row | {"rollout": f"r{int(row['mdp_id'][1:]) % 2}"} for row in log_of(episodes())]
    log = write(tmp_path / "log", rows)
    with pytest.raises(DataError, match="the id of one rollout, got r0, r1"):
        reagent_lite.rollout(log)
    with pytest.raises(DataError, match="one of r0, r1, got 'r7'"):
        reagent_lite.rollout(log, config={"rollout": "r7"})
    assert reagent_lite.rollout(log, config={"rollout": "r1"}).comparison.units == 200
    with pytest.raises(ConfigError, match="the lowest value, then a higher one"):
        reagent_lite.rollout(log, config={"comparison": {"reward_range": [1, 1]}})
