"""A TensorRT whose engines are graphs of a bundle, run by ONNX Runtime on the memory of a `FakeCuda`.

An engine's file names its bundle and graph. What the interface forbids is an error: a shape outside the profile, a missing or misaligned
address, scratch memory that is too small, a context that changes after it was captured.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from fake_cuda import ALIGNMENT, FakeCuda

from dspark.export.profiles import make_profiles
from dspark.runtime.bundle import MANIFEST, load_bundle, record_file
from dspark.runtime.engine import manifest_signatures
from dspark.runtime.engines import EngineGraph, EngineRecord, engine_path
from dspark.runtime.graphs import MODEL_DTYPE
from dspark.runtime.onnxruntime import HostTensor, OnnxRuntimeEngine

VERSION = "1.7.1"
_NUMPY = {"fp32": np.float32, "float32": np.float32, "int64": np.int64}
_NAMES = {"fp32": "FLOAT", "float32": "FLOAT", "int64": "INT64"}


def add_engines(bundle: Path, place: Path, capability: str = "8.9", **changes: Any) -> Path:
    """Copy a bundle and give it engines of this module; `changes` are those of its record."""
    shutil.copytree(bundle, place)
    manifest = load_bundle(bundle).manifest
    signatures = manifest_signatures(manifest)
    capacities = {"R": manifest.ring_capacity, "S": manifest.cache_capacity}
    profiles = make_profiles(signatures, manifest.limits, manifest.num_speculative_tokens, capacities, {})
    graphs = {graph: EngineGraph(0, profiles[graph]) for graph in signatures}
    record = EngineRecord("tensorrt-rtx", VERSION, capability, capacities["R"], capacities["S"], "none", False, False, graphs)
    record = dataclasses.replace(record, **changes)
    for graph in signatures:
        path = place / engine_path(record.directory, graph)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"bundle": str(bundle), "graph": graph}))
    rewrite(place, {record.directory: record})
    return place


def rewrite(bundle: Path, engines: dict[str, EngineRecord] | None = None) -> None:
    """Write the manifest again with the files of `engines/` as they are now."""
    raw = json.loads((bundle / MANIFEST).read_text())
    if engines is not None:
        raw["engines"] = {name: dataclasses.asdict(record) for name, record in engines.items()}
    for path in (bundle / "engines").rglob("*.engine"):
        raw["files"][str(path.relative_to(bundle))] = dataclasses.asdict(record_file(path))
    (bundle / MANIFEST).write_text(json.dumps(raw))


class FakeTensorRT:
    """The module. `refuse` names a call of contexts that returns False; `contexts` counts those that were made."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.refuse, self.contexts = cuda, "", 0
        self.__name__, self.__version__ = "fake_tensorrt", VERSION
        self.TensorIOMode = Enum("TensorIOMode", ["INPUT", "OUTPUT"])
        self.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user")
        self.PluginField = lambda name, data, kind: SimpleNamespace(name=name, data=data, type=kind)
        self.PluginFieldType = SimpleNamespace(FLOAT32=1, INT64=2)
        self.PluginFieldCollection = list
        for name in ("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuildV2", "IPluginV3OneRuntime", "IPluginCreatorV3One"):
            setattr(self, name, type(name, (), {}))
        severity = SimpleNamespace(ERROR=1, INTERNAL_ERROR=0)
        self.ILogger = type("ILogger", (), {"Severity": severity})
        self.creators: dict[tuple[str, str, str], Any] = {}
        self._hosts: dict[str, OnnxRuntimeEngine] = {}

    def get_plugin_registry(self) -> Any:
        def register(creator: Any, namespace: str) -> bool:
            self.creators[creator.name, creator.plugin_version, namespace] = creator
            return True

        return SimpleNamespace(
            register_creator=register, get_creator=lambda *key: self.creators.get(key), all_creators=list(self.creators.values())
        )

    def Runtime(self, log: Any) -> Any:
        def deserialize(data: Any) -> Any:
            try:
                fields = json.loads(bytes(data))
            except ValueError:
                log.log(1, "Serialization assertion stdVersionRead == kSERIALIZATION_VERSION failed")
                return None
            return FakeEngine(self, log, **fields)

        return SimpleNamespace(deserialize_cuda_engine=deserialize, engine_host_code_allowed=False)

    def host(self, bundle: str) -> OnnxRuntimeEngine:
        if bundle not in self._hosts:
            self._hosts[bundle] = OnnxRuntimeEngine(load_bundle(bundle), threads=1)
        return self._hosts[bundle]


class FakeEngine:
    def __init__(self, trt: FakeTensorRT, log: Any, bundle: str, graph: str) -> None:
        self.trt, self.log, self.graph, self.host = trt, log, graph, trt.host(bundle)
        manifest, self.signature = self.host.manifest, self.host.signatures[graph]
        self.specs = {spec.name: spec for spec in (*self.signature.inputs, *self.signature.outputs)}
        self.dtypes = {name: manifest.dtype if spec.dtype == MODEL_DTYPE else spec.dtype for name, spec in self.specs.items()}
        capacities = {"R": manifest.ring_capacity, "S": manifest.cache_capacity}
        profiles = make_profiles(self.host.signatures, manifest.limits, manifest.num_speculative_tokens, capacities, {})
        self.profiles = profiles[graph]
        self.num_io_tensors, self.num_optimization_profiles = len(self.specs), len(self.profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self.specs)[index]

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=_NAMES[self.dtypes[name]])

    def get_tensor_mode(self, name: str) -> Any:
        is_input = any(spec.name == name for spec in self.signature.inputs)
        return self.trt.TensorIOMode.INPUT if is_input else self.trt.TensorIOMode.OUTPUT

    def get_aliased_input_tensor(self, name: str) -> str:
        return self.signature.aliases.get(name, "")

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return 1000 * (index + 1)

    def create_execution_context(self, strategy: str) -> FakeContext:
        assert strategy == "user"
        self.trt.contexts += 1
        return FakeContext(self)


class FakeContext:
    def __init__(self, engine: FakeEngine) -> None:
        self._engine, self._cuda = engine, engine.trt.cuda
        self._profile: int | None = None
        self._scratch: tuple[int, int] | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._changes = 0

    def set_optimization_profile_async(self, index: int, _stream: int) -> bool:
        self._profile = index
        return self._engine.trt.refuse != "profile"

    def set_device_memory(self, address: int, size: int) -> None:
        assert address % ALIGNMENT == 0
        self._scratch = address, size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self._profile is not None
        self._shapes[name] = tuple(shape)
        self._changes += 1
        return self._engine.trt.refuse != "shape"

    def set_tensor_address(self, name: str, address: int) -> bool:
        assert address % ALIGNMENT == 0, f"{name} is not aligned"
        self._addresses[name] = address
        self._changes += 1
        return self._engine.trt.refuse != "address"

    def execute_async_v3(self, stream: int) -> bool:
        engine, cuda = self._engine, self._cuda
        cuda.calls[f"execute {engine.graph}"] += 1
        if engine.trt.refuse == "enqueue" or (engine.trt.refuse == "capture" and cuda.capturing):
            engine.log.log(1, "enqueueV3: the plugin failed")
            return False
        assert self._scratch is not None and self._profile is not None
        assert self._scratch[1] >= engine.get_device_memory_size_for_profile_v2(self._profile)
        cuda.view(*self._scratch)
        shapes, addresses, changes = dict(self._shapes), dict(self._addresses), self._changes
        sizes: dict[str, int] = {}
        for spec in engine.signature.inputs:
            sizes |= {letter: size for letter, size in zip(spec.shape, shapes[spec.name], strict=True) if isinstance(letter, str)}
        assert not engine.profiles[self._profile].faults(sizes), "a shape outside the profile"

        def work() -> None:
            assert self._changes == changes or not captured, "a captured context has changed"
            cuda.view(*self._scratch)
            arrays = {}
            for name, spec in engine.specs.items():
                shape = tuple(sizes[d] if isinstance(d, str) else d for d in spec.shape)
                kind = np.dtype(_NUMPY[engine.dtypes[name]])
                arrays[name] = cuda.view(addresses[name], math.prod(shape) * kind.itemsize).view(kind).reshape(shape)
            for output, state in engine.signature.aliases.items():
                assert addresses[output] == addresses[state], f"{output} and {state} have two addresses"
                del arrays[output]
            engine.host.bind(engine.graph, {name: HostTensor(array) for name, array in arrays.items()}).run()

        captured = cuda.capturing
        cuda.enqueue(work, stream)
        return True
