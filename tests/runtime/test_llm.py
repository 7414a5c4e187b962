"""The Python API: kinds of prompts, parameters, results, streams, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from conftest import GOLDEN, Export

from dspark.runtime import LLM, SamplingParams
from dspark.runtime.errors import BundleError, EngineError, LimitError, RequestError
from dspark.runtime.stats import Stats
from dspark.runtime.stop import StopRule
from dspark.runtime.tokenizer import TextStream, end_tokens, load_tokenizer

CHAT = [{"role": "user", "content": "Sara is 29 years old. Josh is 11 years younger than Sara. What is the sum of their ages?"}]


@pytest.fixture(scope="module")
def llm(pair_bundle: Path) -> LLM:
    return LLM(pair_bundle)


def test_kinds_of_prompts(llm: LLM) -> None:
    """One prompt or several: text, token ids, chat messages; one output each, in order."""
    params = SamplingParams(max_tokens=5)
    ids = llm.encode("def add(a, b):")
    texts = [output.token_ids for output in llm.generate("def add(a, b):", params)]
    assert texts == [o.token_ids for o in llm.generate(ids, params)] == [o.token_ids for o in llm.generate([ids], params)]
    mixed = llm.generate(["def add(a, b):", ids, CHAT], params)
    assert [o.token_ids for o in mixed[:2]] == texts * 2
    assert mixed[2].token_ids == llm.generate(CHAT, params)[0].token_ids
    assert mixed[2].prompt_token_ids == llm.encode(CHAT)
    arrays = llm.generate([np.array(ids), np.array(ids)], params)
    assert [o.token_ids for o in arrays] == texts * 2
    assert [o.token_ids for o in llm.generate(np.array(ids), params)] == texts
    assert llm.generate([], params) == []


def test_results(llm: LLM) -> None:
    (output,) = llm.generate([CHAT], SamplingParams(max_tokens=100, temperature=0))
    assert output.finish_reason == "stop"
    assert output.token_ids[-1] in llm.end_token_ids
    assert "<|im_end|>" not in (output.text or "")
    assert output.text == llm.tokenizer.decode(output.token_ids)
    stats = output.stats
    assert sum(stats.accepted_per_round) == len(output.token_ids) - 1 == stats.tokens - 1
    assert stats.rounds == len(stats.accepted_per_round)
    assert all(a <= n <= 7 for a, n in zip(stats.accepted, stats.proposed, strict=True))
    assert set(stats.seconds) == set(stats.engine) == {"prefill", "choose", "draft", "verify", "accept"}
    assert 0 < stats.host_share < 1
    assert stats.tokens_per_second > 0


def test_acceptance_per_position() -> None:
    stats = Stats(accepted_per_round=[3, 1, 8], accepted=[2, 0, 7], proposed=[7, 1, 7])
    assert stats.mean_accepted_length == 4
    assert stats.acceptance_per_position(7) == [2 / 3, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5]
    assert Stats().mean_accepted_length == 0
    assert Stats().acceptance_per_position(2) == [0, 0]


def test_ignore_eos_and_stop_token_ids(llm: LLM) -> None:
    (short,) = llm.generate([CHAT], SamplingParams(max_tokens=100))
    (longer,) = llm.generate([CHAT], SamplingParams(max_tokens=100, ignore_eos=True))
    assert longer.token_ids[: len(short.token_ids)] == short.token_ids
    assert (len(longer.token_ids), longer.finish_reason) == (100, "length")
    stop = short.token_ids[4]
    (stopped,) = llm.generate([CHAT], SamplingParams(max_tokens=100, stop_token_ids=[stop]))
    assert stopped.token_ids == short.token_ids[: short.token_ids.index(stop) + 1]


@pytest.mark.parametrize(
    ("emitted", "tokens", "limit", "kept", "reason"),
    [
        (0, [10, 11, 99, 20, 21, 22], 5, [10, 11, 99], "stop"),
        (0, [10, 11, 12, 13, 14, 99], 5, [10, 11, 12, 13, 14], "length"),
        (0, [10, 11, 12, 13, 99], 5, [10, 11, 12, 13, 99], "stop"),
        (4, [10], 5, [10], "length"),
        (3, [10], 5, [10], None),
    ],
)
def test_the_first_reason_counts(emitted: int, tokens: list[int], limit: int, kept: list[int], reason: str | None) -> None:
    """Stop token and limit in one accepted run."""
    assert StopRule(frozenset([99]), limit).cut(emitted, tokens) == (kept, reason)


def test_stream_gives_the_text_piece_by_piece(llm: LLM) -> None:
    pieces = list(llm.stream(CHAT, SamplingParams(max_tokens=100)))
    output = pieces[-1].output
    assert output is not None
    assert "".join(piece.text for piece in pieces) == output.text
    assert [token for piece in pieces for token in piece.token_ids] == output.token_ids
    assert len(pieces) == output.stats.rounds + 2


def test_streams_share_the_engine(pair_bundle: Path) -> None:
    """One place, three users: a stream that is half read, a call that waits for it, one that is closed, one that is forgotten."""
    llm, params = LLM(pair_bundle, max_num_seqs=1), SamplingParams(max_tokens=100)
    (alone,) = llm.generate([CHAT], params)
    first, second = llm.stream(CHAT, params), llm.stream(CHAT, params)
    pieces = [next(first)]
    assert second.result().token_ids == alone.token_ids, "it waited, and moved the first to its end"
    pieces += first
    assert [t for piece in pieces for t in piece.token_ids] == alone.token_ids
    assert pieces[-1].output is not None
    closed, forgotten = llm.stream(CHAT, params), llm.stream(CHAT, params)
    next(closed)
    closed.close()
    assert list(closed) == []
    with pytest.raises(RequestError, match="closed before its end"):
        closed.result()
    del forgotten
    assert llm.generate([CHAT], params)[0].token_ids == alone.token_ids


@pytest.mark.parametrize("text", ["naïve café – 你好 🙂", "plain", "🙂" * 5, "a\n\n  b\tc"])
def test_characters_split_across_tokens_appear_whole(pair_bundle: Path, text: str) -> None:
    tokenizer = load_tokenizer(pair_bundle)
    assert tokenizer is not None
    stream = TextStream(tokenizer)
    pieces = [stream.push([token]) for token in tokenizer.encode(text)]
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == text


def test_thinking_is_off_unless_asked_for(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    off = llm.encode(CHAT)
    assert llm.encode(CHAT, {"enable_thinking": False}) == off
    assert not caplog.records
    on = llm.encode(CHAT, {"enable_thinking": True})
    assert on != off
    assert "trained without thinking" in caplog.text


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ("", "the prompt is empty"),
        ([2048], r"token ids \[2048\] are outside the vocabulary's 0..2047"),
        ([-1, 5], r"token ids \[-1\] are outside"),
        ([1] * 1024, "the prompt has 1024 tokens, max_seq_len is 1024"),
        ([1, "a"], "expected text, token ids, or chat messages"),
        ([1.5], "expected text, token ids, or chat messages"),
        (5, "expected text, token ids, or chat messages"),
        ([{"role": "user", "content": None}], "chat template refuses"),
    ],
)
def test_refused_prompts(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([[1, 2], prompt], SamplingParams(max_tokens=2))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"temperature": -0.1}, "temperature is -0.1, expected a number of at least 0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_p": 0}, "top_p is 0, expected a number above 0, at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"stop": ""}, "stop is '', expected None, a string or strings, none empty"),
        ({"stop": ["a", 5]}, "stop is"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, expected at most max_tokens, which is 4"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0, expected a number of 0.01 to 100"),
        ({"frequency_penalty": 3}, "frequency_penalty is 3, expected a number of -2 to 2"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"logit_bias": {5: 1e39}}, "logit_bias"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no', expected True or False"),
        ({"presence_penalty": "a"}, "presence_penalty is 'a'"),
        ({"logit_bias": {-1: 2.0}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids is \\[\\], expected None or at least one token id"),
        ({"logprobs": 21}, "logprobs is 21, expected None or an integer of 0 to 20"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5"),
        ({"max_tokens": -1, "temperature": -1}, r"(?s)max_tokens.*temperature"),
    ],
)
def test_refused_parameters(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**fields)


def test_a_bundle_without_tokenizer(export: Export) -> None:
    llm = LLM(export(GOLDEN / "vanilla", ctx_window="full", debug_outputs=True))
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    assert output.text is None
    assert llm.end_token_ids == {2}
    with pytest.raises(RequestError, match="no tokenizer: pass the prompt as token ids"):
        llm.generate("text")


def test_a_shorter_limit_than_exported(pair_bundle: Path) -> None:
    llm = LLM(pair_bundle, max_seq_len=40)
    (output,) = llm.generate([[5] * 30], SamplingParams(max_tokens=100, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (10, "length")
    for limit in (1, 1025):
        with pytest.raises(LimitError, match=rf"max_seq_len is {limit}, the bundle allows 2\.\.1024"):
            LLM(pair_bundle, max_seq_len=limit)


def test_threads(pair_bundle: Path) -> None:
    """Engines of one process may differ, and other ONNX Runtime sessions are left alone."""
    with pytest.raises(EngineError, match="threads is 0"):
        LLM(pair_bundle, threads=0)
    outputs = [LLM(pair_bundle, threads=n).generate([[5, 6]], SamplingParams(max_tokens=9))[0].token_ids for n in (1, 2)]
    assert outputs[0] == outputs[1]
    onnxruntime.InferenceSession(pair_bundle / "accept.onnx", providers=["CPUExecutionProvider"])


def test_a_template_that_reaches_out_is_stopped(pair_bundle: Path, tmp_path: Path) -> None:
    """The chat template comes with a checkpoint: it runs in a sandbox."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((pair_bundle / name).read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    for template in ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "{{ raise_exception('only users') }}", "{% oops %}"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer is not None
        with pytest.raises(RequestError, match="chat template refuses"):
            tokenizer.apply_chat_template(CHAT)
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}!"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi!"
    (tmp_path / "generation_config.json").write_text("{broken")
    with pytest.raises(BundleError, match=r"generation_config\.json is not JSON"):
        end_tokens(tmp_path, tokenizer)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(tmp_path)


def test_none_means_what_it_means_elsewhere(llm: LLM) -> None:
    """None for parameters that have no value, as front ends pass them; a top_k beyond any vocabulary; token ids as arrays."""
    params = SamplingParams(max_tokens=None, stop=None, stop_token_ids=None, logit_bias=None, allowed_token_ids=None)
    (output,) = llm.generate([CHAT], params)
    assert output.finish_reason == "stop"
    (longest,) = llm.generate([[5] * 1000], SamplingParams(max_tokens=None, ignore_eos=True))
    assert (len(longest.token_ids), longest.finish_reason) == (24, "length")
    odd = SamplingParams(max_tokens=3, temperature=1.0, top_k=2**70, allowed_token_ids=np.arange(50), stop_token_ids=np.array([3]))
    assert set(llm.generate([CHAT], odd)[0].token_ids) <= set(range(50))


def test_a_stop_token_is_not_text(llm: LLM) -> None:
    """Unless asked for; in a stream too."""
    (full,) = llm.generate([CHAT], SamplingParams(max_tokens=12))
    assert llm.tokenizer is not None
    stop = full.token_ids[8]
    first = full.token_ids.index(stop)
    for include in (False, True):
        params = SamplingParams(max_tokens=12, stop_token_ids=[stop], include_stop_str_in_output=include)
        pieces = list(llm.stream(CHAT, params))
        output = pieces[-1].output
        assert output is not None
        assert (output.token_ids, output.stop_reason) == (full.token_ids[: first + 1], stop)
        assert output.text == llm.tokenizer.decode(full.token_ids[: first + include]) == "".join(piece.text for piece in pieces)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None,), "prompts None"),
        ((5,), "prompts 5"),
        ((b"abc",), "expected text, token ids, or chat messages"),
        (("a \ud800",), "the prompt is no valid text"),
        ((CHAT, {"max_tokens": 5}), "expected SamplingParams"),
        (([CHAT], [None]), "sampling parameters None: expected SamplingParams"),
        (([CHAT], [SamplingParams()] * 2), "2 sampling parameters for 1 prompts"),
        ((CHAT, SamplingParams(allowed_token_ids=[2037], min_tokens=2)), "are all stop tokens, which min_tokens forbids"),
    ],
)
def test_calls_that_make_no_sense(llm: LLM, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate(*arguments)
    assert llm._decoder._slots.free == 8


def test_more_calls_that_make_no_sense(llm: LLM) -> None:
    with pytest.raises(RequestError, match="expected text, token ids, or chat messages"):
        llm.stream(5)
    with pytest.raises(RequestError, match=r"chat_template_kwargs \['messages'\] are set by dspark"):
        llm.generate([CHAT], chat_template_kwargs={"messages": []})
