"""What each PTX instruction does, as C++: those that nvcc makes of our kernels.

Source: NVIDIA, "Parallel Thread Execution ISA", version 9.0, https://docs.nvidia.com/cuda/parallel-thread-execution/,
section 9.7. Any other instruction is refused; where a new nvcc or kernel needs one, it is added here with a case in
sim/test_ptx.py.

Registers hold bits. `as_<type>` reads them as a type, `bits` turns a float back. Arithmetic gives the canonical NaN,
0x7fffffff, whatever NaN went in.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

WIDTHS = {f"{kind}{width}": width for kind in "bus" for width in (8, 16, 32, 64)} | {"f32": 32, "pred": 1}
INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


class PtxError(Exception):
    """Something in a text that this executor does not know."""


@dataclass(frozen=True)
class Meaning:
    """C++ of an instruction: `{0}`, `{1}` ... are its operands, `{line}` its line.

    Operands are of kind `=u32` (written), `>u32` (written, the register may be wider), `u32` (read), `<u32` (read from
    a register that may be wider), `address`, or several of these in braces.
    """

    operands: tuple[str, ...]
    code: str


def find(opcode: str) -> Meaning:
    """Returns what an instruction with all its modifiers does.

    Raises:
        PtxError: it is not known.
    """
    meaning = _all().get(opcode) or _memory(opcode) or _atomic(opcode)
    if meaning is None:
        raise PtxError(f"{opcode} is not")
    return meaning


@functools.cache
def _all() -> dict[str, Meaning]:
    return dict([*_integers(), *_bits(), *_floats(), *_comparisons(), *_moves(), *_conversions()])


def _of(result: str, sources: tuple[str, ...], expression: str) -> Meaning:
    """An expression of `{1}`, `{2}` ... whose value becomes the result."""
    storage = f"u{WIDTHS[result]}" if WIDTHS[result] > 1 else "u8"
    value = f"canonical({expression})" if result == "f32" else f"({storage})({expression})"
    return Meaning((f"={result}", *sources), f"{{0}} = {value};")


def _integers() -> Iterator[tuple[str, Meaning]]:
    for t in INTEGERS:
        width = WIDTHS[t]
        two, three = (t, t), (t, t, t)
        twice = {"u": "unsigned __int128", "s": "__int128"}[t[0]]
        yield f"add.{t}", _of(t, two, "(u64){1} + (u64){2}")  # the low bits of sum and product know no sign
        yield f"sub.{t}", _of(t, two, "(u64){1} - (u64){2}")
        yield f"mul.lo.{t}", _of(t, two, "(u64){1} * (u64){2}")
        yield f"mad.lo.{t}", _of(t, three, "(u64){1} * (u64){2} + (u64){3}")
        yield f"mul.hi.{t}", _of(t, two, f"({twice}){{1}} * {{2}} >> {width}")
        yield f"min.{t}", _of(t, two, "{1} < {2} ? {1} : {2}")
        yield f"max.{t}", _of(t, two, "{1} > {2} ? {1} : {2}")
        if t[0] == "s":
            yield f"neg.{t}", _of(t, (t,), "0 - (u64){1}")
        if width < 64:
            wide = f"{t[0]}{2 * width}"
            yield f"mul.wide.{t}", _of(wide, two, f"({wide}){{1}} * ({wide}){{2}}")


def _bits() -> Iterator[tuple[str, Meaning]]:
    for name, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
        for t in ("pred", "b16", "b32", "b64"):
            yield f"{name}.{t}", _of(t, (t, t), f"{{1}} {sign} {{2}}")
    yield "not.pred", _of("pred", ("pred",), "!{1}")
    for t in ("b16", "b32", "b64"):
        width = WIDTHS[t]
        yield f"not.{t}", _of(t, (t,), "~{1}")
        yield f"shl.{t}", _of(t, (t, "u32"), f"{{2}} < {width} ? (u64){{1}} << {{2}} : 0")
        yield f"shr.u{width}", _of(t, (t, "u32"), f"{{2}} < {width} ? {{1}} >> {{2}} : 0")
        yield f"shr.s{width}", _of(t, (f"s{width}", "u32"), f"{{1}} >> ({{2}} < {width} ? {{2}} : {width - 1})")
    yield "bfi.b32", _of("b32", ("b32", "b32", "u32", "u32"), "bfi({1}, {2}, {3}, {4})")


def _floats() -> Iterator[tuple[str, Meaning]]:
    single, two, three = ("f32",), ("f32", "f32"), ("f32", "f32", "f32")
    for rounding in ("", ".rn"):
        for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*")):
            yield f"{name}{rounding}.f32", _of("f32", two, f"{{1}} {sign} {{2}}")
    yield "fma.rn.f32", _of("f32", three, "__builtin_fmaf({1}, {2}, {3})")
    yield "div.rn.f32", _of("f32", two, "{1} / {2}")
    yield "rcp.rn.f32", _of("f32", single, "1.0f / {1}")
    yield "sqrt.rn.f32", _of("f32", single, "__builtin_sqrtf({1})")
    yield "max.f32", _of("f32", two, "greatest({1}, {2})")
    yield "neg.f32", _of("b32", ("b32",), "{1} ^ 0x80000000u")
    yield "copysign.f32", _of("b32", ("b32", "b32"), "({1} & 0x80000000u) | ({2} & 0x7fffffffu)")  # the sign is {1}'s


def _comparisons() -> Iterator[tuple[str, Meaning]]:
    for t in (*INTEGERS, "b16", "b32", "b64"):
        for name, sign in ORDERED.items():
            if t[0] != "b" or name in ("eq", "ne"):
                yield f"setp.{name}.{t}", _of("pred", (t, t), f"{{1}} {sign} {{2}}")
    nan = "({1} != {1} || {2} != {2})"
    yield "setp.nan.f32", _of("pred", ("f32", "f32"), nan)
    for name, sign in ORDERED.items():  # with a NaN false, also `ne`, unlike C's; those that end in u are true
        yield f"setp.{name}.f32", _of("pred", ("f32", "f32"), f"{{1}} {sign} {{2}} && !{nan}")
        yield f"setp.{name}u.f32", _of("pred", ("f32", "f32"), f"{{1}} {sign} {{2}} || {nan}")


def _moves() -> Iterator[tuple[str, Meaning]]:
    for kind in (*(f"{k}{w}" for k in "bus" for w in (16, 32, 64)), "f32"):
        t = f"b{WIDTHS[kind]}"
        yield f"mov.{kind}", _of(t, (t,), "{1}")
        yield f"selp.{kind}", _of(t, (t, t, "pred"), "{3} ? {1} : {2}")
    yield "bar.sync", Meaning(("u32",), "wait_for_others(tid);")
    yield "mov.pred", _of("pred", ("pred",), "{1}")
    for space in ("to.global", "to.local", "local"):
        yield f"cvta.{space}.u64", _of("u64", ("u64",), "{1}")  # addresses are those of the machine that runs this


def _conversions() -> Iterator[tuple[str, Meaning]]:
    def converted(name: str, to: str, of: str, expression: str) -> tuple[str, Meaning]:
        return name, Meaning((f">{to}", f"<{of}"), f"{{0}} = {expression};")

    whole = [f"{kind}{width}" for kind in "us" for width in (8, 16, 32, 64)]
    for to in whole:
        yield from (converted(f"cvt.{to}.{of}", to, of, f"({to}){{1}}") for of in whole)
        yield converted(f"cvt.rn.f32.{to}", "f32", to, "bits((float){1})")
    yield converted("cvt.rzi.s32.f32", "s32", "f32", "saturated({1})")
    yield converted("cvt.rmi.f32.f32", "f32", "f32", "canonical(floorf({1}))")


def _memory(opcode: str) -> Meaning | None:
    """Loads and stores, each held to the memory that it may touch and to its alignment."""
    match = re.fullmatch(
        r"(ld|st)(?:\.(param|global|local|shared))?(?:(?<=ld\.global)\.nc)?(?:\.v([24]))?\.([bus]\d+|f32)", opcode
    )
    if match is None or match[4] not in WIDTHS or match.group(1, 2) == ("st", "param"):
        return None
    is_load, space, count, t = match[1] == "ld", match[2] or "generic", int(match[3] or 1), match[4]
    size = WIDTHS[t] // 8
    c = f"{t[0]}{WIDTHS[t]}" if t[0] == "s" else f"u{WIDTHS[t]}"
    mode = "READS" if is_load else "WRITES"
    at = f"{{{count if is_load else 0}}}"
    moves = []
    for k in range(count):
        slot = f"{{{k if is_load else k + 1}}}"
        place = f"(void *)({'(u64)shared + ' if space == 'shared' else ''}at + {size * k})"
        if is_load:
            moves.append(f"{{{{ {c} value; memcpy(&value, {place}, {size}); {slot} = value; }}}}")
        else:
            moves.append(f"{{{{ const {c} value = {slot}; memcpy({place}, &value, {size}); }}}}")
    code = (
        f"{{{{ static u32 hint; (void)hint; const u64 at = {at}; "
        f"if (!{space}_holds(launch, &hint, at, {size * count}, {mode})) REFUSE(at, {size * count}, {mode}, {{line}}) "
        f"{' '.join(moves)} }}}}"
    )
    kind = f"b{WIDTHS[t]}" if t == "f32" else t  # a float's bits are moved, not the float
    registers = " ".join([f"{'>' if is_load else '<'}{kind}"] * count)
    registers = f"{{{registers}}}" if count > 1 else registers
    return Meaning((registers, "address") if is_load else ("address", registers), code)


def _atomic(opcode: str) -> Meaning | None:
    match = re.fullmatch(r"atom\.global\.(add|max)\.u32", opcode)
    if match is None:
        return None
    fresh = {"add": "old + value", "max": "value > old ? value : old"}[match[1]]
    code = (
        "{{ static u32 hint; const u64 at = {1}; const u32 value = {2}; "
        "if (!global_holds(launch, &hint, at, 4, WRITES)) REFUSE(at, 4, WRITES, {line}) "
        f"u32 old; memcpy(&old, (void *)at, 4); const u32 fresh = {fresh}; "
        "memcpy((void *)at, &fresh, 4); {0} = old; }}"
    )
    return Meaning(("=b32", "address", "u32"), code)
