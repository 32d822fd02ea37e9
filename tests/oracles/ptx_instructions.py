"""What each PTX instruction does, as C++: those that nvcc makes of our kernels.

Source: NVIDIA, "Parallel Thread Execution ISA", version 9.0, https://docs.nvidia.com/cuda/parallel-thread-execution/,
section 9.7. Any other instruction is refused; where a new nvcc or kernel needs one, it is added here with a case in
sim/test_ptx.py.

Registers hold bits. `as_<type>` reads them as a type, `bits` turns a float back. Arithmetic gives the canonical NaN,
0x7fffffff, whatever NaN went in.
"""

from __future__ import annotations

import re

WIDTHS = {f"{kind}{width}": width for kind in "bus" for width in (8, 16, 32, 64)} | {"f32": 32, "pred": 1}
INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
WHOLE = ("u8", "s8", *INTEGERS)
BITS = ("b16", "b32", "b64")
MOVED = (*BITS, *INTEGERS, "f32")
ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
NAN = "({1} != {1} || {2} != {2})"

ROWS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    # Integers; the low bits of sum and product know no sign.
    ("add.T", "T T T", "(u64){1} + (u64){2}", INTEGERS),
    ("sub.T", "T T T", "(u64){1} - (u64){2}", INTEGERS),
    ("mul.lo.T", "T T T", "(u64){1} * (u64){2}", INTEGERS),
    ("mad.lo.T", "T T T T", "(u64){1} * (u64){2} + (u64){3}", INTEGERS),
    ("mul.hi.T", "T T T", "(D){1} * {2} >> W", INTEGERS),
    ("mul.wide.T", "D T T", "(D){1} * (D){2}", INTEGERS[:4]),
    ("min.T", "T T T", "{1} < {2} ? {1} : {2}", INTEGERS),
    ("max.T", "T T T", "{1} > {2} ? {1} : {2}", INTEGERS),
    ("neg.T", "T T", "0 - (u64){1}", INTEGERS[1::2]),
    # Bits.
    *((f"{name}.T", "T T T", f"{{1}} {sign} {{2}}", (*BITS, "pred"))
      for name, sign in (("and", "&"), ("or", "|"), ("xor", "^"))),
    ("not.pred", "pred pred", "!{1}", ("pred",)),
    ("not.T", "T T", "~{1}", BITS),
    ("shl.T", "T T u32", "{2} < W ? (u64){1} << {2} : 0", BITS),
    ("shr.T", "bW bW u32", "{2} < W ? {1} >> {2} : 0", INTEGERS[::2]),
    ("shr.T", "bW T u32", "{1} >> ({2} < W ? {2} : W - 1)", INTEGERS[1::2]),
    ("bfi.T", "T T T u32 u32", "bfi({1}, {2}, {3}, {4})", ("b32",)),
    # Floats; the sign of copysign is that of its first operand.
    *((f"{name}{rounding}.T", "T T T", f"{{1}} {sign} {{2}}", ("f32",))
      for rounding in ("", ".rn") for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*"))),
    ("fma.rn.T", "T T T T", "__builtin_fmaf({1}, {2}, {3})", ("f32",)),
    ("div.rn.T", "T T T", "{1} / {2}", ("f32",)),
    ("rcp.rn.T", "T T", "1.0f / {1}", ("f32",)),
    ("sqrt.rn.T", "T T", "__builtin_sqrtf({1})", ("f32",)),
    ("max.T", "T T T", "greatest({1}, {2})", ("f32",)),
    ("neg.T", "bW bW", "{1} ^ 0x80000000u", ("f32",)),
    ("copysign.T", "bW bW bW", "({1} & 0x80000000u) | ({2} & 0x7fffffffu)", ("f32",)),
    # Comparisons: with a NaN false, also `ne`, unlike C's; those that end in u are true.
    *((f"setp.{name}.T", "pred T T", f"{{1}} {sign} {{2}}", INTEGERS) for name, sign in ORDERED.items()),
    *((f"setp.{name}.T", "pred T T", f"{{1}} {ORDERED[name]} {{2}}", BITS) for name in ("eq", "ne")),
    *((f"setp.{name}.T", "pred T T", f"{{1}} {sign} {{2}} && !{NAN}", ("f32",)) for name, sign in ORDERED.items()),
    *((f"setp.{name}u.T", "pred T T", f"{{1}} {sign} {{2}} || {NAN}", ("f32",)) for name, sign in ORDERED.items()),
    ("setp.nan.T", "pred T T", NAN, ("f32",)),
    # Moves; addresses are those of the machine that runs this.
    ("mov.T", "bW bW", "{1}", MOVED),
    ("mov.pred", "pred pred", "{1}", ("pred",)),
    ("selp.T", "bW bW bW pred", "{3} ? {1} : {2}", MOVED),
    *((f"cvta.{space}.T", "T T", "{1}", ("u64",)) for space in ("to.global", "to.local", "local")),
    # Conversions, of registers that may be wider.
    *((f"cvt.{to}.T", f">{to} <T", f"({to}){{1}}", WHOLE) for to in WHOLE),
    ("cvt.rn.f32.T", ">f32 <T", "bits((float){1})", WHOLE),
    ("cvt.rzi.s32.T", ">s32 <T", "saturated({1})", ("f32",)),
    ("cvt.rmi.f32.T", ">f32 <T", "canonical(floorf({1}))", ("f32",)),
)  # fmt: skip
"""Opcode, result and sources, the expression of sources {1}, {2} ... that becomes the result, and the types T; their
width is W, and D is a type of twice the width."""
OTHERS = {
    "bra": (("label",), "goto {0};"),
    "bra.uni": (("label",), "goto {0};"),
    "ret": ((), "return 0;"),
    "exit": ((), "return 0;"),
    "bar.sync": (("u32",), "wait_for_others(tid);"),
}


class PtxError(Exception):
    """Something in a text that this executor does not know."""


Meaning = tuple[tuple[str, ...], str]
"""Kinds of operands, and C++ of an instruction: `{0}`, `{1}` ... are its operands, `{line}` its line.

Operands are of kind `=u32` (written), `>u32` (written, the register may be wider), `u32` (read), `<u32` (read from a
register that may be wider), `address`, `label`, or several of these in braces.
"""


def find(opcode: str) -> Meaning:
    """Returns what an instruction with all its modifiers does.

    Raises:
        PtxError: it is not known.
    """
    if meaning := KNOWN.get(opcode) or _memory(opcode) or _atomic(opcode):
        return meaning
    raise PtxError(opcode)


def _meaning(opcode: str, operands: str, expression: str, kind: str) -> tuple[str, Meaning]:
    width = WIDTHS[kind]
    twice = f"{kind[0]}{2 * width}" if width < 64 else {"u": "unsigned __int128", "s": "__int128"}.get(kind[0], "")
    names = {"T": kind, "W": str(width), "bW": f"b{width}", "D": twice}
    opcode, operands, expression = (
        re.sub(r"\b(?:T|b?W|D)\b", lambda name: names[name[0]], text) for text in (opcode, operands, expression)
    )
    result, *sources = operands.split()
    if result.startswith(">"):
        return opcode, ((result, *sources), f"{{0}} = {expression};")
    value = f"canonical({expression})" if result == "f32" else f"(u{max(8, WIDTHS[result])})({expression})"
    return opcode, ((f"={result}", *sources), f"{{0}} = {value};")


KNOWN = OTHERS | dict(_meaning(*row, kind) for *row, kinds in ROWS for kind in kinds)


def _memory(opcode: str) -> Meaning | None:
    """Loads and stores, each held to the memory that it may touch and to its alignment."""
    match = re.fullmatch(
        r"(ld|st)(?:\.(param|global|local|shared))?(?:(?<=ld\.global)\.nc)?(?:\.v([24]))?\.([bus]\d+|f32)", opcode
    )
    if match is None or match[4] not in WIDTHS or match.group(1, 2) == ("st", "param"):
        return None
    is_load, space, count, kind = match[1] == "ld", match[2] or "generic", int(match[3] or 1), match[4]
    size = WIDTHS[kind] // 8
    moved = f"{'s' if kind[0] == 's' else 'u'}{8 * size}"
    move, mode = ("LOAD", "READS") if is_load else ("STORE", "WRITES")
    slots = range(count) if is_load else range(1, count + 1)
    base = "(u64)shared + at" if space == "shared" else "at"
    moves = " ".join(f"{move}({moved}, {base} + {size * k}, {{{slot}}})" for k, slot in enumerate(slots))
    address = f"{{{count if is_load else 0}}}"
    code = f"{{{{ const u64 at = {address}; HOLD({space}, {size * count}, {mode}, {{line}}) {moves} }}}}"
    registers = " ".join([f"{'>' if is_load else '<'}{kind.replace('f', 'b')}"] * count)  # bits are moved, not floats
    registers = f"{{{registers}}}" if count > 1 else registers
    return ((registers, "address") if is_load else ("address", registers)), code


def _atomic(opcode: str) -> Meaning | None:
    fresh = {"add": "old + value", "max": "value > old ? value : old"}
    match = re.fullmatch(r"atom\.global\.(add|max)\.u32", opcode)
    if match is None:
        return None
    code = (
        "{{ const u64 at = {1}; const u32 value = {2}; HOLD(global, 4, WRITES, {line}) u32 old; LOAD(u32, at, old) "
        f"STORE(u32, at, ({fresh[match[1]]})) {{0}} = old; }}}}"
    )
    return ("=b32", "address", "u32"), code
