"""Compilation of an environment for a GPU, and checks of its requirements.

    file, constants, math, architecture ──nvcc──► cubin in the cache

The cache key holds sources, flags and architecture; the file name also has nvcc's version. A machine without nvcc uses
a cubin of any version from a cache that another machine has filled.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Literal

import torch

from reagent_lite.errors import KernelBuildError, NoCompilerError, Problem, install
from reagent_lite.sim.cache import cache_folder, find_or_build, make_key
from reagent_lite.sim.compiler import KERNELS
from reagent_lite.sim.kernel_sources import built_from, compilation_unit, include_advice

OLDEST = (7, 5)
_FLAGS = (
    "-std=c++17",
    "-prec-div=true",  # IEEE division and square root, and numbers below 2^-126 as they are: the defaults
    "-prec-sqrt=true",
    "-ftz=false",
    "-w",
    "-diag-error=940",  # a function without return
)
_DESCRIPTION = re.compile(rb'\{"num_actions":[^\0]*')
_CONTRACTION = {"exact": "-fmad=false", "fast": "-fmad=true"}


def find_nvcc() -> Path | None:
    """Returns nvcc from $CUDA_HOME, $CUDA_PATH, the PATH or /usr/local/cuda, in this order, or None."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    candidates = [Path(home) / "bin" / "nvcc" for home in homes if home]
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((path for path in candidates if os.access(path, os.X_OK)), None)


def compiler_flags(math: Literal["exact", "fast"], arch: str) -> tuple[str, ...]:
    """Returns nvcc's flags for language, arithmetic and architecture."""
    return (*_FLAGS, _CONTRACTION[math], f"-arch={arch}")


def build_cubin(
    path: Path,
    parameters: dict[str, float],
    math: Literal["exact", "fast"],
    arch: str,
    form: Literal["cubin", "ptx"] = "cubin",
) -> Path:
    """Returns the cubin of an environment from the cache, compiling it if it is not there.

    Args:
        path: file of the environment.
        parameters: constants of its dynamics to replace.
        math: `exact` gives the same bits as the CPU; `fast` may join a multiplication and an addition.
        arch: architecture of the GPU, such as `sm_90`.
        form: machine code, or the text that the driver compiles.

    Raises:
        KernelBuildError: nvcc refuses the source or the architecture, or there is no nvcc and nothing in the cache.
    """
    unit = compilation_unit(path, parameters)
    flags = compiler_flags(math, arch)
    key = _key(path, parameters, math, arch)
    nvcc = find_nvcc()

    def build(target: Path) -> None:
        if nvcc is None:
            raise NoCompilerError(_no_nvcc())
        source = target.with_suffix(".cu")
        source.write_text(unit, encoding="utf-8")
        command = (str(nvcc), f"-{form}", *flags, f"-I{KERNELS}", f"-I{path.parent}", str(source), "-o", str(target))
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            raise KernelBuildError(_refusal(path, nvcc, arch, (answer.stderr + answer.stdout).strip()))

    return find_or_build(key, _newest_suffix(key, form) if nvcc is None else f".nvcc-{_version(nvcc)}.{form}", build)


def read_description(cubin: Path) -> str:
    """Returns the JSON description of an environment, which its cubin contains as plain text.

    Raises:
        KernelBuildError: the file has no description.
    """
    match = _DESCRIPTION.search(cubin.read_bytes())
    if match is None:
        raise KernelBuildError(Problem(str(cubin), "a compiled environment", "another file", "Delete it and try again"))
    return match[0].decode()


def cuda_problem(
    device: torch.device,
    path: Path | None = None,
    parameters: dict[str, float] | None = None,
    math: Literal["exact", "fast"] = "exact",
) -> str | None:
    """Returns the problem that prevents simulation on a device, or None.

    Args:
        device: the GPU.
        path: an environment; nvcc is not needed if it has already been compiled for this device's architecture.
        parameters: constants of its dynamics to replace.
        math: the arithmetic that it is compiled for, an argument of `build_cubin`.
    """
    problem = driver_problem() or device_problem(device)
    if problem is None and find_nvcc() is None:
        problem = _no_nvcc()
        if path is not None and _files(_key(path, parameters or {}, math, architecture(device))):
            problem = None
    return None if problem is None else str(problem)


def driver_problem() -> Problem | None:
    """Returns which of torch's CUDA build, a GPU and PyCUDA is missing, or None."""
    if torch.version.cuda is None:
        got = f"torch {torch.__version__}, built without CUDA"
        return Problem("simulation on a GPU", "a torch built for CUDA", got, "Install one, or simulate on the CPU")
    if not torch.cuda.is_available():
        advice = "Check nvidia-smi and CUDA_VISIBLE_DEVICES, or simulate on the CPU"
        return Problem("simulation on a GPU", "an NVIDIA GPU with its driver", "none that torch can use", advice)
    if importlib.util.find_spec("pycuda") is None:
        advice = f"With a CUDA toolkit installed, run: {install('cuda')}; or simulate on the CPU"
        return Problem("simulation on a GPU", "the Python package pycuda", "it is not installed", advice)
    return None


def device_problem(device: torch.device) -> Problem | None:
    """Returns the problem of a GPU that is too old, or None."""
    capability = torch.cuda.get_device_capability(device)
    if capability >= OLDEST:
        return None
    return Problem(
        f"simulation on {device} ({torch.cuda.get_device_name(device)})",
        "compute capability {}.{} or newer".format(*OLDEST),
        "{}.{}".format(*capability),
        "Simulate on the CPU",
    )


def architecture(device: torch.device) -> str:
    """Returns a GPU's name for nvcc, such as `sm_90`."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def _key(path: Path, parameters: dict[str, float], math: Literal["exact", "fast"], arch: str) -> str:
    return make_key((*built_from(path, parameters), *compiler_flags(math, arch)))


def _files(key: str, form: str = "cubin") -> list[Path]:
    return sorted(cache_folder().glob(f"{key}-*.{form}"), key=lambda file: file.stat().st_mtime)


def _newest_suffix(key: str, form: str) -> str:
    """Returns the suffix of the newest file of a key and form, whichever nvcc made it."""
    files = _files(key, form)
    return files[-1].name[files[-1].name.index(".") :] if files else f".{form}"


def _version(nvcc: Path) -> str:
    answer = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"\bV(\d+(?:\.\d+)+)", answer)
    if match is None:
        got = answer.strip()[:200] or "no answer"
        raise KernelBuildError(Problem(f"{nvcc} --version", "a version", got, "Reinstall the CUDA toolkit"))
    return match[1]


def _no_nvcc() -> Problem:
    return Problem(
        "simulation on a GPU",
        f"nvcc, or an environment that it compiled before in {cache_folder()}",
        "neither",
        "Install the CUDA toolkit and put its nvcc on the PATH or in CUDA_HOME; or set REAGENT_LITE_CACHE to a folder "
        "that a machine with nvcc and the same kind of GPU filled; or simulate on the CPU",
    )


def _refusal(path: Path, nvcc: Path, arch: str, message: str) -> Problem:
    if "nsupported gpu architecture" in message:
        advice = "Install a CUDA toolkit that knows this GPU, or simulate on the CPU"
        return Problem(str(nvcc), f"a compiler that knows {arch}", f"{message} from nvcc {_version(nvcc)}", advice)
    if "host compiler" in message:
        advice = "nvcc calls the C++ compiler of this machine: install g++, or simulate on the CPU"
        return Problem(str(nvcc), "g++ on the PATH", f"{message}", advice)
    got = f"from nvcc for {arch}:\n{message}\n"
    return Problem(str(path), "an environment that compiles", got, include_advice(path))
