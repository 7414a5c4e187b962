"""The oracle itself equals the values of the published reference classes."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from conftest import GOLDEN
from safetensors.numpy import load_file

FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/golden.safetensors"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_equals_golden(folder: str) -> None:
    golden = load_file(GOLDEN / folder / "golden.safetensors")
    target, drafter = oracle.Target(GOLDEN / folder / "target"), oracle.Drafter(GOLDEN / folder / "drafter")
    tokens = golden["target.input_ids"].tolist()
    np.testing.assert_allclose(target.forward(tokens)[0], golden["target.logits"], atol=1e-4)
    np.testing.assert_allclose(target.taps(tokens, drafter.config["target_layer_ids"]), golden["target.taps"], atol=1e-4)
    taps = np.zeros((0, golden["draft.0.taps"].shape[-1]))
    for r in range(6):
        taps = np.concatenate([taps, golden[f"draft.{r}.taps"]])
        total = int(golden[f"draft.{r}.start"].item())
        assert total == len(taps)
        drafted = drafter.draft(taps, np.arange(total), int(golden[f"draft.{r}.anchor"].item()), total)
        np.testing.assert_array_equal(drafted["tokens"], golden[f"draft.{r}.tokens"])
        for name in {"logits", "hidden", "confidence_logits"} & {key.split(".")[-1] for key in golden if key.startswith("draft")}:
            np.testing.assert_allclose(drafted[name], golden[f"draft.{r}.{name}"], atol=1e-4)
    for layer, (keys, values) in enumerate(drafter.context(taps, np.arange(len(taps)))):
        np.testing.assert_allclose(keys, golden[f"context.{layer}.k"], atol=1e-4)
        np.testing.assert_allclose(values, golden[f"context.{layer}.v"], atol=1e-4)
