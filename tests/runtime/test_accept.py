"""The acceptance step against a loop in plain Python: every count, ties, one row as in plain decoding."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engines import open_parts

from dspark.export.accept import Accept as TorchAccept
from dspark.runtime.sampling import Accept
from dspark.runtime.state import Rows, View


def expected(logits: np.ndarray, tokens: np.ndarray, count: int) -> tuple[int, int]:
    """Return accepted count and next token of one request."""
    choices = [int(np.flatnonzero(row == row.max())[0]) for row in logits]
    accepted = 0
    while accepted < count and tokens[accepted + 1] == choices[accepted]:
        accepted += 1
    return accepted, choices[accepted]


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_every_count(small_bundle: Path, rows: int) -> None:
    """Proposals agree on a prefix of every length, also behind the count that is judged; equal logits choose the lowest index."""
    parts, rng = open_parts(small_bundle), np.random.default_rng(rows)
    accept, batch = Accept(parts.engine), 4
    logits, tokens = parts.engine.allocate((batch, rows, 320), "float32"), parts.engine.allocate((batch, 8), "int64")
    for agree in range(8):
        for _ in range(4):
            values = rng.integers(0, 4, (batch, rows, 320)).astype(np.float32)
            drafted = rng.integers(0, 320, (batch, 8))
            choices = values.argmax(-1)
            drafted[:, 1 : 1 + min(agree, rows)] = choices[:, : min(agree, 7)]
            counts = rng.integers(0, rows, batch)
            logits.write(values)
            tokens.write(drafted)
            ours = accept(Rows(View(0, batch, (0, 1, 2, 3)), logits), counts, tokens)
            in_torch = TorchAccept()(*(torch.from_numpy(v) for v in (values, drafted, counts)))
            reference = np.array([expected(*row) for row in zip(values, drafted, counts, strict=True)])
            np.testing.assert_array_equal(np.stack(ours, -1), reference)
            np.testing.assert_array_equal(torch.stack(in_torch, -1).numpy(), reference)
