"""The extras of the distribution: what runs without them, and what each command says that needs one."""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from oracles.runs import ROOT

import reagent_lite
from reagent_lite.errors import EXTRAS, ConfigError

WITHOUT = """
import runpy, sys
for name in sys.argv.pop(1).split(","):
    sys.modules[name] = None
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
CONFIGS = ROOT / "configs"


def without(extras: set[str], *words: str) -> subprocess.CompletedProcess[str]:
    """Runs `python -m` in an interpreter that cannot import what these extras install."""
    blocked = ",".join(sorted({name for extra in extras for name in EXTRAS[extra]}))
    return subprocess.run([sys.executable, "-c", WITHOUT, blocked, *words], cwd=ROOT, capture_output=True, text=True,
                          check=False, timeout=300)  # fmt: skip


def test_extras_are_those_of_the_distribution() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(declared) - {"all", "dev"} == set(EXTRAS)
    whole = ",".join(one for one in declared if one not in ("all", "dev", "cuda"))  # cuda needs a toolkit
    assert declared["all"] == [f"reagent-lite[{whole}]"]
    distributions = packages_distributions()
    for extra, modules in EXTRAS.items():
        for module in modules:
            names = {one.lower() for one in distributions.get(module, ())}
            wanted = {re.split(r"[^\w.-]", one)[0].lower().replace("_", "-") for one in declared[extra]}
            # not installed here, or what a distribution brings: h5py of minari[hdf5]
            assert not names or module in ("h5py",) or {one.replace("_", "-") for one in names} & wanted, module


def test_simulation_needs_no_extra(tmp_path: Path) -> None:
    changes = {"simulation.total_steps": 6000, "simulation.num_evaluations": 1, "use_gpu": False,
               "simulation.evaluation_episodes": 5, "model_output_path": str(tmp_path / "run")}  # fmt: skip
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    every = set(EXTRAS)
    done = without(every, "workflows.dqn", "--config", str(CONFIGS / "cartpole" / "online.json"), *words)
    assert done.returncode == 0, done.stderr
    assert "tensorboard/ is not written: no tensorboard. To have it, run: pip install 'reagent-lite[report]'\n" in (
        done.stderr
    )
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"model", "report.html", "metrics.jsonl", "config.json"} <= left
    assert "tensorboard" not in left
    played = without(every, "workflows.evaluate", "--model", str(tmp_path / "run" / "model"), "--env", "cartpole_v1",
                     "--set", "simulation.evaluation_episodes=5")  # fmt: skip
    assert played.returncode == 0, played.stderr
    assert json.loads(played.stdout.splitlines()[-1])["rows"] == 0


def test_read_log_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ConfigError, match=r"reagent_lite\.read_log: .* no pyarrow\. Run: pip install 'reagent-lite\[data\]'"
    ):
        _ = reagent_lite.read_log


@pytest.mark.parametrize(
    ("extra", "where", "command"),
    [
        ("data", "training_data_path", "dqn --config configs/cartpole/dqn.json --set use_gpu=false"),
        ("data", "simulation.mode", "dqn --config configs/cartpole/collect.json --set use_gpu=false"),
        ("data", "timeline.inputTableName", "timeline --config configs/cartpole/timeline.json"),
        ("data", "training_data_path", "normalize --config configs/cartpole/normalize.json"),
        ("data", "input_path", "convert --config configs/gymnasium/convert.json"),
        ("data", "shards_path", "shard --config configs/cluster/shard.json --num_nodes 2"),
        ("data", "output_path", "simulate --config configs/cartpole/simulate.json"),
        ("data", "data_path", "inspect --config configs/cartpole/inspect.json"),
        ("data", "data_path", "score --config configs/cartpole/score.json"),
        ("pictures", "simulation.pictures", "dqn --config configs/cartpole/online.json --set simulation.pictures=true"),
        ("serve", "workflows.serve", "serve --model model --log log"),
    ],
    ids=lambda value: value.partition(" ")[0],
)
def test_a_command_names_the_extra_that_it_needs(extra: str, where: str, command: str, tmp_path: Path) -> None:
    output = ["--set", f"model_output_path={json.dumps(str(tmp_path))}"] if command.startswith("dqn") else []
    done = without({extra}, *f"workflows.{command}".split(), *output)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-2] == "config error:"
    problem = f"{where}: expected the packages of the extra {extra}, got no {', '.join(EXTRAS[extra])}"
    assert done.stderr.splitlines()[-1].startswith(f"{problem}. Run: pip install 'reagent-lite[{extra}]'")
    assert list(tmp_path.iterdir()) == []
