"""Build the engines of a bundle with TensorRT or TensorRT-RTX, one of each graph for each compute capability.

Everything that can be checked is checked by `EngineBuilder` before a graph is traced; `build` then writes below `engines/` of the
bundle in the making, which appears whole or not at all. Knows the builder's options. Parsing is `export.network`, shapes `export.profiles`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from dspark.export.lower import lower
from dspark.export.network import Network, expected_layers
from dspark.export.profiles import Letters, Shapes, input_shapes, make_profiles
from dspark.plugins import kernels
from dspark.plugins.contract import PLUGINS
from dspark.plugins.launch import device_capability
from dspark.runtime.bundle import Limits
from dspark.runtime.config import DrafterConfig, TargetConfig
from dspark.runtime.engines import EngineGraph, EngineProfile, EngineRecord, engine_directory, engine_path
from dspark.runtime.errors import EngineError
from dspark.runtime.flavour import load_module
from dspark.runtime.graphs import Signature

_CAPABILITY = re.compile(r"[1-9]\d?\.\d")
_UNITS = {"B": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class BuildOptions:
    """What a user may choose of the engines; names as on the command line."""

    flavour: str
    compute_capabilities: tuple[str, ...] = ()
    shapes: tuple[tuple[str, Shapes], ...] = ()
    workspace: int | None = None
    optimization_level: int | None = None
    timing_cache: Path | None = None
    hardware_compatibility: str = "none"
    version_compatible: bool = False
    strip_weights: bool = False


@dataclass(frozen=True)
class BuildPlan:
    """What engines depend on besides options: the pair, its signatures and sizes."""

    target: TargetConfig
    drafter: DrafterConfig
    signatures: Mapping[str, Signature]
    dtype: str
    num_speculative_tokens: int
    limits: Limits
    capacities: Letters


class EngineBuilder:
    """Builds engines; making one checks module, device and profiles. Raises EngineError or ConfigError."""

    def __init__(self, options: BuildOptions, plan: BuildPlan) -> None:
        self._options, self._plan = options, plan
        self._profiles = make_profiles(plan.signatures, plan.limits, plan.num_speculative_tokens, plan.capacities, dict(options.shapes))
        if plan.drafter.head_dim not in kernels.HEAD_DIMS:
            dims = ", ".join(map(str, kernels.HEAD_DIMS))
            raise EngineError(f"the drafter's head_dim is {plan.drafter.head_dim}, for which there are no kernels: expected one of {dims}")
        self._check_options()
        self._trt = load_module(options.flavour)
        self._capabilities = self._resolve_capabilities()

    def build(self, bundle: Path, weights: Path, progress: Callable[[str], None]) -> dict[str, EngineRecord]:
        """Build every graph of the bundle directory, whose weights lie below `weights`; return what the manifest says of it."""
        records = {}
        for capability in self._capabilities:
            name, graphs = engine_directory(self._options.flavour, capability), {}
            for graph in self._plan.signatures:
                progress(f"building {name}/{graph}")
                model = onnx.load(bundle / f"{graph}.onnx", load_external_data=False)
                plan, graphs[graph] = self._build_graph(graph, model, weights, capability)
                path = bundle / engine_path(name, graph)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("wb") as out:
                    out.write(plan)
            records[name] = self._record(capability, graphs)
        return records

    def _build_graph(self, graph: str, model: onnx.ModelProto, weights: Path, capability: str) -> tuple[Any, EngineGraph]:
        plan = self._plan
        signature, expected = plan.signatures[graph], expected_layers(graph, plan.target, plan.drafter)
        network = Network(self._trt, graph)
        network.parse(lower(model, signature, plan.capacities), weights, signature, plan.dtype, expected)
        config = self._config(network, capability)
        for profile in self._profiles[graph]:
            config.add_optimization_profile(self._profile(network, signature, profile))
        cache = self._load_timing_cache(config)
        serialized = network.builder.build_serialized_network(network.definition, config)
        if serialized is None:
            reasons = "; ".join(network.log.errors) or "it gave no reason"
            raise EngineError(f"{self._trt.__name__} {self._trt.__version__} cannot build graph {graph} for {capability}: {reasons}")
        if cache is not None:
            self._save_timing_cache(config)
        if capability == device_capability():
            self._check_aliases(graph, serialized, signature, network.log)
        plugins = sum(expected.get(operator.name, 0) for operator in PLUGINS)
        return serialized, EngineGraph(plugins, self._profiles[graph])

    def _config(self, network: Network, capability: str) -> Any:
        trt, options = self._trt, self._options
        config = network.builder.create_builder_config()
        # Without it an output that shares an input's memory, the ring, is refused.
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
        if self._plan.dtype == "fp32":
            config.clear_flag(trt.BuilderFlag.TF32)  # float32 products are to be float32, as they are on every other engine
        if options.flavour == "tensorrt-rtx":
            config.num_compute_capabilities = 1
            config.set_compute_capability(_capability(trt, capability), 0)
        if options.workspace is not None:
            config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace)
        if options.optimization_level is not None:
            config.builder_optimization_level = options.optimization_level
        if options.hardware_compatibility != "none":
            config.hardware_compatibility_level = _named(trt, "HardwareCompatibilityLevel", options.hardware_compatibility.upper())
        if options.version_compatible:
            config.set_flag(_named(trt, "BuilderFlag", "VERSION_COMPATIBLE"))
        if options.strip_weights:
            config.set_flag(_named(trt, "BuilderFlag", "STRIP_PLAN"))
        return config

    def _profile(self, network: Network, signature: Signature, profile: EngineProfile) -> Any:
        made = network.builder.create_optimization_profile()
        for name, shapes in input_shapes(signature, profile, self._plan.capacities).items():
            made.set_shape(name, *shapes)
        return made

    def _check_aliases(self, graph: str, serialized: Any, signature: Signature, log: Any) -> None:
        """Make sure that the outputs of plugins share their inputs' memory, which only a loaded engine says."""
        runtime = self._trt.Runtime(log)
        if self._options.version_compatible:
            runtime.engine_host_code_allowed = True  # such an engine carries its own lean runtime
        engine = runtime.deserialize_cuda_engine(serialized)
        if engine is None:
            raise EngineError(f"the engine of {graph} does not load where it was built: {'; '.join(log.errors)}")
        wrong = {
            output: engine.get_aliased_input_tensor(output)
            for output, state in signature.aliases.items()
            if output.split(".")[0].endswith("_ring") and engine.get_aliased_input_tensor(output) != state
        }
        if wrong:
            raise EngineError(f"the engine of {graph} does not update its rings in place: {wrong}")

    def _load_timing_cache(self, config: Any) -> Any:
        path = self._options.timing_cache
        if path is None:
            return None
        cache = config.create_timing_cache(path.read_bytes() if path.exists() else b"")
        if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
            raise EngineError(f"{path} is no timing cache of this {self._trt.__name__} and device: name another file, or remove it")
        return cache

    def _save_timing_cache(self, config: Any) -> None:
        path = self._options.timing_cache
        assert path is not None
        scratch = path.with_name(path.name + ".new")
        scratch.write_bytes(bytes(config.get_timing_cache().serialize()))
        os.replace(scratch, path)

    def _check_options(self) -> None:
        """Refuse what TensorRT-RTX 1.7.1 was seen to ignore, or to fail at in the middle of a build."""
        if self._options.flavour != "tensorrt-rtx":
            return
        if self._options.timing_cache is not None:
            raise EngineError("--timingCacheFile does nothing with tensorrt-rtx, which times kernels where they run: leave it out")
        if self._options.version_compatible:
            raise EngineError("--versionCompatible needs the lean runtime, which tensorrt-rtx does not have: use --backend tensorrt")
        if self._options.strip_weights and device_capability() is None:
            raise EngineError("--strip-weights makes tensorrt-rtx ask for a CUDA device, and there is none here: build with the weights")

    def _resolve_capabilities(self) -> tuple[str, ...]:
        """Return the compute capabilities to build for: those asked, else the device's. Only RTX builds for absent devices."""
        flavour, asked, present = self._options.flavour, self._options.compute_capabilities, device_capability()
        if flavour == "tensorrt-rtx":
            if not asked and present is None:
                raise EngineError("there is no CUDA device here to build for: pass --compute-capability, such as 8.9,12.0")
            for capability in asked:
                _capability(self._trt, capability)
        elif present is None:
            raise EngineError("tensorrt builds on the device it builds for, and there is none here: use --backend tensorrt-rtx")
        elif asked not in ((), (present,)):
            raise EngineError(
                f"tensorrt builds for the device that is present, of compute capability {present}, not for {', '.join(asked)}: "
                "leave --compute-capability out, or use --backend tensorrt-rtx"
            )
        return asked or (str(present),)

    def _record(self, capability: str, graphs: dict[str, EngineGraph]) -> EngineRecord:
        options, capacities = self._options, self._plan.capacities
        return EngineRecord(
            flavour=options.flavour,
            version=str(self._trt.__version__),
            compute_capability=capability,
            ring_capacity=capacities["R"],
            cache_capacity=capacities["S"],
            hardware_compatibility=options.hardware_compatibility,
            version_compatible=options.version_compatible,
            weights_stripped=options.strip_weights,
            graphs=graphs,
        )


def parse_capabilities(text: str) -> tuple[str, ...]:
    """Parse `8.9,12.0`. Raises EngineError."""
    parts = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    bad = [part for part in parts if not _CAPABILITY.fullmatch(part)]
    if bad:
        raise EngineError(f"compute capability {', '.join(map(repr, bad))}: expected such as 8.9 or 12.0, several with commas between")
    return parts


def parse_pools(text: str) -> int:
    """Parse `workspace:512` (MiB) or `workspace:2G` to bytes. Raises EngineError."""
    pool, _, size = text.partition(":")
    digits, unit = (size[:-1], size[-1].upper()) if size[-1:].upper() in _UNITS else (size, "M")
    if pool != "workspace" or not digits.isdecimal() or int(digits) == 0:
        raise EngineError(f"--memPoolSize is {text!r}, expected workspace:SIZE, in MiB or with a suffix {', '.join(_UNITS)}")
    return int(digits) * _UNITS[unit]


def _capability(trt: Any, capability: str) -> Any:
    return _named(trt, "ComputeCapability", f"SM{capability.replace('.', '')}")


def _named(trt: Any, kind: str, name: str) -> Any:
    """Return a member of one of TensorRT's enumerations. Raises EngineError where this module has none of that name."""
    members = getattr(getattr(trt, kind, None), "__members__", {})
    if name not in members:
        raise EngineError(f"{trt.__name__} {trt.__version__} has no {kind} {name}; it has {', '.join(members) or 'none at all'}")
    return members[name]
