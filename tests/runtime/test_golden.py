"""The bundle's graphs and loop equal the values of the published reference classes: hidden, logits, confidence, state, tokens, rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, Export
from engines import open_parts
from safetensors.numpy import load_file

from dspark.runtime import LLM, SamplingParams

FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/golden.safetensors"))


@pytest.fixture(scope="module", params=FOLDERS)
def golden(request: pytest.FixtureRequest, export: Export) -> tuple[dict[str, Any], Path]:
    folder = GOLDEN / request.param
    return load_file(folder / "golden.safetensors"), export(folder, ctx_window="full", debug_outputs=True)


def test_which_folders_have_confidence() -> None:
    without = [f for f in FOLDERS if "draft.0.confidence_logits" not in load_file(GOLDEN / f / "golden.safetensors")]
    assert without == ["dflash"]
    assert len(FOLDERS) == 6


def test_draft_rounds(golden: tuple[dict[str, Any], Path]) -> None:
    """Six rounds over one growing context: round 0 seeded as a prefill, later rounds with their new rows in the draft call."""
    values, bundle = golden
    parts = open_parts(bundle)
    slot = parts.slots.admit("r")
    for r in range(6):
        taps, total = values[f"draft.{r}.taps"], int(values[f"draft.{r}.start"].item())
        anchor = int(values[f"draft.{r}.anchor"].item())
        if len(taps) > parts.engine.manifest.num_speculative_tokens + 1 or r == 0:
            parts.drafter.write_context("r", taps, np.arange(total - len(taps), total))
            proposals = parts.drafter.propose(["r"], [anchor], positions=[total])
        else:
            proposals = parts.drafter.propose(["r"], [anchor], taps[None], [len(taps)], [total])
        np.testing.assert_array_equal(proposals.tokens()[0], values[f"draft.{r}.tokens"])
        np.testing.assert_allclose(proposals.debug["block_hidden"].read()[0], values[f"draft.{r}.hidden"], atol=1e-4)
        np.testing.assert_allclose(proposals.debug["draft_logits"].read()[0], values[f"draft.{r}.logits"], atol=1e-4)
        assert (proposals.confidence_logits is None) == (f"draft.{r}.confidence_logits" not in values)
        if proposals.confidence_logits is not None:
            np.testing.assert_allclose(proposals.confidence_logits.read()[0], values[f"draft.{r}.confidence_logits"], atol=1e-4)
    rings = [tensor.read()[0] for tensor in parts.drafter.rings.tensors(parts.slots.view(["r"])).values()]
    for layer in range(len(rings) // 2):
        for part, ring in (("k", rings[2 * layer]), ("v", rings[2 * layer + 1])):
            rows = values[f"context.{layer}.{part}"]
            np.testing.assert_allclose(ring[:, : len(rows)].swapaxes(0, 1), rows, atol=1e-4)
    assert slot == 0


@pytest.mark.parametrize("chunk", [1, 5, 23])
def test_target(golden: tuple[dict[str, Any], Path], chunk: int) -> None:
    """Logits and taps of the target, fed whole, in chunks and token by token."""
    values, bundle = golden
    parts = open_parts(bundle, slots=2)
    parts.slots.admit("other")
    parts.slots.admit("r")
    tokens = values["target.input_ids"].tolist()
    for begin in range(0, len(tokens), chunk):
        end = min(begin + chunk, len(tokens))
        verified = parts.target.prefill("r", tokens[begin:end])
        np.testing.assert_allclose(verified.taps.tensor.read()[0], values["target.taps"][begin:end], atol=1e-4)
        np.testing.assert_allclose(verified.logits.tensor.read()[0, 0], values["target.logits"][end - 1], atol=1e-4)


@pytest.mark.parametrize("speculative", [True, False])
def test_loops(golden: tuple[dict[str, Any], Path], speculative: bool) -> None:
    """The five loops, with and without a stop id; the reference's list of a cut-off last block is cut to the tokens of the output."""
    values, bundle = golden
    llm = LLM(bundle)
    for j in range(5):
        prompt, greedy = values[f"loop.{j}.prompt"].tolist(), values[f"loop.{j}.greedy"].tolist()
        for stops, ids, lengths in (
            ([], "output_ids", "acceptance_lengths"),
            (values[f"loop.{j}.stop_id"].tolist(), "stopped_output_ids", "stopped_acceptance_lengths"),
        ):
            params = SamplingParams(max_tokens=48, ignore_eos=True, stop_token_ids=stops)
            (output,) = llm.generate([prompt], params, speculative=speculative)
            expected = values[f"loop.{j}.{ids}"].tolist()
            assert prompt + output.token_ids == expected
            assert greedy[: len(expected)] == expected
            assert output.finish_reason == ("stop" if expected[-1] in stops else "length")
            if speculative:
                assert output.stats.accepted_per_round == _cut(values[f"loop.{j}.{lengths}"].tolist(), len(output.token_ids) - 1)


def _cut(lengths: list[int], total: int) -> list[int]:
    """Cut a list of round lengths to a sum."""
    kept: list[int] = []
    for length in lengths:
        if sum(kept) < total:
            kept.append(min(length, total - sum(kept)))
    return kept
