"""C++ for this machine's CPU: which compiler there is, and shared libraries made by it once and found again."""

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from reagent_lite.errors import KernelBuildError, Problem
from reagent_lite.sim.cache import cached, machine, make_key

_CHECKOUT = Path(__file__).resolve().parents[2] / "kernels"
_INSTALLED = Path(sys.prefix).resolve() / "share" / "reagent-lite" / "kernels"
KERNELS = _CHECKOUT if _CHECKOUT.is_dir() else _INSTALLED
"""The folder of all kernel sources."""

_FLAGS = (
    "-std=c++17",
    "-march=native",
    "-fno-math-errno",  # square roots in line; the value is the same
    "-fno-trapping-math",  # nobody reads exception flags: both sides of a choice may be computed; values are the same
    "-fopenmp-simd",  # `omp simd` without libgomp: torch has its own OpenMP, and two in a process fight for the cores
    "-fno-exceptions",
    "-fno-rtti",
    "-fPIC",
    "-shared",
    "-nostdlib",  # nothing of it is used: the same object on any distribution
    "-w",
)
# Loops over an array of the state or over candidates are unrolled whole, or g++ vectorizes nothing around them.
_GNU_FLAGS = ("--param=max-completely-peeled-insns=1000",)


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: to start it, before the flags.
        version: what tells its releases apart.
    """

    command: tuple[str, ...]
    version: str


def find_compiler() -> Compiler:
    """Returns g++, else clang++, else the ziglang wheel's.

    Raises:
        KernelBuildError: there is none.
    """
    for name, flags in (("g++", _GNU_FLAGS), ("clang++", ())):
        path = shutil.which(name)
        if path is not None:
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            if answer.returncode == 0:
                return Compiler((path, *flags), answer.stdout)
    if importlib.util.find_spec("ziglang") is not None:
        return zig_compiler()
    raise KernelBuildError(
        Problem(
            "simulation on the CPU",
            "a C++ compiler",
            "neither g++ nor clang++ on the PATH, nor the Python package ziglang",
            "Install g++, or run: pip install 'reagent-lite[compiler]'",
        )
    )


def zig_compiler() -> Compiler:
    """Returns the C++ compiler inside the ziglang wheel."""
    command = (sys.executable, "-m", "ziglang", "c++", "-fno-sanitize=undefined")
    return Compiler(command, f"ziglang {importlib.metadata.version('ziglang')}")


def build_library(
    unit: str,
    sources: Iterable[str],
    *,
    compiler: Compiler,
    flags: tuple[str, ...],
    folders: Sequence[Path],
    explained: Callable[[str], KernelBuildError],
) -> Path:
    """Returns a shared library for this machine, compiled where there is none of the same making.

    Args:
        unit: source text that the compiler is given.
        sources: every text that decides what the library does; the key of the cache.
        compiler: from find_compiler.
        flags: level of optimization and whatever else differs between libraries.
        folders: to include from.
        explained: makes the error of what the compiler says.

    Raises:
        KernelBuildError: the compiler refuses the source, or the cache cannot be written.
    """
    key = make_key((*sources, *_FLAGS, *flags, *compiler.command[1:], compiler.version, machine()))

    def build(target: Path) -> None:
        source = target.with_suffix(".cpp")
        source.write_text(unit, encoding="utf-8")
        includes = (f"-I{folder}" for folder in folders)
        command = (*compiler.command, *flags, *_FLAGS, *includes, str(source), "-o", str(target))
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            raise explained(answer.stderr)

    return cached(key, ".so", build)
