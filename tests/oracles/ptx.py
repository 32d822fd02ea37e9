"""PTX, the text that nvcc makes of a kernel before the assembler: read, and turned into C++ that does the same.

    text ──read──► Module ──translate──► C++ of one function per entry, which oracles/ptx_machine.py compiles and runs

Source: NVIDIA, "Parallel Thread Execution ISA", version 9.0, https://docs.nvidia.com/cuda/parallel-thread-execution/.
The meaning of each instruction is in oracles/ptx_instructions.py. Whatever is not known is an error with its line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import starmap

from oracles.ptx_instructions import WIDTHS, PtxError, find

BLANK = re.compile(r"\s+|\.(?:version \d+\.\d+|target sm_\d+\w*|address_size 64)\s*?\n")
VARIABLE = re.compile(
    r"(?:\.visible\s+)?\.global\s+\.align\s+(\d+)\s+\.(b8|u8|[bufs]32|[bus]64)\s+(\w+)(?:\[(\d+)\])?"
    r"(?:\s*=\s*\{([^}]*)\})?;"
)
ENTRY = re.compile(r"\.visible\s+\.entry\s+(\w+)\s*\(([^)]*)\)\s*((?:\.maxntid[^\n]*\n\s*)*)\{\n(.*?)^\}", re.S | re.M)
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+\.align\s+\d+\s+)?(\w+)(?:\[(\d+)\])?")
REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(%\w+)(?:<(\d+)>)?;")
DEPOT = re.compile(r"\.(local|shared)\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d+)\];")
STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.]*)(?:\s+(.*?))?\s*;")
OPERAND = re.compile(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,\s]+)\s*(?:,|$)")
SPECIAL = {"%tid.x": "tid", "%ctaid.x": "ctaid", "%ntid.x": "launch->block"}


class Space(dict[str, tuple[int, int]]):
    """Offset and bytes of what is declared in a memory, by name."""

    @property
    def end(self) -> int:
        return max((offset + size for offset, size in self.values()), default=0)

    def add(self, name: str, align: str | int, size: int) -> None:
        """Places it behind the others."""
        self[name] = (-(-self.end // int(align)) * int(align), size)


@dataclass(frozen=True)
class Entry:
    """A kernel: its memories, of which `local` is a thread's own; the type of each register; lines by their numbers.

    Shared memory is addressed by its offset, of 32 bits.
    """

    param: Space = field(default_factory=Space)
    local: Space = field(default_factory=Space)
    shared: Space = field(default_factory=Space)
    registers: dict[str, str] = field(default_factory=dict)
    body: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Module:
    """A whole text: variables by name, as (alignment, content), and kernels by name."""

    variables: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)


# -- Reading ----------------------------------------------------------------------------------------------------------


def read(text: str) -> Module:
    """Returns what a PTX text declares.

    Raises:
        PtxError: it holds something that is not known.
    """
    text = re.sub(r"//[^\n]*", "", text)
    module = Module()
    at = 0
    while at < len(text):
        match = BLANK.match(text, at) or VARIABLE.match(text, at) or ENTRY.match(text, at)
        if match is None:
            raise PtxError(f"line {text.count(chr(10), 0, at) + 1}: {text[at : at + 80]!r} is not known")
        if match.re is VARIABLE:
            align, kind, name, count, values = match.groups()
            module.variables[name] = int(align), _content(WIDTHS[kind] // 8, int(count or 1), values)
        elif match.re is ENTRY:
            module.entries[match[1]] = _entry(match[2], match[4].split("\n"), text.count("\n", 0, match.start(4)) + 1)
        at = match.end()
    return module


def _groups(pattern: str | re.Pattern[str], text: str) -> tuple[str, ...]:
    if match := re.fullmatch(pattern, text):
        return match.groups("")
    raise PtxError(f"{text!r} is not known")


def _content(size: int, count: int, values: str | None) -> bytes:
    numbers = [int(value, 0) % 2 ** (8 * size) for value in values.split(",")] if values else []
    return b"".join(number.to_bytes(size, "little") for number in numbers).ljust(size * count, b"\0")


def _entry(parameters: str, lines: list[str], first: int) -> Entry:
    entry = Entry()
    for text in filter(None, map(str.strip, parameters.split(","))):
        align, kind, name, count = _groups(PARAMETER, text)
        size = WIDTHS[kind] // 8 * int(count or 1)
        entry.param.add(name, align or size, size)
    for line, text in enumerate((" ".join(line.split()) for line in lines), first):
        if match := REGISTERS.fullmatch(text):
            names = [f"{match[2]}{k}" for k in range(int(match[3]))] if match[3] else [match[2]]
            entry.registers.update(dict.fromkeys(names, match[1]))
        elif match := DEPOT.fullmatch(text):
            getattr(entry, match[1]).add(match[3], match[2], int(match[4]))
        elif text not in ("", '.pragma "nounroll";'):
            entry.body[line] = text
    return entry


# -- Writing ----------------------------------------------------------------------------------------------------------


def translate(module: Module) -> str:
    """Returns C++ with `int launch_<entry>(const u8 *param, Launch *launch)` for every entry.

    Raises:
        PtxError: an instruction, a modifier or an operand that is not known.
    """
    variables = [
        f'extern "C" __attribute__((aligned({align}))) u8 {name}[] = {{{", ".join(map(str, content))}}};'
        for name, (align, content) in module.variables.items()
    ]
    return "\n".join(
        ['#include "ptx_machine.h"', *variables, *(_Writer(module, name).kernel() for name in module.entries)]
    )


class _Writer:
    """Writes one kernel as a function of one thread."""

    def __init__(self, module: Module, name: str) -> None:
        self._name, self._entry = name, module.entries[name]
        self._symbols = {
            **{variable: f"(u64){variable}" for variable in module.variables},
            **{depot: f"(u64)(local + {offset})" for depot, (offset, _) in self._entry.local.items()},
            **{parameter: f"(u64)(param + {offset})" for parameter, (offset, _) in self._entry.param.items()},
        }

    def kernel(self) -> str:
        entry = self._entry
        return f"""\
static __attribute__((aligned(16))) u8 shared_{self._name}[{max(1, entry.shared.end)}];
static int thread_{self._name}(const u8 *param, Launch *launch, u32 ctaid, u32 tid) {{
  __attribute__((aligned(16))) u8 local[{max(1, entry.local.end)}];
  poison(local, sizeof local);
  u8 *const shared = shared_{self._name};
  constexpr u64 parameter_bytes = {entry.param.end}, shared_bytes = {entry.shared.end};
  {" ".join(starmap(self._declaration, entry.registers.items()))}
{chr(10).join(starmap(self._line, entry.body.items()))}
  return 0;
}}
LAUNCH({self._name})"""

    def _declaration(self, register: str, kind: str) -> str:
        if kind not in WIDTHS:
            raise PtxError(f"entry {self._name}: a register of type {kind} is not known")
        # What is read before it is written is nobody's value: no zero that happens to be right.
        storage, value = ("u8", "0") if kind == "pred" else (f"u{max(16, WIDTHS[kind])}", "POISON")
        return f"{storage} {register[1:]} = ({storage}){value};"

    def _line(self, line: int, text: str) -> str:
        if text.startswith("$") and text.endswith(":"):
            return f"{_label(text)};"
        try:
            return f"  {self._statement(line, text)}"
        except (PtxError, LookupError, ValueError) as error:
            raise PtxError(f"line {line} of {self._name}: {text!r} is not known: {error}") from None

    def _statement(self, line: int, text: str) -> str:
        """A name that is not there is a LookupError, the wrong number of operands a ValueError."""
        negated, guard, opcode, written = _groups(STATEMENT, text)
        operands = OPERAND.findall(written)
        if "".join(operands).replace(" ", "") != re.sub(r",(?![^{]*\})|\s", "", written):
            raise PtxError("operands")
        kinds, code = find(opcode)
        code = code.format(
            *[part for pair in zip(operands, kinds, strict=True) for part in self._operand(*pair)], line=line
        )
        return f"if ({negated}{self._register(guard, 'pred')}) {{ {code} }}" if guard else code

    def _operand(self, text: str, kind: str) -> list[str]:
        """C++ of an operand, of each where braces hold several; kinds are those of `find`."""
        if kind == "label":
            return [_label(text)]
        if kind == "address":
            return [self._address(text)]
        if kind.startswith("{"):
            (members,) = _groups(r"\{(.*)\}", text.replace(" ", ""))
            return [
                part
                for pair in zip(members.split(","), kind[1:-1].split(), strict=True)
                for part in self._operand(*pair)
            ]
        access, kind = _groups(r"([=<>]?)(\w+)", kind)
        if access in ("=", ">"):
            return [self._register(text, kind, wider=access == ">")]
        is_register = text.startswith("%") and text not in SPECIAL
        value = self._register(text, kind, wider=access == "<") if is_register else self._constant(text, kind)
        return [f"as_{kind}({value})"]

    def _constant(self, text: str, kind: str) -> str:
        if text in SPECIAL:
            return SPECIAL[text]
        if re.fullmatch(r"0f[0-9A-Fa-f]{8}", text) and kind in ("f32", "b32"):
            return f"0x{text[2:]}u"
        if re.fullmatch(r"-?(?:0x[0-9A-Fa-f]+|[1-9]\d*|0)U?", text) and kind != "f32":
            return f"{int(text.rstrip('U'), 0) % 2**64}ull"
        return self._symbols[text] if WIDTHS[kind] == 64 else f"{self._entry.shared[text][0]}ull"

    def _address(self, text: str) -> str:
        name, offset = _groups(r"\[([%\w$]+)(?:\+(-?\d+))?\]", text)
        if name in self._entry.shared:
            base = f"{self._entry.shared[name][0]}ull"
        elif self._entry.registers.get(name, "").endswith("32"):  # of shared memory
            base = f"(u64){name[1:]}"
        else:
            base = self._register(name, "u64") if name.startswith("%") else self._symbols[name]
        return f"{base} + (u64){int(offset or 0)}ll"

    def _register(self, text: str, kind: str, *, wider: bool = False) -> str:
        width = WIDTHS[self._entry.registers[text]]
        if width != WIDTHS[kind] and not (wider and width > WIDTHS[kind]):
            raise PtxError(f"{text!r} of {width} bits as {kind}")
        return text[1:]


def _label(text: str) -> str:
    return text.replace("$", "L")
