"""What `dspark-verify` says of quantised bundles: engines against dequantised torch, tokens against themselves, the float target."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from altered import AlteredEngine, Values
from conftest import SMALL
from engines import open_parts
from random_pair import write_pair

from dspark.export import candidates, verify_cli
from dspark.export.difference import compare_with_float
from dspark.runtime.backend import open_engine
from dspark.runtime.bundle import Bundle, load_bundle
from dspark.runtime.engine import Engine
from dspark.runtime.errors import CheckpointError

PROMPTS = [list(range(40, 71)), [5, 6, 7]]
QUANTIZED = pytest.mark.parametrize("each_bundle", ["int8", "int4"], indirect=True)


def logits_by_prefixes(bundle: Path, prompt: list[int]) -> np.ndarray:
    """Logits behind every token but the last, each from a prefill of its own."""
    rows = []
    for end in range(1, len(prompt)):
        parts = open_parts(bundle, slots=1)
        parts.slots.admit("r")
        rows.append(parts.target.prefill("r", prompt[:end]).logits.tensor.read()[0, 0].copy())
    return np.array(rows)


@QUANTIZED
def test_the_difference_to_the_float_target(each_bundle: Path, small_bundle: Path, small_pair: Path) -> None:
    """Against logits of ONNX Runtime on the float bundle, and numbers worked out anew."""
    bundle = load_bundle(each_bundle)
    found = compare_with_float(bundle, open_engine(bundle, threads=1), small_pair / "target", small_pair / "drafter", PROMPTS)
    ours, theirs = (np.concatenate([logits_by_prefixes(b, p) for p in PROMPTS]) for b in (each_bundle, small_bundle))
    follows = [token for prompt in PROMPTS for token in prompt[1:]]
    assert found.positions == len(follows) == 32
    # Rows of quantised products are the same bits in any call on some CPUs only; the float ones differ by their own rounding.
    assert found.mean_logit == pytest.approx(np.abs(ours - theirs).mean(), rel=1e-3)
    assert found.max_logit == pytest.approx(np.abs(ours - theirs).max(), rel=1e-3)
    assert found.same_tokens == pytest.approx((ours.argmax(1) == theirs.argmax(1)).mean())
    for logits, perplexity in ((ours, found.perplexity), (theirs, found.float_perplexity)):
        probabilities = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum(1, keepdims=True)
        likelihood = np.prod(probabilities[np.arange(32), follows] ** (1 / 32))
        assert perplexity == pytest.approx(1 / likelihood, rel=1e-4)
    assert found.mean_logit > 1e-4, "quantised weights are not the float ones"


def test_other_checkpoints_are_refused(small_pair: Path, tmp_path: Path, small_bundle: Path) -> None:
    bundle = load_bundle(small_bundle)
    write_pair(tmp_path, SMALL, dtype="bf16", deviation=0.1)
    with pytest.raises(CheckpointError, match=r"is not the target that .* was exported from: pass the one that it was"):
        compare_with_float(bundle, open_engine(bundle), tmp_path / "target", small_pair / "drafter", PROMPTS)


@pytest.mark.parametrize("each_bundle", ["int4"], indirect=True)
def test_the_command(each_bundle: Path, small_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tensors agree with torch on dequantised weights, tokens with the engine's own plain decoding, and the difference is printed."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"ids": prompt}) + "\n" for prompt in PROMPTS))
    arguments = [str(each_bundle), "--tokens", "24", "--prompt-file", str(prompts)]
    assert verify_cli.main([*arguments, "--checkpoints", str(small_pair / "target"), str(small_pair / "drafter")]) == 0
    printed = capsys.readouterr().out
    assert "96 greedy tokens, speculative against plain: 0 mismatches, 0 near ties" in printed
    assert "quantised against float32 target, 32 positions" in printed and "perplexity " in printed
    for line, message in (
        ('{"ids": []}', "prompt 1: expected text, or token ids below 320"),
        ('{"ids": 5}', "line 1: expected a JSON object"),
    ):
        prompts.write_text(line + "\n")
        assert verify_cli.main(arguments) == 2
        assert message in capsys.readouterr().err
    prompts.write_text('{"text": "a"}\n')
    assert verify_cli.main(arguments) == 2
    assert "prompt 1 is text, and this bundle has no tokenizer" in capsys.readouterr().err


def test_checkpoints_are_for_quantised_bundles(small_bundle: Path, small_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify_cli.main([str(small_bundle), "--checkpoints", str(small_pair / "target"), str(small_pair / "drafter")]) == 2
    assert "is not quantised, so nothing differs from the float target: leave out --checkpoints" in capsys.readouterr().err


@pytest.mark.parametrize("each_bundle", ["int8"], indirect=True)
def test_a_wrong_quantised_weight_is_found(each_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allowed for rounded inputs does not hide a fifth of a layer's output."""

    def change(_before: Values, after: Values) -> None:
        after["taps"][..., :8] *= 1.5

    def opened(bundle: Bundle, backend: str) -> Engine:
        return AlteredEngine(open_engine(bundle, backend), "target", change)

    monkeypatch.setattr(candidates, "open_engine", opened)
    assert verify_cli.main([str(each_bundle), "--tokens", "4"]) == 1
    assert "FAIL target" in capsys.readouterr().out
