"""The JSON of workflows.simulate: contradictions are said, and sections that may be null get advice as others do."""

import json
from pathlib import Path
from typing import Any

import pytest

from reagent_lite.config import DqnConfig, check, load_config, resolved
from reagent_lite.config.simulate import LOG_SUFFIXES, SimulateConfig
from reagent_lite.data.writing.files import FORMATS
from reagent_lite.errors import ConfigError

GOOD: dict[str, Any] = {"env": "cartpole_v0", "output_path": "out/log.jsonl"}


def faults(tree: dict[str, Any], model: Any = SimulateConfig, base: dict[str, Any] = GOOD) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        check(model, {**base, **tree})
    return {problem.where: str(problem) for problem in caught.value.problems}


def test_defaults() -> None:
    config = check(SimulateConfig, GOOD)
    assert (config.rows, config.episodes, config.num_envs, config.format) == (30000, None, 256, "events")
    assert (config.policy.kind, config.policy.epsilon, config.value_of) == ("random", 0.1, None)


def test_every_suffix_has_a_writer() -> None:
    assert set(LOG_SUFFIXES) == set(FORMATS)
    for suffix in LOG_SUFFIXES:
        check(SimulateConfig, GOOD | {"output_path": f"a/b{suffix}"})


@pytest.mark.parametrize(
    ("tree", "where", "words"),
    [
        ({"env": ""}, "env", "nothing"),
        ({"output_path": ""}, "output_path", "a path"),
        ({"output_path": "log.tsv"}, "output_path", ".jsonl.gz"),
        ({"output_path": "out/.parquet"}, "output_path", ".parquet"),
        ({"output_path": "s3://bucket/log.jsonl"}, "output_path", "a local path"),
        ({"rows": 10, "episodes": 3}, "episodes", "rows 10, episodes 3"),
        ({"rows": None}, "rows", "episodes instead"),
        ({"format": "rows"}, "format", "'transitions'"),
        ({"format": "transitions", "ds": "2026-01-01"}, "ds", "Only events"),
        ({"policy": {"kind": "epsilon_greedy"}}, "policy.model", "nothing"),
        ({"policy": {"kind": "random", "model": "m"}}, "policy.model", "absent with kind random"),
        ({"policy": {"kind": "softmax", "model": "m", "epsilon": 0.2}}, "policy.epsilon", "absent with kind softmax"),
        ({"policy": {"kind": "epsilon_greedy", "model": "m", "temperature": 2.0}}, "policy.temperature", "softmax"),
        ({"policy": {"kind": "greedy", "model": "m"}}, "policy.kind", "'epsilon_greedy'"),
        ({"value_of": {}}, "value_of.model", "kind greedy"),
        ({"value_of": {"model": "m", "epsilon": 0.3}}, "value_of.epsilon", "absent with kind greedy"),
        ({"backend": "cuda", "use_gpu": False}, "backend", "while use_gpu is false"),
    ],
)
def test_rules(tree: dict[str, Any], where: str, words: str) -> None:
    assert words in faults(tree)[where]


def test_all_faults_at_once() -> None:
    tree = {"num_envs": 0, "policy": {"kind": "softmax"}, "value_of": {"model": 3}, "nums": 1}
    assert set(faults(tree)) >= {"num_envs", "policy.model", "value_of.model", "nums"}


def test_episodes_replace_the_default_of_rows_and_the_resolved_config_reads_back() -> None:
    config = check(SimulateConfig, GOOD | {"episodes": 5, "value_of": {"kind": "random"}})
    assert (config.rows, config.episodes) == (None, 5)
    assert check(SimulateConfig, resolved(config)) == config
    assert check(SimulateConfig, resolved(check(SimulateConfig, GOOD))) == check(SimulateConfig, GOOD)


def test_advice_reaches_sections_that_may_be_null() -> None:
    assert (
        "Did you mean 'temperature'?"
        in faults({"value_of": {"kind": "random", "temperture": 1}})["value_of.temperture"]
    )
    assert "Known keys: kind, model" in faults({"value_of": {"kind": "random", "zzz": 1}})["value_of.zzz"]
    assert "policy.temperature" in faults({"temperature": 1})["temperature"]
    assert "the top level" in faults({"value_of": {"kind": "random", "num_envs": 1}})["value_of.num_envs"]


def test_advice_reaches_sections_in_sections() -> None:
    base = {"model_output_path": "out", "simulation": {"env": "cartpole_v0"}}
    inside = {"simulation": {"env": "cartpole_v0", "replay": {"capasity": 3}}}
    assert "Did you mean 'capacity'?" in faults(inside, DqnConfig, base)["simulation.replay.capasity"]
    assert "Did you mean 'simulation.env'?" in faults({"env": "cartpole_v0"}, DqnConfig, base)["env"]
    assert "simulation.replay.prioritized" in faults({"prioritized": True}, DqnConfig, base)["prioritized"]
    assert "an object" in faults({"simulation": 3}, DqnConfig, base)["simulation"]


def test_a_null_section_is_filled_by_overrides(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps(GOOD | {"value_of": None}))
    config = load_config(SimulateConfig, str(file), ("value_of.kind=random", "value_of.gamma=0.5"))
    assert config.value_of is not None
    assert (config.value_of.kind, config.value_of.gamma) == ("random", 0.5)
    with pytest.raises(ConfigError, match="an object at env"):
        load_config(SimulateConfig, str(file), ("env.x=1",))
