"""Section: the drafter's engine of the example pair, with our plugins, against ONNX Runtime on the same graph; then in a CUDA graph.

Both are fed the same rounds of a real text, each with the state that it wrote itself. Outputs and rings are compared after every round,
tokens up to a near tie. TensorRT is driven directly: nothing of `dspark.runtime` runs on the card here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from device.capture import recorded
from device.product import PAIR, bundle, flavour, need
from device.sections import Failed

from dspark.runtime.graphs import DRAFT, MODEL_DTYPE, Signature

LIMIT = 1e-3
"""Largest difference of a float32 tensor, over its largest value; engines are built without TF32."""

ROUNDS, ROWS = 6, 8

Arrays = dict[str, np.ndarray]


def differences(expected: Mapping[str, np.ndarray], actual: Mapping[str, np.ndarray]) -> tuple[float, list[str]]:
    """Return the largest difference of float tensors over their largest value, and faults, for one request's round.

    A token may differ where the two best logits are closer than twice the largest difference of logits. What follows it then differs
    by right, and is not compared.
    """
    ours, theirs = actual["verify_tokens"][0, 1:], expected["verify_tokens"][0, 1:]
    unequal = np.flatnonzero(ours != theirs)
    rows = int(unequal[0]) + 1 if unequal.size else ours.size
    worst, faults = 0.0, []
    for name, values in expected.items():
        if values.dtype.kind != "f":
            continue
        given, wanted = (side[:, :rows] if name in ("draft_logits", "confidence_logits") else side for side in (actual[name], values))
        difference = float(np.nan_to_num(np.abs(given - wanted), nan=np.inf).max() / np.abs(wanted).max())
        worst = max(worst, difference)
        if not difference <= LIMIT:
            faults.append(f"{name} differs by {difference:.1e} of its largest value, at most {LIMIT:.0e} is right")
    if unequal.size:
        logits = expected["draft_logits"][0, rows - 1]
        second, best = np.sort(logits)[-2:]
        noise = float(np.abs(actual["draft_logits"][0, rows - 1] - logits).max())
        if not best - second <= 2 * noise:
            faults.append(f"proposal {rows} is {ours[rows - 1]}, expected {theirs[rows - 1]}, ahead by {best - second:.2e}")
    return worst, faults


class DeviceGraph:
    """An engine with torch tensors bound to every name; an aliased output is its input."""

    def __init__(self, trt: Any, engine: bytes, signature: Signature, sizes: Mapping[str, int]) -> None:
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
        self._engine = self._runtime.deserialize_cuda_engine(engine)
        if self._engine is None:
            raise Failed("the engine does not load on the card that it was built for")
        self._context = self._engine.create_execution_context()
        kinds = {"int64": torch.int64, "float32": torch.float32, MODEL_DTYPE: torch.float32}
        self.tensors: dict[str, torch.Tensor] = {}
        for spec in (*signature.inputs, *signature.outputs):
            shape = [sizes[size] if isinstance(size, str) else size for size in spec.shape]
            source = signature.aliases.get(spec.name)
            self.tensors[spec.name] = self.tensors[source] if source else torch.zeros(shape, dtype=kinds[spec.dtype], device="cuda")
            if spec in signature.inputs:
                self._context.set_input_shape(spec.name, shape)
            self._context.set_tensor_address(spec.name, self.tensors[spec.name].data_ptr())

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        if not self._context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise Failed("TensorRT refused to enqueue the draft, see its message above")


def play(graph: DeviceGraph, signature: Signature, rounds: list[Arrays], run: Callable[[], None]) -> Iterator[Arrays]:
    """Feed rounds to rings of zeros; yield every output and ring."""
    for name in signature.aliases.values():
        graph.tensors[name].zero_()
    for fed in rounds:
        for name, values in fed.items():
            graph.tensors[name].copy_(torch.from_numpy(values))
        run()
        torch.cuda.synchronize()
        yield {spec.name: graph.tensors[spec.name].cpu().numpy() for spec in signature.outputs}


def recorded_text() -> list[int]:
    """Return the tokens of a recorded prompt and its answer."""
    line = json.loads((PAIR / "prompts" / "math.jsonl").read_text().splitlines()[0])
    return [*line["ids"], *line["greedy_ids"]]


def rounds_of(cpu: Any, text: Sequence[int]) -> list[Arrays]:
    """Return the draft's inputs of each round, from the target's taps of a text."""
    from dspark.runtime.state import Slots
    from dspark.runtime.target import Qwen3Target

    ids = text[: ROUNDS * ROWS + 1]
    slots = Slots(1)
    target = Qwen3Target(cpu, slots)
    slots.admit("text")
    taps = target.prefill("text", ids).taps.tensor.read()[0].copy()
    rounds = []
    for end in range(ROWS, len(ids), ROWS):
        numbers = {"start": end - ROWS, "total": end, "first": 0, "anchor": ids[end]}
        rounds.append({name: np.array([value], np.int64) for name, value in numbers.items()} | {"taps": taps[None, end - ROWS : end]})
    return rounds


def play_on_cpu(cpu: Any, signature: Signature, rounds: list[Arrays], sizes: Mapping[str, int]) -> Iterator[Arrays]:
    """The same as `play`, with ONNX Runtime."""
    specs = [spec for spec in (*signature.inputs, *signature.outputs) if spec.name not in signature.aliases]
    tensors = {
        spec.name: cpu.allocate(tuple(sizes[size] if isinstance(size, str) else size for size in spec.shape), spec.dtype) for spec in specs
    }
    step = cpu.bind(DRAFT, tensors)
    for fed in rounds:
        for name, values in fed.items():
            tensors[name].write(values)
        step.run()
        yield {spec.name: tensors[signature.aliases.get(spec.name, spec.name)].read().copy() for spec in signature.outputs}


def run(scratch: Path) -> str:
    """Compare on the card."""
    made = bundle(scratch)
    need("cuda.bindings", "onnxruntime")
    from dspark.plugins import registry
    from dspark.runtime.bundle import load_bundle
    from dspark.runtime.engines import engine_directory, engine_path
    from dspark.runtime.flavour import load_module
    from dspark.runtime.onnxruntime import OnnxRuntimeEngine

    torch.zeros(1, device="cuda")
    name = flavour()
    trt = load_module(name)
    registry.register(trt)
    cpu = OnnxRuntimeEngine(load_bundle(made))
    major, minor = torch.cuda.get_device_capability()
    engine = (made / engine_path(engine_directory(name, f"{major}.{minor}"), DRAFT)).read_bytes()
    signature, sizes = cpu.signatures[DRAFT], {"B": 1, "N": ROWS, "R": cpu.manifest.ring_capacity}
    graph, rounds = DeviceGraph(trt, engine, signature, sizes), rounds_of(cpu, recorded_text())
    with torch.cuda.stream(torch.cuda.Stream()):
        launched = list(play(graph, signature, rounds, graph.run))
    worst, faults = 0.0, []
    for number, (expected, actual) in enumerate(zip(play_on_cpu(cpu, signature, rounds, sizes), launched, strict=True)):
        difference, found = differences(expected, actual)
        worst = max(worst, difference)
        faults += [f"round {number}: {fault}" for fault in found]
    print(f"largest difference {worst:.1e} of a tensor's largest value, over {len(rounds)} rounds")
    for number, (first, again) in enumerate(zip(launched, play(graph, signature, rounds, recorded(graph.run)), strict=True)):
        faults += [f"round {number}: {key} differs in a CUDA graph" for key in first if not np.array_equal(first[key], again[key])]
    if faults:
        raise Failed("; ".join(faults))
    return f"{name} {trt.__version__}: {len(rounds)} rounds within {worst:.1e}, equal in a CUDA graph"
