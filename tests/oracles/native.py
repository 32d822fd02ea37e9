"""Kernels compiled for other vectors than this machine's widest, and memory that ends where it should."""

import ctypes
import mmap
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from reagent_lite.models.dense_kernel import UNITS
from reagent_lite.native.compiler import KERNELS, find_compiler

LANES: Final = {4: ("-D__aarch64__",), 8: ("-U__AVX512F__",), 16: ("-D__AVX512F__",)}
"""Flags by the float32 numbers of a vector: NEON four, AVX eight, AVX-512 sixteen; compiled for this processor."""

_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", "-Wno-psabi")


def built(folder: Path, *flags: str) -> ctypes.CDLL:
    """kernels/dense with other flags than the product's."""
    source, library = folder / "dense.cpp", folder / "dense.so"
    source.write_text("".join(f'#include "{KERNELS / "dense" / unit}"\n' for unit in UNITS))
    subprocess.run([*find_compiler().command, *_FLAGS, *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


class Guarded:
    """Memory whose pages before and after may not be touched."""

    def __init__(self, *, at_end: bool) -> None:
        self._at_end = at_end
        self._maps: list[mmap.mmap] = []
        self._protect = ctypes.CDLL(None, use_errno=True).mprotect

    def room(self, count: int, kind: torch.dtype = torch.float32) -> Tensor:
        """`count` numbers that end, or begin, where the pages do."""
        page, each = mmap.PAGESIZE, kind.itemsize
        size = -(-count * each // page) * page
        pages = mmap.mmap(-1, size + 2 * page)
        self._maps.append(pages)
        start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        for wall in (start, start + page + size):
            assert self._protect(ctypes.c_void_p(wall), ctypes.c_size_t(page), 0) == 0
        offset = page + (size - each * count if self._at_end else 0)
        return torch.frombuffer(pages, dtype=kind, count=count, offset=offset)

    def copy(self, values: Tensor) -> Tensor:
        place = self.room(max(values.numel(), 1), values.dtype)[: values.numel()].view(values.shape)
        return place.copy_(values)


def end_of_guarded(module: str, *, at_end: bool) -> subprocess.CompletedProcess[str]:
    """Returns how a process ended that called a test module's `touch_only_what_is_handed_in`."""
    code = f"from {module} import touch_only_what_is_handed_in as run; run(at_end={at_end})"
    return in_process(code)


def in_process(code: str) -> subprocess.CompletedProcess[str]:
    """Returns how a process ended that ran a piece of Python, beside the tests of models."""
    tests = Path(__file__).resolve().parents[1]
    environment = os.environ | {"PYTHONPATH": f"{tests / 'models'}:{tests.parent}:{tests}"}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
