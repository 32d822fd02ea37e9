"""What each PTX instruction does, as C++: the scalar ones that nvcc uses for kernels like ours.

Source: NVIDIA, "Parallel Thread Execution ISA", version 9.0, https://docs.nvidia.com/cuda/parallel-thread-execution/,
section 9.7. Not here, hence refused: `.ftz`, `.sat`, `.approx`, roundings of arithmetic other than `.rn`, f16, f64,
calls, barriers, shared memory, textures, two predicates at once.

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
UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
ROUNDED = {"rn": "rintf", "rni": "rintf", "rzi": "truncf", "rmi": "floorf", "rpi": "ceilf"}


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
    found = _all().get(opcode) or _memory(opcode) or _conversion(opcode)
    if found is None:
        raise PtxError(f"{opcode} is not")
    return found


@functools.cache
def _all() -> dict[str, Meaning]:
    return dict([*_integers(), *_bits(), *_floats(), *_comparisons(), *_moves(), *_fields()])


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
        high = f"(({twice}){{1}} * {{2}} >> {width})"
        yield f"add.{t}", _of(t, two, "(u64){1} + (u64){2}")  # the low bits of sum and product know no sign
        yield f"sub.{t}", _of(t, two, "(u64){1} - (u64){2}")
        yield f"mul.lo.{t}", _of(t, two, "(u64){1} * (u64){2}")
        yield f"mad.lo.{t}", _of(t, three, "(u64){1} * (u64){2} + (u64){3}")
        yield f"mul.hi.{t}", _of(t, two, high)
        yield f"mad.hi.{t}", _of(t, three, f"(u64){high} + (u64){{3}}")
        yield f"min.{t}", _of(t, two, "{1} < {2} ? {1} : {2}")
        yield f"max.{t}", _of(t, two, "{1} > {2} ? {1} : {2}")
        for name, sign, other in (("div", "/", "0 - (u64){1}"), ("rem", "%", "0")):
            # By zero it is "unspecified": refused. By -1 the least number divided is itself, where a CPU would trap.
            value = f"{{2}} == ({t})-1 ? {other} : (u64)({{1}} {sign} {{2}})" if t[0] == "s" else f"{{1}} {sign} {{2}}"
            plain = _of(t, two, value)
            yield (
                f"{name}.{t}",
                Meaning(plain.operands, f"if ({{2}} == 0) REFUSE(0, 0, DIVIDED, {{line}}) {plain.code}"),
            )
        if t[0] == "s":
            yield f"abs.{t}", _of(t, (t,), "{1} < 0 ? 0 - (u64){1} : (u64){1}")
            yield f"neg.{t}", _of(t, (t,), "0 - (u64){1}")
        if width < 64:
            wide = f"{t[0]}{2 * width}"
            product = f"({wide}){{1}} * ({wide}){{2}}"
            yield f"mul.wide.{t}", _of(wide, two, product)
            yield f"mad.wide.{t}", _of(wide, (t, t, wide), f"(u64)({product}) + (u64){{3}}")


def _bits() -> Iterator[tuple[str, Meaning]]:
    for name, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
        for t in ("pred", "b16", "b32", "b64"):
            yield f"{name}.{t}", _of(t, (t, t), f"{{1}} {sign} {{2}}")
    yield "not.pred", _of("pred", ("pred",), "!{1}")
    for t in ("b16", "b32", "b64"):
        width = WIDTHS[t]
        yield f"not.{t}", _of(t, (t,), "~{1}")
        yield f"cnot.{t}", _of(t, (t,), "{1} == 0")
        yield f"shl.{t}", _of(t, (t, "u32"), f"{{2}} < {width} ? (u64){{1}} << {{2}} : 0")
        for kind in "bu":
            yield f"shr.{kind}{width}", _of(t, (t, "u32"), f"{{2}} < {width} ? {{1}} >> {{2}} : 0")
        yield f"shr.s{width}", _of(t, (f"s{width}", "u32"), f"{{1}} >> ({{2}} < {width} ? {{2}} : {width - 1})")


def _fields() -> Iterator[tuple[str, Meaning]]:
    for t in ("u32", "s32", "u64", "s64"):
        width = WIDTHS[t]
        yield f"bfe.{t}", _of(t, (f"b{width}", "u32", "u32"), f"bfe({{1}}, {{2}}, {{3}}, {width}, {int(t[0] == 's')})")
    for width in (32, 64):
        t = f"b{width}"
        yield f"bfi.{t}", _of(t, (t, t, "u32", "u32"), f"bfi({{1}}, {{2}}, {{3}}, {{4}}, {width})")
        yield f"popc.{t}", _of("u32", (t,), "__builtin_popcountll({1})")
        yield f"clz.{t}", _of("u32", (t,), f"{{1}} ? __builtin_clzll({{1}}) - {64 - width} : {width}")
        yield f"brev.{t}", _of(t, (t,), f"brev({{1}}, {width})")
    yield "prmt.b32", _of("b32", ("b32", "b32", "b32"), "prmt({1}, {2}, {3})")
    yield "lop3.b32", _of("b32", ("b32", "b32", "b32", "b32"), "lop3({1}, {2}, {3}, {4})")
    for mode, amount in (("wrap", "({3} & 31)"), ("clamp", "({3} < 32 ? {3} : 32)")):
        pair = "((u64){2} << 32 | {1})"
        yield f"shf.l.{mode}.b32", _of("b32", ("b32", "b32", "u32"), f"{pair} << {amount} >> 32")
        yield f"shf.r.{mode}.b32", _of("b32", ("b32", "b32", "u32"), f"{pair} >> {amount}")


def _floats() -> Iterator[tuple[str, Meaning]]:
    one, two, three = ("f32",), ("f32", "f32"), ("f32", "f32", "f32")
    for rounding in ("", ".rn"):
        for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*")):
            yield f"{name}{rounding}.f32", _of("f32", two, f"{{1}} {sign} {{2}}")
    yield "fma.rn.f32", _of("f32", three, "__builtin_fmaf({1}, {2}, {3})")
    yield "div.rn.f32", _of("f32", two, "{1} / {2}")
    yield "rcp.rn.f32", _of("f32", one, "1.0f / {1}")
    yield "sqrt.rn.f32", _of("f32", one, "__builtin_sqrtf({1})")
    yield "min.f32", _of("f32", two, "least({1}, {2})")
    yield "max.f32", _of("f32", two, "greatest({1}, {2})")
    yield "neg.f32", _of("b32", ("b32",), "{1} ^ 0x80000000u")
    yield "abs.f32", _of("b32", ("b32",), "{1} & 0x7fffffffu")
    yield "copysign.f32", _of("b32", ("b32", "b32"), "({1} & 0x80000000u) | ({2} & 0x7fffffffu)")


def _comparisons() -> Iterator[tuple[str, Meaning]]:
    for t in (*INTEGERS, "b16", "b32", "b64", "f32"):
        tests = {"b": ("eq", "ne"), "f": tuple(ORDERED)}.get(t[0], tuple(ORDERED))
        cases = {name: f"({{1}} {ORDERED[name]} {{2}})" for name in tests}
        if t[0] == "u":
            cases |= {name: f"({{1}} {sign} {{2}})" for name, sign in UNSIGNED.items()}
        if t == "f32":
            nan = "({1} != {1} || {2} != {2})"
            cases |= {f"{name}u": f"({case} || {nan})" for name, case in cases.items()}
            cases["ne"] = f"({cases['ne']} && !{nan})"  # ordered, unlike C's
            cases |= {"nan": nan, "num": f"!{nan}"}
        for name, case in cases.items():
            yield f"setp.{name}.{t}", _of("pred", (t, t), case)
            for other, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
                yield f"setp.{name}.{other}.{t}", _of("pred", (t, t, "pred"), f"{case} {sign} {{3}}")


def _moves() -> Iterator[tuple[str, Meaning]]:
    for kind in (*(f"{k}{w}" for k in "bus" for w in (16, 32, 64)), "f32"):
        t = f"b{WIDTHS[kind]}"
        yield f"mov.{kind}", _of(t, (t,), "{1}")
        yield f"selp.{kind}", _of(t, (t, t, "pred"), "{3} ? {1} : {2}")
    yield "mov.pred", _of("pred", ("pred",), "{1}")
    for space in ("global", "local", "const"):  # addresses are those of the machine that runs this, in every space
        for name in (f"cvta.{space}.u64", f"cvta.to.{space}.u64"):
            yield name, _of("u64", ("u64",), "{1}")


def _conversion(opcode: str) -> Meaning | None:
    found = re.fullmatch(r"cvt(?:\.(\w+))?\.([us](?:8|16|32|64)|f32)\.([us](?:8|16|32|64)|f32)", opcode)
    if found is None:
        return None
    rounding, to, of = found.groups()
    if "f32" not in (to, of):
        expression = f"({to}){{1}}" if rounding is None else ""
    elif to == of == "f32":
        expression = f"canonical({ROUNDED[rounding]}({{1}}))" if rounding in ("rni", "rzi", "rmi", "rpi") else ""
    elif to == "f32":
        expression = "bits((float){1})" if rounding == "rn" else ""
    else:
        sign, width = int(to[0] == "s"), WIDTHS[to]
        whole = f"{ROUNDED[rounding]}({{1}})" if rounding in ("rni", "rzi", "rmi", "rpi") else ""
        expression = f"({to})saturated({whole}, {width}, {sign})" if whole else ""
    return Meaning((f">{to}", f"<{of}"), f"{{0}} = {expression};") if expression else None


def _memory(opcode: str) -> Meaning | None:
    found = re.fullmatch(r"(ld|st)(?:\.(param|global|local|const))?(\.nc)?(?:\.v([24]))?\.([bus]\d+|f32)", opcode)
    if found is not None:
        which, space, cached, count, t = found.groups()
        is_load = which == "ld"
        if t not in WIDTHS or (cached and (space != "global" or not is_load)):
            return None
        if not is_load and space in ("param", "const"):
            return None
        return _transfer(is_load, space or "generic", int(count or 1), t)
    found = re.fullmatch(r"(atom|red)\.global\.(add|min|max|exch|and|or|xor)\.([us]32|[us]64|b32|b64)", opcode)
    if found is None:
        return None
    which, operation, t = found.groups()
    expression = {
        "add": "(u64)old + (u64)value", "min": "value < old ? value : old", "max": "value > old ? value : old",
        "exch": "value", "and": "old & value", "or": "old | value", "xor": "old ^ value",
    }[operation]  # fmt: skip
    if (t[0] == "b") != (operation in ("exch", "and", "or", "xor")):
        return None
    c = f"u{t[1:]}" if t[0] == "b" else t
    result = "{0} = old; " if which == "atom" else ""
    at, value = ("{1}", "{2}") if which == "atom" else ("{0}", "{1}")
    size = WIDTHS[t] // 8
    code = (
        f"{{{{ static u32 hint; const u64 at = {at}; const {c} value = {value}; "
        f"if (!global_holds(launch, &hint, at, {size}, WRITES)) REFUSE(at, {size}, WRITES, {{line}}) "
        f"{c} old; memcpy(&old, (void *)at, {size}); const {c} fresh = ({c})({expression}); "
        f"memcpy((void *)at, &fresh, {size}); {result}}}}}"
    )
    operands = ("address", t)
    return Meaning((f"=b{WIDTHS[t]}", *operands) if which == "atom" else operands, code)


def _transfer(is_load: bool, space: str, count: int, t: str) -> Meaning:
    """Loads and stores, each held to the memory that it may touch and to its alignment."""
    size = WIDTHS[t] // 8
    c = f"{t[0]}{WIDTHS[t]}" if t[0] == "s" else f"u{WIDTHS[t]}"
    mode = "READS" if is_load else "WRITES"
    first = 0 if is_load else 1
    at = f"{{{count if is_load else 0}}}"
    moves = []
    for k in range(count):
        slot = f"{{{first + k}}}"
        place = f"(void *)(at + {size * k})"
        if is_load:
            moves.append(f"{{{{ {c} value; memcpy(&value, {place}, {size}); {slot} = value; }}}}")
        else:
            moves.append(f"{{{{ const {c} value = {slot}; memcpy({place}, &value, {size}); }}}}")
    code = (
        f"{{{{ static u32 hint; (void)hint; const u64 at = {at}; "
        f"if (!{space}_holds(launch, &hint, at, {size * count}, {mode})) REFUSE(at, {size * count}, {mode}, {{line}}) "
        f"{' '.join(moves)} }}}}"
    )
    # A float's bits are moved, not the float.
    kind = f"b{WIDTHS[t]}" if t == "f32" else t
    registers = " ".join([f"{'>' if is_load else '<'}{kind}"] * count)
    registers = f"{{{registers}}}" if count > 1 else registers
    return Meaning((registers, "address") if is_load else ("address", registers), code)
