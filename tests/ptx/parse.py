"""PTX text to a list of instructions.

    @%p1 ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1+16];

becomes Instruction(opcode="ld.global.v4.b32", operands=((%r1, ..., %r4), Address(%rd1, 16)), guard=%p1).
Operands are Register, Immediate, Symbol, Special, Address, Sink, or a tuple of these (braces).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from .errors import UnknownInstructionError

REGISTER_BITS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64}
PARAMETER_BYTES = {"u8": 1, "u16": 2, "u32": 4, "f32": 4, "b32": 4, "u64": 8, "b64": 8}
SPECIAL = {"%tid.x", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%ntid.x", "%laneid"}

ENTRY = re.compile(r"\.visible\s+\.entry\s+(\w+)\s*\((.*?)\)([^{]*)\{", re.DOTALL)
PARAMETER = re.compile(r"\.param\s+\.(\w+)\s+(?:\.ptr\s+\.global\s+\.align\s+\d+\s+)?(\w+)$")
DECLARATION = re.compile(r"\.reg\s+\.(\w+)\s+(%?\w+)(?:<(\d+)>)?$")
SHARED = re.compile(r"\.extern\s+\.shared\s+\.align\s+\d+\s+\.b8\s+(\w+)\[\];")
LABEL = re.compile(r"([$\w]+):")
STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
IGNORED_LINE = re.compile(r"^\s*\.(loc|file|pragma)\b.*$", re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*")


@dataclass(frozen=True)
class Register:
    name: str
    bits: int


@dataclass(frozen=True)
class Immediate:
    value: int
    """Bits, or a number that the type of the instruction cuts to its width."""


@dataclass(frozen=True)
class Symbol:
    name: str


@dataclass(frozen=True)
class Special:
    name: str


@dataclass(frozen=True)
class Sink:
    """The operand `_`: a result that is dropped."""


@dataclass(frozen=True)
class Address:
    base: Register | Symbol
    offset: int


Operand: TypeAlias = Register | Immediate | Symbol | Special | Sink | Address | tuple["Operand", ...]


@dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None
    guard_negated: bool
    text: str


@dataclass(frozen=True)
class Kernel:
    name: str
    parameters: dict[str, int]
    """Bytes of each parameter, in order."""
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    """Index of the instruction that follows each label."""
    threads: int
    shared_symbols: tuple[str, ...]
    registers: dict[str, Register]


def parse(text: str) -> Kernel:
    """Return the one kernel of a PTX file."""
    text = IGNORED_LINE.sub("", COMMENT.sub("", text))
    entries = list(ENTRY.finditer(text))
    if len(entries) != 1 or ".func" in text:
        raise UnknownInstructionError(
            f"{len(entries)} kernels, or functions; expected one kernel and no function"
        )
    name, parameters, directives = entries[0].groups()
    threads = re.fullmatch(r"\s*\.reqntid\s+(\d+)\s*(\.maxnreg\s+\d+\s*)?", directives)
    if threads is None:
        raise UnknownInstructionError(
            f"directives of the kernel are {directives.strip()!r}; expected .reqntid"
        )
    body = _Body(_up_to_closing_brace(text[entries[0].end() :]))
    return Kernel(
        name,
        _parse_parameters(parameters),
        tuple(body.instructions),
        body.labels,
        int(threads[1]),
        tuple(SHARED.findall(text)),
        body.registers,
    )


def _up_to_closing_brace(text: str) -> str:
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:position]
    raise UnknownInstructionError("the body of the kernel has no closing brace")


def _parse_parameters(text: str) -> dict[str, int]:
    parameters = {}
    for declaration in filter(None, map(str.strip, text.split(","))):
        match = PARAMETER.match(declaration)
        if match is None or match[1] not in PARAMETER_BYTES:
            raise UnknownInstructionError(f"parameter {declaration!r}")
        parameters[match[2]] = PARAMETER_BYTES[match[1]]
    return parameters


class _Body:
    """Statements of a kernel's body. Braces open scopes: a register of an inner scope needs a name that no
    other scope uses."""

    def __init__(self, text: str) -> None:
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.registers: dict[str, Register] = {}
        for chunk in text.split(";"):
            statement = self._take_labels(chunk.strip())
            if statement.startswith(".reg"):
                self._declare(statement)
            elif statement:
                self.instructions.append(self._parse(statement))

    def _take_labels(self, statement: str) -> str:
        """The statement without the labels and scope braces in front of it."""
        while True:
            if statement[:1] in ("{", "}"):
                statement = statement[1:].lstrip()
            elif label := LABEL.match(statement):
                self.labels[label[1]] = len(self.instructions)
                statement = statement[label.end() :].lstrip()
            else:
                return statement

    def _declare(self, statement: str) -> None:
        match = DECLARATION.match(statement)
        if match is None or match[1] not in REGISTER_BITS:
            raise UnknownInstructionError(f"declaration {statement!r}")
        kind, name, count = match.groups()
        names = [name] if count is None else [f"{name}{index}" for index in range(int(count))]
        for each in names:
            if each in self.registers:
                raise UnknownInstructionError(f"register {each} is declared twice")
            self.registers[each] = Register(each, REGISTER_BITS[kind])

    def _parse(self, statement: str) -> Instruction:
        match = STATEMENT.match(statement)
        if match is None:
            raise UnknownInstructionError(f"statement {statement!r}")
        negated, guard, opcode, rest = match.groups()
        return Instruction(
            opcode,
            tuple(self._parse_operand(operand) for operand in OPERAND.findall(rest)),
            None if guard is None else self._register(guard),
            bool(negated),
            " ".join(statement.split()),
        )

    def _parse_operand(self, text: str) -> Operand:
        text = text.strip()
        if text[0] == "{":
            return tuple(self._parse_operand(each) for each in text[1:-1].split(","))
        if text[0] == "[":
            base, _, offset = text[1:-1].partition("+")
            start = self._parse_operand(base)
            if not isinstance(start, Register | Symbol):
                raise UnknownInstructionError(f"address {text}")
            return Address(start, int(offset or "0", 0))
        if text == "_":
            return Sink()
        if text in SPECIAL:
            return Special(text)
        if text[0] == "%":
            return self._register(text)
        if text[:2] in ("0f", "0F"):
            return Immediate(int(text[2:], 16))
        if text[0].isdigit() or text[0] == "-":
            return Immediate(int(text.rstrip("U"), 0))
        return Symbol(text)

    def _register(self, name: str) -> Register:
        if name not in self.registers:
            raise UnknownInstructionError(f"register {name} is not declared")
        return self.registers[name]
