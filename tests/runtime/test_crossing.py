"""What crosses between host and engine in a round: token ids, counts and parameters, never logits, distributions or taps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import open_parts, request, start

from dspark.runtime.onnxruntime import HostTensor
from dspark.runtime.processors import LogitsProcessor

K, V, TAPS = 7, 320, 3 * 64


class Meter:
    """Counts what is read from and written to tensors that the engine allocates, by shape."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.read: list[np.ndarray] = []
        self.written = 0
        read, write = HostTensor.read, HostTensor.write

        def counted_read(tensor: HostTensor) -> np.ndarray:
            self.read.append(read(tensor))
            return self.read[-1]

        def counted_write(tensor: HostTensor, values: Any) -> None:
            self.written += tensor.array.nbytes
            write(tensor, values)

        monkeypatch.setattr(HostTensor, "read", counted_read)
        monkeypatch.setattr(HostTensor, "write", counted_write)

    def take(self) -> tuple[int, int, set[tuple[int, ...]]]:
        """Return bytes read, bytes written, shapes read since the last call; a tensor counts once however often it is looked at."""
        arrays = {id(array): array for array in self.read}.values()
        result = sum(a.nbytes for a in arrays), self.written, {a.shape for a in arrays}
        self.read, self.written = [], 0
        return result


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}], ids=["greedy", "t", "cut"])
def test_bytes_of_a_round(small_bundle: Path, batch: int, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of the README's table."""
    parts = open_parts(small_bundle)
    decoder, requests = parts.decoder(), [request([3, 5, 7 + i], 200, name=i, **params) for i in range(batch)]
    start(decoder, *requests)
    for _ in range(2):
        decoder.round(requests)
    meter = Meter(monkeypatch)
    decoder.round(requests)
    read, written, shapes = meter.take()
    assert read == batch * (8 * (K + 1) + 16)
    assert shapes == {(batch, K + 1), (batch,)}
    numbers = 8 * 6  # start, total, first, anchor; the target's start; count
    if params:
        numbers += 2 * 4 + 4 * (2 * K + 1)  # the temperature twice; the uniforms
        numbers += 4 + 8 + 4 + 4 if "top_k" in params else 4 * (K + 1)  # the cut's parameters, or a threshold that cuts nothing
    assert written == batch * numbers


def test_what_asks_for_more(small_bundle: Path) -> None:
    """Log-probabilities cross as numbers by row; penalties take the logits through the host."""
    for params, extra in (({"logprobs": 2}, {(1, K + 1), (1, K + 1, 20)}), ({"presence_penalty": 0.1}, {(1, K + 1, V)})):
        parts = open_parts(small_bundle)
        decoder, one = parts.decoder(), request([3, 5, 7], 200, **params)
        if "presence_penalty" in params:
            one.processor = LogitsProcessor(one.params, one.prompt, [], V)
        start(decoder, one)
        decoder.round([one])
        with pytest.MonkeyPatch.context() as patch:
            meter = Meter(patch)
            decoder.round([one])
            _, _, shapes = meter.take()
        assert shapes == {(1, K + 1), (1,)} | extra


def test_prompts_and_narrow_rounds(small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taps of a prompt's chunk go from graph to graph, and so does the block of a round of fewer proposals."""
    parts = open_parts(small_bundle)
    decoder, one = parts.decoder(), request(list(range(30)), 200)
    decoder.admit(one)
    meter = Meter(monkeypatch)
    decoder.prefill(one)
    _, written, shapes = meter.take()
    assert shapes == {(1, K + 1), (1,)}
    assert written < 8 * 40 + parts.drafter.rings.bytes_at(1, parts.drafter.rings.capacity)  # the tokens, some numbers; a clean slot
    for _ in range(2):
        decoder.round([one], 4)
    meter.take()
    decoder.round([one], 4)
    read, written, shapes = meter.take()
    assert (read, written) == (8 * (K + 1) + 16, 8 * 6) and shapes == {(1, K + 1), (1,)}
