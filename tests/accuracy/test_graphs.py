"""The same ONNX files through torch and ONNX Runtime, by Polygraphy: all eight graphs, and the state after several rounds."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from altered import AlteredEngine, Values
from conftest import GOLDEN, PAIR, Export
from polygraphy.backend.onnxrt import OnnxrtRunner
from polygraphy.common import TensorMetadata
from polygraphy.comparator import Comparator, IterationResult
from polygraphy.logger import G_LOGGER
from safetensors.numpy import load_file

from dspark.export.accuracy import REFERENCE, RoundCompare, compare_tensors
from dspark.export.eager import EagerEngine
from dspark.export.runner import EngineRunner, Memory
from dspark.export.scenario import COMMITS, Call, batch_size, scenario
from dspark.runtime.bundle import Bundle, load_bundle
from dspark.runtime.engine import Array
from dspark.runtime.graphs import CONTEXT, DRAFT, DRAFT_SAMPLED, GRAPHS, TARGET
from dspark.runtime.onnxruntime import OnnxRuntimeEngine
from dspark.runtime.state import Slots
from dspark.runtime.target import Qwen3Target

FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/golden.safetensors"))
BY_DEFAULT = ("gated", "tied_mqa_bias")
PAIRS = [
    *(pytest.param(GOLDEN / name, id=name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in FOLDERS),
    pytest.param(PAIR, id="pair"),
]


@pytest.fixture(scope="module", params=PAIRS)
def bundle(request: pytest.FixtureRequest, export: Export, pair_bundle: Path) -> Bundle:
    """The golden pairs have a window of 16, so that the rings wrap; the example pair is as the README exports it."""
    return load_bundle(pair_bundle if request.param == PAIR else export(request.param, ctx_window=16))


class SessionRunner(OnnxrtRunner):
    """Polygraphy's own runner on the session of one graph; `state` goes from call to call by copies, as outputs and inputs.

    Independent of the runtime's bindings, and of state in place. `memory` says which rows are looked at.
    """

    def __init__(self, engine: OnnxRuntimeEngine, graph: str, state: Values, memory: Memory) -> None:
        super().__init__(lambda: engine._session(graph), name="session")
        self._signature, self._state, self._memory = engine.signatures[graph], state, memory
        self._names = list(self._signature.aliases.values())

    def get_input_metadata_impl(self) -> Any:
        metadata = TensorMetadata()
        for name, meta in super().get_input_metadata_impl().items():
            if name not in self._names:
                metadata.add(name, meta.dtype, meta.shape)
        return metadata

    def infer_impl(self, feed_dict: Values) -> Any:
        manifest = self._memory.engine.manifest
        capacities = {"B": len(feed_dict["logits" if "logits" in feed_dict else "start"])}
        capacities |= {"R": manifest.ring_capacity, "S": manifest.cache_capacity}
        for spec in self._signature.inputs:
            if spec.name in self._names and spec.name not in self._state:
                self._state[spec.name] = np.zeros([capacities[d] if isinstance(d, str) else d for d in spec.shape], np.float32)
        outputs = super().infer_impl(OrderedDict(feed_dict | {name: self._state[name] for name in self._names}))
        for updated, name in self._signature.aliases.items():
            self._state[name] = outputs[updated]
            outputs[updated] = np.take_along_axis(outputs[updated], self._memory.written(self._signature)[:, None, :, None], 2)
        return outputs


def run(bundle: Bundle, ours: Callable[[str, Memory], Any], compared: Callable[[Call, dict[str, Any], RoundCompare], None]) -> set[str]:
    """Run the scenario on torch and on the runners of `ours`, compare every call; return the graphs that took part."""
    engine, graphs = EagerEngine(bundle), set()
    memory = Memory(engine, batch_size(bundle.manifest))
    calls = scenario(bundle.manifest)
    call = next(calls)
    while True:
        graphs.add(call.graph)
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
            results = Comparator.run([EngineRunner(REFERENCE, memory, call.graph), ours(call.graph, memory)], data_loader=[call.feed])
            compare = RoundCompare(bundle.manifest, call, engine.signatures[call.graph].outputs)
            (accuracy,) = Comparator.compare_accuracy(results, compare_func=compare, comparisons=[(1, 0)])
        (outcome,) = accuracy["session", REFERENCE]
        compared(call, dict(outcome), compare)
        try:
            call = calls.send({name: np.asarray(values) for name, values in results[REFERENCE][0].items()})
        except StopIteration:
            return graphs


def test_every_graph_and_the_state(bundle: Bundle) -> None:
    """Torch against Polygraphy's runner of ONNX Runtime, over prefill and four ragged rounds, state fed forward by each."""
    engine, state, seen = OnnxRuntimeEngine(bundle), dict[str, Array](), set()

    def compared(call: Call, outcome: dict[str, Any], compare: RoundCompare) -> None:
        for name, result in outcome.items():
            assert result, f"{call.step}, {call.graph}, {name}: {result}, tolerance {compare.tolerances[name]}"
            seen.add((call.step, name))

    graphs = run(bundle, lambda graph, memory: SessionRunner(engine, graph, state, memory), compared)
    assert graphs == set(GRAPHS)
    last = f"round {len(COMMITS) - 1}"
    for kind, config in (("ring", bundle.manifest.drafter), ("cache", bundle.manifest.target)):
        for layer in range(config.num_hidden_layers):
            assert {(last, f"{part}_{kind}.{layer}.updated") for part in ("key", "value")} <= seen


def test_the_scenario_is_ragged_and_wraps(export: Export) -> None:
    """What the comparison rests on: unequal lengths and commits, rows on both sides of the ring's end, holes, four rounds."""
    bundle = load_bundle(export(GOLDEN / "gated", ctx_window=16))
    engine = EagerEngine(bundle)
    memory, calls = Memory(engine, 2), scenario(bundle.manifest)
    call, drafts = next(calls), []
    while True:
        if call.graph in (DRAFT, DRAFT_SAMPLED):
            drafts.append(call.feed)
        with EngineRunner("torch", memory, call.graph) as runner:
            outputs = runner.infer(call.feed)
        try:
            call = calls.send(outputs)
        except StopIteration:
            break
    assert len(drafts) == len(COMMITS) == 4
    totals = np.array([feed["total"] for feed in drafts])
    assert (np.diff(totals, axis=0)[:, 0] != np.diff(totals, axis=0)[:, 1]).any()
    ring = bundle.manifest.ring_capacity
    first = drafts[0]["first"]
    assert first[0] == 0 < first[1] < ring < totals[0][1]
    assert totals[-1][0] < ring


@pytest.mark.parametrize("folder", [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.slow) for name in FOLDERS])
def test_the_reference_is_the_published_model(export: Export, folder: str) -> None:
    """Torch with the bundle's weights gives the golden logits and taps: the comparison is not against itself."""
    golden = load_file(GOLDEN / folder / "golden.safetensors")
    engine, slots = EagerEngine(load_bundle(export(GOLDEN / folder, ctx_window=16))), Slots(1)
    target = Qwen3Target(engine, slots)
    slots.admit("r")
    verified = target.prefill("r", golden["target.input_ids"].tolist())
    np.testing.assert_allclose(verified.logits.tensor.read()[0, 0], golden["target.logits"][-1], atol=1e-4)
    np.testing.assert_allclose(verified.taps.tensor.read()[0], golden["target.taps"], atol=1e-4)


def stale(before: Values, after: Values) -> None:
    """One slot of the ring keeps its old row."""
    after["key_ring.0"][0, :, int(before["start"][0])] = before["key_ring.0"][0, :, int(before["start"][0])]


def neighbour(before: Values, after: Values) -> None:
    """All rows of a cache lie one position too late."""
    after["value_cache.1"][...] = np.roll(after["value_cache.1"], 1, 2)


def swapped_taps(_before: Values, after: Values) -> None:
    """The taps are those of other layers."""
    after["taps"][...] = np.roll(after["taps"], after["taps"].shape[-1] // 3, -1)


def one_logit(_before: Values, after: Values) -> None:
    after["logits"][0, 0, 3] += 1e-3


def not_a_number(_before: Values, after: Values) -> None:
    after["logits"][0, 0, 3] = np.nan


ALTERATIONS = {
    "stale": (CONTEXT, stale, "key_ring.0.updated"),
    "neighbour": (TARGET, neighbour, "value_cache.1.updated"),
    "swapped taps": (TARGET, swapped_taps, "taps"),
    "one logit": (TARGET, one_logit, "logits"),
    "not a number": (TARGET, not_a_number, "logits"),
}


def test_alterations_are_found(export: Export) -> None:
    """Each in the output that holds it; an intact engine beside them passes."""
    bundle = load_bundle(export(GOLDEN / "gated", ctx_window=16))
    intact = OnnxRuntimeEngine(bundle)
    engines = {name: AlteredEngine(intact, graph, change) for name, (graph, change, _) in ALTERATIONS.items()}
    reports = compare_tensors(bundle.manifest, EagerEngine(bundle), {**engines, "intact": intact})
    assert reports["intact"].passed
    for name, (graph, _, output) in ALTERATIONS.items():
        assert not reports[name].passed, name
        assert not reports[name].measured[graph, output].passed, name
    for name in ("one logit", "not a number"):
        assert [key for key, row in reports[name].measured.items() if not row.passed] == [(TARGET, "logits")]
    assert np.isnan(reports["not a number"].measured[TARGET, "logits"].difference)


@pytest.mark.parametrize(("lead", "passes"), [(1e-6, True), (1e-3, False)])
def test_near_ties_of_proposals(export: Export, lead: float, passes: bool) -> None:
    """A proposal may differ where the reference's logits are next to equal, and what follows it in the block with it; nowhere else."""
    bundle = load_bundle(export(GOLDEN / "gated", ctx_window=16))
    k, vocabulary = bundle.manifest.num_speculative_tokens, bundle.manifest.drafter.vocab_size
    logits = np.zeros((1, k, vocabulary), np.float32)
    logits[:, :, 5] = 1
    logits[:, 2, 6] = 1 - lead
    reference = {"verify_tokens": np.full((1, k + 1), 5), "confidence_logits": np.ones((1, k), np.float32), "draft_logits": logits}
    ours = {name: values.copy() for name, values in reference.items()}
    ours["verify_tokens"][0, 3:] = [6, *([9] * (k - 3))]
    ours["confidence_logits"][0, 3:] = 7
    compare = RoundCompare(bundle.manifest, Call("round 0", DRAFT, {}), EagerEngine(bundle).signatures[DRAFT].outputs)
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        outcome = compare(IterationResult(ours, runner_name="ours"), IterationResult(reference, runner_name="theirs"))
        assert all(outcome.values()) == passes
        assert compare.near_ties["ours"] == passes
        ours["confidence_logits"][0, 1] = 7
        assert not compare(IterationResult(ours, runner_name="ours"), IterationResult(reference, runner_name="theirs"))["confidence_logits"]


def test_near_ties_of_draws(export: Export) -> None:
    """A drawn proposal may differ where the uniform number lies at the edge of the two tokens; a token further away may not."""
    bundle = load_bundle(export(GOLDEN / "gated", ctx_window=16))
    k, vocabulary = bundle.manifest.num_speculative_tokens, bundle.manifest.drafter.vocab_size
    probs = np.zeros((1, k, vocabulary), np.float32)
    probs[:, :, 4:8] = 0.25
    reference = {"verify_tokens": np.full((1, k + 1), 5), "draft_probs": probs}
    outputs = EagerEngine(bundle).signatures[DRAFT_SAMPLED].outputs
    for token, uniform, passes in ((6, 0.4999999, True), (4, 0.2500001, True), (6, 0.4, False), (7, 0.4999999, False), (4, 0.4, False)):
        call = Call("round 2", DRAFT_SAMPLED, {"draft_uniform": np.full((1, k), uniform, np.float32)})
        ours = reference | {"verify_tokens": reference["verify_tokens"].copy()}
        ours["verify_tokens"][0, 2] = token
        with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
            outcome = RoundCompare(bundle.manifest, call, outputs)(
                IterationResult(ours, runner_name="ours"), IterationResult(reference, runner_name="theirs")
            )
        assert all(outcome.values()) == passes, (token, uniform)
