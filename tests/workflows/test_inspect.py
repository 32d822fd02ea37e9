"""workflows.inspect: from a log that nobody has described to a config that trains, or the reasons for none."""

import json
import re
import string
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers.logs import candidate_rows, random_rows, write_lines
from helpers.runs import Runner, absent, merged, metrics, trained
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles.catalog import events, visits

import reagent_lite
from reagent_lite.config import DqnConfig, ParametricDqnConfig, check
from reagent_lite.config.timeline_config import TimelineConfig
from reagent_lite.data.copy.prepared_copy import prepare_training_copy
from reagent_lite.data.logs import Log
from reagent_lite.errors import ReagentLiteError

PROBABILITIES = {"call": 0.3, "mail": 0.5, "none": 0.2}
FAST = {"models": {"final_fit_passes": 1}, "bootstrap_resamples": 100}


pytestmark = pytest.mark.usefixtures("caches")


def clicks(count: int = 600) -> pd.DataFrame:
    """A log of clicks."""
    rng = np.random.default_rng(0)
    offer = rng.choice(list(PROBABILITIES), count, p=list(PROBABILITIES.values()))
    income = rng.normal(size=count)
    return pd.DataFrame(
        {
            "timestamp": pd.date_range("2026-01-01", periods=count, freq="s"),
            "user_id": rng.integers(0, 200, count),
            "age": rng.integers(18, 80, count),
            "income": income,
            "segment": rng.choice(list("abcd"), count),
            "offer": offer,
            "propensity_score": [PROBABILITIES[name] for name in offer],
            "click": ((offer == "mail") == (income > 0)).astype(int),
            "revenue": rng.random(count),
            "constant": 1.0,
        }
    )


def sessions(count: int = 600) -> pd.DataFrame:
    """Events: sessions of 3 decisions, whose last says so."""
    frame = clicks(count).drop(columns=["user_id", "timestamp", "revenue", "constant", "segment"])
    number = np.arange(count)
    return frame.assign(session=[f"s{index}" for index in number // 3], step=number % 3, done=number % 3 == 2)


def test_from_a_file_of_clicks_to_a_config(tmp_path: Path, run: Runner) -> None:
    clicks().to_csv(tmp_path / "clicks.csv", index=False)
    done = run("inspect", {}, "--data", str(tmp_path / "clicks.csv"), "--output", str(tmp_path / "x.json")).ok
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "training_data_path": str(tmp_path / "clicks.csv"),
        "model_output_path": "outputs/clicks",
        "defaults": "2026",
        "algorithm": "boosting",
        "actions": ["call", "mail", "none"],
        "data": {"columns": {"action": "offer", "reward": "click", "action_probability": "propensity_score",
                             "state_features": ["age", "income", "segment"]}},
    }  # fmt: skip
    assert not absent(
        done.err,
        "clicks.csv: 600 rows read, all of them; 10 columns",
        "segment: text, present in 100.0%, 4 distinct",
        "4 distinct strings: treated as categories",
        "used as reward: its name is 'click'",
        "propensity_score: in (0, 1] in every row",
        "no episodes: each row is an independent decision",
        "to decide: reward: click; revenue",
        "constant left out, one value",
        "reagent-lite train --config",
    )
    assert done.outcome["columns"]["offer"] == {"kind": "text", "present": 1.0, "distinct": 3, "read_as": "action"}


WRITE: dict[str, Callable[[pd.DataFrame, Path], None]] = {
    "csv": lambda frame, path: frame.to_csv(path, index=False),
    "jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True, date_format="iso"),
    "parquet": lambda frame, path: frame.to_parquet(path),
    "feather": lambda frame, path: frame.to_feather(path),
    "frame": lambda frame, path: None,
}


def trains(inspected: Any, folder: Path) -> bool:
    """Whether a model comes of the proposed config."""
    assert inspected.problems == ()
    quickly = {"model_output_path": str(folder / "out"), "use_gpu": False, "evaluation": FAST}
    if "epochs" in inspected.config:
        quickly["epochs"] = 1
    return trained(merged(inspected.config, quickly)).model is not None


OWN = {"mdp_id": "session", "sequence_number": "step", "terminal": "done", "action": "offer", "reward": "click",
       "action_probability": "propensity_score"}  # fmt: skip


@pytest.mark.parametrize(("form", "own"), [("csv", False), ("jsonl", True), ("parquet", False), ("feather", True)])
def test_events_of_every_format(form: str, own: bool, tmp_path: Path) -> None:
    """With columns of their own names, or with the documented ones and features in a map."""
    frame = sessions()
    if not own:
        states = frame[["age", "income"]].astype(float).to_dict("records")
        frame = frame.drop(columns=["age", "income"]).rename(columns={name: field for field, name in OWN.items()})
        frame["state_features"] = [*map(json.dumps, states)] if form == "csv" else states
    WRITE[form](frame, tmp_path / f"log.{form}")
    inspected = reagent_lite.inspect(tmp_path / f"log.{form}")
    columns = OWN | {"state_features": ["age", "income"]} if own else None
    assert inspected.config.get("data", {}).get("columns") == columns
    assert inspected.config["rl"] == {"epsilon": 0.1}  # greedy by default, and its log could not evaluate another one
    assert inspected.episodes == "200 episodes of 3 to 3 rows, median 3"
    assert (inspected.rows, inspected.whole, inspected.workflow) == (600, True, "dqn")
    assert trains(inspected, tmp_path)


@pytest.mark.parametrize(
    ("rows", "workflow"), [(candidate_rows(300), "parametric_dqn"), (random_rows(300, missing=0.0), "dqn")]
)
def test_transitions(rows: list[dict[str, Any]], workflow: str, tmp_path: Path) -> None:
    inspected = reagent_lite.inspect(write_lines(tmp_path / "log.jsonl", rows))
    assert inspected.workflow == workflow
    assert trains(inspected, tmp_path)


def test_columns_of_csv_as_analysts_have_them(tmp_path: Path) -> None:
    """Names of actions are the cells; nan is absent among numbers and a text among texts, as in training."""
    frame = clicks().assign(
        offer=lambda frame: frame["offer"].map({"call": "01", "mail": "02", "none": "10"}),
        newsletter=["true", "false", "nan"] * 200,
        member=["true", "maybe", "nan"] * 200,
        height=["nan", "1.5", "2.5"] * 200,
        price=["€1,50", "2,5", "31.12.2025"] * 200,
        lab=["1", "NA", "2"] * 200,
        waiting_time=range(600),
    )
    frame.to_csv(tmp_path / "log.csv", index=False)
    inspected = reagent_lite.inspect(tmp_path / "log.csv")
    assert inspected.config["actions"] == ["01", "02", "10"]
    features = ["age", "income", "segment", "newsletter", "member", "height", "lab"]
    assert inspected.config["data"]["columns"]["state_features"] == features
    assert inspected.config["data"]["columns"]["csv"] == {"null": ["NA"]}
    facts = inspected.facts()
    assert [(facts[name]["kind"], facts[name]["distinct"]) for name in features[-4:]] == [
        ("flag", 2), ("text", 3), ("number", 2), ("integer", 2)
    ]  # fmt: skip
    assert not absent(
        "\n".join(inspected.decide),
        "price left out, strings that look like numbers",
        "waiting_time left out, by their names they may be sequence_number",
    )


def test_decisions_with_one_place_in_their_episode_are_said() -> None:
    inspected = reagent_lite.inspect(sessions().assign(step=0, done=True))
    assert any("step: 400 rows with the session and step of another" in choice for choice in inspected.decide)


def test_the_first_rows_alone_are_read() -> None:
    frame = clicks()
    frame.loc[500, "click"] = 7
    inspected = reagent_lite.inspect(frame, rows=100)
    assert (inspected.rows, inspected.whole, inspected.problems) == (100, False, ())
    assert inspected.facts()["click"]["distinct"] == 2


@pytest.mark.parametrize(
    ("columns", "note", "used"),
    [
        ({}, r"propensity_score: in \(0, 1\] in every row, from 0.2 to 0.5$", True),
        # one row of probabilities for each action adds up to 1.1
        ({**{f"p_{action}": probability for action, probability in PROBABILITIES.items()},
          "p_mail": [0.5] * 7 + [0.6] + [0.5] * 592},
         "p_call, p_mail, p_none: .* do not add up to 1 in 1 of 600 rows$", True),
        ({"policy": [PROBABILITIES] * 600}, ".* they add up to 1 in all 600 rows", True),
        # by hand: the mean of 1 / p is 1 where every p is 1, and 3 actions give 3
        ({"propensity_score": 1.0}, ".*the mean of 1 / probability is 1; ", True),
        ({"propensity_score": 50.0}, r".*: not a probability in \(0, 1\] in every row: 600 outside, 0 absent$", False),
    ],
)  # fmt: skip
def test_whether_propensities_are_plausible(columns: dict[str, Any], note: str, used: bool) -> None:
    inspected = reagent_lite.inspect(clicks().assign(**columns).sort_values("income"))  # has a column of row labels
    assert re.match(note, inspected.propensities[-1]), inspected.propensities
    read_as = inspected.config["data"]["columns"]
    assert (read_as["state_features"], "action_probability" in read_as) == (["age", "income", "segment"], used)


def test_a_propensity_by_its_values_is_no_feature() -> None:
    """It depends on the action; a share whose mean of 1 / x is not the number of actions is a feature."""
    frame = clicks().rename(columns={"propensity_score": "chance"}).assign(share=[0.5, 0.9] * 300)
    inspected = reagent_lite.inspect(frame)
    assert inspected.config["data"]["columns"]["state_features"] == ["age", "income", "segment", "share"]
    assert any("by their values it may be chance, left out" in choice for choice in inspected.decide)


def test_what_is_known_is_given_as_columns() -> None:
    frame = clicks().rename(columns={"offer": "kind", "click": "good"})
    (problem,) = reagent_lite.inspect(frame).problems
    assert re.match("no column is known to be the action.*it may be segment, kind", problem)
    given = {"action": "kind", "reward": "good", "state_features": ["income"]}
    inspected = reagent_lite.inspect(frame, columns=given)
    assert inspected.problems == ()
    assert inspected.config["data"]["columns"] == given | {"action_probability": "propensity_score"}


def test_columns_of_every_action_are_probabilities_if_they_can_be() -> None:
    frame = clicks()
    chances = {f"p_{name}": share for name, share in PROBABILITIES.items()}
    given = reagent_lite.inspect(frame.assign(**chances))
    assert "add up to 1 in all 600 rows" in str(given)
    assert not {*chances} & {*given.config["data"]["columns"]["state_features"]}
    others = {
        "no sum of 1": {name: np.random.default_rng(1).random(600) for name in chances},
        "one-hot, which may be 0 for the action taken": {
            name: (np.arange(600) % 3 == index).astype(float) for index, name in enumerate(chances)
        },
    }
    for columns in others.values():
        inspected = reagent_lite.inspect(frame.assign(**columns))
        assert {*chances} <= {*inspected.config["data"]["columns"]["state_features"]}
        assert "a probability for each action" not in str(inspected)


ENDS = {  # terminal, truncated, and others that say ends, as libraries name them
    "d3rlpy": ("terminals", "timeouts", ("episode_terminals",)),
    "D4RL": ("terminals", "timeouts", ("done",)),
    "Gymnasium": ("terminated", "truncated", ("done",)),
    "Minari": ("terminations", "truncations", ()),
    "RLlib": ("terminateds", "truncateds", ("dones",)),
    "RLDS": ("is_terminal", "time_limit", ("is_last",)),
    "of old": ("dones", "", ()),
    "MushroomRL": ("absorbing", "", ("last",)),
    "with flag": ("done_flag", "timeout_flags", ()),
    "of games": ("game_over", "", ("end_of_episode",)),
}


@pytest.mark.parametrize("library", ENDS)
def test_flags_of_ends_as_libraries_name_them(library: str) -> None:
    terminal, truncated, others = ENDS[library]
    frame = sessions().rename(columns={"done": terminal})
    last = frame[terminal]
    frame = frame.assign(**dict.fromkeys([truncated] if truncated else [], False), **dict.fromkeys(others, last))
    inspected = reagent_lite.inspect(frame)
    columns = inspected.config["data"]["columns"]
    assert columns["terminal"] == terminal
    assert columns.get("truncated", "truncated") == (truncated or "truncated")
    assert columns["state_features"] == ["age", "income"]


@pytest.mark.parametrize("answers", [(True, False), (1, 0), ("Yes", "no")])
def test_opposites_of_flags_of_ends_are_no_flags_and_no_features(answers: tuple[Any, Any]) -> None:
    frame = sessions()
    last = frame.pop("done")
    yes, no = answers
    opposite = np.where(last, no, yes)
    names = ("not_done", "nonterminal", "is_not_last", "mask", "bootstrap", "in_play")
    step_type = np.where(last, 2, np.minimum(frame["step"], 1))
    inspected = reagent_lite.inspect(frame.assign(**dict.fromkeys(names, opposite), step_type=step_type))
    assert inspected.config["data"]["columns"]["state_features"] == ["age", "income"]
    assert "terminal" not in inspected.fields
    assert any(f"{', '.join((*names, 'step_type'))} left out, they say where" in choice for choice in inspected.decide)


def test_flags_of_ends_may_be_answers(tmp_path: Path) -> None:
    frame = sessions()
    last = frame["done"]
    frame.assign(done=np.where(last, "Yes", "no")).to_csv(tmp_path / "log.csv", index=False)
    inspected = reagent_lite.inspect(tmp_path / "log.csv")
    assert inspected.fields["terminal"] == "done"
    config = inspected.config
    log = Log(
        str(tmp_path / "log.csv"), actions=tuple(config["actions"]), columns=config["data"]["columns"],
        directory=str(tmp_path / "copies"),
    )  # fmt: skip
    copy = prepare_training_copy(log)
    np.testing.assert_array_equal(copy.bootstrap[:][np.argsort(copy.origin_line[:])], ~last)


def test_outcomes_that_are_to_be_small_and_counts_of_rows_are_no_features() -> None:
    rng = np.random.default_rng(0)
    few = rng.choice([1, 10], 600)
    outcomes = dict.fromkeys(("is_fraud", "churned", "unsubscribed", "cancelled"), rng.integers(0, 2, 600))
    weights = dict.fromkeys(("weight", "wt", "downsampled", "freq_weight", "sample_frac", "expansion_factor"), few)
    inspected = reagent_lite.inspect(clicks().assign(**outcomes, **weights, body_weight=rng.normal(70, 10, 600)))
    assert inspected.config["data"]["columns"]["state_features"] == ["age", "income", "segment", "body_weight"]
    reasons = "\n".join(inspected.decide)
    assert not absent(
        reasons, f"{', '.join(outcomes)} left out, by their names what came", f"{', '.join(weights)} left out, weights"
    )


def test_what_no_decision_knows_is_no_feature(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = clicks().assign(
        sold=rng.choice(["Yes", "No"], 600),
        sample_weight=rng.random(600),
        sampling_rate=0.5 + rng.random(600) / 2,
        inverse=lambda frame: 1 / frame["propensity_score"],
        zip=[f"{number:05d}" for number in rng.integers(0, 99_999, 600)],
        branch=[f"0{number}" for number in rng.integers(1, 9, 600)],
        customer=rng.permutation(600) + 10_000,
    )
    frame.to_csv(tmp_path / "log.csv", index=False)
    inspected = reagent_lite.inspect(tmp_path / "log.csv")
    assert inspected.config["data"]["columns"]["state_features"] == ["age", "income", "segment"]
    reasons = "\n".join(inspected.decide)
    assert not absent(
        reasons,
        "sample_weight, sampling_rate, inverse left out, weights or sampling rates",
        "zip, branch left out, ids by their leading zeros",
        "sold may be a reward too and is left out",
    )
    without = reagent_lite.inspect(tmp_path / "log.csv", columns={"reward": "age", "action": "income"})
    assert without.config is None
    assert any("ids by their leading zeros" in choice for choice in without.decide)


def test_rewards_of_a_shop(tmp_path: Path) -> None:
    """Yes and No, some of them missing, in a file with semicolons and decimal commas."""
    rng = np.random.default_rng(0)
    frame = clicks(300).drop(columns=["click", "revenue", "user_id", "timestamp", "constant"])
    frame = frame.assign(bought=rng.choice(["Yes", "no", None], 300), land=rng.choice(["DE", "de ", "FR"], 300))
    frame.to_csv(tmp_path / "shop.csv", index=False, sep=";", decimal=",")
    inspected = reagent_lite.inspect(tmp_path / "shop.csv")
    columns = inspected.config["data"]["columns"]
    assert (columns["reward"], columns["action_probability"]) == ("bought", "propensity_score")
    # the spelling without spare spaces stays, however often it is written
    assert columns["state_features"] == ["age", "income", "segment", {"column": "land", "map": {"de ": "DE"}}]
    assert inspected.config["timeline"] == {"on_refused": "drop_episode"}
    missing = int(frame["bought"].isna().sum())
    assert columns["csv"] == {"delimiter": ";", "decimal": ","}
    assert not absent(
        "\n".join(inspected.decide), f"bought: {missing} rows without a reward", "land: 'de ' as 'DE' by map"
    )
    log = Log(
        str(tmp_path / "shop.csv"),
        actions=tuple(inspected.config["actions"]),
        columns=columns,
        timeline=TimelineConfig(timeline={"inputTableName": "", **inspected.config["timeline"]}),
        directory=str(tmp_path / "copies"),
    )
    copy = prepare_training_copy(log)
    assert (len(copy), copy.counts["refused_rows"]) == (300 - missing, missing)
    assert float(copy.reward[:].sum()) == (frame["bought"] == "Yes").sum()
    assert any("rows that break a rule left out" in note for note in copy.notes)
    ages = copy.state[:, [str(name) for name in copy.state_ids].index("income")]
    np.testing.assert_allclose(np.sort(ages), np.sort(frame["income"][frame["bought"].notna()]), rtol=1e-6)


def test_a_wrong_name_in_columns_is_answered_with_the_nearest() -> None:
    inspected = reagent_lite.inspect(clicks(), columns={"reward": "clik"})
    assert "columns.reward: the log has no column 'clik'. Did you mean 'click'?" in inspected.problems


def test_an_edited_config_is_kept(tmp_path: Path, run: Runner) -> None:
    clicks().to_csv(tmp_path / "clicks.csv", index=False)
    target = tmp_path / "x.json"
    target.write_text("{}")
    arguments = ("--data", str(tmp_path / "clicks.csv"), "--output", str(target))
    assert "x.json was another config, which is kept as" in run("inspect", {}, *arguments).ok.err
    assert (tmp_path / "x.before.json").read_text() == "{}"
    assert "is kept as" not in run("inspect", {}, *arguments).ok.err


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda frame: frame.drop(columns=["click", "revenue"]), "no column is known to be the reward"),
        (lambda frame: frame.assign(offer="mail"), "offer has one value, mail"),
        (lambda frame: frame.assign(offer=range(len(frame))), "offer has 600 values, more than 200"),
        (lambda frame: frame[["offer", "click"]], "is left to be a feature"),
        (lambda frame: frame.assign(click=np.inf), "is not a finite number in every row"),
        (lambda frame: frame.rename(columns={"user_id": "mdp_id"}).drop(columns="timestamp"), "mdp_id without a"),
        (lambda frame: frame.assign(offer=frame["offer"].map({"call": 1, "mail": 2, "none": 3})), "written as strings"),
        (lambda frame: frame.assign(offer=frame["offer"] == "mail"), "Write names as strings"),
        (lambda _: sessions().rename(columns={"done": "terminal", "step": "when"}), "sequence_number, the order of"),
    ],
)  # fmt: skip
def test_why_there_is_no_config(change: Callable[[pd.DataFrame], pd.DataFrame], problem: str) -> None:
    inspected = reagent_lite.inspect(change(clicks()))
    assert inspected.config is None
    assert any(problem in text for text in inspected.problems), inspected.problems


def test_results_are_frames(tmp_path: Path) -> None:
    frame = clicks()
    inspected = reagent_lite.inspect(frame)
    table = inspected.table.set_index("column")
    assert table.loc["click", ["kind", "distinct", "read_as"]].tolist() == ["integer", 2, "reward"]
    quickly = {"model_output_path": str(tmp_path / "out"), "use_gpu": False, "evaluation": FAST}
    outcome = reagent_lite.train(merged(inspected.config, quickly), frame)
    assert outcome.metrics["step"].tolist() == [line["step"] for line in metrics(tmp_path / "out")]
    settings = {"evaluation": FAST}
    for result in (outcome, reagent_lite.evaluate(outcome.model, frame, config=settings)):
        estimates = result.estimates.set_index(["outcome", "estimator"])
        assert set(estimates["policy"]) == {"model"}
        tags = {f"CPE/{name}/{estimator}" for name, estimator in estimates.index}
        assert tags == {tag for tag in result.scores if re.fullmatch("CPE/[^/]+/(?!Logged_)[^/]+", tag)} != set()
        expected = [result.scores[f"CPE/{name}/{estimator}"] for name, estimator in estimates.index]
        np.testing.assert_array_equal(estimates["estimate"], np.array(expected, float))
    both = reagent_lite.evaluate(outcome.model, frame, against="uniform", config=settings).estimates
    assert set(both["policy"]) == {"model", "against"}


NAMES = st.sampled_from(
    ["mdp_id", "session", "step", "t", "action", "offer", "reward", "click", "p", "propensity", "done", "terminal",
     "state_features", "state", "possible_actions", "next_state_features", "next_action", "metrics", "time_diff", "age",
     "x", "next_x", "ds", "user id", "Unnamed: 0", "7", "_x", "é", "state_features.3", ""]
) | st.text(string.printable, max_size=8)  # fmt: skip
MAPS = st.dictionaries(st.sampled_from(["0", "x", "é", "-", ""]), st.floats() | st.none(), max_size=3)
CELLS: list[st.SearchStrategy[Any]] = [
    st.integers(0, 3), st.integers() | st.just(10**400), st.sampled_from([1, 10**400]),
    st.floats(), st.floats(0, 1), st.booleans(), st.sampled_from(["a", "b"]),
    st.text(max_size=5), st.datetimes(), st.none(), MAPS, st.lists(st.sampled_from(["a", "b"]), max_size=2),
    st.lists(MAPS, max_size=2), st.sampled_from(["1", "2", "x", "{", "[1", "2026-01-01"]), st.binary(max_size=3),
    st.dates(), st.decimals(allow_nan=False, allow_infinity=False), st.timedeltas(),
]  # fmt: skip


@st.composite
def frames(draw: st.DrawFn) -> pd.DataFrame:
    rows = draw(st.integers(0, 40))
    columns = st.sampled_from(CELLS).flatmap(lambda cells: st.lists(cells, min_size=rows, max_size=rows))
    return pd.DataFrame(draw(st.dictionaries(NAMES, columns, max_size=7)))


@settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(frame=frames(), form=st.sampled_from(["frame", "csv", "jsonl"]))
def test_any_frame_gives_a_config_or_a_reason(frame: pd.DataFrame, form: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / f"log.{form}"
        try:
            WRITE[form](frame, log)
        except (ValueError, TypeError, OverflowError, UnicodeError):
            return  # pandas does not write it
        try:
            inspected = reagent_lite.inspect(frame if form == "frame" else log)
        except ReagentLiteError:  # a log that cannot be read, with the reason
            return
        list(inspected.lines())
        json.dumps(inspected.facts())
        assert (inspected.config is None) == bool(inspected.problems)
        if inspected.config is not None:
            check(DqnConfig if inspected.workflow == "dqn" else ParametricDqnConfig, inspected.config)


def _visits(count: int = 600) -> list[dict[str, Any]]:
    rng = np.random.default_rng(4)
    return [
        {"mdp_id": f"e{number // 3}", "sequence_number": number % 3, "action": "ab"[number % 2], "reward": 1.0,
         "terminal": number % 3 == 2, "age": float(rng.integers(90)), "user": f"u{rng.integers(30)}",
         "seen": [f"i{item}" for item in rng.integers(130, size=rng.integers(4))],
         "bought": [f"i{item}" for item in rng.integers(130, size=2)],
         "rated": {f"k{key}": 0.5 for key in rng.integers(50, size=rng.integers(3))},
         "shop_id": int(rng.integers(40)), "row_id": number, "token": f"t{number}",
         "vector": rng.integers(9, size=3).tolist(), "chances": {"a": 0.5, "b": 0.5}, "next_seen": ["i1", "i2"]}
        for number in range(count)
    ]  # fmt: skip


def test_ids_lists_of_ids_and_scores_get_vectors(tmp_path: Path) -> None:
    """30 users are categories, who have rows in other episodes than the one that mdp_id names."""
    inspected = reagent_lite.inspect(write_lines(tmp_path / "log.jsonl", _visits()))
    data = inspected.config["data"]
    assert data["columns"]["state_features"] == ["age", "user", "seen", "bought", "rated", "shop_id"]
    assert data["embeddings"] == {
        "seen": {"length": 3, "table": "seen"}, "bought": {"length": 2, "table": "seen"},
        "rated": {"length": 2, "scores": True, "pooling": "sum"}, "shop_id": {},
    }  # fmt: skip
    words = " ".join(inspected.decide)
    for part in ("seen: a vector for each id: 0 to 3 of 130 ids in a row", "bought: a vector for each id, in the table",
                 "rated: a vector for each id: ids with scores, 0 to 2 of 50 ids",
                 "shop_id: a vector for each id: 40 ids",
                 "row_id, token left out, 600 ids, of which 100% of the values are too rare"):  # fmt: skip
        assert part in words
    quickly = {"epochs": 1, "model_output_path": str(tmp_path / "out"), "use_gpu": False, "evaluation": FAST}
    assert trained(merged(inspected.config, quickly)).model is not None


def test_ids_in_maps_of_states_and_candidates(tmp_path: Path) -> None:
    """Lists have the ids of candidates; each candidate was taken in too few rows for a table of its own."""
    rows = events(visits(300, 80, 5, 1), 2)
    inspected = reagent_lite.inspect(write_lines(tmp_path / "log.jsonl", rows))
    assert inspected.config["data"] == {
        "embeddings": {"seen": {"length": 5, "table": "seen"}, "item": {"table": "seen"}}
    }
    assert inspected.config["rl"]["gamma"] == 0.0
    assert "algorithm" not in inspected.config
    named = [
        {**row, "action": row["action"]["item"], "possible_actions": [each["item"] for each in row["possible_actions"]]}
        for row in rows
    ]
    items = write_lines(
        tmp_path / "items.jsonl", [{"item_id": f"i{number}", "price": 1.0 + number % 7} for number in range(80)]
    )
    by_id = reagent_lite.inspect(write_lines(tmp_path / "ids.jsonl", named), items=str(items))
    assert by_id.config["data"]["embeddings"] == {"seen": {"length": 5, "table": "seen"}, "item_id": {"table": "seen"}}


def test_people_with_several_single_decisions_get_vectors() -> None:
    rng = np.random.default_rng(0)
    frame = clicks(9000).assign(user_id=rng.integers(1200, size=9000))
    inspected = reagent_lite.inspect(frame)
    assert inspected.config["data"]["embeddings"] == {"user_id": {}}
    assert inspected.config["rl"] == {"gamma": 0.0, "epsilon": 0.1}
    rare = reagent_lite.inspect(clicks(9000).assign(user_id=rng.integers(8000, size=9000)))
    assert "embeddings" not in rare.config["data"]
    assert rare.config["algorithm"] == "boosting"
