"""tests/benchmarks/gpu.py measures on a CPU what it measures on a GPU, and its file never waits for the last figure."""

import importlib.metadata
import json
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from benchmarks import gpu

from reagent_lite.config import check
from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.distributed.launcher import Processes
from reagent_lite.doctor import machine
from reagent_lite.run import declaring, output_folder
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.kernel_sources import find_environment, origin

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


def test_without_a_gpu_the_tests_count_and_nothing_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "tests", lambda: {"exit_code": 0, "result": "3 skipped"})
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    assert gpu.main([str(tmp_path / "gpu.json")]) == 0
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["simulation on the GPU"] == "no GPU"
    assert report["tests"]["result"] == json.loads(capsys.readouterr().out)["tests"] == "3 skipped"
    assert not [name for name in report if "environments" in name]


def test_figures_of_a_small_run() -> None:
    """Rates are those of the last epoch; a profile counts launches of a step, on a CPU of calls, also those inside."""
    figures = gpu.training(16, CPU, cuda_graph=True, updates=30)
    # an update of 16 rows after each step of 16 environments
    assert figures["env_steps_per_second"] == pytest.approx(figures["learned_rows_per_second"], rel=0.01)
    assert figures["updates_per_second"] == pytest.approx(figures["learned_rows_per_second"] / 16, rel=0.05)
    assert gpu.logged(64, CPU, cuda_graph=True, rows=2000, epochs=2)["learned_rows_per_second"] > 1000
    profile = gpu.profiled(16, CPU, steps=3)
    assert 100 < profile["launches_per_step"] < 2000
    assert {"matrix products", "optimizer", "gathers and scatters"} <= set(profile["families"])
    assert sum(family["share"] for family in profile["families"].values()) == pytest.approx(1, abs=0.01)
    stepping = gpu.stepping("cartpole_v1", 64, CPU, steps=2, seconds=0.01)
    assert stepping["share_of_limit"] == pytest.approx(stepping["dynamics"] / stepping["copy_limit"], abs=1e-3)
    # state of 4 words in and out, episode, step count in and out, end; action, reward, return in and out
    assert stepping["bytes_per_step"] == 32 + 4 + 8 + 1 + 1 + 4 + 8 == 58


def test_kernels_belong_to_families_by_their_names() -> None:
    names = {
        "env_step": "environments",
        "sm90_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_cublas": "matrix products",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": "copies",
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel>": "gathers and scatters",
        "void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor>": "optimizer",
        "Memcpy DtoD (Device -> Device)": "copies",
        "void at::native::elementwise_kernel<128, 2, add>": "element by element",
        "something": "other",
    }
    figures = gpu.by_family((name, 2.0, 10.0) for name in names)
    assert (figures["launches_per_step"], figures["microseconds_per_step"]) == (16, 80)
    assert {family: entry["launches"] / 2 for family, entry in figures["families"].items()} == Counter(names.values())


def test_a_checkout_that_is_not_installed_knows_its_release(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version

    def installed(name: str) -> str:
        if name == "reagent-lite":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    for module in (importlib.metadata, declaring, output_folder):
        monkeypatch.setattr(module, "version", installed)
    backend = CpuBackend(find_environment("cartpole_v1"), {}, "exact")
    assert "reagent-lite 0." in machine.check_versions().found
    for release in (declaring._versions(Processes(1, "cpu"))["reagent-lite"],
                    output_folder.installed_versions()["reagent-lite"],
                    origin(check(EnvironmentConfig, {"env": "cartpole_v1"}), backend.spec, ())["release"]):  # fmt: skip
        assert release.startswith("0.")
