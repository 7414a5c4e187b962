"""JSON to frozen dataclasses, every mismatch noted.

Knows types only. Does not know what the values mean.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

_LARGEST = 10**300


def parse(kind: Any, value: Any, where: str, faults: list[str]) -> Any:
    """Build `kind` (a dataclass, a container of such, or a plain type) from JSON, noting each mismatch."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        return _parse_dataclass(typing.cast(type, kind), value, where, faults)
    if origin is dict and isinstance(value, dict):
        return {key: parse(arguments[1], item, f"{where}.{key}", faults) for key, item in value.items()}
    if origin is tuple and isinstance(value, list):
        return tuple(parse(arguments[0], item, f"{where}[{i}]", faults) for i, item in enumerate(value))
    if origin is types.UnionType:
        return None if value is None else parse(arguments[0], value, where, faults)
    if kind is float and type(value) in (int, float):
        if abs(value) <= _LARGEST:
            return float(value)
        faults.append(f"{where} is {value!r:.80}, expected a finite number")
        return value
    if not isinstance(kind, type) or type(value) is not kind:
        faults.append(f"{where} is {value!r:.80}, expected {getattr(kind, '__name__', kind)}")
    return value


def _parse_dataclass(kind: type, value: Any, where: str, faults: list[str]) -> Any:
    if not isinstance(value, dict):
        faults.append(f"{where} is {value!r:.80}, expected an object")
        return None
    declared = typing.get_type_hints(kind)
    faults += [f"{where}.{key} is missing" for key in sorted(declared.keys() - value.keys())]
    faults += [f"{where}.{key} is unknown" for key in sorted(value.keys() - declared.keys())]
    parsed = {key: parse(declared[key], value[key], f"{where}.{key}", faults) for key in declared if key in value}
    return None if declared.keys() - value.keys() else kind(**parsed)
