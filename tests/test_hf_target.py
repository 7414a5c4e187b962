"""The example with a Hugging Face model as target: tokens and rounds of the bundle's own target, and its logits and taps by request."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import json
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from conftest import PAIR
from engines import Parts, open_parts, request, start

from dspark.runtime import LLM, SamplingParams
from dspark.runtime.errors import ConfigError
from dspark.runtime.state import Rows, Slots
from dspark.runtime.target import Verified

transformers = pytest.importorskip("transformers", reason="the example needs transformers, of the dev extra")

SCRIPT = PAIR.parent / "hf_target.py"
TOLERANCE = 1e-4


def load_example() -> ModuleType:
    """Import the script by its path."""
    spec = importlib.util.spec_from_file_location("hf_target", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


EXAMPLE = load_example()


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    """The example pair's target. On one thread: with two on a busy machine its small kernels took four times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield transformers.AutoModelForCausalLM.from_pretrained(PAIR / "target", dtype="float32")
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    """A prompt of each kind with its greedy output."""
    return [
        json.loads((PAIR / "prompts" / f"{kind}.jsonl").read_text().splitlines()[0]) for kind in ("math", "func", "json", "code", "prose")
    ]


@pytest.fixture(scope="module")
def rounds(pair_bundle: Path, records: list[dict[str, Any]]) -> list[list[int]]:
    """The rounds of each prompt, decoded alone on the bundle's own target."""
    llm = LLM(pair_bundle)
    return [llm.generate([record["ids"]], SamplingParams(max_tokens=160))[0].stats.accepted_per_round for record in records]


class LastTaps(EXAMPLE.HuggingFaceTarget):
    """Returns the taps of a chunk's last three rows only, as if the others came from a prefix cache."""

    def prefill(self, request: Hashable, tokens: Sequence[int]) -> Verified:
        verified = super().prefill(request, tokens)
        values = verified.taps.tensor.read()[:, -3:]
        taps = self._engine.allocate(values.shape, "model")
        taps.write(values)
        return Verified(verified.logits, Rows(verified.taps.view, taps))


def open_llm(bundle: Path, model: Any, kind: Callable[..., Any] = EXAMPLE.HuggingFaceTarget, **options: Any) -> tuple[LLM, Any]:
    """Return an LLM on the example's target, and that target."""
    made: list[Any] = []

    def factory(engine: Any, slots: Slots) -> Any:
        made.append(kind(model, engine, slots))
        return made[0]

    return LLM(bundle, target=factory, **options), made[0]


def test_tokens_and_rounds(pair_bundle: Path, model: Any, records: list[dict[str, Any]], rounds: list[list[int]]) -> None:
    """Five prompts of all kinds in three slots, one after the other taking a place that is free again."""
    llm, target = open_llm(pair_bundle, model, max_num_seqs=3)
    outputs = llm.generate([record["ids"] for record in records], SamplingParams(max_tokens=160))
    assert [output.token_ids for output in outputs] == [record["greedy_ids"] for record in records]
    assert [output.stats.accepted_per_round for output in outputs] == rounds
    assert target._requests == {}
    (plain,) = llm.generate([records[2]["ids"]], SamplingParams(max_tokens=160), speculative=False)
    assert plain.token_ids == records[2]["greedy_ids"]


def test_logits_and_taps(pair_bundle: Path, model: Any) -> None:
    """Both targets on the same slots: prompts in chunks, ragged verifications of random tokens, partial commits, requests left out."""
    parts, rng = open_parts(pair_bundle, slots=4), np.random.default_rng(3)
    both = (parts.target, EXAMPLE.HuggingFaceTarget(model, parts.engine, parts.slots))

    def compare(ours: Verified, theirs: Verified, rows: dict[int, int], last: bool = False) -> None:
        for name in ("logits", "taps"):
            assert getattr(ours, name).view.rows == getattr(theirs, name).view.rows
            a, b = (getattr(verified, name).tensor.read() for verified in (ours, theirs))
            assert a.shape == b.shape
            for row, count in rows.items():
                np.testing.assert_allclose(b[row, :count], a[row, :count], atol=TOLERANCE, rtol=TOLERANCE)

    for name, chunks in {"a": (9,), "b": (30, 7), "c": (1,)}.items():
        parts.slots.admit(name)
        for n in chunks:
            tokens = rng.integers(0, 2048, n).tolist()
            compare(*(target.prefill(name, tokens) for target in both), {0: n})

    plan = [  # requests, width, counts, rows to commit (0: the verification is given up)
        ("abc", 8, (7, 2, 5), (3, 1, 6)),
        ("cab", 8, (7, 7, 7), (0, 0, 0)),
        ("cab", 8, (0, 7, 4), (1, 8, 2)),
        ("b", 5, (4,), (2,)),
        ("ac", 4, (3, 1), (1, 2)),
        ("abc", 1, (0, 0, 0), (1, 1, 1)),
        ("abc", 8, (7, 7, 7), (1, 1, 1)),
    ]
    for names, width, counts, committed in plan:
        view = parts.slots.view(names)
        tokens = parts.engine.allocate((view.size, width), "int64")
        tokens.write(rng.integers(0, 2048, (view.size, width)))
        rows = {row: count + 1 for row, count in zip(view.rows, counts, strict=True)}
        compare(*(target.verify(list(names), Rows(view, tokens), counts) for target in both), rows)
        for name, n in zip(names, committed, strict=True):
            for target in both if n else ():
                target.commit(name, n)


def test_embedding_and_last_layer(pair_bundle: Path, model: Any) -> None:
    """Taps -1 and L - 1, which Transformers' own hidden states give differently: equal to the oracle's, not normed."""
    engine, slots, ids = open_parts(pair_bundle).engine, Slots(1), (-1, 3, 7)
    drafter = dataclasses.replace(engine.manifest.drafter, target_layer_ids=ids)
    other = SimpleNamespace(manifest=dataclasses.replace(engine.manifest, drafter=drafter), allocate=engine.allocate)
    target, tokens = EXAMPLE.HuggingFaceTarget(model, other, slots), [5, 900, 77, 1301, 8]
    slots.admit("r")
    taps = target.prefill("r", tokens).taps.tensor.read()[0]
    np.testing.assert_allclose(taps, oracle.Target(PAIR / "target").taps(tokens, list(ids)), atol=TOLERANCE, rtol=TOLERANCE)


def test_release_leaves_no_cache(pair_bundle: Path, model: Any, records: list[dict[str, Any]]) -> None:
    """A stream that is closed in its middle, one that waits for its prompt to be fed, and one that ends."""
    llm, target = open_llm(pair_bundle, model)
    ending, closed = (llm.stream(record["ids"], SamplingParams(max_tokens=12)) for record in records[:2])
    next(closed), next(closed)
    caches = [weakref.ref(fed.cache) for fed in target._requests.values()]
    assert len(caches) == 2
    closed.close()
    ending.result()
    gc.collect()
    assert target._requests == {}
    assert [cache() for cache in caches] == [None, None]
    target.release("never fed")


def test_taps_of_the_last_rows_only(pair_bundle: Path, model: Any, records: list[dict[str, Any]], rounds: list[list[int]]) -> None:
    """What a prefix cache leaves out costs acceptance, no token."""
    llm, _ = open_llm(pair_bundle, model, LastTaps)
    outputs = llm.generate([record["ids"] for record in records[:3]], SamplingParams(max_tokens=160))
    assert [output.token_ids for output in outputs] == [record["greedy_ids"] for record in records[:3]]
    assert [output.stats.accepted_per_round for output in outputs] != rounds[:3]


def test_graphs_are_bound_once(pair_bundle: Path, model: Any, records: list[dict[str, Any]]) -> None:
    parts, made = open_parts(pair_bundle), []
    bind = parts.engine.bind
    parts.engine.bind = lambda graph, tensors: made.append(graph) or bind(graph, tensors)
    target = EXAMPLE.HuggingFaceTarget(model, parts.engine, parts.slots)
    decoder = Parts(parts.engine, parts.slots, target, parts.drafter).decoder()
    requests = [request(record["ids"], 160, name=i) for i, record in enumerate(records[3:])]
    start(decoder, *requests)
    for _ in range(2):
        decoder.round(requests)
    before = len(made)
    decoder.round(requests)
    decoder.round(requests[::-1])
    assert len(made) == before


def test_another_model_is_refused(pair_bundle: Path) -> None:
    config = transformers.Qwen3Config(
        vocab_size=100, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8
    )
    message = r"the model has 1 layers, hidden size 8, 100 vocabulary rows; the target of this bundle has 8 layers, hidden size 192, 2048"
    with pytest.raises(ConfigError, match=message):
        LLM(pair_bundle, target=partial(EXAMPLE.HuggingFaceTarget, transformers.Qwen3ForCausalLM(config)))


def test_command(pair_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompt = "Write this as a JSON object: Julia is a 25 year old pilot from Dublin."
    monkeypatch.setattr("sys.argv", ["hf_target.py", str(pair_bundle), str(PAIR / "target"), "--prompt", prompt, "--compare"])
    assert EXAMPLE.main() == 0
    assert "generate gives the same tokens" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["hf_target.py", str(pair_bundle), str(tmp_path), "--prompt", prompt])
    with pytest.raises(SystemExit):
        EXAMPLE.main()
    assert "has no config.json: expected the directory of a Hugging Face checkpoint" in capsys.readouterr().err
