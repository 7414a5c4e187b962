"""Engine on TensorRT or TensorRT-RTX: a bundle's compiled graphs, enqueued on one stream.

A step that is run again is captured as a CUDA graph, with an execution context of its own: a captured graph holds the addresses that its
context had. Contexts share the scratch memory of their graph. Knows TensorRT's runtime. Does not know slots, requests or sampling.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dspark.plugins import registry
from dspark.plugins.rules import PluginError
from dspark.runtime.bundle import Bundle, Manifest
from dspark.runtime.cuda import Cuda, Graph
from dspark.runtime.device import ALIGNMENT, Device, DeviceTensor, Memory
from dspark.runtime.engine import Array, Step, Tensor, check_binding, manifest_signatures
from dspark.runtime.engines import PREFILL, EngineRecord, choose_record
from dspark.runtime.errors import EngineError, LimitError, numbered
from dspark.runtime.flavour import DTYPES, load_module, make_log
from dspark.runtime.graphs import MODEL_DTYPE, Signature

logger = logging.getLogger(__name__)


@dataclass
class _Loaded:
    """The engine of a graph, its scratch memory, and a context of each profile for steps that are not captured."""

    engine: Any
    scratch: Memory
    scratch_bytes: int
    contexts: dict[int, Any] = field(default_factory=dict)


class TensorRTEngine:
    """Runs a bundle's engines of a flavour on the current CUDA device.

    Raises EngineError when the bundle has none for this device and this version of TensorRT.
    """

    fixed_capacity = True

    def __init__(self, bundle: Bundle, flavour: str, *, cuda: Cuda | None = None) -> None:
        self.manifest: Manifest = bundle.manifest
        self.signatures = manifest_signatures(self.manifest)
        self.cuda = cuda or Cuda()
        self.name, self.record = choose_record(self.manifest.engines, flavour, self.cuda.capability)
        self.trt = load_module(flavour)
        _check_record(self.name, self.record, str(self.trt.__version__))
        try:
            registry.register(self.trt)
            registry.check_registered(self.trt)
        except PluginError as error:
            raise EngineError(str(error)) from error
        self.log = make_log(self.trt)
        self._runtime = self.trt.Runtime(self.log)
        if self.record.version_compatible:
            self._runtime.engine_host_code_allowed = True  # such an engine carries its own lean runtime
        self._bundle = bundle
        self.device = Device(self.cuda)
        self.enqueue_seconds = 0.0
        self.uncaptured: dict[str, str] = {}
        """Graphs whose steps cannot be captured, and why."""
        self._loaded: dict[str, _Loaded] = {}

    @property
    def run_seconds(self) -> float:
        return self.enqueue_seconds + self.device.wait_seconds

    def available_memory(self) -> int | None:
        return self.cuda.available_memory()

    def load(self, graphs: Iterable[str]) -> None:
        for graph in graphs:
            self.loaded(graph)

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        return self.device.tensor(shape, self.manifest.dtype if dtype == MODEL_DTYPE else dtype)

    def fetch(self, tensors: Sequence[Tensor]) -> list[Array]:
        return self.device.fetch([tensor for tensor in tensors if isinstance(tensor, DeviceTensor)])

    def bind(self, graph: str, tensors: Mapping[str, Tensor]) -> Step:
        signature = self.signatures[graph]
        sizes = check_binding(graph, signature, self.manifest, {name: tensor.shape for name, tensor in tensors.items()})
        capacities = {"R": self.record.ring_capacity, "S": self.record.cache_capacity}
        wrong = [f"{letter} = {sizes[letter]}, built for {size}" for letter, size in capacities.items() if sizes.get(letter, size) != size]
        if wrong:
            raise LimitError(f"graph {graph} of {self.name} has fixed capacities: {', '.join(wrong)}")
        try:
            profile = self.record.graphs[graph].profile(sizes)
        except LimitError as error:
            raise LimitError(f"graph {graph} of {self.name}: {error}") from None
        ours = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, DeviceTensor)}
        assert len(ours) == len(tensors), "tensors of another engine"
        return _BoundGraph(self, graph, self.loaded(graph), profile, signature, ours)

    def loaded(self, graph: str) -> _Loaded:
        """Return the engine of a graph, loaded."""
        if graph not in self._loaded:
            self._loaded[graph] = self._load(graph)
        return self._loaded[graph]

    def _load(self, graph: str) -> _Loaded:
        path, signature = self._bundle.engine_path(self.name, graph), self.signatures[graph]
        self.log.errors.clear()
        registry.faults.clear()
        if _is_onnx(path):
            raise EngineError(f"{path} is an ONNX file, expected an engine: build it with dspark-export --backend {self.record.flavour}")
        with path.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as data:
            engine = self._runtime.deserialize_cuda_engine(data)
        if engine is None:
            reasons = dict.fromkeys([*registry.faults, *self.log.errors]) or ["it gave no reason"]
            raise EngineError(f"{self.trt.__name__} {self.trt.__version__} cannot load {path}: build the engines again:{numbered(reasons)}")
        faults = _engine_faults(self.trt, engine, signature, self.manifest.dtype, len(self.record.graphs[graph].profiles))
        if faults:
            raise EngineError(f"{path} is not the engine of graph {graph} of this bundle: build the engines again:{numbered(faults)}")
        sizes = [engine.get_device_memory_size_for_profile_v2(index) for index in range(engine.num_optimization_profiles)]
        scratch = max(ALIGNMENT, *sizes)
        return _Loaded(engine, self.device.memory(scratch), scratch)


class _BoundGraph:
    """A graph with its tensors: enqueued on a shared context at first, captured when it runs again, then replayed."""

    _own: Any = None
    _captured: Graph | None = None

    def __init__(
        self, engine: TensorRTEngine, graph: str, loaded: _Loaded, profile: int, signature: Signature, tensors: Mapping[str, DeviceTensor]
    ) -> None:
        self._engine, self._graph, self._loaded, self._profile = engine, graph, loaded, profile
        self._inputs = {spec.name: tensors[spec.name] for spec in signature.inputs}
        outputs = {spec.name: tensors[signature.aliases.get(spec.name, spec.name)] for spec in signature.outputs}
        self._tensors = self._inputs | outputs
        # A prompt's chunks have many lengths: a context and a graph of their own would be thrown away with the next one.
        self._repeats = engine.record.graphs[graph].profiles[profile].name != PREFILL
        self._runs = 0

    def __del__(self) -> None:
        self._engine.device.retire(self._captured, self._own)

    def run(self) -> None:
        began, engine = time.perf_counter(), self._engine
        if self._captured is not None:
            engine.cuda.launch(self._captured, engine.device.stream)
        elif self._runs == 0 or not self._repeats or self._graph in engine.uncaptured:
            self._enqueue(self._shared_context())
        else:
            # A context defers work to its first enqueue, which must not be part of a captured graph.
            self._own = self._bound(self._context())
            self._enqueue(self._own)
            self._captured = self._capture()
        self._runs += 1
        engine.enqueue_seconds += time.perf_counter() - began

    def _shared_context(self) -> Any:
        contexts = self._loaded.contexts
        if self._profile not in contexts:
            contexts[self._profile] = self._context()
        return self._bound(contexts[self._profile])

    def _context(self) -> Any:
        trt, stream = self._engine.trt, self._engine.device.stream
        context = self._loaded.engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None or not context.set_optimization_profile_async(self._profile, stream):
            raise self._error("makes no execution context")
        context.set_device_memory(self._loaded.scratch.address, self._loaded.scratch_bytes)
        return context

    def _bound(self, context: Any) -> Any:
        """Give a context the shapes and addresses of this step."""
        for name, tensor in self._inputs.items():
            if not context.set_input_shape(name, tensor.shape):
                raise self._error(f"refuses shape {list(tensor.shape)} of {name}")
        for name, tensor in self._tensors.items():
            if not context.set_tensor_address(name, tensor.address):
                raise self._error(f"refuses the address of {name}")
        return context

    def _enqueue(self, context: Any) -> None:
        if not context.execute_async_v3(self._engine.device.stream):
            raise self._error("does not run it")

    def _capture(self) -> Graph | None:
        """Return the step as a CUDA graph; None, noted once a graph, where it cannot be captured."""
        engine, graph = self._engine, None
        try:
            engine.cuda.begin_capture(engine.device.stream)
            try:
                self._enqueue(self._own)
            finally:
                graph = engine.cuda.end_capture(engine.device.stream)
        except EngineError as error:
            engine.uncaptured[self._graph] = str(error)
            engine.device.retire(graph)
            logger.warning("graph %s runs without CUDA graph: %s", self._graph, error)
            return None
        return graph

    def _error(self, what: str) -> EngineError:
        """Return an error with what TensorRT and the plugins said since the last one."""
        reasons = "; ".join(dict.fromkeys([*registry.faults, *self._engine.log.errors])) or "it gave no reason"
        registry.faults.clear()
        self._engine.log.errors.clear()
        return EngineError(f"graph {self._graph}: {self._engine.trt.__name__} {what}: {reasons}")


def _check_record(name: str, record: EngineRecord, version: str) -> None:
    """Raise EngineError when the engines were built by another version, or hold no weights."""
    if record.weights_stripped:
        raise EngineError(f"engines/{name} was built with --strip-weights and holds no weights: export again without it")
    if record.version != version and not record.version_compatible:
        raise EngineError(
            f"engines/{name} was built by {record.flavour} {record.version}, installed is {version}: "
            f"export again here, or install {record.flavour} {record.version}"
        )


def _engine_faults(trt: Any, engine: Any, signature: Signature, dtype: str, profiles: int) -> list[str]:
    """Return where an engine's tensors differ from a graph's signature."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    declared = {spec.name: spec for spec in (*signature.inputs, *signature.outputs)}
    faults = [f"{name} is missing" for name in declared if name not in names]
    faults += [f"{name} is no tensor of this graph" for name in names if name not in declared]
    inputs = {spec.name for spec in signature.inputs}
    for name, spec in declared.items():
        if name not in names:
            continue
        wanted, actual = DTYPES[dtype if spec.dtype == MODEL_DTYPE else spec.dtype], engine.get_tensor_dtype(name).name
        if actual != wanted:
            faults.append(f"{name} has dtype {actual}, expected {wanted}")
        if (engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT) != (name in inputs):
            faults.append(f"{name} is {'an output' if name in inputs else 'an input'}")
    for output, state in signature.aliases.items():
        if output in names and engine.get_aliased_input_tensor(output) != state:
            faults.append(f"{output} does not take the memory of {state}")
    if engine.num_optimization_profiles != profiles:
        faults.append(f"{engine.num_optimization_profiles} profiles, the manifest has {profiles}")
    return faults


def _is_onnx(path: Path) -> bool:
    """Whether a file starts as an ONNX model does: with its `ir_version` field."""
    with path.open("rb") as handle:
        return handle.read(1) == b"\x08"
