"""The GPU build as far as it goes without a GPU: what nvcc makes of the sources, and where that is kept."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from sim.conftest import COUNTER, written

from reagent_lite.config.environment import EnvironmentConfig
from reagent_lite.errors import KernelBuildError
from reagent_lite.sim import cuda_build, kernel_sources
from reagent_lite.sim.backend import open_backend
from reagent_lite.sim.compiler import KERNELS
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.cuda_build import build_cubin, compiler_flags, cuda_problem, find_nvcc, read_description
from reagent_lite.sim.kernel_sources import compilation_unit, find_environment, known_environments

NVCC = find_nvcc()
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine")


pytestmark = pytest.mark.usefixtures("empty_cache")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return written(tmp_path, COUNTER, "counter.cuh")


# -- What nvcc makes of the sources -----------------------------------------------------------------------------------


@needs_nvcc
@pytest.mark.parametrize(
    ("name", "math", "every"),
    [
        ("cartpole_v1", "exact", False),
        *(
            pytest.param(name, math, True, marks=pytest.mark.slow)
            for name in known_environments()
            for math in ("exact", "fast")
        ),
    ],
)
def test_an_environment_compiles_for_every_architecture(name: str, math: Literal["exact", "fast"], every: bool) -> None:
    """Or for the oldest and the newest, which need not be slow."""
    answer = subprocess.check_output([str(NVCC), "--list-gpu-code"], text=True)
    known = {arch for arch in answer.split() if 75 <= int(arch[3:]) <= 120}  # Turing to consumer Blackwell
    assert {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"} <= known
    chosen = known if every else {"sm_75", "sm_120"}
    files = {build_cubin(find_environment(name), {}, math, arch) for arch in chosen}
    assert (len(files), len(set(map(read_description, files)))) == (len(chosen), 1)


@needs_nvcc
def test_constants_are_folded_in_float32(own: Path, tmp_path: Path) -> None:
    """Each operation is rounded as where it would run; rounded once at the end, this chain has another last bit."""
    number = np.float32(0.1)
    rounded_once = float(number)
    for k in range(1, 40):
        number = number * np.float32(1.1) + np.float32(1 / k)
        rounded_once = rounded_once * float(np.float32(1.1)) + float(np.float32(1 / k))
    assert number != np.float32(rounded_once)
    factors = "".join(f"  x = x * 1.1f + {float(np.float32(1 / k))!r}f;\n" for k in range(1, 40))
    chain = f"constexpr float chain() {{\n  float x = 0.1f;\n{factors}  return x;\n}}\nconstexpr float c = chain();\n"
    own.write_text(COUNTER.replace("DEVICE float step", f"{chain}DEVICE float step").replace("worth * ", "c + 0.0f * "))
    (tmp_path / "unit.cu").write_text(compilation_unit(own, {}))
    flags = [flag for flag in compiler_flags("exact", "sm_75") if flag != "-w"] + ["-Werror=all-warnings"]
    subprocess.run([str(NVCC), "-ptx", *flags, f"-I{KERNELS}", "unit.cu"], check=True, cwd=tmp_path)
    assert f"0f{number.view(np.uint32):08X}" in (tmp_path / "unit.ptx").read_text()


# -- Errors -----------------------------------------------------------------------------------------------------------


@needs_nvcc
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("s.past[0] = float(action);", "s.past[0] = speed;", r'counter.cuh\(19\).*"speed" is undefined'),
        ("#define TIME_LIMIT 100", "", "an environment must define TIME_LIMIT"),
        ("return worth", "worth", "missing return statement"),
    ],
)
def test_a_compile_error_gives_file_and_line(own: Path, empty_cache: Path, old: str, new: str, message: str) -> None:
    own.write_text(COUNTER.replace(old, new))
    with pytest.raises(KernelBuildError, match=message) as caught:
        build_cubin(own, {}, "exact", "sm_90")
    assert str(caught.value).startswith(f"{own}: expected an environment that compiles, got from nvcc for sm_90:\n")
    assert not list(empty_cache.iterdir())  # nothing half built stays


@needs_nvcc
def test_an_unknown_architecture_names_the_toolkit(own: Path) -> None:
    with pytest.raises(KernelBuildError, match=r"knows sm_70, got .*from nvcc \d+\.\d+"):
        build_cubin(own, {}, "exact", "sm_70")  # CUDA 13 starts at sm_75


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu(own: Path) -> None:
    assert "simulate on the CPU" in cuda_problem(torch.device("cuda"), own)
    with pytest.raises(KernelBuildError, match="simulation on a GPU: expected"):
        open_backend(EnvironmentConfig(env=str(own), backend="cuda"), torch.device("cuda"))
    for device in ("cuda", "cpu"):
        assert isinstance(open_backend(EnvironmentConfig(env=str(own)), torch.device(device)), CpuBackend)


def test_what_is_missing_is_said_in_order(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = [
        ("torch.version.cuda", None, "13.0", "expected a torch built for CUDA"),
        ("torch.cuda.is_available", lambda: False, lambda: True, "expected an NVIDIA GPU with its driver"),
        ("importlib.util.find_spec", lambda name: None, lambda name: object(), "pip install 'reagent-lite[cuda]'"),
        ("torch.cuda.get_device_capability", lambda device: (6, 0), lambda device: (9, 0),
         "compute capability 7.5 or newer, got 6.0"),
        ("reagent_lite.sim.cuda_build.find_nvcc", lambda: None, lambda: NVCC,
         "expected nvcc, or an environment that it compiled"),
    ]  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla P100")
    for name, missing, present, words in problems:
        monkeypatch.setattr(name, missing)
        assert words in cuda_problem(torch.device("cuda:0"), own)
        monkeypatch.setattr(name, present)
    if NVCC is not None:
        build_cubin(own, {}, "exact", "sm_90")
        monkeypatch.setattr(cuda_build, "find_nvcc", lambda: None)
        assert cuda_problem(torch.device("cuda:0"), own) is None  # the cubin is in the cache


# -- Cache ------------------------------------------------------------------------------------------------------------


@needs_nvcc
def test_what_decides_the_code_decides_the_file(own: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_build, "find_or_build", lambda key, suffix, build: key)  # its file, not to compile any
    cartpole = find_environment("cartpole_v1")
    files = {
        build_cubin(cartpole, {}, "exact", "sm_90"),
        build_cubin(cartpole, {}, "fast", "sm_90"),
        build_cubin(cartpole, {}, "exact", "sm_80"),
        build_cubin(cartpole, {"gravity": 1.62}, "exact", "sm_90"),
        build_cubin(own, {}, "exact", "sm_90"),
    }
    own.write_text(COUNTER.replace(">= int(goal)", "> int(goal)"))
    changed = build_cubin(own, {}, "exact", "sm_90")
    assert len({*files, changed}) == 6
    moved = shutil.copytree(KERNELS, tmp_path / "installed" / "kernels")
    elsewhere = shutil.copy(own, tmp_path / "installed")
    monkeypatch.setattr(kernel_sources, "KERNELS", moved)
    monkeypatch.setattr(cuda_build, "KERNELS", moved)
    # where it lies does not, nor where the kernels lie
    assert build_cubin(Path(elsewhere), {}, "exact", "sm_90") == build_cubin(own, {}, "exact", "sm_90") == changed
    assert build_cubin(find_environment("cartpole_v1"), {}, "exact", "sm_90") in files


@needs_nvcc
def test_without_nvcc_a_cubin_of_any_nvcc_serves(own: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled = build_cubin(own, {}, "exact", "sm_90")
    older = filled.rename(filled.with_name(re.sub(r"nvcc-[\d.]+\.cubin$", "nvcc-12.4.131.cubin", filled.name)))
    with monkeypatch.context() as gone:
        gone.setattr(cuda_build, "find_nvcc", lambda: None)
        assert build_cubin(own, {}, "exact", "sm_90") == older
        with pytest.raises(KernelBuildError, match=f"nvcc, or .* in {empty_cache}, got neither"):
            build_cubin(own, {}, "exact", "sm_80")
    assert build_cubin(own, {}, "exact", "sm_90") == filled  # where there is one, its own


@needs_nvcc
def test_an_nvcc_in_cuda_home_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = written(tmp_path, "#!/bin/sh\necho no version here\n", "toolkit/bin/nvcc")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert find_nvcc() == NVCC  # it cannot be run
    fake.chmod(0o755)
    assert find_nvcc() == fake
    with pytest.raises(KernelBuildError, match="got no version here"):
        build_cubin(find_environment("cartpole_v1"), {}, "exact", "sm_90")
