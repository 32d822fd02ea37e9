"""Code in the documentation does what the text around it says."""

import ast
import json
import os
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import nbformat
import optuna
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]


def outputs(notebook: nbformat.NotebookNode) -> list[dict[str, str]]:
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [output.data for output in shown if output.output_type != "stream"]


def executed(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str] | None = None
) -> list[list[dict[str, str]]]:
    """Runs a notebook of docs in a folder; returns the outputs that it is published with, and those of the run.

    Its code has the values of `changes` in the place of the keys.
    """
    for variable in ("HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(folder / variable))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "docs" / name, 4)
    shown = outputs(notebook)
    for old, new in (changes or {}).items():
        assert any(old in cell.source for cell in notebook.cells)
        for cell in notebook.cells:
            cell.source = cell.source.replace(old, new)
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    return [shown, outputs(notebook)]


def test_the_notebook_leads_from_a_frame_to_decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mail is worth 0.5 to whoever bought in the last 60 days and 0.1 to others, a call the reverse."""
    for shown in executed("first_model.ipynb", tmp_path, monkeypatch):
        _, described, trained, evaluated, estimates, greedy, drawn = shown
        assert "reward: its name is &#x27;bought&#x27;" in described["text/html"].replace("'", "&#x27;")
        assert "Sequential_Doubly_Robust" in estimates["text/html"]
        for result in (trained, evaluated):
            assert result["text/html"].startswith("<p><strong>✓ Ship:</strong>")
        low, high = re.search(
            r"Self Normalized Doubly Robust Reward</td><td>\S+ \(([\d.]+) to ([\d.]+)\)", evaluated["text/html"]
        ).groups()
        assert float(low) < 0.5 < float(high)
        assert greedy["text/plain"].startswith("['mail', 'call', ")
        assert "probability" in drawn["text/plain"]
    assert (tmp_path / "outputs/first_model/report.html").is_file()


def test_the_notebook_leads_from_treatments_to_a_served_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is published with two better policies, as many stays give; the run here has a tenth of them."""
    fewer = {"10_000": "1_000", '"epochs": 6': '"epochs": 1', '"final_fit_passes": 2': '"final_fit_passes": 1',
             "arange(300)": "arange(50)", "(300, 1)": "(50, 1)", "round(300": "round(50"}  # fmt: skip
    published, run = executed("icu_sepsis.ipynb", tmp_path, monkeypatch, fewer)
    assert [sorted(output) for output in run] == [sorted(output) for output in published]
    for shown, most_survivors_off in ((published, 28), (run, 12)):  # four standard deviations
        # learning.md, by the linear solve
        assert shown[0]["text/plain"] == "{'uniform': 0.78007, 'clinicians': 0.78184}"
        served = ast.literal_eval(shown[5]["text/plain"])
        assert abs(served["survivors of 300"] - served["expected"]) < most_survivors_off
    _, _, _, estimates, values, _, following = (output["text/plain"] for output in published)
    intervals = re.findall(r"<td>([\d.]+)</td>\s*<td>([\d.]+)</td>\s*<td>trustworthy</td>\s*<td>([\d.]+)</td>",
                           published[3]["text/html"])  # fmt: skip
    assert len(intervals) >= 2
    assert all(float(low) < float(exact) < float(high) for low, high, exact in intervals)
    assert "Sequential_Doubly_Robust" in estimates
    assert ast.literal_eval(values)["decision"] == "not enough to say"
    clinicians, first, last = (float(number) for number in re.findall(r"0\.\d+", following))
    assert (clinicians, first) == (0.782, ast.literal_eval(values)["first policy"])
    assert min(first, last) > 0.79
    assert max(first, last) < 0.87514
    assert "Rows of each log" in (tmp_path / "outputs/next/report.html").read_text()


def test_the_search_leaves_hopeless_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three trials, of which the second is not worth going on after its first evaluation."""

    class SecondIsHopeless(optuna.pruners.BasePruner):
        def prune(self, study: optuna.Study, trial: optuna.trial.FrozenTrial) -> bool:
            return trial.number == 1

    search = partial(optuna.create_study, sampler=optuna.samplers.RandomSampler(seed=0), pruner=SecondIsHopeless())
    monkeypatch.setattr(optuna, "create_study", search)
    (code,) = re.findall(r"```python\n(import json.+?)```", (ROOT / "configs/README.md").read_text(), re.DOTALL)
    config = tmp_path / "configs" / "cartpole" / "online.json"
    config.parent.mkdir(parents=True)
    config.write_text(
        '{"use_gpu": false, "simulation": {"env": "cartpole_v1", "num_envs": 8, "total_steps": 800, "warmup_steps": 80,'
        ' "epsilon_end": 0.1, "num_evaluations": 2, "evaluation_episodes": 4}, "training": {"minibatch_size": 32}}'
    )
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(code.replace("n_trials=20", "n_trials=3"), "configs/README.md", "exec"), names)
    study: optuna.Study = names["study"]
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED", "COMPLETE"]
    assert [len(trial.intermediate_values) for trial in study.trials] == [2, 1, 2]
    for number in (0, 2):
        trial, folder = study.trials[number], tmp_path / "outputs" / "search" / str(number)
        trained = json.loads((folder / "config.json").read_text())["training"]
        assert trained["learning_rate"] == trial.params["learning_rate"]
        scores = json.loads((folder / "model" / "evaluation.json").read_text())["scores"]
        assert trial.value == scores["simulation/return/mean"]
    assert study.best_params == max(study.trials[0], study.trials[2], key=lambda trial: trial.value).params
    assert not (tmp_path / "outputs/search/1/model").exists()


def test_pages_name_what_there_is() -> None:
    """Links lead to a file, and to a heading of it; tests that a page names exist."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    pages = {file: (ROOT / file).read_text() for file in tracked if file.endswith(".md")}
    tests = "".join((ROOT / file).read_text() for file in tracked if Path(file).name.startswith("test_"))
    headings = {
        file: {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"(?m)^#+ (.*)$", text)}
        for file, text in pages.items()
    }
    wrong = []
    for file, text in pages.items():
        for path, heading in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", text):
            target = os.path.normpath(ROOT / file / ".." / path) if path else str(ROOT / file)
            there = headings.get(os.path.relpath(target, ROOT), set())
            if not os.path.exists(target) or (heading and heading not in there):
                wrong.append((file, f"{path}#{heading}"))
        named = [] if file == "CHANGELOG.md" else re.findall(r"`(?:[\w/]*/)?(test_\w+)(?:\.py)?`", text)
        wrong += [
            (file, name) for name in named if f"def {name}(" not in tests and f"/{name}.py" not in "\n".join(tracked)
        ]
    assert wrong == []
