"""Runs PTX on the CPU, a thread after another, and holds every load and store to the memory that a launch was given.

What this does not show: what ptxas and the GPU make of the PTX, threads that run at once, streams, the driver.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from oracles.ptx import Module, read, translate
from torch import Tensor

from reagent_lite.sim.cache import find_or_build, make_key
from reagent_lite.sim.compiler import find_compiler

# No contraction of a * b + c: `fma` is written where PTX has one. Integers wrap around, as those of PTX do.
# -O1 takes up to three times as long to compile and saves less.
FLAGS = ("-std=c++17", "-Og", "-ffp-contract=off", "-fno-math-errno", "-fwrapv", "-fPIC", "-shared", "-w")
HEADER = Path(__file__).with_name("ptx_machine.h")
REFUSALS = {1: "reads", 2: "writes"}


class IllegalAccess(Exception):  # noqa: N818
    """A thread touched memory that its launch was not given."""


@dataclass(frozen=True, kw_only=True)
class Region:
    """Memory that kernels may touch."""

    name: str
    address: int
    size: int
    writable: bool = True


class _Region(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("begin", "end", "writable")]


class _Launch(ctypes.Structure):
    _words = ("num_regions", "grid", "block", "backwards", "refusal", "line", "ctaid", "tid", "size", "reserved")
    _fields_ = [
        ("regions", ctypes.POINTER(_Region)),
        *((name, ctypes.c_uint32) for name in _words),
        ("address", ctypes.c_uint64),
    ]


def regions(tensors: Mapping[str, Tensor]) -> list[Region]:
    """The memory of tensors that lie whole in it."""
    return [Region(name=name, address=tensor.data_ptr(), size=tensor.nbytes) for name, tensor in tensors.items()]


class Machine:
    """A PTX text, ready to run.

    Attributes:
        module: what the text declares.
    """

    def __init__(self, text: str) -> None:
        """Translates and compiles it, as the cache of compiled environments has it; PtxError names what is unknown."""
        self.module: Module = read(text)
        self._lines = text.split("\n")
        source = translate(self.module)
        command = (*find_compiler().command, *FLAGS, f"-I{HEADER.parent}", "-x", "c++", "-", "-o")
        key = make_key((source, HEADER.read_text(), *command))

        def build(target: Path) -> None:
            subprocess.run((*command, str(target)), input=source, text=True, check=True)

        self._library = ctypes.CDLL(str(find_or_build(key, ".so", build)))
        self._variables = [
            Region(name=name, address=ctypes.addressof(ctypes.c_char.in_dll(self._library, name)), size=len(content))
            for name, (_, content) in self.module.variables.items()
        ]

    def launch(
        self,
        name: str,
        shape: tuple[int, int],
        arguments: bytes,
        memory: Sequence[Region],
        *,
        backwards: bool = False,
    ) -> None:
        """Runs a kernel in a grid of `shape` = (blocks, threads of a block), all one-dimensional.

        Raises:
            IllegalAccess: a thread read or wrote outside of `memory`, or at an address that is no multiple of the size.
        """
        expected = self.module.entries[name].param.end
        if len(arguments) != expected:
            raise ValueError(f"{name} takes {expected} bytes, not {len(arguments)}")
        known = [*memory, *self._variables]
        table = (_Region * len(known))(*((r.address, r.address + r.size, r.writable) for r in known))
        block = (ctypes.c_uint64 * (-(-len(arguments) // 8)))()  # aligned, as a GPU's are
        ctypes.memmove(block, arguments, len(arguments))
        launch = _Launch(regions=table, num_regions=len(known), grid=shape[0], block=shape[1], backwards=int(backwards))
        if self._library[f"launch_{name}"](block, ctypes.byref(launch)):
            raise IllegalAccess(self._complaint(name, launch, known))

    def _complaint(self, name: str, launch: _Launch, known: list[Region]) -> str:
        line = " ".join(self._lines[launch.line - 1].split())
        thread = f"{name}, block {launch.ctaid}, thread {launch.tid}, line {launch.line} `{line}`"
        nearest = max(
            [region for region in known if region.address <= launch.address],
            key=lambda region: region.address,
            default=None,
        )
        place = (
            f"byte {launch.address - nearest.address} of {nearest.name}, which has {nearest.size}"
            if nearest
            else f"address {launch.address:#x}"
        )
        misaligned = ", a misaligned address" if launch.address % launch.size else ""
        return f"{thread} {REFUSALS[launch.refusal]} {launch.size} bytes at {place}{misaligned}"
