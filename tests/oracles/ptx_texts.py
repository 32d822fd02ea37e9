"""Small PTX texts, to be filled with instructions, and their launch."""

from __future__ import annotations

import struct

from oracles.ptx_machine import Machine, regions
from torch import Tensor

HEADER = ".version 9.0\n.target sm_75\n.address_size 64\n"
REGISTERS = """{
	.reg .pred 	%p<10>;
	.reg .b16 	%rs<10>;
	.reg .b32 	%r<10>;
	.reg .f32 	%f<10>;
	.reg .b64 	%rd<20>;
"""


def entry(name: str, body: str) -> str:
    """A kernel that is given two addresses, in %rd10 and %rd11."""
    return f"""
.visible .entry {name}(
	.param .u64 {name}_0,
	.param .u64 {name}_1
)
{REGISTERS}
	ld.param.u64 	%rd10, [{name}_0];
	ld.param.u64 	%rd11, [{name}_1];
{body}
	ret;
}}
"""


def launch(machine: Machine, name: str, first: Tensor, second: Tensor, shape: tuple[int, int] = (1, 1)) -> None:
    arguments = struct.pack("PP", first.data_ptr(), second.data_ptr())
    machine.launch(name, shape, arguments, regions({"first": first, "second": second}))
