"""The GPU build as far as it goes without a GPU: what nvcc makes of the sources, and where that is kept."""

import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from reagent_lite.errors import KernelBuildError
from reagent_lite.sim import cuda_build, sources
from reagent_lite.sim.backend import open_backend
from reagent_lite.sim.compiler import KERNELS
from reagent_lite.sim.cpu import CpuBackend
from reagent_lite.sim.cuda import CudaBackend, on_stream
from reagent_lite.sim.cuda_build import build_cubin, compiler_flags, cuda_problem, find_nvcc, read_description
from reagent_lite.sim.sources import compilation_unit, find_environment, known_environments
from reagent_lite.sim.spec import EnvSpec

NVCC = find_nvcc()
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc on this machine")
ENVIRONMENTS = known_environments()
DYNAMICS = "DEVICE float step(State &s, int action, Random &random, bool &terminated) {"
OWN = """
#define NUM_ACTIONS 2
#define OBSERVATION_SIZE 1
#define TIME_LIMIT 10
#define PARAMETERS(P) P(goal, 3.0f)
#define STATE(FIELD, ARRAY) FIELD(float, x)
DECLARE_ENVIRONMENT
DEVICE void reset(State &s, Random &random) { s.x = 0.0f; }
DEVICE void observe(const State &s, float *observation) { observation[0] = s.x; }
DEVICE float step(State &s, int action, Random &random, bool &terminated) {
  s.x += float(action);
  terminated = s.x >= goal;
  return s.x;
}
"""


def architectures() -> list[str]:
    """Of this nvcc, those from Turing to consumer Blackwell."""
    if NVCC is None:
        return []
    answer = subprocess.run([NVCC, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    return sorted((name for name in answer.split() if 75 <= int(name[3:]) <= 120), key=lambda name: int(name[3:]))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("REAGENT_LITE_CACHE", str(folder))
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "my_env.cuh"
    file.write_text(OWN)
    return file


def ptx(environment: Path, math: str, tmp_path: Path) -> tuple[str, Counter[str]]:
    """What nvcc makes of an environment before the assembler: the text, and its instructions by name."""
    source = tmp_path / "unit.cu"
    source.write_text(compilation_unit(environment, {}))
    kept = (flag for flag in compiler_flags(math, "sm_75") if flag != "-w")  # type: ignore[arg-type]
    flags = (*kept, "-Werror=all-warnings")
    folders = [f"-I{KERNELS}", f"-I{environment.parent}"]
    target = tmp_path / "unit.ptx"
    subprocess.run([str(NVCC), "-ptx", *flags, *folders, str(source), "-o", str(target)], check=True)
    text = target.read_text()
    return text, Counter(re.findall(r"^\s+(?:@!?%p\d+\s+)?([a-z][a-z0-9_]*(?:\.[a-z0-9_:]+)*)\s", text, re.MULTILINE))


# -- What nvcc makes of the sources -----------------------------------------------------------------------------------


@needs_nvcc
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_environment_compiles_and_describes_itself_as_on_a_cpu(name: str) -> None:
    path = find_environment(name)
    oldest, newest = (build_cubin(path, {}, "exact", arch) for arch in ("sm_75", "sm_120"))
    assert oldest.read_bytes()[:4] == newest.read_bytes()[:4] == b"\x7fELF"
    assert read_description(oldest) == read_description(newest)
    on_cpu = CpuBackend(path, {}, "exact", optimization="-O0").spec
    numbers = list(on_cpu.parameters.values()), [x for row in on_cpu.action_features for x in row]
    assert EnvSpec.parse(name, read_description(oldest)).measured(*numbers) == on_cpu


@needs_nvcc
def test_an_environment_compiles_for_every_architecture() -> None:
    known = architectures()
    assert {"sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"} <= set(known)
    files = {build_cubin(find_environment("cartpole_v1"), {}, "exact", arch) for arch in known}
    assert len(files) == len(known)


@needs_nvcc
def test_an_environment_needs_no_parameters(own: Path) -> None:
    own.write_text(OWN.replace("#define PARAMETERS(P) P(goal, 3.0f)\n", "").replace("goal", "3.0f"))
    assert '"parameters":[]' in read_description(build_cubin(own, {}, "exact", "sm_90"))


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("math", ["exact", "fast"])
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_environment_compiles_for_every_architecture(name: str, math: str) -> None:
    for arch in architectures():
        build_cubin(find_environment(name), {}, math, arch)  # type: ignore[arg-type]


@needs_nvcc
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_exact_arithmetic_is_that_of_ieee_754(name: str, tmp_path: Path) -> None:
    """PTX, because what ptxas makes of a correctly rounded division holds fused operations and may."""
    _, used = ptx(find_environment(name), "exact", tmp_path)
    assert used["mul.rn.f32"] > 0
    rounded = re.compile(r"(add|sub|mul|div|rcp|sqrt)\.rn\.f32")
    for instruction in used:
        operation, *kinds = instruction.split(".")
        if operation in {"add", "sub", "mul", "div", "rcp", "sqrt"} and "f32" in kinds:
            assert rounded.fullmatch(instruction), instruction
        assert operation not in {"fma", "call", "ex2", "lg2", "sin", "cos", "tanh", "rsqrt"}, instruction
        assert operation != "mad" or "f32" not in kinds, instruction
        assert not {"f64", "f16", "approx", "ftz"} & set(kinds), instruction
        assert operation not in {"atom", "red"} or "f32" not in kinds, instruction


@needs_nvcc
def test_fast_arithmetic_fuses(tmp_path: Path) -> None:
    _, used = ptx(find_environment("cartpole_v1"), "fast", tmp_path)
    assert used["fma.rn.f32"] > 0  # so the test above would see one
    assert used["mul.rn.f32"] == 0


@needs_nvcc
def test_constants_are_folded_in_float32(own: Path, tmp_path: Path) -> None:
    """Each operation is rounded as where it would run; rounded once at the end, this chain has another last bit."""
    number = np.float32(0.1)
    rounded_once = 0.0
    for k in range(1, 40):
        number = number * np.float32(1.1) + np.float32(1 / k)
        rounded_once = (rounded_once or float(np.float32(0.1))) * float(np.float32(1.1)) + float(np.float32(1 / k))
    assert number != np.float32(rounded_once)
    factors = "".join(f"  x = x * 1.1f + {float(np.float32(1 / k))!r}f;\n" for k in range(1, 40))
    chain = f"constexpr float chain() {{\n  float x = 0.1f;\n{factors}  return x;\n}}\nconstexpr float c = chain();\n"
    own.write_text(OWN.replace(DYNAMICS, f"{chain}{DYNAMICS}").replace("return s.x;", "return c;"))
    listing, _ = ptx(own, "exact", tmp_path)
    assert f"0f{number.view(np.uint32):08X}" in listing


# -- Errors -----------------------------------------------------------------------------------------------------------


@needs_nvcc
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (OWN.replace("s.x += float(action);", "s.x += speed;"), r'my_env.cuh\(11\).*"speed" is undefined'),
        (OWN.replace("return s.x;", "return s.x"), r"my_env.cuh\(14\)"),
        (OWN.replace("#define TIME_LIMIT 10\n", ""), "an environment must define TIME_LIMIT"),
        (OWN.replace("FIELD(float, x)", "FIELD(double, x)"), "a state variable is a float, int or unsigned"),
        (OWN.replace(DYNAMICS, DYNAMICS.replace("step", "move")), "an environment must define: DEVICE float step"),
    ],
    ids=["undefined", "syntax", "no limit", "double", "no step"],
)
def test_a_compile_error_gives_file_and_line(own: Path, cache: Path, broken: str, message: str) -> None:
    own.write_text(broken)
    with pytest.raises(KernelBuildError, match=message) as caught:
        build_cubin(own, {}, "exact", "sm_90")
    assert str(caught.value).startswith(f"{own}: expected an environment that compiles, got from nvcc for sm_90:\n")
    assert list(cache.iterdir()) == []  # nothing half built stays


@needs_nvcc
def test_an_unknown_architecture_names_the_toolkit(own: Path) -> None:
    with pytest.raises(
        KernelBuildError, match=r"a compiler that knows sm_70, got .*from nvcc \d+\.\d+.*Install a CUDA"
    ):
        build_cubin(own, {}, "exact", "sm_70")  # CUDA 13 starts at sm_75
    with pytest.raises(KernelBuildError, match="a compiler that knows sm_99"):
        build_cubin(own, {}, "exact", "sm_99")


def test_without_nvcc_and_cache(own: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_build, "find_nvcc", lambda: None)
    with pytest.raises(
        KernelBuildError, match=rf"expected nvcc, or .* in {cache}, got neither. Install the CUDA toolkit"
    ):
        build_cubin(own, {}, "exact", "sm_90")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu(own: Path) -> None:
    problem = cuda_problem(torch.device("cuda"), own)
    assert problem is not None
    assert "simulate on the CPU" in problem
    with pytest.raises(KernelBuildError, match="simulation on a GPU: expected"):
        CudaBackend(own, {}, "exact", torch.device("cuda"))
    with pytest.raises(KernelBuildError, match="simulation on a GPU: expected"):
        open_backend(str(own), backend="cuda", device=torch.device("cuda"), parameters={}, math="exact")
    for device in ("cuda", "cpu"):
        chosen = open_backend(str(own), backend="auto", device=torch.device(device), parameters={}, math="exact")
        assert isinstance(chosen, CpuBackend)


def test_on_a_cpu_the_stream_is_none() -> None:
    with on_stream(torch.device("cpu")) as stream:
        assert stream is None


def test_what_is_missing_is_said_in_order(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda:0")

    def problem() -> str:
        return cuda_problem(device, own) or ""

    monkeypatch.setattr(torch.version, "cuda", None)
    assert "expected a torch built for CUDA" in problem()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "expected an NVIDIA GPU with its driver" in problem()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda_build.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'reagent-lite[cuda]'" in problem()
    monkeypatch.setattr(cuda_build.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla P100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 0))
    assert "cuda:0 (Tesla P100): expected compute capability 7.5 or newer, got 6.0" in problem()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    if NVCC is not None:
        build_cubin(own, {}, "exact", "sm_90")
        assert problem() == ""
    monkeypatch.setattr(cuda_build, "find_nvcc", lambda: None)
    assert problem() == "" if NVCC is not None else "expected nvcc" in problem()  # the cubin is in the cache
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "expected nvcc, or an environment that it compiled before" in problem()


# -- Cache ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The commands that compile, as they come."""
    commands: list[str] = []
    run = subprocess.run

    def counted(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if "-cubin" in command:
            commands.append(" ".join(command))
        return run(command, **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(cuda_build.subprocess, "run", counted)
    return commands


@needs_nvcc
def test_what_decides_the_code_decides_the_file(own: Path, runs: list[str], tmp_path: Path) -> None:
    cartpole = find_environment("cartpole_v1")
    files = [
        build_cubin(cartpole, {}, "exact", "sm_90"),
        build_cubin(cartpole, {}, "fast", "sm_90"),
        build_cubin(cartpole, {}, "exact", "sm_80"),
        build_cubin(cartpole, {"gravity": 1.62}, "exact", "sm_90"),
        build_cubin(own, {}, "exact", "sm_90"),
    ]
    own.write_text(OWN.replace("s.x >= goal", "s.x > goal"))
    files.append(build_cubin(own, {}, "exact", "sm_90"))
    assert len(set(files)) == len(runs) == 6
    assert build_cubin(own, {}, "exact", "sm_90") == files[-1]
    assert len(runs) == 6  # nothing is compiled a second time
    elsewhere = tmp_path / "elsewhere" / own.name
    elsewhere.parent.mkdir()
    elsewhere.write_text(own.read_text())
    assert build_cubin(elsewhere, {}, "exact", "sm_90") == files[-1]  # where it lies does not


@needs_nvcc
def test_a_cache_serves_another_checkout(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = [build_cubin(path, {}, "exact", "sm_90") for path in (own, find_environment("cartpole_v1"))]
    moved = tmp_path / "installed" / "kernels"
    shutil.copytree(KERNELS, moved)
    monkeypatch.setattr(sources, "KERNELS", moved)
    monkeypatch.setattr(cuda_build, "KERNELS", moved)
    monkeypatch.setattr(cuda_build, "find_nvcc", lambda: None)
    assert [build_cubin(path, {}, "exact", "sm_90") for path in (own, find_environment("cartpole_v1"))] == here


@needs_nvcc
def test_without_nvcc_a_cubin_of_any_nvcc_serves(own: Path, runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    filled = build_cubin(own, {}, "exact", "sm_90")
    older = filled.with_name(re.sub(r"nvcc-[\d.]+\.cubin$", "nvcc-12.4.131.cubin", filled.name))
    os.replace(filled, older)
    with monkeypatch.context() as gone:
        gone.setattr(cuda_build, "find_nvcc", lambda: None)
        assert build_cubin(own, {}, "exact", "sm_90") == older
        with pytest.raises(KernelBuildError, match="got neither"):
            build_cubin(own, {}, "exact", "sm_80")
    assert build_cubin(own, {}, "exact", "sm_90") != older  # where there is one, its own
    assert len(runs) == 2


@needs_nvcc
def test_an_nvcc_in_cuda_home_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "toolkit" / "bin" / "nvcc"
    fake.parent.mkdir(parents=True)
    fake.write_text("#!/bin/sh\necho no version here\n")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert find_nvcc() == NVCC  # it cannot be run
    fake.chmod(0o755)
    assert find_nvcc() == fake
    with pytest.raises(KernelBuildError, match="expected a version, got no version here"):
        build_cubin(find_environment("cartpole_v1"), {}, "exact", "sm_90")
