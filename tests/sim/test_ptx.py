"""The executor of PTX against values by hand, from the text of NVIDIA's "Parallel Thread Execution ISA" 9.0, 9.7.

Every other test of what nvcc makes of our kernels rests on it (test_cuda_code.py).
"""

import struct
from itertools import starmap

import numpy as np
import pytest
import torch
from oracles.ptx import read, translate
from oracles.ptx_instructions import PtxError
from oracles.ptx_machine import IllegalAccess, Machine, Region, regions

NAN, ODD_NAN, INFINITE, LEAST = 0x7FFFFFFF, 0xFFC00001, 0x7F800000, 0x80000000
ALL, MOST, ALL64 = 2**32 - 1, 2**31 - 1, 2**64 - 1

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


def f(x: float) -> int:
    """The bits of a float."""
    return int(np.float32(x).view(np.uint32))


# An instruction reads what `inputs` put into registers 1, 2, 3, 4 of every kind, and writes register 5 of some kind.
CASES: list[tuple[str, tuple[int, ...], int]] = [
    # Shifts clamp at the width; signs fill.
    ("shl.b32 %r5, %r1, %r2", (1, 31), 2**31),
    ("shl.b32 %r5, %r1, %r2", (1, 32), 0),
    ("shl.b64 %rd5, %rd1, %r2", (1, 64), 0),
    ("shl.b16 %rs5, %rs1, %r2", (3, 15), 0x8000),
    ("shr.u32 %r5, %r1, %r2", (2**31, 31), 1),
    ("shr.u32 %r5, %r1, 32", (ALL,), 0),
    ("shr.s32 %r5, %r1, %r2", (2**31, 32), ALL),
    ("shr.s32 %r5, %r1, %r2", (MOST, ALL), 0),
    ("shr.u64 %rd5, %rd1, 32", (0x123456789,), 1),
    # Integers wrap around.
    ("add.s32 %r5, %r1, %r2", (MOST, 1), 2**31),
    ("add.s64 %rd5, %rd1, -1", (0,), ALL64),
    ("mul.lo.s32 %r5, %r1, %r2", (0x10001, 0x10001), 0x00020001),
    ("mul.lo.s16 %rs5, %rs1, %rs2", (0x8001, 3), 0x8003),
    ("mul.hi.u32 %r5, %r1, %r2", (ALL, ALL), ALL - 1),  # (2^32 - 1)^2 = 2^64 - 2^33 + 1
    ("mul.hi.s32 %r5, %r1, %r2", (ALL, ALL), 0),
    ("mul.wide.u32 %rd5, %r1, -766435501", (1,), 0xD2511F53),  # as nvcc writes Philox's factor
    ("mul.wide.s32 %rd5, %r1, 2", (ALL,), -2 % 2**64),
    ("mul.wide.u16 %r5, %rs1, %rs2", (0xFFFF, 0xFFFF), 0xFFFE0001),
    ("mad.lo.s32 %r5, %r1, %r2, %r3", (3, 5, ALL), 14),
    ("max.u32 %r5, %r1, %r2", (1, ALL), ALL),
    ("min.s32 %r5, %r1, %r2", (1, ALL), ALL),
    ("neg.s32 %r5, %r1", (5,), -5 % 2**32),
    # Bits.
    ("and.b32 %r5, %r1, %r2", (0b1100, 0b1010), 0b1000),
    ("xor.b32 %r5, %r1, -1", (5,), ALL - 5),
    ("not.b32 %r5, %r1", (0,), ALL),
    ("bfi.b32 %r5, %r1, %r2, 4, 8", (0xFF, 0), 0xFF0),
    ("bfi.b32 %r5, %r1, %r2, 28, 8", (0xFF, 1), 0xF0000001),
    # Floats are rounded to the nearest, ties to even, once; what underflows stays.
    ("add.rn.f32 %f5, %f1, %f2", (f(1 + 2**-23), f(2**-24)), f(1 + 2**-22)),
    ("add.f32 %f5, %f1, 0fBF800000", (f(1),), 0),
    ("mul.rn.f32 %f5, %f1, %f2", (f(2**-100), f(2**-40)), 1 << 9),  # 2^-140 = 2^9 * 2^-149
    ("fma.rn.f32 %f5, %f1, %f2, %f3", (f(1 + 2**-12), f(1 + 2**-12), f(-1 - 2**-11)), f(2**-24)),
    ("div.rn.f32 %f5, %f1, %f2", (f(1), f(3)), 0x3EAAAAAB),
    ("div.rn.f32 %f5, %f1, %f2", (f(1), f(0)), INFINITE),
    ("rcp.rn.f32 %f5, %f1", (f(-0.0),), INFINITE | LEAST),
    ("sqrt.rn.f32 %f5, %f1", (f(2),), 0x3FB504F3),
    ("sqrt.rn.f32 %f5, %f1", (f(-1),), NAN),
    ("sub.rn.f32 %f5, %f1, %f2", (INFINITE, INFINITE), NAN),
    ("add.rn.f32 %f5, %f1, %f2", (f(1), ODD_NAN), NAN),
    ("neg.f32 %f5, %f1", (f(0),), f(-0.0)),
    ("copysign.f32 %f5, %f1, %f2", (f(-1), f(3)), f(-3)),
    ("copysign.f32 %f5, %f1, %f2", (f(1), f(-3)), f(3)),
    # A number is more than a NaN, +0 more than -0.
    ("max.f32 %f5, %f1, %f2", (ODD_NAN, f(1)), f(1)),
    ("max.f32 %f5, %f1, %f2", (ODD_NAN, ODD_NAN), NAN),
    ("max.f32 %f5, %f1, %f2", (f(-0.0), f(0)), f(0)),
    # Comparisons: ordered ones are false with a NaN, also `ne`; those that end in u are true.
    ("setp.geu.f32 %p5, %f1, %f2", (f(1), NAN), 1),
    ("setp.lt.f32 %p5, %f1, %f2", (f(1), NAN), 0),
    ("setp.ne.f32 %p5, %f1, %f2", (f(1), NAN), 0),
    ("setp.neu.f32 %p5, %f1, %f2", (f(1), NAN), 1),
    ("setp.nan.f32 %p5, %f1, %f2", (f(1), NAN), 1),
    ("setp.eq.f32 %p5, %f1, %f2", (f(0), f(-0.0)), 1),
    ("setp.lt.s32 %p5, %r1, 0", (ALL,), 1),
    ("setp.lt.u32 %p5, %r1, 0", (ALL,), 0),
    ("setp.lt.u16 %p5, %rs1, 1", (0xFFFF,), 0),
    ("setp.eq.s16 %p5, %rs1, -1", (0xFFFF,), 1),
    # Conversions: saturation, NaN, rounding, and which bits are read.
    ("cvt.rzi.s32.f32 %r5, %f1", (f(-2.9),), -2 % 2**32),
    ("cvt.rzi.s32.f32 %r5, %f1", (f(3e9),), MOST),
    ("cvt.rzi.s32.f32 %r5, %f1", (f(-3e9),), 2**31),
    ("cvt.rzi.s32.f32 %r5, %f1", (NAN,), 0),
    ("cvt.rmi.f32.f32 %f5, %f1", (f(-0.5),), f(-1)),
    ("cvt.rn.f32.s32 %f5, %r1", (MOST,), f(2.0**31)),
    ("cvt.rn.f32.s32 %f5, %r1", (2**24 + 1,), f(2.0**24)),
    ("cvt.rn.f32.u32 %f5, %r1", (ALL,), f(2.0**32)),
    ("cvt.s64.s32 %rd5, %r1", (ALL,), ALL64),
    ("cvt.u32.u64 %r5, %rd1", (0x123456789,), 0x23456789),
    ("cvt.s32.s8 %r5, %r1", (0x1FF,), ALL),
    ("cvt.u32.u16 %r5, %rs1", (0xFFFF,), 0xFFFF),
    # Moves and choices.
    ("mov.b32 %f5, %r1", (NAN - 1,), NAN - 1),
    ("mov.f32 %f5, 0f3F800000", (), f(1)),
    ("selp.b32 %r5, %r1, %r2, %p1", (1, 2), 1),  # %p1 holds, %p2 does not
    ("selp.b16 %rs5, 2, %rs1, %p2", (9,), 9),
    ("and.pred %p5, %p1, %p2", (), 0),
    ("or.pred %p5, %p1, %p2", (), 1),
    ("not.pred %p5, %p2", (), 1),
]  # fmt: skip
KINDS = {"%rs": "b16", "%rd": "b64", "%r": "b32", "%f": "b32"}


def case(k: int) -> str:
    """Puts the inputs into registers of every kind, and stores what the instruction wrote."""
    instruction, inputs, _ = CASES[k]
    lines = ["setp.eq.s32 %p1, 0, 0;", "setp.ne.s32 %p2, 0, 0;"]
    lines += [f"ld.global.{kind} {register}{j}, [%rd10+{8 * j}];" for j in range(1, len(inputs) + 1)
              for register, kind in KINDS.items()]  # fmt: skip
    lines += [f"{instruction};", "selp.u32 %r5, 1, 0, %p5;" if " %p5," in instruction else ""]
    register = instruction.split()[1].rstrip(",")
    kind = KINDS.get(register[:-1])  # none of a predicate
    lines.append(f"st.global.{kind or 'b32'} [%rd11], {register if kind else '%r5'};")
    return entry(f"case_{k}", "\n".join(lines))


@pytest.fixture(scope="module")
def cases() -> Machine:
    return Machine(HEADER + "".join(map(case, range(len(CASES)))))


@pytest.mark.parametrize(
    "k", range(len(CASES)), ids=[text.split(" ")[0] + f"-{k}" for k, (text, *_) in enumerate(CASES)]
)
def test_an_instruction_at_its_edges(cases: Machine, k: int) -> None:
    _, inputs, expected = CASES[k]
    given = torch.from_numpy(np.array([0, *inputs, *[0] * (4 - len(inputs))], np.uint64).view(np.int64))
    result = torch.zeros(1, dtype=torch.int64)
    cases.launch(
        f"case_{k}",
        (1, 1),
        struct.pack("PP", given.data_ptr(), result.data_ptr()),
        regions({"given": given, "result": result}),
    )
    assert result.item() % 2**64 == expected, hex(result.item() % 2**64)


# -- Control, memory, threads -----------------------------------------------------------------------------------------

PROGRAMS = {
    "beyond_shared": """
	.shared .align 4 .b8 mirrored[132];
	mov.u32 	%r1, 0;
	st.shared.u32 	[mirrored+132], %r1;""",
    "beyond_local": """
	.local .align 4 .b8 __local_depot1[8];
	mov.u32 	%r1, 0;
	st.local.u32 	[__local_depot1+8], %r1;""",
    "beyond_parameters": """
	ld.param.u32 	%r1, [beyond_parameters_1+8];""",
    "writes": """
	st.global.u32 	[%rd11], %r1;""",
    # thread 5 of each block reads at an offset that first[0] says
    "offset": """
	mov.u32 	%r1, %tid.x;
	setp.ne.s32 	%p1, %r1, 5;
	@%p1 ret;
	ld.global.s64 	%rd1, [%rd10];
	add.s64 	%rd2, %rd10, %rd1;
	ld.global.u32 	%r2, [%rd2];""",
}  # fmt: skip


@pytest.fixture(scope="module")
def programs() -> Machine:
    return Machine(HEADER + "".join(starmap(entry, PROGRAMS.items())))


@pytest.mark.parametrize(
    ("name", "offset", "words"),
    [
        *(("offset", offset, r"offset, block 0, thread 5, line \d+ `ld.global.u32 %r2, \[%rd2\];` reads 4 bytes at")
          for offset in (-4, 5, 6, 8, 2**40)),
        ("beyond_local", 0, "beyond_local, .* writes 4 bytes"),
        ("beyond_shared", 0, "beyond_shared, .* writes 4 bytes"),
        ("beyond_parameters", 0, "beyond_parameters, .* reads 4 bytes"),
        ("writes", 0, "writes, .* writes 4 bytes at byte 0 of second"),
    ],
)  # fmt: skip
def test_a_byte_outside_is_an_error(programs: Machine, name: str, offset: int, words: str) -> None:
    first, second = torch.tensor([offset]), torch.zeros(1, dtype=torch.int32)
    arguments = struct.pack("PP", first.data_ptr(), second.data_ptr())
    memory = [*regions({"first": first}), Region(name="second", address=second.data_ptr(), size=4, writable=False)]
    with pytest.raises(IllegalAccess, match=words):
        programs.launch(name, (1, 8), arguments, memory)
    first[0] = 4
    programs.launch("offset", (1, 8), arguments, memory)


# -- What is not known ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "add.ftz.f32 %f5, %f1, %f2;",
        "add.sat.s32 %r5, %r1, %r2;",
        "cvt.f32.s32 %f5, %r1;",
        "setp.lt.s32 %p5|%p6, %r1, %r2;",
        "shfl.sync.idx.b32 %r5, %r1, 0, 31, -1;",
        "bar.arrive 0, 32;",
        "st.param.u32 [%rd1], %r1;",
        "call.uni foo;",
        "add.s32 %r5, %rd1, %r2;",
        "add.s32 %r5, %r1, %r99;",
        "add.s32 %r5, %r1, 0f3F800000;",
        "add.s32 %r5, %r1;",
        "mov.u64 %rd5, elsewhere;",
        "mov.b64 %rd5, {%r1, %r2};",
        "ld.global.u32 %r5, [4096];",
        "@%r1 bra $L__BB0_1;",
        ".extern .shared .align 4 .b8 memory[];",
        ".reg .f64 %fd<3>;",
        "add.s32 %r5, %r1, %r2",
    ],
)
def test_what_is_not_known_is_named_and_never_skipped(line: str) -> None:
    with pytest.raises(PtxError, match=r"is not known|is not|register of type f64"):
        translate(read(HEADER + entry("strange", line)))
