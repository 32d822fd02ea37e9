"""Code in the documentation does what the text around it says."""

import ast
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import nbformat
import optuna
import pytest
from helpers.runs import ROOT
from IPython.core.interactiveshell import InteractiveShell


def executed(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str] | None = None
) -> list[list[dict[str, str]]]:
    """Runs a notebook of docs in a folder; returns the outputs that it is published with, and those of the run.

    Its code has the values of `changes` in the place of the keys.
    """
    for variable in ("HOME", "IPYTHONDIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(folder / variable))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.chdir(folder)
    text = (ROOT / "docs" / name).read_text()
    published = nbformat.reads(text, 4).cells
    for old, new in (changes or {}).items():
        assert json.dumps(old)[1:-1] in text
        text = text.replace(json.dumps(old)[1:-1], json.dumps(new)[1:-1])
    shell = InteractiveShell()
    results = [shell.run_cell(cell.source) for cell in nbformat.reads(text, 4).cells if cell.cell_type == "code"]
    for result in results:
        result.raise_error()
    return [
        [output.data for cell in published for output in cell.get("outputs", []) if output.output_type != "stream"],
        [shell.display_formatter.format(result.result)[0] for result in results if result.result is not None],
    ]


def test_the_notebook_leads_from_a_frame_to_decisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mail is worth 0.5 to whoever bought in the last 60 days and 0.1 to others, a call the reverse.

    The best action has a probability of 0.95, so that the policy is worth 0.48.
    """
    interval = r"Self Normalized Doubly Robust Reward</td><td>\S+ \(([\d.]+) to ([\d.]+)\)"
    for shown in executed("first_model.ipynb", tmp_path, monkeypatch):
        _, described, trained, evaluated, estimates, greedy, drawn = (
            output.get("text/html") or output["text/plain"] for output in shown
        )
        assert "reward: its name is &#x27;bought&#x27;" in described.replace("'", "&#x27;")
        assert "Sequential_Doubly_Robust" in estimates
        assert [text[:28] for text in (trained, evaluated)] == ["<p><strong>✓ Ship:</strong> "] * 2
        ((low, high),) = re.findall(interval, evaluated)
        assert float(low) < 0.48 < float(high)
        assert greedy.startswith("['mail', 'call', ")
        assert set(re.findall(r"0\.\d+|1\.0+", drawn)) <= {"0.95", "0.05"}
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
    intervals = re.findall(r"<td>([\d.]+)</td>\s*<td>([\d.]+)</td>\s*<td>trustworthy</td>\s*<td>([\d.]+)</td>",
                           published[3]["text/html"])  # fmt: skip
    assert len(intervals) >= 2
    assert all(float(low) < float(exact) < float(high) for low, high, exact in intervals)
    values = ast.literal_eval(published[4]["text/plain"])
    assert values["decision"] == "not enough to say"
    clinicians, first, last = (float(number) for number in re.findall(r"0\.\d+", published[6]["text/plain"]))
    assert (clinicians, first) == (0.782, values["first policy"])
    assert all(0.79 < value < 0.87514 for value in (first, last))
    assert "Rows of each log" in (tmp_path / "outputs/next/report.html").read_text()


def test_the_search_leaves_hopeless_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three trials, of which the second is not worth going on after its first evaluation."""
    second_is_hopeless = Mock(spec=optuna.pruners.BasePruner, prune=lambda study, trial: trial.number == 1)
    search = partial(optuna.create_study, sampler=optuna.samplers.RandomSampler(seed=0), pruner=second_is_hopeless)
    monkeypatch.setattr(optuna, "create_study", search)
    (code,) = re.findall(r"```python\n(import optuna.+?)```", (ROOT / "docs/training.md").read_text(), re.DOTALL)
    config = tmp_path / "configs" / "cartpole" / "online.json"
    config.parent.mkdir(parents=True)
    config.write_text(
        '{"use_gpu": false, "model_output_path": "outputs/search",'
        ' "simulation": {"env": "cartpole_v1", "num_envs": 8, "total_steps": 800, "warmup_steps": 80,'
        ' "epsilon_end": 0.1, "num_evaluations": 2, "evaluation_episodes": 4}, "training": {"minibatch_size": 32}}'
    )
    monkeypatch.chdir(tmp_path)
    exec(compile(code.replace("n_trials=20", "n_trials=3"), "docs/training.md", "exec"), names := {})
    trials = names["study"].trials
    assert [(trial.state.name, len(trial.intermediate_values)) for trial in trials] == [
        ("COMPLETE", 2), ("PRUNED", 1), ("COMPLETE", 2),
    ]  # fmt: skip
    best = max(trials[0], trials[2], key=lambda trial: trial.value)
    assert names["study"].best_params == best.params
    folder = Path("outputs") / "search" / str(best.number)
    trained = json.loads((folder / "config.json").read_text())["training"]
    document = json.loads((folder / "model" / "evaluation.json").read_text())
    score = document["scores"]["choosing/simulation/return/mean"]
    assert (best.params["learning_rate"], best.value) == (trained["learning_rate"], score)
    assert best.user_attrs == {"decision": document["decision"], "model": str(folder / "model"), "folder": str(folder)}


def test_pages_name_what_there_is() -> None:
    """Links lead to a file, and to a heading of it; tests that a page names exist."""
    tracked = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).split()
    pages = {file: (ROOT / file).read_text() for file in tracked if file.endswith(".md")}
    tests = [Path(file) for file in tracked if Path(file).name.startswith("test_")]
    names = {name for file in tests for name in (file.stem, *re.findall(r"def (\w+)\(", (ROOT / file).read_text()))}
    headings = {
        file: {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in re.findall(r"(?m)^#+ (.*)$", text)}
        for file, text in pages.items()
    }
    links = [
        (file, os.path.normpath(Path(file, "..", path)) if path else file, heading)
        for file, text in pages.items()
        for path, heading in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", text)
    ]
    dead = [
        (file, target, heading)
        for file, target, heading in links
        if not (ROOT / target).exists() or (heading and heading not in headings.get(target, set()))
    ]
    unknown = [
        (file, name)
        for file in pages.keys() - {"CHANGELOG.md"}
        for name in re.findall(r"`(?:[\w/]*/)?(test_\w+)(?:\.py)?`", pages[file])
        if name not in names
    ]
    assert (dead, unknown) == ([], [])


def test_the_guides_build_as_a_site(tmp_path: Path) -> None:
    """Strictly: every page is in the navigation, and every link and anchor between pages leads somewhere."""
    pytest.importorskip("mkdocs")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    subprocess.run(build, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert (tmp_path / "site/index.html").is_file()
