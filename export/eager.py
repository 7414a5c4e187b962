"""Engine on torch: the modules that a bundle's graphs were traced from, run eagerly in float32 on the CPU, with the bundle's own weights.

The reference of accuracy comparisons, behind the same seam as every other engine. Also for a bf16 or fp16 bundle it computes in float32,
and it always has the debug outputs. Needs the memory of the pair in float32. Does not know how engines are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import ArrayLike
from torch import Tensor as TorchTensor
from torch import nn

from dspark.export.accept import Accept, AcceptSampled, Logprobs
from dspark.export.drafter import Drafter
from dspark.export.pair import SHARED
from dspark.export.quantize import dequantize, quantized_bits
from dspark.export.target import Target
from dspark.export.truncate import Truncate
from dspark.runtime.bundle import Bundle
from dspark.runtime.engine import Array, Tensor, check_binding, manifest_signatures
from dspark.runtime.graphs import ACCEPT, ACCEPT_SAMPLED, CONTEXT, DRAFT, DRAFT_SAMPLED, LOGPROBS, MODEL_DTYPE, TARGET, TRUNCATE

Values = Sequence[TorchTensor]
_KEPT = ("bf16", "f16", "f32")
"""Endings of a weight's name in a quantised bundle that keeps it as it is stored."""
Forward = Callable[[Values, list[TorchTensor]], tuple[Values, Values]]


class EagerTensor:
    """A torch tensor on the CPU."""

    def __init__(self, tensor: TorchTensor) -> None:
        self.tensor = tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    def read(self) -> Array:
        return self.tensor.numpy()

    def write(self, values: ArrayLike) -> None:
        self.read()[...] = values

    def copy(self, source: Tensor) -> None:
        assert isinstance(source, EagerTensor)
        both = tuple(slice(min(sizes)) for sizes in zip(self.shape, source.shape, strict=True))
        self.tensor[both] = source.tensor[both]

    def rows(self, lo: int, size: int) -> EagerTensor:
        return EagerTensor(self.tensor[lo : lo + size])


class EagerEngine:
    """Runs a bundle's graphs as torch modules in float32."""

    fixed_capacity = False

    def __init__(self, bundle: Bundle) -> None:
        m = self.manifest = replace(bundle.manifest, dtype="fp32", debug_outputs=True)
        self.run_seconds = 0.0
        self.signatures = manifest_signatures(m)
        target = _load(Target(m.target, m.drafter.target_layer_ids), "target", bundle, TARGET)
        walk = {"debug_outputs": True, "markov_topk": m.markov_topk}
        drafter = _load(Drafter(m.drafter, m.num_speculative_tokens, m.window, **walk), "drafter", bundle, DRAFT)
        top = self.signatures[LOGPROBS].outputs[1].shape[-1]
        assert isinstance(top, int)
        self.forwards: dict[str, Forward] = {
            CONTEXT: lambda inputs, rings: ((), drafter.context(*inputs, rings)),
            DRAFT: lambda inputs, rings: drafter(*inputs, rings),
            DRAFT_SAMPLED: lambda inputs, rings: drafter(*inputs[:5], rings, *inputs[5:]),
            TARGET: lambda inputs, caches: _split(target(*inputs, caches)),
            ACCEPT: _stateless(Accept()),
            ACCEPT_SAMPLED: _stateless(AcceptSampled()),
            TRUNCATE: _stateless(Truncate()),
            LOGPROBS: _stateless(Logprobs(top)),
        }

    def allocate(self, shape: tuple[int, ...], dtype: str) -> EagerTensor:
        return EagerTensor(torch.from_numpy(np.zeros(shape, "float32" if dtype == MODEL_DTYPE else dtype)))

    def available_memory(self) -> int | None:
        return None

    def load(self, graphs: Iterable[str]) -> None:
        assert self.forwards.keys() >= set(graphs)  # all are there from the start

    def fetch(self, tensors: Sequence[Tensor]) -> list[Array]:
        return [tensor.read() for tensor in tensors]

    def bind(self, graph: str, tensors: Mapping[str, Tensor]) -> _EagerStep:
        check_binding(graph, self.signatures[graph], self.manifest, {name: tensor.shape for name, tensor in tensors.items()})
        ours = {name: tensor.tensor for name, tensor in tensors.items() if isinstance(tensor, EagerTensor)}
        assert len(ours) == len(tensors), "tensors of another engine"
        return _EagerStep(self, graph, ours)


class _EagerStep:
    """A graph bound to torch tensors; the modules return new state, which is copied to where the old one is."""

    def __init__(self, engine: EagerEngine, graph: str, tensors: Mapping[str, TorchTensor]) -> None:
        self._engine, self._forward, self._tensors, signature = engine, engine.forwards[graph], tensors, engine.signatures[graph]
        states = set(signature.aliases.values())
        self._inputs = [tensors[spec.name] for spec in signature.inputs if spec.name not in states]
        self._states = [tensors[spec.name] for spec in signature.inputs if spec.name in states]
        self._outputs = [tensors[spec.name] for spec in signature.outputs if spec.name not in signature.aliases]

    def run(self) -> None:
        began = time.perf_counter()
        with torch.no_grad():
            outputs, states = self._forward(self._inputs, list(self._states))
            for old, new in zip([*self._outputs, *self._states], [*outputs, *states], strict=True):
                old.copy_(new)
        self._engine.run_seconds += time.perf_counter() - began


def _stateless(module: nn.Module) -> Forward:
    def forward(inputs: Values, _states: list[TorchTensor]) -> tuple[Values, Values]:
        result = module(*inputs)
        return ((result,) if isinstance(result, TorchTensor) else result), ()

    return forward


def _split(result: tuple[TorchTensor, TorchTensor, list[TorchTensor]]) -> tuple[Values, Values]:
    logits, taps, caches = result
    return (logits, taps), caches


def _load(model: nn.Module, kind: str, bundle: Bundle, graph: str) -> nn.Module:
    """Give a model the weights of a graph, as float32: the values that an engine computes with, also where the export rounded them."""
    read = ir.load(bundle.graph_path(graph)).graph
    ir.external_data.set_base_dir(read, Path(bundle.manifest.weights.root or bundle.directory))
    values = {name: value.const_value.numpy() for name, value in read.initializers.items() if value.const_value is not None}
    quantized = bundle.manifest.quantization
    if quantized is not None and f"{kind}.lm_head.weight" not in values and model.lm_head.weight is model.embed_tokens.weight:
        model.lm_head.weight = nn.Parameter(torch.empty(0))  # a tied table is gathered from as it is stored, and multiplied quantised
    for name, parameter in model.named_parameters():
        # A weight that both models share, or a tied one, has the name of its first user.
        names = [f"{owner}.{n}" for n in ((name, *SHARED) if name in SHARED else (name,)) for owner in (kind, "target")]
        bits = None if quantized is None else quantized_bits(kind, name, quantized)
        if quantized is not None and bits is not None:
            stored = next(n for n in (f"{n}.int{bits}" for n in names) if n in values)
            found = dequantize(values[stored], values[f"{stored}.scales"], bits, _columns(read, stored))
        else:
            found = next(values[form] for n in names for form in (n, *(f"{n}.{kept}" for kept in _KEPT)) if form in values)
        parameter.data = torch.from_numpy(found.astype(np.float32))
    return model.eval()


def _columns(graph: ir.Graph, packed: str) -> int:
    """Return the input columns of a packed weight, whose last group may be filled up."""
    node = next(node for node in graph if any(value is not None and value.name == packed for value in node.inputs))
    return node.attributes["K"].as_int()
