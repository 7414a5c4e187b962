"""Test helpers: a bundle's engine with target and drafter on a number of slots, and a drafter that is right for a scripted prefix."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspark.runtime.bundle import load_bundle
from dspark.runtime.decode import Decoder
from dspark.runtime.drafter import Drafter, Proposals
from dspark.runtime.engine import Array
from dspark.runtime.onnxruntime import OnnxRuntimeEngine
from dspark.runtime.request import Request
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.state import Slots
from dspark.runtime.stop import StopRule
from dspark.runtime.target import Qwen3Target

WARNINGS = 2


@dataclass
class Parts:
    """The parts of a decoder, open to a test."""

    engine: OnnxRuntimeEngine
    slots: Slots
    target: Qwen3Target
    drafter: Drafter

    def decoder(self, drafter: Any = None, **limits: int) -> Decoder:
        """Return a decoder over these parts."""
        manifest = self.engine.manifest
        options = {
            "num_speculative_tokens": manifest.num_speculative_tokens,
            "max_seq_len": manifest.limits.max_seq_len,
            **limits,
        }
        return Decoder(self.engine, self.slots, self.target, drafter or self.drafter, **options)


def open_parts(bundle: Path, slots: int = 4) -> Parts:
    """Load a bundle; ONNX Runtime prints warnings, so that a test can see that it gives none."""
    engine = OnnxRuntimeEngine(load_bundle(bundle), log_severity=WARNINGS)
    table = Slots(slots)
    return Parts(engine, table, Qwen3Target(engine, table), Drafter(engine, table))


def request(prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int] = (), name: Hashable = "r", **options: Any) -> Request:
    """Return a request; `seed` and `speculative` are its own, other options are sampling parameters."""
    own = {key: options.pop(key) for key in ("seed", "speculative") if key in options}
    params = SamplingParams(max_tokens=max_tokens, **options)
    return Request(name, list(prompt), StopRule(frozenset(stop_ids), max_tokens), params, **own)


def start(decoder: Decoder, *requests: Request) -> None:
    """Give requests slots and feed their prompts."""
    for one in requests:
        decoder.admit(one)
        decoder.prefill(one)


def fed_whole(bundle: Path, tokens: Sequence[int]) -> Parts:
    """Return fresh parts with one request, `r`, that was fed all `tokens`."""
    parts = open_parts(bundle, slots=1)
    parts.slots.admit("r")
    for begin in range(0, len(tokens), 64):
        chunk = tokens[begin : begin + 64]
        taps = parts.target.prefill("r", chunk).taps.tensor.read()[0]
        parts.drafter.write_context("r", taps, np.arange(begin, begin + len(chunk)))
    return parts


def decode(decoder: Decoder, *requests: Request) -> Iterator[list[int]]:
    """Decode requests together to their ends; yield what a step emitted."""
    for one in requests:
        decoder.add(one)
    while any(one.finish_reason is None for one in requests):
        for _, tokens in decoder.step():
            yield tokens
        for one in requests:
            if one.error is not None:
                raise one.error


class ScriptedDrafter:
    """The bundle's drafter with its proposals replaced: right for the first r positions of a round, wrong behind them.

    `truth` gives the greedy output of each request, `right` the r of a request's round; the rings are written as ever.
    """

    def __init__(self, drafter: Drafter, truth: dict[Hashable, list[int]], right: Callable[[Hashable, int], int], vocabulary: int) -> None:
        self._drafter, self._truth, self._right, self._vocabulary = drafter, truth, right, vocabulary
        self._prompts: dict[Hashable, int] = {}
        self.rounds: dict[Hashable, int] = {}
        self.propose_hook: Callable[[Proposals], None] | None = None

    def write_context(self, request: Hashable, taps: Array, positions: Array) -> None:
        self._drafter.write_context(request, taps, positions)
        if request not in self.rounds:  # the prompt, chunk by chunk
            self._prompts[request] = int(positions[-1]) + 1

    def release(self, request: Hashable) -> None:
        self._drafter.release(request)

    def total(self, request: Hashable) -> int:
        return self._drafter.total(request)

    def skip_to(self, request: Hashable, position: int) -> None:
        self._drafter.skip_to(request, position)
        self._prompts[request] = position

    def propose(
        self, requests: Sequence[Hashable], anchors: Sequence[int], taps: Any = None, counts: Any = None, draws: Any = None
    ) -> Proposals:
        proposals = self._drafter.propose(requests, anchors, taps, counts, draws=draws)
        if self.propose_hook is not None:
            self.propose_hook(proposals)
        tokens = proposals.verify_tokens.read().copy()
        for name, row in zip(requests, proposals.view.rows, strict=True):
            if name not in self._prompts:  # a plain request
                continue
            emitted = self._drafter.total(name) - self._prompts[name] + 1
            number = self.rounds[name] = self.rounds.get(name, 0) + 1
            right = self._right(name, number - 1)
            for k in range(tokens.shape[1] - 1):
                ahead = self._truth[name][emitted + k : emitted + k + 1]
                token = ahead[0] if ahead else 0
                tokens[row, 1 + k] = token if k < right else (token + 1) % self._vocabulary
        proposals.verify_tokens.write(tokens)
        return proposals
