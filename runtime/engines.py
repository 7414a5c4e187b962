"""Records of the compiled engines of a bundle: what they were made by and for, and the sizes they accept.

Part of the format of `runtime.bundle`. Knows numbers and names; loads nothing. Sizes are by shape letter, as in `runtime.graphs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dspark.runtime.errors import EngineError, LimitError, numbered

ENGINES = "engines"
FLAVOURS = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}
"""Flavours of TensorRT and the Python module of each."""

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True)
class EngineProfile:
    """One optimization profile: the least, the best and the largest size of each letter. Capacities are fixed and not among them."""

    name: str
    minimum: dict[str, int]
    optimum: dict[str, int]
    maximum: dict[str, int]

    def faults(self, sizes: Mapping[str, int]) -> list[str]:
        """Return which sizes lie outside."""
        return [
            f"profile {self.name}: {letter} = {size}, the engine was built for {self.minimum[letter]}..{self.maximum[letter]}"
            for letter, size in sizes.items()
            if letter in self.minimum and not self.minimum[letter] <= size <= self.maximum[letter]
        ]


@dataclass(frozen=True)
class EngineGraph:
    """The engine of one graph: its plugin layers, and its profiles in the order of their indices."""

    plugin_layers: int
    profiles: tuple[EngineProfile, ...]

    def profile(self, sizes: Mapping[str, int]) -> int:
        """Return the index of the last profile that accepts the sizes, that of rounds before that of prompts.

        Raises LimitError with what each refuses.
        """
        for index, profile in reversed(list(enumerate(self.profiles))):
            if not profile.faults(sizes):
                return index
        faults = [fault for profile in self.profiles for fault in profile.faults(sizes)]
        raise LimitError(f"no profile takes these sizes; build the engine again with larger --maxShapes or limits:{numbered(faults)}")


@dataclass(frozen=True)
class EngineRecord:
    """The engines in one directory below `engines/`, one a graph."""

    flavour: str
    version: str
    compute_capability: str
    ring_capacity: int
    cache_capacity: int
    hardware_compatibility: str
    version_compatible: bool
    weights_stripped: bool
    graphs: dict[str, EngineGraph]

    @property
    def directory(self) -> str:
        """Name of the directory below `engines/`."""
        return engine_directory(self.flavour, self.compute_capability)


def engine_directory(flavour: str, compute_capability: str) -> str:
    """Return the name of the directory that holds the engines of a flavour for a compute capability such as `8.9`."""
    return f"{flavour}-sm{compute_capability.replace('.', '')}"


def engine_path(directory: str, graph: str) -> str:
    """Return the path of an engine relative to its bundle."""
    return f"{ENGINES}/{directory}/{graph}.engine"


def record_faults(name: str, record: EngineRecord, graphs: tuple[str, ...], ring_capacity: int, cache_capacity: int) -> list[str]:
    """Return what a record says that cannot be, for a bundle of these graphs and capacities."""
    where = f"engines.{name}"
    checks = [
        (record.flavour in FLAVOURS, f"{where}.flavour is {record.flavour!r}, expected one of {', '.join(FLAVOURS)}"),
        (record.directory == name, f"{where} says flavour {record.flavour}, compute capability {record.compute_capability}: another name"),
        (
            (record.ring_capacity, record.cache_capacity) == (ring_capacity, cache_capacity),
            f"{where} was built for capacities {record.ring_capacity} and {record.cache_capacity}, "
            f"the bundle has {ring_capacity} and {cache_capacity}: build it again",
        ),
        (set(record.graphs) == set(graphs), f"{where}.graphs are {', '.join(record.graphs)}, expected {', '.join(graphs)}"),
    ]
    faults = [fault for holds, fault in checks if not holds]
    for graph, engine in record.graphs.items():
        for profile in engine.profiles:
            ranges = [tuple(part.get(key, 0) for part in (profile.minimum, profile.optimum, profile.maximum)) for key in profile.maximum]
            if not ranges or any(not 1 <= low <= best <= high for low, best, high in ranges):
                faults.append(f"{where}.graphs.{graph}: profile {profile.name} contradicts itself: {profile}")
        if not engine.profiles:
            faults.append(f"{where}.graphs.{graph} has no profile")
    return faults


def choose_record(engines: Mapping[str, EngineRecord], flavour: str, capability: str) -> tuple[str, EngineRecord]:
    """Return name and record of the engines that a device of this compute capability runs. Raises EngineError naming what there is."""
    name = engine_directory(flavour, capability)
    if name in engines:
        return name, engines[name]
    major = int(capability.split(".", maxsplit=1)[0])
    for other, record in engines.items():
        if record.flavour == flavour and record.hardware_compatibility == "ampere_plus" and major >= 8:
            return other, record
    there = ", ".join(sorted(engines)) or "none at all"
    raise EngineError(
        f"the bundle has no engines of {flavour} for compute capability {capability}, it has {there}: "
        f"export again with --backend {flavour}, here or with --compute-capability {capability} where that can be built ahead"
    )
