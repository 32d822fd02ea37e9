"""The extras of the distribution: what runs without them, and what each command says that needs one."""

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from helpers.runs import ROOT, Run

import reagent_lite
from reagent_lite.errors import EXTRAS, ConfigError

WITHOUT = f"""
import contextlib, io, json, runpy, sys
sys.modules |= dict.fromkeys({[name for names in EXTRAS.values() for name in names]})
for command in sys.argv[1:]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        sys.argv, code = command.split(), 0
        try:
            runpy.run_module("workflows." + sys.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code or 0
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
print(json.dumps([int("torch._dynamo" in sys.modules), "", "the compiler is imported"]))
"""
"""Runs a workflow with each argument's words where nothing can be imported that extras install."""
NEEDED = [
    ("data", "training_data_path", "dqn --config configs/cartpole/dqn.json --set use_gpu=false{out}"),
    ("data", "simulation.mode", "dqn --config configs/cartpole/collect.json --set use_gpu=false{out}"),
    ("data", "timeline.inputTableName", "timeline --config configs/cartpole/timeline.json"),
    ("data", "training_data_path", "normalize --config configs/cartpole/normalize.json"),
    ("data", "data_path", "convert --config configs/gymnasium/convert.json"),
    ("data", "data_path", "shard --config configs/cluster/shard.json --num_nodes 2 --node_index 0"),
    ("data", "output_path", "simulate --config configs/cartpole/simulate.json"),
    ("data", "data_path", "inspect --config configs/cartpole/inspect.json"),
    ("data", "data_path", "score --config configs/cartpole/score.json"),
    (
        "pictures",
        "simulation.pictures",
        "dqn --config configs/cartpole/online.json --set simulation.pictures=true{out}",
    ),
    ("serve", "workflows.serve", "serve --model model --log log"),
]
"""The extra that a command needs, who needs it, and the command."""


def test_extras_are_those_of_the_distribution() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(declared) - {"all", "dev", "docs"} == set(EXTRAS)
    whole = ",".join(extra for extra in declared if extra not in ("all", "dev", "docs", "cuda"))  # cuda needs a toolkit
    assert declared["all"] == [f"reagent-lite[{whole}]"]
    distributions = packages_distributions()
    for extra, module in [(extra, module) for extra, modules in EXTRAS.items() for module in modules]:
        names = {name.lower().replace("_", "-") for name in distributions.get(module, ())}
        wanted = {re.split(r"[^\w.-]", need)[0].lower().replace("_", "-") for need in declared[extra]}
        # not installed here, or what a distribution brings: h5py of minari[hdf5]
        assert not names or module == "h5py" or names & wanted, module


def test_simulation_needs_no_extra_nor_torchs_compiler_and_other_commands_name_what_they_need(tmp_path: Path) -> None:
    few = "--set simulation.evaluation_episodes=5"
    commands = [
        f"dqn --config configs/cartpole/online.json --set use_gpu=false --set model_output_path={tmp_path}/run {few}"
        " --set simulation.total_steps=6000 --set simulation.num_evaluations=1",
        f"evaluate --model {tmp_path}/run/model --env cartpole_v1 {few}",
        *(command.format(out=f" --set model_output_path={tmp_path}/refused") for *_, command in NEEDED),
    ]
    printed = subprocess.check_output([sys.executable, "-c", WITHOUT, *commands], cwd=ROOT, text=True, timeout=300)
    done, played, *others, compiler = (Run(*json.loads(line)) for line in printed.splitlines())
    needed = "tensorboard/ is not written: no tensorboard. To have it, run: pip install 'reagent-lite[report]'\n"
    assert needed in done.ok.err
    files = {"model", "report.html", "metrics.jsonl", "config.json"}
    assert {*os.listdir(tmp_path / "run")} & {*files, "tensorboard"} == files
    assert played.ok.outcome["rows"] == 0
    for (extra, where, command), ended in zip(NEEDED, others, strict=True):
        packages = f"expected the packages of the extra {extra}, got no {', '.join(EXTRAS[extra])}"
        message = f"config error:\n{where}: {packages}. Run: pip install 'reagent-lite[{extra}]'"
        assert (ended.code, message in ended.err) == (2, True), (command, ended.err)
    assert os.listdir(tmp_path) == ["run"]
    assert compiler.ok


def test_read_log_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"read_log: .* no pyarrow"):
        _ = reagent_lite.read_log
