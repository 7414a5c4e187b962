"""When a request ends: tokens, strings, lengths, and which of them counts when several fall in one block."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN, PAIR, Export

from dspark.runtime import LLM, SamplingParams
from dspark.runtime.errors import RequestError
from dspark.runtime.request import Choice, Request
from dspark.runtime.stop import OutputText, StopRule
from dspark.runtime.tokenizer import load_tokenizer

STOP_ID = 99


class Letters:
    """A stream in which token n is the n-th letter of a text; -1 is text that only the next token completes."""

    def __init__(self, text: str) -> None:
        self._text, self._held = text, ""

    def push(self, tokens: Sequence[int]) -> str:
        self._held += "".join(self._text[t] for t in tokens)
        if self._held.endswith("~"):  # an incomplete character
            return ""
        held, self._held = self._held.replace("~", ""), ""
        return held

    def finish(self) -> str:
        return self._held


@pytest.mark.parametrize(
    ("emitted", "tokens", "most", "least", "kept", "reason"),
    [
        (0, [10, 11, STOP_ID, 20, 21, 22], 5, 0, [10, 11, STOP_ID], "stop"),  # case D3
        (0, [1, 2, 3, 4, 5, 6, STOP_ID], 5, 0, [1, 2, 3, 4, 5], "length"),
        (0, [1, 2, 3, 4, STOP_ID, 6], 5, 0, [1, 2, 3, 4, STOP_ID], "stop"),
        (3, [1, 2, STOP_ID], 5, 0, [1, 2], "length"),
        (3, [1], 5, 0, [1], None),
        (4, [STOP_ID], 5, 0, [STOP_ID], "stop"),
        (0, [STOP_ID, 2, STOP_ID, 4], 9, 2, [STOP_ID, 2, STOP_ID], "stop"),
        (2, [STOP_ID], 9, 2, [STOP_ID], "stop"),
        (0, [], 5, 0, [], None),
    ],
)
def test_the_first_reason_counts(emitted: int, tokens: list[int], most: int, least: int, kept: list[int], reason: str | None) -> None:
    assert StopRule(frozenset([STOP_ID]), most, least).cut(emitted, tokens) == (kept, reason)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 20])
@pytest.mark.parametrize(
    ("text", "strings", "shown", "count", "matched"),
    [
        ("one two three", ["two"], "one ", 7, "two"),
        ("one two three", ["e t"], "on", 5, "e t"),
        ("one two three", ["three", "two"], "one ", 7, "two"),
        ("one two three", ["zwo"], "one two three", None, None),
        ("aab", ["ab"], "a", 3, "ab"),
        ("ababac", ["abac"], "ab", 6, "abac"),
        ("abcd", ["bcd", "c"], "ab", 3, "c"),
        ("abcd", ["abcd", "d"], "", 4, "abcd"),
        ("x~y.z", ["xy"], "", 3, "xy"),
        ("aaaa", ["aaa"], "", 3, "aaa"),
    ],
)
def test_stop_strings(text: str, strings: list[str], shown: str, count: int | None, matched: str | None, size: int) -> None:
    """Whatever the size of the blocks: the string that is whole first, and no character that might belong to one shown before."""
    for include in (False, True):
        output, pieces, ended, pushed = OutputText(Letters(text), strings, include=include), [], None, 0
        while ended is None and pushed < len(text):
            block = list(range(pushed, min(pushed + size, len(text))))
            ended = output.push(block)
            pushed += len(block) if ended is None else ended
            pieces.append(output.take(final=False))
            assert matched is None or include or shown.startswith("".join(pieces))
        pieces.append(output.take(final=True))
        assert "".join(pieces) == output.text == shown + (matched if include and matched else "")
        assert output.matched == matched
        assert (None if ended is None else pushed) == count


def test_a_string_before_the_least_length_does_not_count() -> None:
    output = OutputText(Letters("stop stop"), ["stop"])
    assert output.push(list(range(4)), unarmed=6) is None
    assert output.push([4, 5, 6], unarmed=2) is None
    assert output.push([7, 8], unarmed=0) == 2
    assert output.text == "stop "
    straddling = OutputText(Letters("stop"), ["stop"])
    assert straddling.push([0, 1, 2, 3], unarmed=3) == 4, "it is whole behind the least length"
    within = OutputText(Letters("stopx"), ["stop"])
    assert within.push([0, 1, 2, 3, 4], unarmed=4) is None


@pytest.mark.parametrize(
    ("strings", "most", "kept", "reason"),
    [
        (["b"], 9, [0, 1], "stop"),  # before the stop token
        (["e"], 9, [0, 1, 2], "stop"),  # the stop token comes first
        (["c"], 9, [0, 1, 2], "stop"),  # both at one token
        (["c"], 2, [0, 1], "length"),
        (["b"], 2, [0, 1], "stop"),  # the last token allowed completes the string
    ],
)
def test_order_within_a_block(strings: list[str], most: int, kept: list[int], reason: str) -> None:
    one = Request("r", [1], StopRule(frozenset([2]), most), text=OutputText(Letters("abcdef"), strings))
    logprobs = [{token: -1.0} for token in range(6)]
    assert one.emit(Choice([0, 1, 2, 3, 4, 5], logprobs)) == one.output == kept
    assert (one.finish_reason, one.logprobs) == (reason, logprobs[: len(kept)])


@pytest.fixture(scope="module")
def llm(pair_bundle: Path) -> LLM:
    return LLM(pair_bundle)


def lines(kind: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (PAIR / "prompts" / f"{kind}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("number", range(2))
def test_stop_strings_of_the_pair(llm: LLM, number: int) -> None:
    """Real text, long blocks: text ends before the string, tokens with the one that completes it; a stream shows no part of it."""
    line = lines("func")[number]
    (full,) = llm.generate([line["ids"]], SamplingParams(max_tokens=160))
    assert full.text is not None
    for begin in range(3, len(full.text) - 8, 17):
        stop = full.text[begin : begin + 4]
        params = SamplingParams(max_tokens=160, stop=stop)
        stream = llm.stream(line["ids"], params)
        pieces = list(stream)
        output = pieces[-1].output
        assert output is not None
        assert output.text == full.text[: full.text.index(stop)] == "".join(piece.text for piece in pieces)
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert full.token_ids[: len(output.token_ids)] == output.token_ids == [t for piece in pieces for t in piece.token_ids]
        assert llm.tokenizer is not None
        assert stop not in llm.tokenizer.decode(output.token_ids[:-1]), "no token behind the one that completes it"
        assert stop in llm.tokenizer.decode(output.token_ids)
        assert sum(output.stats.accepted_per_round) == len(output.token_ids) - 1
        (plain,) = llm.generate([line["ids"]], params, speculative=False)
        assert (plain.token_ids, plain.text) == (output.token_ids, output.text)


def test_a_stop_string_across_bytes(pair_bundle: Path) -> None:
    """Characters of several bytes, each its own token: the string matches when its last byte has come."""
    tokenizer = load_tokenizer(pair_bundle)
    assert tokenizer is not None
    text = "a 🙂 b 你好 c"
    tokens = tokenizer.encode(text)
    for stop in ("🙂", "你好", "好 c", " b"):
        output = OutputText(tokenizer.stream(), [stop])
        ended = output.push(tokens)
        assert ended is not None
        assert output.text == text[: text.index(stop)]
        assert stop in tokenizer.decode(tokens[:ended])
        assert stop not in tokenizer.decode(tokens[: ended - 1])


def test_stop_reasons(llm: LLM) -> None:
    ids = lines("func")[0]["ids"]
    (full,) = llm.generate([ids], SamplingParams(max_tokens=160))
    assert (full.finish_reason, full.stop_reason) == ("stop", None), "the model's own end token"
    (output,) = llm.generate([ids], SamplingParams(max_tokens=160, stop_token_ids=[full.token_ids[9]]))
    first = full.token_ids.index(full.token_ids[9])
    assert (output.token_ids, output.stop_reason) == (full.token_ids[: first + 1], full.token_ids[9])
    (output,) = llm.generate([ids], SamplingParams(max_tokens=4))
    assert (output.finish_reason, output.stop_reason) == ("length", None)
    (included,) = llm.generate([ids], SamplingParams(max_tokens=160, stop=["return"], include_stop_str_in_output=True))
    assert included.text is not None
    assert included.text.endswith("return")


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("least", [1, 7, 40, 90])
def test_min_tokens(llm: LLM, least: int, speculative: bool) -> None:
    """No end token before; the longest plain output without one first differs from the free run where an end was due."""
    ids = lines("math")[0]["ids"]
    (free,) = llm.generate([ids], SamplingParams(max_tokens=120))
    (output,) = llm.generate([ids], SamplingParams(max_tokens=120, min_tokens=least), speculative=speculative)
    (plain,) = llm.generate([ids], SamplingParams(max_tokens=120, min_tokens=least), speculative=False)
    assert output.token_ids == plain.token_ids
    assert not set(output.token_ids[:least]) & set(llm.end_token_ids)
    shared = min(len(free.token_ids) - 1, len(output.token_ids))
    assert output.token_ids[:shared] == free.token_ids[:shared]
    assert len(output.token_ids) > least
    if least < len(free.token_ids):
        assert output.token_ids == free.token_ids


def test_stop_strings_need_a_tokenizer(export: Export) -> None:
    llm = LLM(export(GOLDEN / "vanilla", ctx_window="full", debug_outputs=True))
    with pytest.raises(RequestError, match="no tokenizer: use stop_token_ids"):
        llm.generate([[1, 2]], SamplingParams(stop="x"))


def test_the_string_that_ends_first_among_those_of_one_token() -> None:
    class Words:
        def push(self, tokens: Sequence[int]) -> str:
            return "".join(["a", "bcd"][t] for t in tokens)

        def finish(self) -> str:
            return ""

    output = OutputText(Words(), ["cd", "abcd", "bc"])
    assert output.push([0, 1]) == 2
    assert (output.matched, output.text, output.take(final=True)) == ("bc", "a", "a")
