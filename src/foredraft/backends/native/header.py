"""The interface of the kernels as ctypes needs it, read from foredraft.h, so that it is written down only there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

from foredraft.kernels.build import SOURCES

_INTEGERS = {"int": c_int, "int32_t": c_int32, "int64_t": c_int64, "uint64_t": c_uint64}
_NUMBERS: dict[str, Any] = {**_INTEGERS, "float": c_float, "double": c_double}
_TEXT = re.sub(r"/\*.*?\*/", "", (SOURCES / "foredraft.h").read_text(encoding="utf-8"), flags=re.DOTALL)

CONSTANTS = {name: int(value) for name, value in re.findall(r"(FD_\w+) = (\d+)", _TEXT)}
STRUCTURES: dict[str, type[Structure]] = {}  # by the names that they have in C


def _declared(declaration: str) -> Iterator[tuple[str, Any]]:
    """The names of a declaration like `const float *x, *y` or `int x[A + 1]`, and their types. A pointer to numbers is
    an address, which is what a tensor tells."""
    kind, names = declaration.replace("const", "").split(maxsplit=1)
    for name in names.split(","):
        if "[" in name:
            array, size = name.strip(" ]").split("[")
            yield array, _NUMBERS[kind] * sum(CONSTANTS.get(part) or int(part) for part in size.split(" + "))
        elif "*" not in name:
            yield name.strip(), STRUCTURES.get(kind) or _NUMBERS[kind]
        elif name.count("*") == 2:
            yield name.strip("* "), POINTER(c_void_p)
        else:
            yield name.strip("* "), POINTER(STRUCTURES[kind]) if kind in STRUCTURES else c_void_p


for _body, _name in re.findall(r"typedef struct \{(.*?)\} (\w+);", _TEXT, re.DOTALL):
    _fields = [field for declaration in _body.split(";")[:-1] for field in _declared(declaration)]
    STRUCTURES[_name] = type(_name, (Structure,), {"_fields_": _fields})

# Types of the result and of the arguments, by name.
_RESULTS = {"int ": c_int, "int64_t ": c_int64, "void ": None, "const char *": c_char_p, "fd_text *": c_void_p}
FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    name: (_RESULTS[result], [next(_declared(each))[1] for each in arguments.split(",") if each != "void"])
    for result, name, arguments in re.findall(r"^(\w.*[ *])(fd_\w+)\(([^)]*)\);", _TEXT, re.MULTILINE)
}
