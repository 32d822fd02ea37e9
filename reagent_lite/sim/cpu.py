"""Environments on the CPU: compiled, called through ctypes, sliced over threads."""

import ctypes
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Literal, get_args

import torch

from reagent_lite.errors import KernelBuildError, Problem
from reagent_lite.sim.cache import find_or_build, machine, make_key
from reagent_lite.sim.calls import ActCall, Call, Kernel
from reagent_lite.sim.compiler import KERNELS, Compiler, find_compiler
from reagent_lite.sim.kernel_sources import MACHINERY, built_from, compilation_unit, include_advice, require_parameters
from reagent_lite.sim.spec import EnvSpec

# Warnings, and lines that compilers print between errors.
_CONTEXT = re.compile(
    r"^(?:In file included|\S+: (?:In|At) |\S.*?:\d+:\d+: warning: |cc1plus: |\d+ (?:warning|error)s? )", re.MULTILINE
)
_MOST_ERRORS = 5
_FLAGS = (
    "-std=c++17",
    "-march=native",
    "-fno-math-errno",  # inlines square roots; the values are the same
    "-fno-trapping-math",  # exception flags are not read: both branches may be computed; the values are the same
    "-fopenmp-simd",  # `omp simd` without libgomp: torch has its own OpenMP, and two in a process compete for cores
    "-fno-exceptions",
    "-fno-rtti",
    "-fPIC",
    "-shared",
    "-nostdlib",  # the standard library is not used: the same object on any distribution
    "-Werror=return-type",
    "-Werror=double-promotion",  # refuses a literal without `f`
)
_CONTRACTION = {"exact": "-ffp-contract=off", "fast": "-ffp-contract=fast"}
# With fewer words of state and observation per thread, a thread costs more (about 50 us) than it saves.
_WORDS_PER_SLICE = 262144
_ALIGNMENT = 512

_Entry = Callable[[int, int, int], None]


class CpuBackend:
    """An environment compiled for this machine's CPU.

    Attributes:
        spec: description of the environment.
        device: the CPU.
    """

    def __init__(
        self,
        path: Path,
        parameters: dict[str, float],
        math: Literal["exact", "fast"],
        *,
        threads: int | None = None,
        optimization: str = "-O3",
        compiler: Compiler | None = None,
        cache: Path | None = None,
    ) -> None:
        """Compiles the environment, or loads it from the cache.

        Args:
            path: file of the environment.
            parameters: constants of its dynamics to replace.
            math: `exact` gives the same bits everywhere; `fast` may join a multiplication and an addition.
            threads: number of slices computed in parallel; None means as many as torch uses.
            optimization: optimization level of the compiler.
            compiler: None means the result of `find_compiler`.
            cache: folder for compiled code; None means the user's cache.

        Raises:
            KernelBuildError: no compiler, or it refuses the source; the error contains its message.
            SimulationError: the environment does not have a given parameter.
        """
        self.device = torch.device("cpu")
        flags = (optimization, _CONTRACTION[math])
        library = _build(path, parameters, flags, compiler or find_compiler(), cache)
        self._library = ctypes.CDLL(str(library))
        self._entries = {kernel: self._entry(kernel) for kernel in get_args(Kernel)}
        self.spec = self._read_spec(path.stem)
        require_parameters(parameters, self.spec)
        self._threads = threads or torch.get_num_threads()
        words = self.spec.state_words + self.spec.agents * self.spec.observation_size
        self._slice = max(1, _WORDS_PER_SLICE // words)
        self._pool = ThreadPoolExecutor(self._threads - 1, "simulation") if self._threads > 1 else None

    def launch(self, kernel: Kernel, call: Call | ActCall) -> None:
        """Runs one kernel over all environments of a call."""
        entry = self._entries[kernel]
        num = call.num
        address = ctypes.addressof(call)
        if self._pool is None or num < 2 * self._slice:
            entry(address, 0, num)
            return
        slices = min(self._threads, num // self._slice)
        aligned = -(-_ALIGNMENT // self.spec.agents)
        size = -(-num // (slices * aligned)) * aligned
        waiting = [self._pool.submit(entry, address, begin, min(num, begin + size)) for begin in range(size, num, size)]
        entry(address, 0, min(num, size))
        wait(waiting)

    def _entry(self, name: str) -> _Entry:
        function = self._library[name]
        function.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
        function.restype = None
        return function

    def _read_spec(self, name: str) -> EnvSpec:
        text = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(self._library, "env_description")))
        spec = EnvSpec.parse(name, text.decode())
        parameters = (ctypes.c_float * max(1, len(spec.parameters)))()
        features = torch.zeros(spec.num_actions, spec.action_feature_size)
        types = (ctypes.c_int * spec.agents)()
        observed = ctypes.c_int()
        self._library.env_describe(parameters, ctypes.c_void_p(features.data_ptr()), types, ctypes.byref(observed))
        numbers = list(parameters)[: len(spec.parameters)]
        return spec.with_measurements(numbers, features, list(types), observed.value)


def _build(
    path: Path, parameters: dict[str, float], flags: tuple[str, ...], compiler: Compiler, folder: Path | None
) -> Path:
    key = make_key((*built_from(path, parameters), *_FLAGS, *flags, *compiler.command[1:], compiler.version, machine()))

    def build(target: Path) -> None:
        source = target.with_suffix(".cpp")
        source.write_text(compilation_unit(path, parameters), encoding="utf-8")
        includes = (f"-I{KERNELS}", f"-I{path.parent}")
        command = (*compiler.command, *flags, *_FLAGS, *includes, str(source), "-o", str(target))
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            got = f"from the compiler:\n{_relevant_errors(answer.stderr)}\n"
            raise KernelBuildError(Problem(str(path), "an environment that compiles", got, include_advice(path)))

    return find_or_build(key, ".so", build, folder)


def _relevant_errors(message: str) -> str:
    """Returns the errors about missing parts of the environment, else those outside our headers, else all of them."""
    errors = [
        _CONTEXT.split(block)[0].rstrip()
        for block in re.split(r"^(?=\S.*?:\d+:\d+: (?:fatal )?error: )", message, flags=re.MULTILINE)[1:]
    ]
    machinery = tuple(f"{KERNELS}/{part}" for part in MACHINERY)
    missing = [error for error in errors if re.match(r".*(an environment |a state variable is )", error)]
    in_environment = [error for error in errors if not error.startswith(machinery)]
    shown = missing or in_environment or [message.strip()]
    more = [f"and {len(shown) - _MOST_ERRORS} more errors"] if len(shown) > _MOST_ERRORS else []
    return "\n".join(shown[:_MOST_ERRORS] + more)
