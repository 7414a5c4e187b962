"""The graphs of a pair, joined from traced stages of the torch modules.

Knows which stage follows which. Does not know where weights lie: it asks for them by parameter name.
Shape letters as in runtime.graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import onnx_ir as ir

from dspark.export.accept import Accept
from dspark.export.assemble import Assembly
from dspark.export.drafter import Drafter
from dspark.export.functions import operator_functions
from dspark.export.target import Target
from dspark.export.trace import Stage, Tracer
from dspark.runtime.config import DrafterConfig, TargetConfig, TransformerConfig
from dspark.runtime.graphs import ACCEPT, CONTEXT, DRAFT, MODEL_DTYPE, TARGET, Signature, TensorSpec, signatures

Weight = Callable[[str], ir.TensorProtocol]


@dataclass(frozen=True)
class GraphPlan:
    """What the graphs of a pair depend on, besides weights."""

    target: TargetConfig
    drafter: DrafterConfig
    num_speculative_tokens: int
    window: int
    dtype: str
    opset: int
    debug_outputs: bool

    @property
    def signatures(self) -> dict[str, Signature]:
        """Signature of every graph by name."""
        return signatures(self.target, self.drafter, self.num_speculative_tokens, debug_outputs=self.debug_outputs)


def build_graphs(plan: GraphPlan, target_weight: Weight, drafter_weight: Weight, progress: Callable[[str], None]) -> dict[str, ir.Model]:
    """Trace the pair's stages and return its graphs by name; `progress` is told what is being done."""
    progress("tracing the models")
    one_layer = {"num_hidden_layers": 1, "max_position_embeddings": 1}
    shallow = replace(plan, target=replace(plan.target, **one_layer), drafter=replace(plan.drafter, **one_layer))
    stages, drafter = _trace(shallow)
    progress("joining the graphs")
    bodies = [ir.from_proto(function) for function in operator_functions(plan.opset).values()]
    graphs = {}
    for name, join, weight in (
        (CONTEXT, _join_context, drafter_weight),
        (DRAFT, partial(_join_draft, drafter=drafter), drafter_weight),
        (TARGET, _join_target, target_weight),
        (ACCEPT, _join_accept, target_weight),
    ):
        assembly = Assembly(name, plan.signatures[name], plan.dtype, plan.opset, weight)
        graphs[name] = assembly.finish(join(assembly, stages, plan), bodies)
    return graphs


@lru_cache(maxsize=32)
def _trace(plan: GraphPlan) -> tuple[dict[str, Stage], Drafter]:
    """Trace the stages of a pair of one-layer models; pairs that differ in depth alone share them."""
    tracer = Tracer(plan.dtype, plan.opset)
    drafter = _plan_drafter(tracer, plan)
    _plan_target(tracer, plan)
    _plan_accept(tracer, plan)
    return tracer.trace(), drafter


def _rows(name: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name, MODEL_DTYPE, shape)


def _per_request(*names: str) -> list[TensorSpec]:
    return [TensorSpec(name, "int64", ("B",)) for name in names]


def _angles(config: TransformerConfig, rows: int | str) -> list[TensorSpec]:
    return [_rows(name, "B", rows, config.head_dim // 2) for name in ("cos", "sin")]


def _states(kind: str, config: TransformerConfig, capacity: str) -> list[TensorSpec]:
    return [_rows(f"{part}_{kind}", "B", config.num_key_value_heads, capacity, config.head_dim) for part in ("key", "value")]


# In a stage the angles come last: sizes are read from the last input that has them. The angles are shared by all layers, so an engine
# computes each reshape's target once; the state has no reader but its write.


def _plan_drafter(tracer: Tracer, plan: GraphPlan) -> Drafter:
    config, k = plan.drafter, plan.num_speculative_tokens
    model = tracer.build(lambda: Drafter(config, k, plan.window, debug_outputs=plan.debug_outputs))
    layer, hidden, block, vocabulary = model.layers[0], config.hidden_size, config.block_size, config.vocab_size
    inputs = {spec.name: spec for spec in plan.signatures[DRAFT].inputs}
    rings = _states("ring", config, "R")
    tracer.plan("project_context", model, model.project_context, [inputs["taps"], inputs["start"]], ["context", "cos", "sin"])
    rows = [*rings, _rows("context", "B", "N", hidden), *_per_request("start"), *_angles(config, "N")]
    tracer.plan("write_context", model, layer.write_context, rows, ["key_ring_updated", "value_ring_updated"])
    tracer.plan("embed_block", model, model.embed_block, [inputs["anchor"], inputs["total"]], ["x", "cos", "sin"])
    rows = [*rings, _rows("x", "B", block, hidden), *_per_request("total", "first"), *_angles(config, block)]
    tracer.plan("draft_layer", model, layer.draft, rows, ["y"])

    state = [_rows("state", "B", config.markov_rank)] if model.has_state else []
    outputs = ["hidden", *(f"base_{i}" for i in range(k)), *(f"row_{i}" for i in range(k)), *(s.name for s in state)]
    tracer.plan("rows", model, model.rows, [_rows("x", "B", block, hidden)], outputs)
    confidence = ["confidence"] if config.enable_confidence_head else []
    base = TensorSpec("base", "float32", ("B", vocabulary))
    step = [base, _rows("row", "B", hidden), *_per_request("previous"), *state]
    tracer.plan("step", model, model.step, step, ["token", "logits", *confidence, *(f"next_{s.name}" for s in state)])
    parts = _per_request(*(f"token_{i}" for i in range(k)))
    if plan.debug_outputs:
        parts += [TensorSpec(f"logits_{i}", "float32", ("B", vocabulary)) for i in range(k)]
    parts += [TensorSpec(f"{name}_{i}", "float32", ("B", 1)) for name in confidence for i in range(k)]
    outputs = ["tokens", *confidence, *(["all_logits"] if plan.debug_outputs else [])]
    tracer.plan("collect", model, model.collect, [inputs["anchor"], *parts], outputs)
    return model


def _plan_target(tracer: Tracer, plan: GraphPlan) -> None:
    config = plan.target
    model = tracer.build(lambda: Target(config, ()))
    inputs = {spec.name: spec for spec in plan.signatures[TARGET].inputs}
    x = _rows("x", "B", "N", config.hidden_size)
    tapped = [replace(x, name=f"tapped_{i}") for i in range(len(plan.drafter.target_layer_ids))]
    tracer.plan("embed", model, model.embed, [inputs["tokens"], inputs["start"]], ["x", "cos", "sin"])
    caches, angles, layer = _states("cache", config, "S"), _angles(config, "N"), model.layers[0]
    rows = [*caches, x, *_per_request("start"), *angles]
    tracer.plan("target_write", model, layer.write, rows, ["normed", "key_cache_updated", "value_cache_updated"])
    tracer.plan("visible", model, model.visible, [caches[0], *_per_request("start"), angles[0]], ["visible"])
    visible = TensorSpec("visible", "bool", ("B", 1, "Q", "S"))
    rows = [*caches, x, replace(x, name="normed"), visible, *_per_request("start"), *angles]
    tracer.plan("target_attend", model, layer.attend, rows, ["y"])
    tracer.plan("head", model, model.head, [x, inputs["logit_rows"], *tapped], ["logits", "taps"])


def _plan_accept(tracer: Tracer, plan: GraphPlan) -> None:
    declared, model = plan.signatures[ACCEPT], tracer.build(Accept)
    tracer.plan(ACCEPT, model, model.forward, declared.inputs, [spec.name for spec in declared.outputs])


def _join_context(graph: Assembly, stages: dict[str, Stage], plan: GraphPlan) -> list[ir.Value]:
    context, cos, sin = graph.call(stages["project_context"], graph["taps"], graph["start"])
    rings = []
    for i in range(plan.drafter.num_hidden_layers):
        old = graph[f"key_ring.{i}"], graph[f"value_ring.{i}"]
        rings += graph.call(stages["write_context"], *old, context, graph["start"], cos, sin, layer=i)
    return rings


def _join_draft(graph: Assembly, stages: dict[str, Stage], plan: GraphPlan, drafter: Drafter) -> list[ir.Value]:
    rings = _join_context(graph, stages, plan)
    x, cos, sin = graph.call(stages["embed_block"], graph["anchor"], graph["total"])
    for i in range(plan.drafter.num_hidden_layers):
        written = rings[2 * i], rings[2 * i + 1]
        (x,) = graph.call(stages["draft_layer"], *written, x, graph["total"], graph["first"], cos, sin, layer=i)
    hidden, *rows = graph.call(stages["rows"], x)
    k, previous = drafter.k, graph["anchor"]
    state, steps = rows[2 * k :], []
    for i in range(k):
        previous, *outputs = graph.call(stages["step"], rows[i], rows[k + i], previous, *state)
        state = outputs[-1:] if drafter.has_state else []
        steps.append((previous, *outputs))
    collected = graph.call(stages["collect"], graph["anchor"], *drafter.parts(steps))
    return [*drafter.joined(collected, hidden), *rings]


def _join_target(graph: Assembly, stages: dict[str, Stage], plan: GraphPlan) -> list[ir.Value]:
    x, cos, sin = graph.call(stages["embed"], graph["tokens"], graph["start"])
    outputs, caches = {-1: x}, []
    for i in range(plan.target.num_hidden_layers):
        old = graph[f"key_cache.{i}"], graph[f"value_cache.{i}"]
        normed, *written = graph.call(stages["target_write"], *old, x, graph["start"], cos, sin, layer=i)
        if i == 0:
            (visible,) = graph.call(stages["visible"], written[0], graph["start"], cos)
        (x,) = graph.call(stages["target_attend"], *written, x, normed, visible, graph["start"], cos, sin, layer=i)
        outputs[i] = x
        caches += written
    tapped = [outputs[i] for i in plan.drafter.target_layer_ids]
    return [*graph.call(stages["head"], x, graph["logit_rows"], *tapped), *caches]


def _join_accept(graph: Assembly, stages: dict[str, Stage], plan: GraphPlan) -> list[ir.Value]:
    return graph.call(stages[ACCEPT], *(graph[spec.name] for spec in plan.signatures[ACCEPT].inputs))
