"""Engine on ONNX Runtime's CPU provider.

State is written in place: one buffer is bound as a graph's input and output, and the write node is the input's only reader.
Knows ONNX Runtime sessions. Does not know slots, requests or sampling.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dspark.runtime.bundle import Bundle, Manifest
from dspark.runtime.engine import Array, Tensor, check_binding, manifest_signatures
from dspark.runtime.errors import EngineError
from dspark.runtime.graphs import MODEL_DTYPE, Signature
from dspark.runtime.prepacked import MODEL, PACKED, PrepackedCache

# Each session has a thread pool of its own. A pool that goes on spinning after its run takes the cores from the next session: a round of
# the example pair took 7.6 ms with two threads, 2.7 ms with pools that stop (2 cores). One pool for all sessions is no faster, and makes
# every other session of the process fail that does not ask for it.
_STOP_SPINNING = "session.force_spinning_stop"
DEFAULT_THREADS = 0
"""ONNX Runtime's own choice: one a physical core."""
_SAVE_PACKED = (
    ("session.optimized_model_external_initializers_min_size_in_bytes", "1024"),
    ("session.save_external_prepacked_constant_initializers", "1"),
)
_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"


class HostTensor:
    """A numpy array that ONNX Runtime reads and writes where it is."""

    def __init__(self, array: Array) -> None:
        import onnxruntime

        self.array = array
        self.value = onnxruntime.OrtValue.ortvalue_from_numpy(array)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def read(self) -> Array:
        return self.array

    def write(self, values: ArrayLike) -> None:
        self.array[...] = values

    def copy(self, source: Tensor) -> None:
        assert isinstance(source, HostTensor)
        both = tuple(slice(min(sizes)) for sizes in zip(self.shape, source.shape, strict=True))
        self.array[both] = source.array[both]

    def rows(self, lo: int, size: int) -> HostTensor:
        return HostTensor(self.array[lo : lo + size])


class _BoundGraph:
    """A session with its input and output buffers bound; keeps the buffers alive."""

    def __init__(self, engine: OnnxRuntimeEngine, graph: str, session: Any, tensors: Mapping[str, Tensor]) -> None:
        self._engine, self._graph, self._run, self._tensors = engine, graph, session.run_with_iobinding, dict(tensors)
        self._options = engine.run_options()
        self._binding = engine.bound(session.io_binding(), engine.signatures[graph], tensors)

    def run(self) -> None:
        began = time.perf_counter()
        try:
            self._run(self._binding, self._options)
        except Exception as error:  # ONNX Runtime's errors share no narrower base
            raise EngineError(f"graph {self._graph} failed: {error}") from error
        self._engine.session_seconds += time.perf_counter() - began


class OnnxRuntimeEngine:
    """Runs a bundle's graphs with ONNX Runtime on the CPU. A graph is loaded when it is first used, or by `load`.

    `threads` is the number of threads a graph runs on (default: one a physical core), `prepacked` a folder for graphs with packed weights.
    """

    fixed_capacity = False
    provider = "CPUExecutionProvider"

    def __init__(self, bundle: Bundle, *, threads: int | None = None, prepacked: Path | None = None, log_severity: int = 3) -> None:
        import onnxruntime

        self.manifest: Manifest = bundle.manifest
        self.session_seconds = 0.0
        self.signatures = manifest_signatures(self.manifest)
        self._check_dtype(bundle)
        if threads is not None and threads < 1:
            raise EngineError(f"threads is {threads}, expected at least 1")
        self._bundle, self._threads, self._log_severity = bundle, threads or DEFAULT_THREADS, log_severity
        self._cache = None if prepacked is None else PrepackedCache(prepacked, bundle, onnxruntime.__version__)
        self._sessions: dict[str, Any] = {}

    @property
    def run_seconds(self) -> float:
        return self.session_seconds

    def available_memory(self) -> int | None:
        try:
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024

    def load(self, graphs: Iterable[str]) -> None:
        for graph in graphs:
            self._session(graph)

    def allocate(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        name = {"fp32": "float32", "fp16": "float16"}[self.manifest.dtype] if dtype == MODEL_DTYPE else dtype
        return HostTensor(np.zeros(shape, name))

    def fetch(self, tensors: Sequence[Tensor]) -> list[Array]:
        return [tensor.read() for tensor in tensors]

    def bind(self, graph: str, tensors: Mapping[str, Tensor]) -> _BoundGraph:
        check_binding(graph, self.signatures[graph], self.manifest, {name: tensor.shape for name, tensor in tensors.items()})
        return _BoundGraph(self, graph, self._session(graph), tensors)

    def bound(self, binding: Any, signature: Signature, tensors: Mapping[str, Tensor]) -> Any:
        """Bind the memory of tensors to a session's inputs and outputs."""
        values = {name: tensor.value for name, tensor in tensors.items() if isinstance(tensor, HostTensor)}
        assert len(values) == len(tensors), "tensors of another engine"
        for spec in signature.inputs:
            binding.bind_ortvalue_input(spec.name, values[spec.name])
        for spec in signature.outputs:
            binding.bind_ortvalue_output(spec.name, values[signature.aliases.get(spec.name, spec.name)])
        return binding

    def run_options(self) -> Any:
        """Return the options of every run; None for ONNX Runtime's own."""
        return None

    def _check_dtype(self, bundle: Bundle) -> None:
        if self.manifest.dtype == "bf16":
            raise EngineError(
                f"{bundle.directory} is a bf16 bundle, and ONNX Runtime's CPU provider has no bf16 MatMul: "
                "export again with --dtype fp32 to run on the CPU"
            )

    def _providers(self) -> list[Any]:
        return [self.provider]

    def _session(self, graph: str) -> Any:
        if graph not in self._sessions:
            self._sessions[graph] = self._load(graph)
        return self._sessions[graph]

    def _load(self, graph: str) -> Any:
        import onnxruntime

        path, options = self._bundle.graph_path(graph), self._options()
        if self._cache is None:
            session = self._open(path, options)
        else:
            path = self._cache.model(graph, lambda folder: self._save(graph, folder))
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL  # it is optimized
            try:
                session = self._open(path, options)
            except EngineError as error:
                raise EngineError(f"{error}; remove {path.parent}, which is written again") from error
        declared = self.signatures[graph]
        names = ([i.name for i in session.get_inputs()], [o.name for o in session.get_outputs()])
        expected = ([s.name for s in declared.inputs], [s.name for s in declared.outputs])
        if names != expected:
            raise EngineError(f"{path} has inputs and outputs {names}, its manifest means {expected}: export the bundle again")
        return session

    def _save(self, graph: str, folder: Path) -> None:
        """Write a graph as it is optimized, its weights packed, into a folder."""
        options = self._options()
        options.optimized_model_filepath = str(folder / MODEL)
        for key, value in (*_SAVE_PACKED, ("session.optimized_model_external_initializers_file_name", PACKED)):
            options.add_session_config_entry(key, value)
        try:
            self._open(self._bundle.graph_path(graph), options)
        except EngineError as error:
            raise EngineError(
                f"graph {graph} with packed weights cannot be written below {folder.parent}: name a folder with more room, or none; {error}"
            ) from error

    def _options(self) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = self._log_severity
        options.intra_op_num_threads = self._threads
        options.add_session_config_entry(_STOP_SPINNING, "1")
        return options

    def _open(self, path: Path, options: Any) -> Any:
        import onnxruntime

        if self.manifest.weights.root is not None and path.parent == self._bundle.directory:
            options.add_session_config_entry(_WEIGHTS_FOLDER, self.manifest.weights.root)
        try:
            return onnxruntime.InferenceSession(path, options, providers=self._providers())
        except Exception as error:  # ONNX Runtime's errors share no narrower base
            raise EngineError(f"ONNX Runtime {onnxruntime.__version__} cannot load {path}: {error}") from error
