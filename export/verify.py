"""Compare a bundle on the CPU with the torch modules it was traced from, on random input.

Two requests of different length are prefilled, then drafted and verified for three rounds with partial acceptance; outputs and state are
compared after each. Knows both sides. Needs the memory of the pair in float32.

A quantised bundle is compared twice with torch on what its integers stand for. With its products computed in float32, it must agree as
closely as a bundle of floats: this shows every weight, node and offset to be right. As it is, its kernels round the inputs of products to
8 bits, which torch does not: this shows how much that changes, and needs wide tolerances.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from dspark.export.checkpoint import STORED_DTYPES, StoredTensor
from dspark.export.drafter import Drafter
from dspark.export.lower_weights import NBITS
from dspark.export.pair import Pair, load_pair
from dspark.export.quantize import dequantize, quantize_rows, quantized_bits
from dspark.export.target import Target
from dspark.runtime.accept import Acceptance
from dspark.runtime.bundle import Bundle, Quantization, Weights, load_bundle
from dspark.runtime.drafter import Drafter as BundleDrafter
from dspark.runtime.engine import Array
from dspark.runtime.graphs import GRAPHS
from dspark.runtime.onnxruntime import OnnxRuntimeEngine
from dspark.runtime.state import Rows, Slots
from dspark.runtime.target import Qwen3Target

_TOLERANCE = {"fp32": 1e-4, "fp16": 3e-2}
"""Largest difference relative to the largest magnitude (at least 1) of the compared tensor."""
_ROUNDED_TOLERANCE = 0.1
"""The same for products whose inputs are rounded to 8 bits: 1/254 of the largest of a group in each product, which adds up over layers."""
_FLOAT32_LEVEL = 1
"""MatMulNBits's accuracy_level for products in float32."""
_PROMPT_LENGTHS = (5, 9)
_COMMITS = ((1, 3), (2, 1), (4, 2))
"""Rows that each request commits in each round."""


@dataclass
class Comparison:
    """The largest difference seen of one kind of tensor, against its tolerance."""

    name: str
    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the difference is within the tolerance; a NaN is not."""
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        return f"{'ok  ' if self.passed else 'FAIL'} {self.name:<18} {self.difference:9.2e}  (tolerance {self.tolerance:.0e})"


class _Report:
    def __init__(self, tolerance: float, suffix: str = "") -> None:
        self.rows: dict[str, Comparison] = {}
        self._tolerance, self._suffix = tolerance, suffix

    def compare(self, name: str, ours: Array, theirs: Tensor, *, exact: bool = False) -> None:
        name += self._suffix
        reference = theirs.double().numpy()
        scale = 1.0 if exact else max(1.0, float(np.abs(reference).max(initial=0)))
        difference = float(np.abs(np.asarray(ours, np.float64) - reference).max(initial=0)) / scale
        row = self.rows.setdefault(name, Comparison(name, 0.0, 0.0 if exact else self._tolerance))
        row.difference = difference if np.isnan(difference) else max(row.difference, difference)

    def decided(self, logits: Tensor) -> int:
        """Return how many leading rows of `logits [N,V]` have a largest entry that the tolerance cannot turn."""
        best = logits.topk(2, -1).values
        margin = 2 * self._tolerance * max(1.0, float(logits[logits.isfinite()].abs().max()))
        return int((best[:, 0] - best[:, 1] > margin).long().cumprod(0).sum())


def verify_bundle(
    bundle: Path | str, target: Path | str, drafter: Path | str, *, seed: int = 0, threads: int | None = None
) -> list[Comparison]:
    """Return the largest difference of every kind of output and state between the bundle and torch."""
    loaded = load_bundle(bundle)
    manifest = loaded.manifest
    pair = load_pair(Path(target), Path(drafter), manifest.drafter.mask_token_id)
    models = _models(pair, loaded)
    report = _Report(_TOLERANCE[manifest.dtype])
    if manifest.quantization is None:
        _compare(loaded, *models, report, seed, threads)
        return list(report.rows.values())
    with tempfile.TemporaryDirectory() as scratch:
        _compare(_with_float32_products(loaded, Path(scratch)), *models, report, seed, threads)
    rounded = _Report(_ROUNDED_TOLERANCE, ", rounded")
    _compare(loaded, *models, rounded, seed, threads)
    return [*report.rows.values(), *rounded.rows.values()]


def _models(pair: Pair, bundle: Bundle) -> tuple[nn.Module, nn.Module]:
    """Return target and drafter in torch with the weights that the bundle's stand for."""
    manifest = bundle.manifest
    options = {"debug_outputs": True, "markov_topk": manifest.markov_topk}
    target = Target(manifest.target, manifest.drafter.target_layer_ids)
    drafter = Drafter(manifest.drafter, manifest.num_speculative_tokens, manifest.window, **options)
    load_weights("target", target, pair.target_tensors, manifest.quantization)
    load_weights("drafter", drafter, pair.drafter_tensors, manifest.quantization)
    return target, drafter


def _with_float32_products(bundle: Bundle, scratch: Path) -> Bundle:
    """Return the bundle with graphs in `scratch` that differ in one thing: products of quantised weights keep their inputs as they are."""
    for graph in GRAPHS:
        model = onnx.load(bundle.graph_path(graph), load_external_data=False)
        for node in model.graph.node:
            for attribute in node.attribute:
                if node.op_type == NBITS and attribute.name == "accuracy_level":
                    attribute.i = _FLOAT32_LEVEL
        onnx.save(model, scratch / f"{graph}.onnx")
    return Bundle(scratch, replace(bundle.manifest, weights=Weights(str(bundle.directory.resolve()), {})))


def _compare(bundle: Bundle, torch_target: nn.Module, torch_drafter: nn.Module, report: _Report, seed: int, threads: int | None) -> None:
    manifest = bundle.manifest
    k = manifest.num_speculative_tokens
    engine = OnnxRuntimeEngine(bundle, threads=threads)
    requests = list(range(min(len(_PROMPT_LENGTHS), manifest.limits.max_batch_size)))
    slots = Slots(len(requests))
    ours, drafts, accept = Qwen3Target(engine, slots), BundleDrafter(engine, slots), Acceptance(engine)
    rng = np.random.default_rng(seed)
    reference = [_Reference(torch_target, torch_drafter, manifest.cache_capacity, manifest.ring_capacity) for _ in requests]
    anchors = []
    with torch.no_grad():
        for request in requests:
            slots.admit(request)
            length = max(1, min(_PROMPT_LENGTHS[request], manifest.limits.max_chunk, manifest.limits.max_seq_len // 4))
            prompt = rng.integers(0, manifest.target.vocab_size, length)
            verified = ours.prefill(request, prompt.tolist())
            logits, taps = reference[request].feed(prompt)
            report.compare("prefill logits", verified.logits.tensor.read()[0, 0], logits[-1])
            report.compare("prefill taps", verified.taps.tensor.read()[0], taps)
            drafts.write_context(request, verified.taps.tensor.read()[0], np.arange(length))
            reference[request].commit(length, context=True)
            anchors.append(int(logits[-1].argmax()))
        taps_rows, counts = None, [None] * len(requests)
        for commits in _COMMITS:
            if max(ours.length(request) for request in requests) + k + 1 > manifest.limits.max_seq_len:
                break
            proposals = drafts.propose(requests, anchors, taps_rows, counts)
            drafted = proposals.verify_tokens.read().copy()
            verified = ours.verify(requests, Rows(proposals.view, proposals.verify_tokens), [k] * len(requests))
            judged = np.full(proposals.view.size, k)
            chosen = accept.greedy(verified.logits, judged, proposals.verify_tokens)
            counts = [min(count, k + 1) for count in commits[: len(requests)]]
            taps_rows = verified.taps
            for request, row in zip(requests, proposals.view.rows, strict=True):
                own = reference[request]
                tokens, confidence, draft_logits = own.draft(anchors[request])
                # Behind a near tie the two walks may part, each right by its own rounding: compare up to there.
                walked = report.decided(draft_logits)
                report.compare("drafted tokens", drafted[row, : walked + 1], tokens[: walked + 1], exact=True)
                if confidence is not None and proposals.confidence_logits is not None:
                    report.compare("confidence logits", proposals.confidence_logits.read()[row, : walked + 1], confidence[: walked + 1])
                logits, taps = own.feed(drafted[row])
                report.compare("verify logits", verified.logits.tensor.read()[row], logits)
                report.compare("verify taps", verified.taps.tensor.read()[row], taps)
                choice = logits.argmax(-1)
                agreed = int((choice[:-1].numpy() == drafted[row, 1:]).cumprod().sum())
                if report.decided(logits) > agreed:
                    report.compare("accepted", chosen.accepted[row], torch.tensor(agreed), exact=True)
                    report.compare("next token", chosen.next_token[row], choice[agreed], exact=True)
                anchors[request] = int(choice[counts[request] - 1])
                own.commit(counts[request], context=False)
                ours.commit(request, counts[request])
                for kind, state, tensors, size in (
                    ("cache", ours.caches, own.caches, ours.length(request)),
                    ("ring", drafts.rings, own.rings, drafts.total(request)),
                ):
                    for tensor, theirs in zip(state.tensors(proposals.view).values(), tensors, strict=True):
                        report.compare(f"{kind} rows", tensor.read()[row, :, :size], theirs[0, :, :size])


class _Reference:
    """One request in torch: caches, rings and the numbers of its rows."""

    def __init__(self, target: nn.Module, drafter: nn.Module, cache_capacity: int, ring_capacity: int) -> None:
        self._target, self._drafter = target, drafter
        config = drafter.config
        self._length = self._total = 0
        rows = sum(_PROMPT_LENGTHS) + 8 * config.block_size
        self.caches = zeros(target, min(cache_capacity, rows))
        self.rings = zeros(drafter, ring_capacity)
        self._taps: Tensor | None = None
        self._new: Tensor | None = None

    def feed(self, tokens: Array) -> tuple[Tensor, Tensor]:
        """Run the target behind the committed rows; return logits `[N,V]` and taps `[N,m*H]`."""
        ids, rows = torch.from_numpy(np.asarray(tokens, np.int64))[None], torch.arange(len(tokens))[None]
        logits, self._taps, self.caches = self._target(ids, torch.tensor([self._length]), rows, self.caches)
        return logits[0], self._taps[0]

    def commit(self, rows: int, *, context: bool) -> None:
        """Commit the first `rows` fed tokens; their taps go to the rings at once (`context`) or with the next draft."""
        assert self._taps is not None
        new = self._taps[:, :rows]
        self._length += rows
        if context:
            self.rings = self._drafter.context(new, torch.tensor([self._total]), self.rings)
            self._total, self._new = self._length, None
        else:
            self._new = new

    def draft(self, anchor: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """Write the rows committed last, then draft; return verify_tokens `[K+1]`, confidence `[K]` and corrected logits `[K,V]`."""
        start = torch.tensor([self._total])
        if self._new is not None:
            self.rings = self._drafter.context(self._new, start, self.rings)
            self._total = self._length
        junk = torch.zeros(1, 1, self._drafter.config.taps_width)
        numbers = [torch.tensor([n]) for n in (self._total, self._total, 0, anchor)]
        outputs, _ = self._drafter(junk, *numbers, self.rings)
        confidence = outputs[1][0] if self._drafter.config.enable_confidence_head else None
        return outputs[0][0], confidence, outputs[-1][0]


def zeros(model: nn.Module, capacity: int) -> list[Tensor]:
    """Return empty caches or rings of a model, key and value of each layer in turn, for one request."""
    attention = [layer.self_attn for layer in model.layers]
    return [torch.zeros(1, a.k_proj.out_features // a.head_dim, capacity, a.head_dim) for a in attention for _ in ("key", "value")]


def load_weights(kind: str, model: nn.Module, tensors: Mapping[str, StoredTensor], quantization: Quantization | None) -> None:
    """Give a model of a kind, `target` or `drafter`, its weights in float32: the stored ones, or what they are quantised to."""
    parameters = dict(model.named_parameters())
    tied = quantization is not None and "lm_head.weight" in tensors and "lm_head.weight" not in parameters
    if tied:
        # A tied table is gathered from as it is stored, and multiplied with quantised.
        model.lm_head.weight = nn.Parameter(torch.empty(0))
        parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        stored = tensors[name]
        raw = np.memmap(stored.file, STORED_DTYPES[stored.dtype], "r", stored.offset, stored.shape)
        values = np.asarray(raw, np.float32).copy()
        bits = None if quantization is None else quantized_bits(kind, name, quantization)
        if quantization is not None and bits is not None:
            values = dequantize(*quantize_rows(values, bits, quantization.group_size, name), bits, values.shape[1])
        parameter.data = torch.from_numpy(values)
    model.eval()
