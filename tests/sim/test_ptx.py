"""The executor of PTX against values by hand, from the text of NVIDIA's "Parallel Thread Execution ISA" 9.0, 9.7.

Every other test of what nvcc makes of our kernels rests on it (test_cuda_code.py). Memory and what it does not know are
in test_ptx_memory.py.
"""

import struct

import numpy as np
import pytest
import torch
from oracles.ptx_machine import Machine
from oracles.ptx_texts import HEADER, entry, launch

NAN, ODD_NAN, INFINITE, LEAST = 0x7FFFFFFF, 0xFFC00001, 0x7F800000, 0x80000000
ALL, MOST, ALL64 = 2**32 - 1, 2**31 - 1, 2**64 - 1


def f(x: float) -> int:
    """The bits of a float."""
    return int.from_bytes(struct.pack("<f", x), "little")


def m(x: int, width: int = 32) -> int:
    """A negative number's bits."""
    return x % 2**width


# An instruction reads what `inputs` put into registers 1, 2, 3, 4 of every kind, and writes register 5 of some kind.
CASES: list[tuple[str, tuple[int, ...], int]] = [
    # Shifts clamp at the width; signs fill.
    ("shl.b32 %r5, %r1, %r2", (1, 31), 2**31),
    ("shl.b32 %r5, %r1, %r2", (1, 32), 0),
    ("shl.b32 %r5, %r1, %r2", (1, ALL), 0),
    ("shl.b64 %rd5, %rd1, %r2", (1, 63), 2**63),
    ("shl.b64 %rd5, %rd1, %r2", (1, 64), 0),
    ("shl.b16 %rs5, %rs1, %r2", (3, 15), 0x8000),
    ("shl.b16 %rs5, %rs1, 16", (3,), 0),
    ("shr.u32 %r5, %r1, %r2", (2**31, 31), 1),
    ("shr.u32 %r5, %r1, 32", (ALL,), 0),
    ("shr.b32 %r5, %r1, 4", (ALL,), ALL >> 4),
    ("shr.s32 %r5, %r1, 4", (2**31,), 0xF8000000),
    ("shr.s32 %r5, %r1, %r2", (2**31, 32), ALL),
    ("shr.s32 %r5, %r1, %r2", (MOST, ALL), 0),
    ("shr.s16 %rs5, %rs1, 20", (0x8000,), 0xFFFF),
    ("shr.s64 %rd5, %rd1, 70", (2**63,), ALL64),
    ("shr.u64 %rd5, %rd1, 32", (0x123456789,), 1),
    ("shf.l.wrap.b32 %r5, %r1, %r2, %r3", (2**31, 1, 1), 3),  # (1 << 1) | (2^31 >> 31)
    ("shf.l.wrap.b32 %r5, %r1, %r2, %r3", (7, 9, 32), 9),
    ("shf.l.clamp.b32 %r5, %r1, %r2, %r3", (7, 9, 40), 7),
    ("shf.r.wrap.b32 %r5, %r1, %r2, %r3", (2**31, 1, 1), 0xC0000000),
    ("shf.r.clamp.b32 %r5, %r1, %r2, %r3", (7, 9, 40), 9),
    # Integers wrap around.
    ("add.s32 %r5, %r1, %r2", (MOST, 1), 2**31),
    ("add.s64 %rd5, %rd1, -1", (0,), ALL64),
    ("sub.s32 %r5, %r1, %r2", (0, 1), ALL),
    ("sub.u16 %rs5, %rs1, %rs2", (0, 1), 0xFFFF),
    ("mul.lo.s32 %r5, %r1, %r2", (0x10001, 0x10001), 0x00020001),
    ("mul.lo.s64 %rd5, %rd1, %rd2", (2**63 + 3, 2), 6),
    ("mul.lo.s16 %rs5, %rs1, %rs2", (0x8001, 3), 0x8003),
    ("mul.hi.u32 %r5, %r1, %r2", (ALL, ALL), ALL - 1),  # (2^32 - 1)^2 = 2^64 - 2^33 + 1
    ("mul.hi.s32 %r5, %r1, %r2", (ALL, ALL), 0),
    ("mul.hi.s32 %r5, %r1, %r2", (ALL, 1), ALL),
    ("mul.hi.u64 %rd5, %rd1, %rd2", (2**63, 4), 2),
    ("mul.hi.s64 %rd5, %rd1, %rd2", (2**63, 4), m(-2, 64)),
    ("mul.wide.u32 %rd5, %r1, 2", (ALL,), 0x1FFFFFFFE),
    ("mul.wide.u32 %rd5, %r1, -766435501", (1,), 0xD2511F53),  # as nvcc writes Philox's factor
    ("mul.wide.s32 %rd5, %r1, 2", (ALL,), m(-2, 64)),
    ("mul.wide.u16 %r5, %rs1, %rs2", (0xFFFF, 0xFFFF), 0xFFFE0001),
    ("mul.wide.s16 %r5, %rs1, %rs2", (0xFFFF, 0xFFFF), 1),
    ("mad.lo.s32 %r5, %r1, %r2, %r3", (3, 5, ALL), 14),
    ("mad.wide.u32 %rd5, %r1, %r2, %rd3", (ALL, 2, 2), 2**33),
    ("mad.hi.u32 %r5, %r1, %r2, %r3", (2**31, 2, 7), 8),
    ("div.s32 %r5, %r1, %r2", (m(-7), 2), m(-3)),
    ("rem.s32 %r5, %r1, %r2", (m(-7), 2), m(-1)),
    ("div.u32 %r5, %r1, %r2", (ALL, 2), MOST),
    ("rem.u32 %r5, %r1, %r2", (ALL, 10), 5),
    ("div.s32 %r5, %r1, %r2", (2**31, ALL), 2**31),  # -2^31 / -1 wraps
    ("rem.s32 %r5, %r1, %r2", (2**31, ALL), 0),
    ("max.u32 %r5, %r1, %r2", (1, ALL), ALL),
    ("max.s32 %r5, %r1, %r2", (1, ALL), 1),
    ("min.s32 %r5, %r1, %r2", (1, ALL), ALL),
    ("abs.s32 %r5, %r1", (m(-5),), 5),
    ("neg.s32 %r5, %r1", (5,), m(-5)),
    # Bits.
    ("and.b32 %r5, %r1, %r2", (0b1100, 0b1010), 0b1000),
    ("or.b64 %rd5, %rd1, %rd2", (2**40, 1), 2**40 + 1),
    ("xor.b32 %r5, %r1, -1", (5,), ALL - 5),
    ("not.b16 %rs5, %rs1", (0,), 0xFFFF),
    ("cnot.b32 %r5, %r1", (0,), 1),
    ("cnot.b32 %r5, %r1", (6,), 0),
    ("popc.b32 %r5, %r1", (0xF1,), 5),
    ("clz.b32 %r5, %r1", (0,), 32),
    ("clz.b32 %r5, %r1", (1,), 31),
    ("brev.b32 %r5, %r1", (1,), 2**31),
    ("bfe.u32 %r5, %r1, 8, 8", (0xABCD1234,), 0x12),
    ("bfe.u32 %r5, %r1, 28, 8", (0xABCD1234,), 0xA),
    ("bfe.s32 %r5, %r1, 8, 8", (0x8000,), 0xFFFFFF80),
    ("bfe.s32 %r5, %r1, 28, 8", (2**31,), 0xFFFFFFF8),
    ("bfe.s32 %r5, %r1, 8, 0", (ALL,), 0),
    ("bfi.b32 %r5, %r1, %r2, 4, 8", (0xFF, 0), 0xFF0),
    ("bfi.b32 %r5, %r1, %r2, 28, 8", (0xFF, 1), 0xF0000001),
    ("bfi.b32 %r5, %r1, %r2, 4, 0", (0xFF, 6), 6),
    ("prmt.b32 %r5, %r1, %r2, 0x7531", (0x33221100, 0x77665544), 0x77553311),
    ("prmt.b32 %r5, %r1, %r2, 8", (0x80, 0), 0x808080FF),
    ("lop3.b32 %r5, %r1, %r2, %r3, 0x96", (0b1100, 0b1010, 0b0110), 0),
    ("lop3.b32 %r5, %r1, %r2, %r3, 0xEA", (0b1100, 0b1010, 0b0001), 0b1001),  # a & b | c: 0xF0 & 0xCC | 0xAA
    # Floats are rounded to the nearest, ties to even, once; what underflows stays.
    ("add.rn.f32 %f5, %f1, %f2", (f(1), f(2**-24)), f(1)),
    ("add.rn.f32 %f5, %f1, %f2", (f(1 + 2**-23), f(2**-24)), f(1 + 2**-22)),
    ("add.f32 %f5, %f1, 0fBF800000", (f(1),), 0),
    ("sub.rn.f32 %f5, %f1, %f2", (f(1), f(2**-25)), f(1)),
    ("mul.rn.f32 %f5, %f1, %f2", (f(2**-100), f(2**-40)), 1 << 9),  # 2^-140 = 2^9 * 2^-149
    ("mul.rn.f32 %f5, %f1, %f2", (f(1 + 2**-12), f(1 + 2**-12)), f(1 + 2**-11)),
    ("fma.rn.f32 %f5, %f1, %f2, %f3", (f(1 + 2**-12), f(1 + 2**-12), f(-1 - 2**-11)), f(2**-24)),
    ("div.rn.f32 %f5, %f1, %f2", (f(1), f(3)), 0x3EAAAAAB),
    ("div.rn.f32 %f5, %f1, %f2", (f(1), f(0)), INFINITE),
    ("rcp.rn.f32 %f5, %f1", (f(-0.0),), INFINITE | LEAST),
    ("sqrt.rn.f32 %f5, %f1", (f(2),), 0x3FB504F3),
    ("sqrt.rn.f32 %f5, %f1", (f(-1),), NAN),
    ("sub.rn.f32 %f5, %f1, %f2", (INFINITE, INFINITE), NAN),
    ("add.rn.f32 %f5, %f1, %f2", (f(1), ODD_NAN), NAN),
    ("neg.f32 %f5, %f1", (f(0),), f(-0.0)),
    ("abs.f32 %f5, %f1", (f(-2),), f(2)),
    ("copysign.f32 %f5, %f1, %f2", (f(-2), f(3)), f(-3)),
    # A number is more than a NaN, +0 more than -0.
    ("max.f32 %f5, %f1, %f2", (ODD_NAN, f(1)), f(1)),
    ("max.f32 %f5, %f1, %f2", (f(1), ODD_NAN), f(1)),
    ("max.f32 %f5, %f1, %f2", (ODD_NAN, ODD_NAN), NAN),
    ("max.f32 %f5, %f1, %f2", (f(-0.0), f(0)), f(0)),
    ("max.f32 %f5, %f1, %f2", (f(0), f(-0.0)), f(0)),
    ("min.f32 %f5, %f1, %f2", (f(-0.0), f(0)), f(-0.0)),
    ("min.f32 %f5, %f1, %f2", (f(0), f(-0.0)), f(-0.0)),
    ("min.f32 %f5, %f1, %f2", (f(-3), ODD_NAN), f(-3)),
    # Comparisons: ordered ones are false with a NaN, also `ne`; those that end in u are true.
    ("setp.lt.f32 %p5, %f1, %f2", (f(1), NAN), 0),
    ("setp.ltu.f32 %p5, %f1, %f2", (f(1), NAN), 1),
    ("setp.ge.f32 %p5, %f1, %f2", (NAN, NAN), 0),
    ("setp.geu.f32 %p5, %f1, %f2", (f(1), f(2)), 0),
    ("setp.eq.f32 %p5, %f1, %f2", (NAN, NAN), 0),
    ("setp.equ.f32 %p5, %f1, %f2", (NAN, NAN), 1),
    ("setp.ne.f32 %p5, %f1, %f2", (f(1), NAN), 0),
    ("setp.ne.f32 %p5, %f1, %f2", (f(1), f(2)), 1),
    ("setp.neu.f32 %p5, %f1, %f2", (f(1), NAN), 1),
    ("setp.num.f32 %p5, %f1, %f2", (f(1), NAN), 0),
    ("setp.nan.f32 %p5, %f1, %f2", (f(1), NAN), 1),
    ("setp.eq.f32 %p5, %f1, %f2", (f(0), f(-0.0)), 1),
    ("setp.lt.s32 %p5, %r1, 0", (ALL,), 1),
    ("setp.lt.u32 %p5, %r1, 0", (ALL,), 0),
    ("setp.hi.u32 %p5, %r1, 0", (ALL,), 1),
    ("setp.ls.u32 %p5, %r1, %r2", (3, 3), 1),
    ("setp.lt.u16 %p5, %rs1, 1", (0xFFFF,), 0),
    ("setp.eq.s16 %p5, %rs1, -1", (0xFFFF,), 1),
    ("setp.gt.s64 %p5, %rd1, -1", (2**63,), 0),
    ("setp.ne.b32 %p5, %r1, %r2", (1, 1), 0),
    # Conversions: saturation, NaN, rounding, and which bits are read.
    ("cvt.rzi.s32.f32 %r5, %f1", (f(-2.9),), m(-2)),
    ("cvt.rzi.s32.f32 %r5, %f1", (f(3e9),), MOST),
    ("cvt.rzi.s32.f32 %r5, %f1", (f(-3e9),), 2**31),
    ("cvt.rzi.s32.f32 %r5, %f1", (NAN,), 0),
    ("cvt.rzi.u32.f32 %r5, %f1", (f(3e9),), 3_000_000_000),
    ("cvt.rzi.u32.f32 %r5, %f1", (f(-1),), 0),
    ("cvt.rzi.u32.f32 %r5, %f1", (INFINITE,), ALL),
    ("cvt.rzi.s64.f32 %rd5, %f1", (f(-(2.0**40)),), m(-(2**40), 64)),
    ("cvt.rzi.s64.f32 %rd5, %f1", (NAN,), 2**63),
    ("cvt.rzi.u8.f32 %rs5, %f1", (f(300),), 255),
    ("cvt.rzi.s8.f32 %rs5, %f1", (f(-200),), m(-128, 16)),
    ("cvt.rni.s32.f32 %r5, %f1", (f(2.5),), 2),
    ("cvt.rni.s32.f32 %r5, %f1", (f(3.5),), 4),
    ("cvt.rmi.s32.f32 %r5, %f1", (f(-0.5),), ALL),
    ("cvt.rpi.s32.f32 %r5, %f1", (f(0.5),), 1),
    ("cvt.rmi.f32.f32 %f5, %f1", (f(-0.5),), f(-1)),
    ("cvt.rzi.f32.f32 %f5, %f1", (f(-0.5),), f(-0.0)),
    ("cvt.rpi.f32.f32 %f5, %f1", (f(1e30),), f(1e30)),
    ("cvt.rni.f32.f32 %f5, %f1", (f(2.5),), f(2)),
    ("cvt.rn.f32.s32 %f5, %r1", (MOST,), f(2.0**31)),
    ("cvt.rn.f32.s32 %f5, %r1", (2**24 + 1,), f(2.0**24)),
    ("cvt.rn.f32.s32 %f5, %r1", (ALL,), f(-1)),
    ("cvt.rn.f32.u32 %f5, %r1", (ALL,), f(2.0**32)),
    ("cvt.rn.f32.u64 %f5, %rd1", (2**63 + 2**39 + 1,), f(2.0**63) + 1),  # one more than a tie
    ("cvt.rn.f32.u8 %f5, %r1", (0x1FF,), f(255)),
    ("cvt.s64.s32 %rd5, %r1", (ALL,), ALL64),
    ("cvt.u64.u32 %rd5, %r1", (ALL,), ALL),
    ("cvt.u32.u64 %r5, %rd1", (0x123456789,), 0x23456789),
    ("cvt.s32.s8 %r5, %r1", (0x1FF,), ALL),
    ("cvt.u32.u16 %r5, %rs1", (0xFFFF,), 0xFFFF),
    # Moves and choices.
    ("mov.b32 %f5, %r1", (NAN - 1,), NAN - 1),
    ("mov.f32 %f5, 0f3F800000", (), f(1)),
    ("mov.u32 %r5, %ntid.x", (), 1),
    ("selp.b32 %r5, %r1, %r2, %p1", (1, 2), 1),  # %p1 holds, %p2 does not
    ("selp.f32 %f5, %f1, 0fFFC00001, %p2", (f(1),), ODD_NAN),
    ("selp.b16 %rs5, 2, %rs1, %p2", (9,), 9),
    ("and.pred %p5, %p1, %p2", (), 0),
    ("or.pred %p5, %p1, %p2", (), 1),
    ("xor.pred %p5, %p1, %p1", (), 0),
    ("not.pred %p5, %p2", (), 1),
    ("setp.lt.and.s32 %p5, %r1, %r2, %p2", (1, 2), 0),
    ("setp.lt.or.s32 %p5, %r1, %r2, %p1", (2, 1), 1),
]  # fmt: skip
KINDS = {"%rs": "b16", "%rd": "b64", "%r": "b32", "%f": "b32", "%p": "pred"}


def case(k: int) -> str:
    """Puts the inputs into registers of every kind, and stores what the instruction wrote."""
    instruction, inputs, _ = CASES[k]
    lines = ["setp.eq.s32 %p1, 0, 0;", "setp.ne.s32 %p2, 0, 0;"]
    for j in range(1, len(inputs) + 1):
        loads = (("b16", "rs"), ("b32", "r"), ("b32", "f"), ("b64", "rd"))
        lines += [f"ld.global.{kind} %{register}{j}, [%rd10+{8 * j}];" for kind, register in loads]
    lines.append(f"{instruction};")
    written = next(kind for register, kind in KINDS.items() if f" {register}5," in instruction)
    if written == "pred":
        lines += ["selp.u32 %r5, 1, 0, %p5;"]
    register = {"pred": "%r5"}.get(written, instruction.split()[1].rstrip(","))
    lines.append(f"st.global.{'b32' if written == 'pred' else written} [%rd11], {register};")
    return entry(f"case_{k}", "\n".join(lines))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(HEADER + "".join(map(case, range(len(CASES)))), tmp_path_factory.mktemp("cases"))


@pytest.mark.parametrize(
    "k", range(len(CASES)), ids=[text.split(" ")[0] + f"-{k}" for k, (text, *_) in enumerate(CASES)]
)
def test_an_instruction_at_its_edges(cases: Machine, k: int) -> None:
    _, inputs, expected = CASES[k]
    given = torch.from_numpy(np.array([0, *inputs, *[0] * (4 - len(inputs))], np.uint64).view(np.int64))
    result = torch.zeros(1, dtype=torch.int64)
    launch(cases, f"case_{k}", given, result)
    assert result.item() % 2**64 == expected, hex(result.item() % 2**64)
