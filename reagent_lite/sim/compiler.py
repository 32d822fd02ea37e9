"""The folder of kernel sources, and the C++ compiler of this machine."""

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from dataclasses import dataclass

from reagent_lite.errors import NoCompilerError, Problem, install
from reagent_lite.shipped import find_shipped

KERNELS = find_shipped("kernels")
"""The folder of all kernel sources."""

# Fully unrolls loops over an array of the state or over candidates; otherwise g++ does not vectorize the loop around.
_GNU_FLAGS = ("--param=max-completely-peeled-insns=1000",)


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: the command, without flags.
        version: output of `--version`, part of the cache key.
    """

    command: tuple[str, ...]
    version: str


def find_compiler() -> Compiler:
    """Returns g++, else clang++, else the ziglang wheel's.

    Raises:
        NoCompilerError: there is none.
    """
    for name, flags in (("g++", _GNU_FLAGS), ("clang++", ())):
        path = shutil.which(name)
        if path is not None:
            answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
            if answer.returncode == 0:
                return Compiler((path, *flags), answer.stdout)
    if importlib.util.find_spec("ziglang") is not None:
        return zig_compiler()
    raise NoCompilerError(
        Problem(
            "simulation on the CPU",
            "a C++ compiler",
            "neither g++ nor clang++ on the PATH, nor the Python package ziglang",
            f"Install g++, or run: {install('compiler')}",
        )
    )


def zig_compiler() -> Compiler:
    """Returns the C++ compiler inside the ziglang wheel."""
    command = (sys.executable, "-m", "ziglang", "c++", "-fno-sanitize=undefined")
    return Compiler(command, f"ziglang {importlib.metadata.version('ziglang')}")
