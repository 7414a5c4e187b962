"""Rules of a plugin, read off an operator's contract: its sizes, dtypes and attributes, each fault a sentence.

Knows the contract only, no TensorRT: `plugins.registry` asks it from TensorRT's callbacks. A size is a number, or None where it is
chosen at run time. Shape letters as in `plugins.contract`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dspark.plugins.contract import BLOCK_ATTENTION, FLOATS, RING_WRITE, Operator


class PluginError(ValueError):
    """A plugin was given what its operator's contract refuses, or is not registered."""


def letters(shape: str) -> list[str]:
    """Return the letters of a shape of the contract."""
    return shape.split(",")


def sizes(operator: Operator, shapes: Sequence[Sequence[int | None]]) -> dict[str, int | None]:
    """Return the size of each letter, given the shapes of the inputs in order. Raises PluginError with all faults."""
    faults: list[str] = []
    if len(shapes) != len(operator.inputs):
        raise PluginError(f"{operator.name} has {len(shapes)} inputs, expected {len(operator.inputs)}: {', '.join(operator.inputs)}")
    known: dict[str, int | None] = {}
    for (name, declared), shape in zip(operator.inputs.items(), shapes, strict=True):
        if len(shape) != len(letters(declared)):
            faults.append(f"{name} has {len(shape)} dimensions, expected {len(letters(declared))} ({declared})")
            continue
        for letter, size in zip(letters(declared), shape, strict=True):
            before = known.get(letter)
            if before is not None and size is not None and before != size:
                faults.append(f"{name} has {letter} = {size}, expected {before} as in the inputs before it")
            known[letter] = size if before is None else before
    faults += [fault for fault in _bounds(operator, known) if not faults]
    if faults:
        raise PluginError(f"{operator.name}: {'; '.join(faults)}")
    return known


def _bounds(operator: Operator, known: Mapping[str, int | None]) -> list[str]:
    rows, capacity, heads, kv_heads = (known.get(letter) for letter in ("N", "R", "Hq", "G"))
    if operator is RING_WRITE and rows is not None and capacity is not None and rows > capacity:
        return [f"{rows} rows do not fit a ring of {capacity}: N must not exceed R"]
    if operator is BLOCK_ATTENTION and heads is not None and kv_heads is not None and heads % kv_heads:
        return [f"{heads} query heads are no multiple of {kv_heads} key/value heads"]
    return []


def exact_sizes(operator: Operator, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """Return the size of each letter where all are known."""
    known = sizes(operator, shapes)
    return {letter: size for letter, size in known.items() if size is not None}


def source_of(operator: Operator, letter: str) -> tuple[int, int]:
    """Return input and axis that give an output its `letter`."""
    for position, declared in enumerate(operator.inputs.values()):
        if letter in letters(declared):
            return position, letters(declared).index(letter)
    raise AssertionError(f"no input of {operator.name} has {letter}")


def dtype_fits(operator: Operator, position: int, dtypes: Sequence[str | None]) -> bool:
    """Whether tensor `position` (inputs, then outputs) may have its dtype, given those before it: floats are all of one dtype."""
    names = [*operator.inputs, *operator.outputs]
    fixed = operator.dtypes.get(names[position])
    if fixed is not None:
        return dtypes[position] == fixed
    first = next(i for i, name in enumerate(names) if name not in operator.dtypes)
    return dtypes[position] in FLOATS and dtypes[position] == dtypes[first]


def checked_attributes(operator: Operator, given: Mapping[str, object]) -> dict[str, int | float]:
    """Return the attributes of a node. Raises PluginError with each that is missing or not of its type."""
    values: dict[str, int | float] = {}
    faults = []
    for name, kind in operator.attributes.items():
        value = given.get(name)
        if value is None:
            faults.append(f"attribute {name} is missing, expected {kind.__name__}")
        elif type(value) is not kind or not isinstance(value, int | float):
            faults.append(f"attribute {name} is {value!r} ({type(value).__name__}), expected {kind.__name__}")
        else:
            values[name] = value
    faults += [f"attribute {name} is {value}, expected at least 1" for name, value in values.items() if type(value) is int and value < 1]
    if faults:
        raise PluginError(f"{operator.name}: {'; '.join(faults)}")
    return values


def check_agreement(operator: Operator, attributes: Mapping[str, int | float], known: Mapping[str, int | None]) -> None:
    """Raise PluginError where the head attributes, which repeat sizes, differ from the shapes."""
    pairs = [(name, letter) for name, letter in (("heads", "Hq"), ("kv_heads", "G"), ("head_dim", "D")) if name in attributes]
    faults = [
        f"attribute {name} is {attributes[name]}, the inputs have {letter} = {known[letter]}"
        for name, letter in pairs
        if known[letter] is not None and known[letter] != attributes[name]
    ]
    if faults:
        raise PluginError(f"{operator.name}: {'; '.join(faults)}")
