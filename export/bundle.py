"""One export: a checked pair in, a bundle directory out.

Knows the order of the work. The parts are elsewhere: checkpoints, graphs, weights, writing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import onnx
import onnx_ir as ir

from dspark.export.build import BuildOptions, BuildPlan, EngineBuilder
from dspark.export.check import check_graph, check_references
from dspark.export.checkpoint import Checkpoint
from dspark.export.graphs import GraphPlan, build_graphs
from dspark.export.lower_weights import lower_weights
from dspark.export.pair import Pair, load_pair
from dspark.export.quantize import DEFAULT_GROUP_SIZE, MARKOV_OUTPUT
from dspark.export.weights import GATHERED, WANTED, Weights, check_finite
from dspark.export.write import atomic_directory, check_output, record_files
from dspark.plugins.contract import VERSION as OPS_CONTRACT
from dspark.runtime.bundle import (
    DTYPES,
    FORMAT_VERSION,
    GROUP_SIZES,
    MANIFEST,
    MARKOV_BITS,
    TOKENIZER_FILES,
    WEIGHT_BITS,
    CheckpointRecord,
    Conventions,
    Limits,
    Manifest,
    Quantization,
    file_sha256,
    fingerprint,
)
from dspark.runtime.errors import ConfigError, numbered
from dspark.runtime.graphs import GRAPHS, TARGET, cache_capacity, ring_capacity

DEFAULT_WINDOW = 2048
OPSETS = (24, 25)
"""TensorScatter, the body of the ring write, is new in 24; onnxscript 0.7.2 converts up to 25."""


@dataclass(frozen=True)
class ExportOptions:
    """What a user may choose; None means the default that the checkpoints give."""

    dtype: str = "auto"
    weights: str = "float"
    drafter_weights: str | None = None
    group_size: int | None = None
    num_speculative_tokens: int | None = None
    markov_topk: int | None = None
    ctx_window: int | str = DEFAULT_WINDOW
    max_batch_size: int = 8
    max_seq_len: int | None = None
    max_chunk: int = 512
    mask_token_id: int | None = None
    copy_weights: bool = False
    check_finite: bool = False
    debug_outputs: bool = False
    opset: int = OPSETS[0]
    overwrite: bool = False
    build: BuildOptions | None = None


@dataclass(frozen=True)
class Progress:
    """Callbacks: `step` gets what begins, `weights` bytes written and bytes in all."""

    step: Callable[[str], None] = field(default=lambda _: None)
    weights: Callable[[int, int], None] = field(default=lambda _done, _total: None)


def export_bundle(
    target: Path | str,
    drafter: Path | str,
    output: Path | str,
    options: ExportOptions | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Export the pair in two model directories to the bundle directory `output` and return its manifest.

    Raises ConfigError, CheckpointError or ExportError before anything is written; an interruption leaves nothing behind.
    """
    target, drafter, output = Path(target), Path(drafter), Path(output)
    options, progress = options or ExportOptions(), progress or Progress()
    check_output(output, overwrite=options.overwrite)
    progress.step("reading the checkpoints")
    pair = load_pair(target, drafter, options.mask_token_id)
    plan, limits, quantization = resolve(pair, options)
    rings = ring_capacity(min(plan.window, limits.max_seq_len), plan.num_speculative_tokens)
    caches = cache_capacity(limits.max_seq_len, plan.num_speculative_tokens)
    builder = None if options.build is None else EngineBuilder(options.build, _build_plan(plan, limits, rings, caches))
    if options.check_finite:
        progress.step("checking that all weights are finite")
        check_finite(pair.target_tensors | {f"drafter.{name}": t for name, t in pair.drafter_tensors.items()})
    # Of the few candidates' rows in the Markov head's output none is multiplied whole.
    tables = GATHERED if plan.markov_topk is None else (*GATHERED, MARKOV_OUTPUT)
    weights = Weights(pair, plan.dtype, copy=options.copy_weights, quantization=quantization, tables=tables)
    graphs = build_graphs(plan, weights.resolver("target", plan.target), weights.resolver("drafter", plan.drafter), progress.step)
    if quantization is not None:
        for name, graph in graphs.items():
            lower_weights(graph, weights.forms("target" if name == TARGET else "drafter"), quantization.group_size)
    with atomic_directory(output, overwrite=options.overwrite) as scratch:
        if weights.inside:
            kind = "quantising" if quantization is not None else "converting" if weights.converted else "copying"
            progress.step(f"{kind} the weights")
            weights.write(scratch, progress.weights)
        progress.step("checking the graphs")
        record = weights.record()
        for name in GRAPHS:
            _write_graph(graphs[name], scratch / f"{name}.onnx", plan, root=record.root)
        for name in TOKENIZER_FILES:
            if (target / name).exists():
                shutil.copyfile(target / name, scratch / name)
        engines = {} if builder is None else builder.build(scratch, Path(record.root or scratch), progress.step)
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            dspark_version=version("dspark"),
            ops_contract=OPS_CONTRACT,
            opset=plan.opset,
            dtype=plan.dtype,
            target=plan.target,
            drafter=plan.drafter,
            num_speculative_tokens=plan.num_speculative_tokens,
            markov_topk=plan.markov_topk,
            window=plan.window,
            ring_capacity=rings,
            cache_capacity=caches,
            limits=limits,
            conventions=Conventions(plan.num_speculative_tokens, plan.num_speculative_tokens + 1),
            debug_outputs=plan.debug_outputs,
            weights=record,
            quantization=quantization,
            checkpoints={"target": identity(pair.target_checkpoint), "drafter": identity(pair.drafter_checkpoint)},
            files=record_files(scratch),
            engines=engines,
        )
        (scratch / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
    return manifest


def resolve(pair: Pair, options: ExportOptions) -> tuple[GraphPlan, Limits, Quantization | None]:
    """Return what the options mean for this pair. Raises ConfigError with all that cannot be."""
    block = pair.drafter.block_size
    k = block if options.num_speculative_tokens is None else options.num_speculative_tokens
    longest = pair.target.max_position_embeddings if options.max_seq_len is None else options.max_seq_len
    window = longest if options.ctx_window == "full" else int(options.ctx_window)
    limits = Limits(options.max_batch_size, longest, options.max_chunk)
    dtype = options.dtype
    if dtype == "auto":
        # The CPU wants float32; TensorRT computes in what the checkpoint holds.
        stored = {kind: name for name, kind in WANTED.items()}
        dtype = "fp32" if options.build is None else stored[pair.target_tensors["embed_tokens.weight"].dtype]
    checks = [
        (1 <= k <= block, f"num_speculative_tokens is {k}, expected 1..{block} (the drafter's block)"),
        (window >= block + 2, f"ctx_window is {window}, the minimum is {block + 2} (block + 2)"),
        (limits.max_batch_size >= 1, f"max_batch_size is {limits.max_batch_size}, expected at least 1"),
        (longest >= 2, f"max_seq_len is {longest}, expected at least 2"),
        (
            longest <= pair.target.max_position_embeddings,
            f"max_seq_len is {longest}, the target's max_position_embeddings is {pair.target.max_position_embeddings}",
        ),
        (limits.max_chunk >= 1, f"max_chunk is {limits.max_chunk}, expected at least 1"),
        (dtype in DTYPES, f"dtype is {options.dtype!r}, expected auto, {', '.join(DTYPES)}"),
        (options.opset in OPSETS, f"opset is {options.opset}, expected one of {OPSETS}"),
        (
            options.markov_topk is None or pair.drafter.markov_rank > 0,
            "markov_topk is for a drafter with a Markov head, which this one has not",
        ),
        (
            options.markov_topk is None or 1 <= options.markov_topk <= pair.drafter.vocab_size,
            f"markov_topk is {options.markov_topk}, expected 1..{pair.drafter.vocab_size} (the vocabulary)",
        ),
    ]
    quantization, quantization_faults = _quantization(pair, options, dtype)
    faults = [fault for holds, fault in checks if not holds] + quantization_faults
    if faults:
        raise ConfigError(f"this export cannot be done as asked:{numbered(faults)}")
    plan = GraphPlan(pair.target, pair.drafter, k, window, dtype, options.opset, options.debug_outputs, options.markov_topk)
    return plan, limits, quantization


def _quantization(pair: Pair, options: ExportOptions, dtype: str) -> tuple[Quantization | None, list[str]]:
    """Return what the options say of quantised weights, and all that cannot be."""
    chosen = options.weights, options.weights if options.drafter_weights is None else options.drafter_weights
    unknown = [
        f"{choice!r} is no form of weights, expected one of {', '.join(WEIGHT_BITS)}" for choice in chosen if choice not in WEIGHT_BITS
    ]
    if unknown:
        return None, unknown[:1]
    target_bits, drafter_bits = (WEIGHT_BITS[choice] for choice in chosen)
    if target_bits is None and drafter_bits is None:
        return None, [] if options.group_size is None else ["group_size is about quantised weights: choose weights int8 or int4"]
    group = DEFAULT_GROUP_SIZE if options.group_size is None else options.group_size
    walks_all = drafter_bits is not None and pair.drafter.markov_rank > 0 and options.markov_topk is None
    checks = [
        (group in GROUP_SIZES, f"group_size is {group}, expected one of {', '.join(map(str, GROUP_SIZES))}"),
        (
            options.build is None,
            "quantised weights run on ONNX Runtime alone (MatMulNBits is its own operator): leave out the engines, or the quantisation",
        ),
        (
            dtype == "fp32" or options.build is not None,
            f"dtype is {dtype!r}, quantised weights go with fp32: their kernels compute in float32 and 8-bit integers",
        ),
    ]
    faults = [fault for holds, fault in checks if not holds]
    return Quantization(group, target_bits, drafter_bits, MARKOV_BITS if walks_all else None), faults


def _build_plan(plan: GraphPlan, limits: Limits, rings: int, caches: int) -> BuildPlan:
    sizes = {"R": rings, "S": caches}
    return BuildPlan(plan.target, plan.drafter, plan.signatures, plan.dtype, plan.num_speculative_tokens, limits, sizes)


def _write_graph(model: ir.Model, path: Path, plan: GraphPlan, *, root: str | None) -> None:
    signature = plan.signatures[path.stem]
    proto = ir.to_proto(model)
    data = proto.SerializeToString(deterministic=True)
    path.write_bytes(data)
    check_graph(model, signature)
    if root is None:
        onnx.checker.check_model(os.fspath(path), full_check=True)
    else:
        check_references(model, proto, root)


def identity(checkpoint: Checkpoint) -> CheckpointRecord:
    """Return what the manifest keeps of a checkpoint."""
    files = {file.name: fingerprint(file) for file in checkpoint.files}
    return CheckpointRecord(file_sha256(checkpoint.directory / "config.json"), files)
