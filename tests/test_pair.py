"""The example pair on real text: all 120 prompts reproduce the recorded greedy tokens and the recorded rounds."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from conftest import PAIR, Export

from dspark.runtime import LLM, SamplingParams

KINDS = ("math", "func", "json", "code", "prose")


@pytest.fixture(scope="module")
def llm(pair_bundle: Path) -> LLM:
    llm = LLM(pair_bundle)
    assert llm.manifest.window > llm.manifest.limits.max_seq_len, "the records were made with the full context"
    return llm


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_outputs(llm: LLM, kind: str) -> None:
    """Tokens exactly, speculative and plain; rounds exactly (of outputs cut at 160 tokens all but the last)."""
    lines = (PAIR / "prompts" / f"{kind}.jsonl").read_text().splitlines()
    assert len(lines) == 24
    for line in lines:
        record = json.loads(line)
        outputs = {way: llm.generate([record["ids"]], SamplingParams(max_tokens=160), speculative=way)[0] for way in (True, False)}
        assert outputs[True].token_ids == outputs[False].token_ids == record["greedy_ids"]
        ours, recorded = outputs[True].stats.accepted_per_round, record["accepted_per_round"]
        if outputs[True].finish_reason == "length":
            ours, recorded = ours[:-1], recorded[: len(ours) - 1]
        assert ours == recorded


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"weights": "int8"}, {"weights": "int4"}, {"weights": "int4", "markov_topk": 64}], ids=str)
def test_quantized_pairs_are_lossless(export: Export, options: dict[str, Any]) -> None:
    """All 120 prompts give, speculatively, what the same quantised target gives plainly; the drafter keeps its skill."""
    llm, emitted = LLM(export(PAIR, **options)), []
    for kind in KINDS:
        for line in (PAIR / "prompts" / f"{kind}.jsonl").read_text().splitlines():
            ids = json.loads(line)["ids"]
            outputs = {way: llm.generate([ids], SamplingParams(max_tokens=160), speculative=way)[0] for way in (True, False)}
            assert outputs[True].token_ids == outputs[False].token_ids
            emitted += outputs[True].stats.accepted_per_round if kind == "func" else []
    assert sum(emitted) / len(emitted) > 7


def test_chat_messages_and_text_give_the_recorded_ids(llm: LLM) -> None:
    """The chat template and the tokenizer give the ids that the records were made with."""
    for kind in KINDS:
        for line in (PAIR / "prompts" / f"{kind}.jsonl").read_text().splitlines():
            record = json.loads(line)
            assert llm.encode(record.get("messages") or record["text"]) == record["ids"]


def test_acceptance_is_that_of_the_trained_drafter(llm: LLM) -> None:
    """A drafter that loses its skill stays lossless: the mean accepted length says that it has not."""
    lines = (PAIR / "prompts" / "func.jsonl").read_text().splitlines()
    outputs = llm.generate([json.loads(line)["ids"] for line in lines], SamplingParams(max_tokens=160))
    emitted = [n for output in outputs for n in output.stats.accepted_per_round]
    assert sum(emitted) / len(emitted) > 7


def test_example_script_runs(pair_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(PAIR.parent / "generate.py")
    monkeypatch.setattr("sys.argv", [script, str(pair_bundle)])
    runpy.run_path(script, run_name="__main__")
    assert "finish: stop" in capsys.readouterr().out
