"""PTX, the text that nvcc makes of a kernel before the assembler: read, and turned into C++ that does the same.

    text ──read──► Module ──translate──► C++ of one function per entry, which oracles/ptx_machine.py compiles and runs

Source: NVIDIA, "Parallel Thread Execution ISA", version 9.0, https://docs.nvidia.com/cuda/parallel-thread-execution/.
The meaning of each instruction is in oracles/ptx_instructions.py. Whatever is not known is an error with its line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from oracles.ptx_instructions import WIDTHS, PtxError, find

VARIABLE = re.compile(
    r"(?:\.visible\s+)?\.(global)\s+\.align\s+(\d+)\s+\.(b8|u8|[bufs]32|[bus]64)\s+(\w+)(?:\[(\d+)\])?"
    r"(?:\s*=\s*\{([^}]*)\})?;"
)
ENTRY = re.compile(r"\.visible\s+\.entry\s+(\w+)\s*\(([^)]*)\)\s*((?:\.maxntid[^\n]*\n\s*)*)\{\n(.*?)^\}", re.S | re.M)
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr\s+\.align\s+\d+\s+)?(\w+)(?:\[(\d+)\])?")
HEADER = re.compile(r"\.(?:version \d+\.\d+|target sm_\d+\w*|address_size 64)\s*?\n")
REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(%\w+)(?:<(\d+)>)?;")
DEPOT = re.compile(r"\.(local|shared)\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d+)\];")
STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.]*)(?:\s+(.*?))?\s*;")
OPERAND = re.compile(r"\s*(\{[^}]*\}|\[[^\]]*\]|[^,\s]+)\s*(?:,|$)")
ADDRESS = re.compile(r"\[([%\w$]+)(?:\+(-?\d+))?\]")
SPECIAL = {"%tid.x": "tid", "%ctaid.x": "ctaid", "%ntid.x": "launch->block"}


@dataclass(frozen=True, kw_only=True)
class Variable:
    """Data of a module, such as `env_description`."""

    name: str
    align: int
    data: bytes
    writable: bool


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line: `@%p1 bra $L__BB1_6;` has the guard `%p1`; a label has its name alone."""

    line: int
    text: str
    guard: str = ""
    opcode: str = ""
    operands: tuple[str, ...] = ()
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A kernel, by name: offset and bytes of parameters, depots and shared memory, the type of registers.

    A depot is local memory. Shared memory is addressed by its offset, of 32 bits.
    """

    name: str
    parameters: dict[str, tuple[int, int]]
    registers: dict[str, str] = field(default_factory=dict)
    depots: dict[str, tuple[int, int]] = field(default_factory=dict)
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)
    body: list[Instruction] = field(default_factory=list)

    @property
    def parameter_bytes(self) -> int:
        return max(offset + size for offset, size in self.parameters.values())

    @property
    def local_bytes(self) -> int:
        return _end(self.depots)

    @property
    def shared_bytes(self) -> int:
        return _end(self.shared)


def _end(placed: dict[str, tuple[int, int]]) -> int:
    return max((offset + size for offset, size in placed.values()), default=0)


@dataclass(frozen=True, kw_only=True)
class Module:
    """A whole text."""

    text: str
    variables: dict[str, Variable] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)


# -- Reading ----------------------------------------------------------------------------------------------------------


def read(text: str) -> Module:
    """Returns what a PTX text declares.

    Raises:
        PtxError: it holds something that is not known.
    """
    text = re.sub(r"//[^\n]*", "", text)
    module = Module(text=text)
    at = 0
    while at < len(text):
        if text[at].isspace():
            at += 1
            continue
        if match := HEADER.match(text, at):
            pass
        elif match := VARIABLE.match(text, at):
            module.variables[match[4]] = _variable(match)
        elif match := ENTRY.match(text, at):
            first = text.count("\n", 0, match.start(4)) + 1
            module.entries[match[1]] = _entry(match[1], match[2], match[4], first)
        else:
            raise PtxError(f"line {text.count(chr(10), 0, at) + 1}: {text[at : at + 80]!r} is not known")
        at = match.end()
    return module


def _variable(match: re.Match[str]) -> Variable:
    space, align, kind, name, count, values = match.groups()
    size = WIDTHS[kind] // 8
    numbers = [int(value, 0) for value in values.split(",")] if values else []
    data = b"".join((number % 2 ** (8 * size)).to_bytes(size, "little") for number in numbers)
    return Variable(
        name=name, align=int(align), data=data.ljust(size * int(count or 1), b"\0"), writable=space == "global"
    )


def _entry(name: str, parameters: str, body: str, first: int) -> Entry:
    placed: dict[str, tuple[int, int]] = {}
    end = 0
    for text in filter(None, (part.strip() for part in parameters.split(","))):
        match = PARAMETER.fullmatch(text)
        if match is None:
            raise PtxError(f"entry {name}: parameter {text!r} is not known")
        size = WIDTHS[match[2]] // 8 * int(match[4] or 1)
        align = int(match[1] or size)
        begin = -(-end // align) * align
        placed[match[3]] = (begin, size)
        end = begin + size
    entry = Entry(name=name, parameters=placed)
    entry.body.extend(_instructions(entry, body, first))
    return entry


def _instructions(entry: Entry, body: str, first: int) -> Iterator[Instruction]:
    for line, raw in enumerate(body.split("\n"), first):
        text = " ".join(raw.split())
        if not text or text == '.pragma "nounroll";':
            continue
        if match := REGISTERS.fullmatch(text):
            names = [f"{match[2]}{k}" for k in range(int(match[3]))] if match[3] else [match[2]]
            entry.registers.update(dict.fromkeys(names, match[1]))
        elif match := DEPOT.fullmatch(text):
            placed, align = entry.depots if match[1] == "local" else entry.shared, int(match[2])
            placed[match[3]] = (-(-_end(placed) // align) * align, int(match[4]))
        elif match := re.fullmatch(r"(\$\w+):", text):
            yield Instruction(line=line, text=text, label=match[1])
        elif match := STATEMENT.fullmatch(text):
            operands = tuple(operand[1] for operand in OPERAND.finditer(match[4] or ""))
            if "".join(operands).replace(" ", "") != re.sub(r",(?![^{]*\})|\s", "", match[4] or ""):
                raise PtxError(f"line {line}: operands of {text!r} are not known")
            guard = (match[1] or "") + (match[2] or "")
            yield Instruction(line=line, text=text, guard=guard, opcode=match[3], operands=operands)
        else:
            raise PtxError(f"line {line}: {text!r} is not known")


# -- Writing ----------------------------------------------------------------------------------------------------------


def translate(module: Module) -> str:
    """Returns C++ with `int launch_<entry>(const u8 *param, Launch *launch)` for every entry.

    Raises:
        PtxError: an instruction, a modifier or an operand that is not known.
    """
    parts = ['#include "ptx_machine.h"']
    for variable in module.variables.values():
        numbers = ", ".join(map(str, variable.data))
        alignment = f"__attribute__((aligned({variable.align})))"
        parts.append(f'extern "C" {alignment} u8 {variable.name}[{len(variable.data)}] = {{{numbers}}};')
    parts += [_Writer(module, entry).whole() for entry in module.entries.values()]
    return "\n".join(parts)


class _Writer:
    """Writes one kernel as a function of one thread."""

    def __init__(self, module: Module, entry: Entry) -> None:
        self._module, self._entry = module, entry

    def whole(self) -> str:
        entry = self._entry
        lines = [f"static int thread_{entry.name}(const u8 *param, Launch *launch, u32 ctaid, u32 tid) {{"]
        lines.append(f"  __attribute__((aligned(16))) u8 local[{max(1, entry.local_bytes)}];")
        lines.append(f"  constexpr u64 parameter_bytes = {entry.parameter_bytes};")
        lines.append("  poison(local, sizeof local);" if entry.local_bytes else "")
        lines.insert(0, f"static __attribute__((aligned(16))) u8 shared_{entry.name}[{max(1, entry.shared_bytes)}];")
        lines.append(f"  u8 *const shared = shared_{entry.name};\n  constexpr u64 shared_bytes = {entry.shared_bytes};")
        # What is read before it is written is nobody's value: no zero that happens to be right.
        for name, kind in entry.registers.items():
            if kind not in WIDTHS:
                raise PtxError(f"entry {entry.name}: a register of type {kind} is not known")
            lines.append(f"  {_storage(kind)} {name[1:]} = ({_storage(kind)}){'0' if kind == 'pred' else 'POISON'};")
        for instruction in entry.body:
            try:
                lines.append(self._statement(instruction))
            except PtxError as error:
                text = f"line {instruction.line} of {entry.name}: {instruction.text!r}"
                raise PtxError(f"{text} is not known: {error}") from None
        lines.append(f"  return 0;\n}}\nLAUNCH({entry.name})")
        return "\n".join(lines)

    def _statement(self, instruction: Instruction) -> str:
        if instruction.label:
            return f"{instruction.label.replace('$', 'L')}:;"
        opcode, operands = instruction.opcode, instruction.operands
        if opcode in ("bra", "bra.uni"):
            code = f"goto {operands[0].replace('$', 'L')};"
        elif opcode in ("ret", "exit"):
            code = "return 0;"
        else:
            meaning = find(opcode)
            if len(operands) != len(meaning.operands):
                raise PtxError(f"{len(meaning.operands)} operands are")
            pairs = zip(operands, meaning.operands, strict=True)
            named = [part for text, kind in pairs for part in self._operand(text, kind)]
            code = meaning.code.format(*named, line=instruction.line)
        if not instruction.guard:
            return f"  {code}"
        guard = self._register(instruction.guard.lstrip("!"), "pred")
        return f"  if ({'!' if instruction.guard[0] == '!' else ''}{guard}) {{ {code} }}"

    def _operand(self, text: str, kind: str) -> list[str]:
        """C++ of an operand, of each where braces hold several; kinds are those of `Meaning`."""
        if kind == "address":
            return [self._address(text)]
        if kind.startswith("{"):
            kinds = kind[1:-1].split()
            members = [part.strip() for part in text.strip("{}").split(",")]
            if len(members) != len(kinds) or text[0] != "{":
                raise PtxError(f"{len(kinds)} registers in braces are")
            return [part for pair in zip(members, kinds, strict=True) for part in self._operand(*pair)]
        if kind[0] in "=>":
            return [self._register(text, kind[1:], wider=kind[0] == ">")]
        wider = kind[0] == "<"
        kind = kind.lstrip("<")
        if text.startswith("%") and text not in SPECIAL:
            return [f"as_{kind}({self._register(text, kind, wider=wider)})"]
        return [f"as_{kind}({self._constant(text, kind)})"]

    def _constant(self, text: str, kind: str) -> str:
        if text in SPECIAL:
            return SPECIAL[text]
        if re.fullmatch(r"0f[0-9A-Fa-f]{8}", text) and kind in ("f32", "b32"):
            return f"0x{text[2:]}u"
        if re.fullmatch(r"-?(?:0x[0-9A-Fa-f]+|[1-9]\d*|0)U?", text) and kind != "f32":
            return f"{int(text.rstrip('U'), 0) % 2**64}ull"
        if text in self._entry.shared:
            return f"{self._entry.shared[text][0]}ull"
        if WIDTHS[kind] == 64:
            return self._symbol(text)
        raise PtxError(f"{text!r} as {kind} is not")

    def _symbol(self, text: str) -> str:
        if text in self._entry.parameters:
            return f"(u64)(param + {self._entry.parameters[text][0]})"
        if text in self._entry.depots:
            return f"(u64)(local + {self._entry.depots[text][0]})"
        if text in self._module.variables:
            return f"(u64){text}"
        raise PtxError(f"{text!r} is not")

    def _address(self, text: str) -> str:
        match = ADDRESS.fullmatch(text)
        if match is None:
            raise PtxError(f"the address {text!r} is not")
        if match[1] in self._entry.shared:
            base = f"{self._entry.shared[match[1]][0]}ull"
        elif self._entry.registers.get(match[1], "").endswith("32"):  # of shared memory
            base = f"(u64){match[1][1:]}"
        else:
            base = self._register(match[1], "u64") if match[1].startswith("%") else self._symbol(match[1])
        return f"{base} + (u64){int(match[2] or 0)}ll"

    def _register(self, text: str, kind: str, *, wider: bool = False) -> str:
        declared = self._entry.registers.get(text)
        if declared is None:
            raise PtxError(f"the register {text!r} is not")
        have, want = WIDTHS[declared], WIDTHS[kind]
        if (declared == "pred") != (kind == "pred") or (have != want and not (wider and have > want)):
            raise PtxError(f"{text!r}, which is .{declared}, as {kind} is not")
        return text[1:]


def _storage(kind: str) -> str:
    return "u8" if kind == "pred" else f"u{max(16, WIDTHS[kind])}"
