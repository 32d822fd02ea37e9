"""tests/benchmarks/gpu.py measures on a CPU what it measures on a GPU, and its file never waits for the last figure."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from benchmarks import gpu

CPU = torch.device("cpu")


def test_the_file_has_each_figure_as_soon_as_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "folder" / "gpu.json"
    monkeypatch.setattr(gpu, "tests", lambda: {"exit_code": 0, "result": "3 skipped"})
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "machine", lambda device: {"gpus": []})
    figures = {"first": Mock(return_value=1.5), "second": Mock(side_effect=RuntimeError("out of memory")),
               "third": Mock(side_effect=KeyboardInterrupt)}  # fmt: skip
    monkeypatch.setattr(gpu, "figures_of", lambda device: figures)
    with pytest.raises(KeyboardInterrupt):
        gpu.main([str(file)])
    report = json.loads(file.read_text())
    assert {name: report[name] for name in figures if name in report} == {
        "first": 1.5, "second": "RuntimeError: out of memory",
    }  # fmt: skip


def test_figures_of_a_small_run() -> None:
    """Rates are those of the last epoch; a profile counts launches of a step, on a CPU of calls, also those inside."""
    figures = gpu.training(16, CPU, cuda_graph=True, updates=60)
    assert figures["updates_per_second"] == pytest.approx(figures["learned_rows_per_second"] / 16, rel=0.05)
    assert gpu.logged(64, CPU, cuda_graph=True, rows=2000, epochs=2)["learned_rows_per_second"] > 1000
    profile = gpu.profiled(16, CPU, steps=3)
    assert 100 < profile["launches_per_step"] < 2000
    assert sum(family["share"] for family in profile["families"].values()) == pytest.approx(1, abs=0.01)
    stepping = gpu.stepping("cartpole_v1", 64, CPU, steps=2, seconds=0.01)
    # state of 4 words in and out, episode, step count in and out, end; action, reward, return in and out
    assert stepping["bytes_per_step"] == 32 + 4 + 8 + 1 + 1 + 4 + 8 == 58
