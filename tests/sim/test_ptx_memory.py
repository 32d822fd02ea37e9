"""The executor of PTX: loops, threads, kinds of memory, what is refused while running and what is not known at all."""

import struct
from pathlib import Path

import pytest
import torch
from oracles.ptx import read, translate
from oracles.ptx_instructions import PtxError
from oracles.ptx_machine import IllegalAccess, Machine, Region, regions
from oracles.ptx_texts import HEADER, entry, launch
from torch import Tensor

# -- Control, memory, threads -----------------------------------------------------------------------------------------

PROGRAMS = {
    # first[0] + first[0] - 1 + ... + 1, by a loop that a predicate leaves and one that a predicate enters
    "triangle": """
	ld.global.u32 	%r1, [%rd10];
	mov.u32 	%r2, 0;
	setp.eq.s32 	%p1, %r1, 0;
	@%p1 bra 	$L__BB0_2;

$L__BB0_1:
	.pragma "nounroll";
	add.s32 	%r2, %r2, %r1;
	add.s32 	%r1, %r1, -1;
	setp.eq.s32 	%p2, %r1, 0;
	@!%p2 bra 	$L__BB0_1;

$L__BB0_2:
	st.global.u32 	[%rd11], %r2;""",
    # second[thread] = threads counted so far by `atom`, while first[0], first[1] count and keep the greatest
    "atomics": """
	mov.u32 	%r1, %ctaid.x;
	mov.u32 	%r2, %ntid.x;
	mov.u32 	%r3, %tid.x;
	mad.lo.s32 	%r4, %r1, %r2, %r3;
	atom.global.add.u32 	%r5, [%rd10], 2;
	red.global.max.u32 	[%rd10+4], %r4;
	mul.wide.u32 	%rd1, %r4, 4;
	add.s64 	%rd2, %rd11, %rd1;
	st.global.u32 	[%rd2], %r5;""",
    # second[0..2] = first as signed bytes, as a pair of words, and its low byte stored alone
    "widths": """
	ld.global.s8 	%r1, [%rd10];
	st.global.u32 	[%rd11], %r1;
	ld.global.v2.u32 	{%r2, %r3}, [%rd10];
	st.global.v2.u32 	[%rd11+8], {%r3, %r2};
	st.global.u8 	[%rd11+4], %r3;""",
    # second[0] = 40 + table[1], through local memory
    "spaces": """
	mov.u64 	%rd1, __local_depot0;
	add.s64 	%rd2, %rd1, 4;
	mov.u64 	%rd3, table;
	ld.global.u32 	%r1, [%rd3+4];
	st.local.u32 	[%rd2], %r1;
	ld.local.u32 	%r2, [__local_depot0+4];
	add.s32 	%r3, %r2, 40;
	st.global.u32 	[%rd11], %r3;""",
    "divide": """
	ld.global.u32 	%r1, [%rd10];
	div.u32 	%r2, %r1, %r1;
	st.global.u32 	[%rd11], %r2;""",
    "beyond_local": """
	mov.u32 	%r1, 0;
	st.local.u32 	[__local_depot1+8], %r1;""",
    "beyond_parameters": """
	ld.param.u32 	%r1, [beyond_parameters_1+8];""",
    "into_constants": """
	mov.u64 	%rd3, settled;
	st.global.u32 	[%rd3], %r1;""",
    # thread 5 of each block reads at an offset that first[0] says
    "offset": """
	mov.u32 	%r1, %tid.x;
	setp.ne.s32 	%p1, %r1, 5;
	@%p1 ret;
	ld.global.s64 	%rd1, [%rd10];
	add.s64 	%rd2, %rd10, %rd1;
	ld.global.u32 	%r2, [%rd2];""",
}  # fmt: skip
DEPOTS = {
    "spaces": "\t.local .align 4 .b8 __local_depot0[8];\n",
    "beyond_local": "\t.local .align 4 .b8 __local_depot1[8];\n",
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    variables = ".global .align 4 .u32 table[2] = {1, 2};\n.const .align 4 .b8 settled[4] = {1, 0, 0, 0};\n"
    text = HEADER + variables + "".join(entry(name, DEPOTS.get(name, "") + body) for name, body in PROGRAMS.items())
    return Machine(text, tmp_path_factory.mktemp("programs"))


def words(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_loops_and_predicates(programs: Machine) -> None:
    result = words(-1)
    for number, expected in ((0, 0), (1, 1), (10, 55)):
        launch(programs, "triangle", words(number), result)
        assert result.item() == expected


def test_threads_of_a_grid_share_memory_and_nothing_else(programs: Machine) -> None:
    counts, seen = words(0, 7), torch.zeros(96, dtype=torch.int32)
    launch(programs, "atomics", counts, seen, (3, 32))
    assert counts.tolist() == [192, 95]
    assert seen.tolist() == list(range(0, 192, 2))
    counts.zero_()
    arguments = struct.pack("PP", counts.data_ptr(), seen.data_ptr())
    programs.launch("atomics", (3, 32), arguments, regions({"a": counts, "b": seen}), backwards=True)
    assert seen.tolist() == list(range(190, -1, -2))


def test_widths_of_loads_and_stores(programs: Machine) -> None:
    result = torch.zeros(4, dtype=torch.int32)
    launch(programs, "widths", words(0x12345680, 0x2FF), result)
    assert result.tolist() == [-128, 0xFF, 0x2FF, 0x12345680]


def test_local_memory_and_tables(programs: Machine) -> None:
    result = words(0)
    launch(programs, "spaces", words(0), result)
    assert result.item() == 42
    assert programs.data("table") == struct.pack("II", 1, 2)


@pytest.mark.parametrize("offset", [-1, -4, 5, 6, 7, 8, 2**40, -(2**40)])
def test_a_byte_outside_is_an_error(programs: Machine, offset: int) -> None:
    first = torch.tensor([offset])
    name = r"offset, block 0, thread 5, line \d+ `ld.global.u32 %r2, \[%rd2\];` reads 4 bytes at"
    with pytest.raises(IllegalAccess, match=name):
        programs.launch("offset", (1, 8), struct.pack("PP", first.data_ptr(), 0), regions({"first": first}))
    first[0] = 4
    programs.launch("offset", (1, 8), struct.pack("PP", first.data_ptr(), 0), regions({"first": first}))


def test_what_else_is_refused_while_running(programs: Machine) -> None:
    one, zero = words(1), words(0)
    with pytest.raises(IllegalAccess, match=r"divide, block 0, thread 0, .* divides by zero"):
        launch(programs, "divide", zero, one)
    for name, what in (("beyond_local", "writes"), ("beyond_parameters", "reads"), ("into_constants", "writes")):
        with pytest.raises(IllegalAccess, match=f"{name}, .* {what} 4 bytes"):
            launch(programs, name, one, one)
    arguments = struct.pack("PP", one.data_ptr(), zero.data_ptr())
    kept = [*regions({"one": one}), Region(name="zero", address=zero.data_ptr(), size=4, writable=False)]
    with pytest.raises(IllegalAccess, match=r"triangle, .* writes 4 bytes at byte 0 of zero, which has 4"):
        programs.launch("triangle", (1, 1), arguments, kept)
    with pytest.raises(IllegalAccess, match="reads 4 bytes at address 0x0"):
        programs.launch("triangle", (1, 1), bytes(16), [])
    with pytest.raises(ValueError, match="triangle takes 16 bytes, not 15"):
        programs.launch("triangle", (1, 1), arguments[:-1], kept)


# -- What is not known ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "add.ftz.f32 %f5, %f1, %f2;",
        "add.rz.f32 %f5, %f1, %f2;",
        "add.sat.s32 %r5, %r1, %r2;",
        "div.approx.f32 %f5, %f1, %f2;",
        "ex2.approx.f32 %f5, %f1;",
        "cvt.rzi.ftz.s32.f32 %r5, %f1;",
        "cvt.f32.s32 %f5, %r1;",
        "cvt.sat.f32.f32 %f5, %f1;",
        "max.NaN.f32 %f5, %f1, %f2;",
        "setp.lt.ftz.f32 %p5, %f1, %f2;",
        "setp.lt.s32 %p5|%p6, %r1, %r2;",
        "shfl.sync.idx.b32 %r5, %r1, 0, 31, -1;",
        "bar.sync 0;",
        "ld.volatile.global.u32 %r5, [%rd1];",
        "ld.shared.u32 %r5, [%rd1];",
        "st.param.u32 [%rd1], %r1;",
        "atom.global.add.f32 %f5, [%rd1], %f1;",
        "call.uni foo;",
        "add.s32 %r5, %rd1, %r2;",
        "add.s32 %r5, %p1, %r2;",
        "add.s32 %r5, %r1, %r99;",
        "add.s32 %r5, %r1, 0f3F800000;",
        "add.rn.f32 %f5, %f1, 1;",
        "add.s32 %r5, %r1;",
        "mov.u32 %r5, %laneid;",
        "mov.u64 %rd5, elsewhere;",
        "mov.b64 %rd5, {%r1, %r2};",
        "ld.global.u32 %r5, [4096];",
        "@%r1 bra $L__BB0_1;",
        ".shared .align 4 .b8 memory[16];",
        ".reg .f64 %fd<3>;",
        "add.s32 %r5, %r1, %r2",
    ],
)
def test_what_is_not_known_is_named_and_never_skipped(line: str) -> None:
    with pytest.raises(PtxError, match=r"is not known|is not|register of type f64"):
        translate(read(HEADER + entry("strange", line)))


def test_a_module_with_something_unknown() -> None:
    with pytest.raises(PtxError, match=r"line 4: '.func foo"):
        read(HEADER + ".func foo() { ret; }\n")


def test_the_complaint_gives_the_line(tmp_path: Path) -> None:
    text = HEADER + entry("strange", "\tadd.ftz.f32 \t%f5, %f1, %f2;")
    number = 1 + text.split("\n").index("\tadd.ftz.f32 \t%f5, %f1, %f2;")
    expected = f"line {number} of strange: 'add.ftz.f32 %f5, %f1, %f2;' is not known"
    with pytest.raises(PtxError, match=expected):
        Machine(text, tmp_path)
