"""The graphs of a pair, joined from traced stages of the torch modules.

Knows which stage follows which. Does not know where weights lie: it asks for them by parameter name.
Shape letters as in runtime.graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import onnx_ir as ir
from torch import nn

from dspark.export.accept import Accept, AcceptSampled, Logprobs
from dspark.export.assemble import Assembly
from dspark.export.drafter import Drafter
from dspark.export.functions import operator_functions
from dspark.export.target import Target
from dspark.export.trace import Stage, Tracer
from dspark.export.truncate import STEPS, Truncate
from dspark.runtime.config import DrafterConfig, TargetConfig, TransformerConfig
from dspark.runtime.graphs import (
    ACCEPT,
    ACCEPT_SAMPLED,
    CONTEXT,
    DRAFT,
    DRAFT_SAMPLED,
    LOGPROBS,
    MODEL_DTYPE,
    TARGET,
    TRUNCATE,
    Signature,
    TensorSpec,
    acceptance_signatures,
    signatures,
)

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
    markov_topk: int | None = None

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
    stages |= _trace_acceptance(plan.drafter.vocab_size, plan.num_speculative_tokens, plan.opset)
    progress("joining the graphs")
    bodies = [ir.from_proto(function) for function in operator_functions(plan.opset).values()]
    graphs = {}
    for name, join, weight in (
        (CONTEXT, _join_context, drafter_weight),
        (DRAFT, partial(_join_draft, drafter=drafter), drafter_weight),
        (DRAFT_SAMPLED, partial(_join_draft, drafter=drafter, sampled=True), drafter_weight),
        (TARGET, _join_target, target_weight),
        (TRUNCATE, _join_truncate, target_weight),
        *((name, partial(_join_single, name=name), target_weight) for name in (ACCEPT, ACCEPT_SAMPLED, LOGPROBS)),
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
    return tracer.trace(), drafter


@lru_cache(maxsize=32)
def _trace_acceptance(vocabulary: int, num_speculative_tokens: int, opset: int) -> dict[str, Stage]:
    """Trace the graphs without weights; all of them compute in float32, whatever the models do."""
    tracer, declared = Tracer("fp32", opset), acceptance_signatures(vocabulary, num_speculative_tokens)
    top = declared[LOGPROBS].outputs[1].shape[-1]
    modules: dict[str, Callable[[], nn.Module]] = {ACCEPT: Accept, ACCEPT_SAMPLED: AcceptSampled, LOGPROBS: lambda: Logprobs(top)}
    for name, make in modules.items():
        model = tracer.build(make)
        tracer.plan(name, model, model.forward, declared[name].inputs, [spec.name for spec in declared[name].outputs])
    _plan_truncate(tracer, {spec.name: spec for spec in declared[TRUNCATE].inputs})
    return tracer.trace()


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
    model = tracer.build(lambda: Drafter(config, k, plan.window, debug_outputs=plan.debug_outputs, markov_topk=plan.markov_topk))
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
    outputs = ["hidden", *(f"{kind}_{i}" for kind in model.row_kinds for i in range(k)), *(s.name for s in state)]
    tracer.plan("rows", model, model.rows, [_rows("x", "B", block, hidden)], outputs)
    confidence = ["confidence"] if config.enable_confidence_head else []
    choices = vocabulary if plan.markov_topk is None else plan.markov_topk
    kinds = {"base": TensorSpec("base", "float32", ("B", choices)), "row": _rows("row", "B", hidden)}
    kinds["candidates"] = TensorSpec("candidates", "int64", ("B", choices))
    step = [*(kinds[kind] for kind in model.row_kinds), *_per_request("previous")]
    after = [*confidence, *(f"next_{s.name}" for s in state)]
    tracer.plan("step", model, model.step, [*step, *state], ["token", "logits", *after])
    drawn = [TensorSpec(name, "float32", ("B",)) for name in ("temperature", "uniform")]
    tracer.plan("step_sampled", model, model.step_sampled, [*step, *drawn, *state], ["token", "logits", "probs", *after])
    uniform = TensorSpec("draft_uniform", "float32", ("B", k))
    tracer.plan("uniforms", model, lambda uniform: uniform.unbind(1), [uniform], [f"uniform_{i}" for i in range(k)])
    widths = {**dict.fromkeys(confidence, 1), "probs": vocabulary, **({"logits": vocabulary} if plan.debug_outputs else {})}
    for name, skipped in (("collect", {"probs"}), ("collect_sampled", set())):
        joined = {kind: width for kind, width in widths.items() if kind not in skipped}
        parts = _per_request(*(f"token_{i}" for i in range(k)))
        parts += [TensorSpec(f"{kind}_{i}", "float32", ("B", width)) for kind, width in joined.items() for i in range(k)]
        tracer.plan(name, model, model.collect, [inputs["anchor"], *parts], ["tokens", *(f"all_{kind}" for kind in joined)])
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


def _plan_truncate(tracer: Tracer, inputs: dict[str, TensorSpec]) -> None:
    model = tracer.build(Truncate)
    z, weights = replace(inputs["logits"], name="z"), replace(inputs["logits"], name="weights")
    low, high, needed = (TensorSpec(name, "float32", ("B", "M")) for name in ("low", "high", "needed"))
    begin = [inputs["logits"], inputs["temperature"], inputs["min_p"]]
    tracer.plan("truncate_begin", model, model.begin, begin, ["z", "weights", "low", "high"])
    tracer.plan("narrow_count", model, model.narrow_count, [z, inputs["top_k"], low, high], ["new_low", "new_high"])
    tracer.plan("needed_mass", model, model.needed_mass, [z, weights, inputs["top_p"], low], ["needed"])
    tracer.plan("narrow_mass", model, model.narrow_mass, [z, weights, needed, low, high], ["new_low", "new_high"])


def _join_context(graph: Assembly, stages: dict[str, Stage], plan: GraphPlan) -> list[ir.Value]:
    context, cos, sin = graph.call(stages["project_context"], graph["taps"], graph["start"])
    rings = []
    for i in range(plan.drafter.num_hidden_layers):
        old = graph[f"key_ring.{i}"], graph[f"value_ring.{i}"]
        rings += graph.call(stages["write_context"], *old, context, graph["start"], cos, sin, layer=i)
    return rings


def _join_draft(graph: Assembly, stages: dict[str, Stage], plan: GraphPlan, drafter: Drafter, *, sampled: bool = False) -> list[ir.Value]:
    rings = _join_context(graph, stages, plan)
    x, cos, sin = graph.call(stages["embed_block"], graph["anchor"], graph["total"])
    for i in range(plan.drafter.num_hidden_layers):
        written = rings[2 * i], rings[2 * i + 1]
        (x,) = graph.call(stages["draft_layer"], *written, x, graph["total"], graph["first"], cos, sin, layer=i)
    hidden, *rows = graph.call(stages["rows"], x)
    k, previous = drafter.k, graph["anchor"]
    uniforms = graph.call(stages["uniforms"], graph["draft_uniform"]) if sampled else []
    state, steps = rows[k * len(drafter.row_kinds) :], []
    for i in range(k):
        drawn = (graph["temperature"], uniforms[i]) if sampled else ()
        step = stages["step_sampled" if sampled else "step"]
        previous, *outputs = graph.call(step, *drafter.row(rows, i), previous, *drawn, *state)
        state = outputs[-1:] if drafter.has_state else []
        steps.append((previous, *outputs))
    collect = stages["collect_sampled" if sampled else "collect"]
    collected = graph.call(collect, graph["anchor"], *drafter.parts(steps, sampled=sampled))
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


def _join_truncate(graph: Assembly, stages: dict[str, Stage], _plan: GraphPlan) -> list[ir.Value]:
    z, weights, low, zero = graph.call(stages["truncate_begin"], graph["logits"], graph["temperature"], graph["min_p"])
    high = zero
    for _ in range(STEPS):
        low, high = graph.call(stages["narrow_count"], z, graph["top_k"], low, high)
    (needed,) = graph.call(stages["needed_mass"], z, weights, graph["top_p"], low)
    high = zero
    for _ in range(STEPS):
        low, high = graph.call(stages["narrow_mass"], z, weights, needed, low, high)
    return [low]


def _join_single(graph: Assembly, stages: dict[str, Stage], plan: GraphPlan, name: str) -> list[ir.Value]:
    return graph.call(stages[name], *(graph[spec.name] for spec in plan.signatures[name].inputs))
