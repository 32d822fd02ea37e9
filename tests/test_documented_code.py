"""Code in the documentation does what the text around it says."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]


def outputs(notebook: nbformat.NotebookNode) -> list[dict[str, str]]:
    return [one.data for cell in notebook.cells for one in cell.get("outputs", []) if one.output_type != "stream"]


def test_the_notebook_leads_from_a_frame_to_decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mail is worth 0.5 to whoever bought in the last 60 days and 0.1 to others, a call the reverse."""
    for name in ("HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "docs" / "first_model.ipynb", 4)
    shown = outputs(notebook)
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    for found in (shown, outputs(notebook)):
        _, trained, evaluated, greedy, drawn = found
        for result in (trained, evaluated):
            assert result["text/html"].startswith("<p><strong>✓ Ship:</strong>")
        low, high = re.search(
            r"Sequential Doubly Robust</td><td>\S+ \(([\d.]+) to ([\d.]+)\)", evaluated["text/html"]
        ).groups()
        assert float(low) < 0.5 < float(high)
        assert greedy["text/plain"].startswith("['mail', 'call', ")
        assert "probability" in drawn["text/plain"]
    assert (tmp_path / "outputs/first_model/report.html").is_file()


def test_the_search_leaves_hopeless_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for Optuna, which is no dependency: two trials, of which the second is not worth going on."""
    optuna: Any = ModuleType("optuna")
    optuna.TrialPruned = type("TrialPruned", (Exception,), {})
    monkeypatch.setitem(sys.modules, "optuna", optuna)
    ended: list[float | str] = []

    class Trial:
        def __init__(self, number: int) -> None:
            self.number, self.reports = number, dict[int, float]()

        def suggest_float(self, name: str, low: float, high: float, *, log: bool) -> float:
            return low if self.number else high

        def report(self, value: float, step: int) -> None:
            self.reports[step] = value

        def should_prune(self) -> bool:
            return self.number == 1

    class Study:
        best_params: dict[str, float] = {}

        def optimize(self, objective: Any, n_trials: int) -> None:
            for trial in map(Trial, range(2)):
                try:
                    ended.append(objective(trial))
                except optuna.TrialPruned:
                    ended.append("pruned")
                assert len(trial.reports) == (1 if trial.number else 2)

    optuna.create_study = lambda direction: Study()
    (code,) = re.findall(r"```python\n(import json.+?)```", (ROOT / "configs/README.md").read_text(), re.DOTALL)
    config = tmp_path / "configs" / "cartpole" / "online.json"
    config.parent.mkdir(parents=True)
    config.write_text(
        '{"use_gpu": false, "simulation": {"env": "cartpole_v1", "num_envs": 8, "total_steps": 800, "warmup_steps": 80,'
        ' "epsilon_end": 0.1, "num_evaluations": 2, "evaluation_episodes": 4}, "training": {"minibatch_size": 32}}'
    )
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "configs/README.md", "exec"), {})
    assert isinstance(ended[0], float)
    assert 8 <= ended[0] <= 500
    assert ended[1] == "pruned"
    assert (tmp_path / "outputs/search/0/model").is_dir()
    assert not (tmp_path / "outputs/search/1/model").exists()
