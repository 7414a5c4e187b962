"""Optimization profiles of every graph from a bundle's limits, with a user's shapes over them, checked as a whole.

A user's shape sets the sizes of its letters in the `decode` profile of every graph that has the tensor, so that no other tensor of the
graph need be named. Knows letters and numbers; not TensorRT. B batch rows, N new rows, M logit rows, K proposals.
"""

from __future__ import annotations

from collections.abc import Mapping

from dspark.runtime.bundle import Limits
from dspark.runtime.engines import DECODE, PREFILL, EngineProfile
from dspark.runtime.errors import ConfigError, numbered
from dspark.runtime.graphs import CONTEXT, TARGET, Signature

KINDS = ("minShapes", "optShapes", "maxShapes")
Shapes = dict[str, tuple[int, ...]]
Letters = dict[str, int]


def parse_shapes(text: str) -> Shapes:
    """Parse `name:1x8,name:4`. Raises ConfigError."""
    shapes: Shapes = {}
    for part in text.split(","):
        name, _, dims = part.partition(":")
        sizes = dims.split("x")
        if not name or not all(size.isdecimal() for size in sizes):
            raise ConfigError(f"{part!r} is no shape: expected NAME:1x8, several with commas between")
        shapes[name] = tuple(int(size) for size in sizes)
    return shapes


def make_profiles(
    signatures: Mapping[str, Signature], limits: Limits, num_speculative_tokens: int, capacities: Letters, asked: Mapping[str, Shapes]
) -> dict[str, tuple[EngineProfile, ...]]:
    """Return the profiles of each graph. `asked` holds a user's shapes by kind: `minShapes`, `optShapes`, `maxShapes`.

    Raises ConfigError with every shape that no graph has, that disagrees with another, or that lies outside the limits.
    """
    width = num_speculative_tokens + 1
    most = {"B": limits.max_batch_size, "N": width, "M": width}
    faults: list[str] = []
    profiles: dict[str, tuple[EngineProfile, ...]] = {}
    known = {spec.name for signature in signatures.values() for spec in signature.inputs}
    for kind in KINDS:
        faults += [f"--{kind}: no graph has an input {name!r}" for name in asked.get(kind, {}) if name not in known]
    for graph, signature in signatures.items():
        present = [letter for letter in most if any(letter in spec.shape for spec in signature.inputs)]
        low, best, high = (_asked(graph, signature, kind, asked.get(kind, {}), capacities, faults) for kind in KINDS)
        maximum = {letter: high.get(letter, most[letter]) for letter in present}
        minimum = {letter: low.get(letter, 1) for letter in present}
        usual = {letter: 1 if letter == "B" else most[letter] for letter in present}
        optimum = {k: best.get(k, max(minimum[k], min(usual[k], maximum[k]))) for k in present}
        for k in present:
            if not 1 <= minimum[k] <= optimum[k] <= maximum[k]:
                faults.append(f"{graph}: {k} has minimum {minimum[k]}, optimum {optimum[k]}, maximum {maximum[k]}, expected them in order")
            if maximum[k] > most[k]:
                remedy = "--max-batch-size" if k == "B" else "--num-speculative-tokens"
                faults.append(f"{graph}: {k} may be {maximum[k]}, the bundle allows {most[k]}: export with a larger {remedy}")
        decode = EngineProfile(DECODE, minimum, optimum, maximum)
        chunk = min(limits.max_chunk, capacities["R"]) if graph == CONTEXT else limits.max_chunk
        profiles[graph] = (_prefill(present, chunk), decode) if graph in (CONTEXT, TARGET) else (decode,)
    if faults:
        raise ConfigError(f"these profiles cannot be:{numbered(dict.fromkeys(faults))}")
    return profiles


def input_shapes(signature: Signature, profile: EngineProfile, capacities: Letters) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the least, best and largest shape of each input."""
    return {
        spec.name: tuple(
            tuple(dim if isinstance(dim, int) else (capacities | part)[dim] for dim in spec.shape)
            for part in (profile.minimum, profile.optimum, profile.maximum)
        )
        for spec in signature.inputs
    }


def _prefill(present: list[str], chunk: int) -> EngineProfile:
    """One request, chunks of any length up to the limit, logits of one row."""
    once = dict.fromkeys(present, 1)
    return EngineProfile(PREFILL, once, once | {"N": chunk}, once | {"N": chunk})


def _asked(graph: str, signature: Signature, kind: str, shapes: Shapes, capacities: Letters, faults: list[str]) -> Letters:
    """Return the sizes of letters that a user's shapes of one kind mean for a graph; notes what cannot be."""
    letters: Letters = {}
    source: dict[str, str] = {}
    for spec in signature.inputs:
        shape = shapes.get(spec.name)
        if shape is None:
            continue
        expected = [capacities.get(str(dim), dim) for dim in spec.shape]
        fixed = all(isinstance(wanted, str) or wanted == size for wanted, size in zip(expected, shape, strict=False))
        if len(shape) != len(expected) or not fixed:
            faults.append(f"--{kind}: {spec.name} is {'x'.join(map(str, shape))}, expected {'x'.join(map(str, expected))}")
            continue
        for wanted, size in zip(expected, shape, strict=True):
            if isinstance(wanted, str):
                if letters.setdefault(wanted, size) != size:
                    faults.append(f"--{kind}: {graph} has {wanted} = {size} in {spec.name}, {letters[wanted]} in {source[wanted]}")
                source.setdefault(wanted, spec.name)
    return letters
