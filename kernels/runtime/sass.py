"""What a compiled kernel turned into: its instructions and registers, read from its cubin on a machine without a GPU.

Needs NVIDIA's nvdisasm (`pip install nvidia-cuda-nvdisasm`, or the CUDA toolkit).
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import struct
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
_SECTION = re.compile(r"\.section\s+\.text\.(\S+?),")


@dataclass(frozen=True, slots=True)
class Sass:
    """One kernel of a cubin."""

    name: str
    opcodes: Counter[str]  #: with modifiers, e.g. "LDG.E.128"
    registers: int  #: of a thread

    def count(self, *parts: str) -> int:
        """Instructions whose opcode begins with the first part and has all the other parts as modifiers."""
        first, *modifiers = parts
        return sum(
            n
            for op, n in self.opcodes.items()
            if op.split(".")[0] == first and set(modifiers) <= set(op.split(".")[1:])
        )

    @property
    def spills(self) -> int:
        """Accesses to local memory: registers that did not fit, or arrays indexed at run time."""
        return self.count("LDL") + self.count("STL")


def nvdisasm() -> str | None:
    """Path of the disassembler; None if there is none."""
    found = shutil.which("nvdisasm")
    if found is None and (spec := importlib.util.find_spec("nvidia")) is not None:
        for place in spec.submodule_search_locations or ():
            for path in sorted(Path(place).glob("*/bin/nvdisasm")):
                found = str(path)
    return found


def disassemble(cubin: bytes) -> list[Sass]:
    """The kernels of a cubin. Raises FileNotFoundError without nvdisasm."""
    registers = _registers(cubin)
    parts = _SECTION.split(_text(cubin))
    return [
        Sass(name, Counter(_INSTRUCTION.findall(body)), registers[name])
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    ]


def _text(cubin: bytes) -> str:
    tool = nvdisasm()
    if tool is None:
        raise FileNotFoundError("nvdisasm is not installed: pip install nvidia-cuda-nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], check=True, capture_output=True, text=True).stdout


def _registers(cubin: bytes) -> dict[str, int]:
    """Registers a thread per kernel, from the register counts (attribute 0x2f) of .nv.info in the ELF64 file."""
    sections = _sections(cubin)
    symbols, strings, info = (sections[name] for name in (".symtab", ".strtab", ".nv.info"))
    found, at = {}, 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != 4:  # the value is in the header itself
            continue
        if attribute == 0x2F:
            symbol, count = struct.unpack_from("<II", info, at)
            name = struct.unpack_from("<I", symbols, symbol * 24)[0]
            found[strings[name : strings.index(b"\0", name)].decode()] = count
        at += size
    return found


def _sections(elf: bytes) -> dict[str, bytes]:
    """The sections of an ELF64 file by name."""
    offset = struct.unpack_from("<Q", elf, 0x28)[0]
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, offset + i * size) for i in range(count)]
    strings = headers[names][4]
    found = {}
    for header in headers:
        start = strings + header[0]
        name = elf[start : elf.index(b"\0", start)].decode()
        found[name] = elf[header[4] : header[4] + header[5]] if header[1] != 8 else b""
    return found
