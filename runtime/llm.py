"""`LLM`: prompts in, text out.

Knows prompts, text and parameters. The decoding is runtime.decode; this version takes a list of prompts one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dspark.runtime.bundle import load_bundle
from dspark.runtime.decode import Decoder, Request
from dspark.runtime.drafter import Drafter
from dspark.runtime.errors import LimitError, RequestError
from dspark.runtime.onnxruntime import OnnxRuntimeEngine
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.state import Slots
from dspark.runtime.stats import Stats
from dspark.runtime.stop import StopRule
from dspark.runtime.target import Qwen3Target
from dspark.runtime.tokenizer import Message, end_tokens, load_tokenizer

Prompt = str | Sequence[int] | Sequence[Message]


@dataclass(frozen=True)
class RequestOutput:
    """What one prompt gave. `text` is None for a bundle without a tokenizer."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str
    stats: Stats


@dataclass(frozen=True)
class Piece:
    """Newly committed tokens of a stream, the text they complete, and at the end the whole output."""

    token_ids: list[int]
    text: str
    output: RequestOutput | None = None


class LLM:
    """A target with its drafter, loaded from a bundle.

    `speculative=False` decodes plainly on the same target graph. `num_speculative_tokens` may be less than the bundle serves;
    `max_seq_len` may be less than it allows. `threads` is the number of threads a graph runs on (default: one a physical core).
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        speculative: bool = True,
        num_speculative_tokens: int | None = None,
        max_seq_len: int | None = None,
        threads: int | None = None,
    ) -> None:
        loaded = load_bundle(bundle)
        manifest = self.manifest = loaded.manifest
        most = manifest.num_speculative_tokens
        k = most if num_speculative_tokens is None else num_speculative_tokens
        if not 1 <= k <= most:
            raise LimitError(f"num_speculative_tokens is {k}, this bundle serves 1..{most} proposals (verify width {most + 1})")
        self.tokenizer = load_tokenizer(loaded.directory)
        self.end_token_ids = end_tokens(loaded.directory, self.tokenizer)
        engine = OnnxRuntimeEngine(loaded, threads=threads)
        slots = Slots(1)
        target = Qwen3Target(engine, slots, max_seq_len)
        self._max_seq_len = target.max_seq_len
        drafter = Drafter(engine, slots)
        limits: dict[str, Any] = {"num_speculative_tokens": k, "max_seq_len": self._max_seq_len}
        self._decoders = {use: Decoder(engine, slots, target, drafter if use else None, **limits) for use in (True, False)}
        self._speculative = speculative
        self._requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        *,
        speculative: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate from one prompt or several: strings, lists of token ids, or lists of chat messages; one output each, in order.

        Every prompt is checked before the first is decoded. Raises RequestError.
        """
        params = sampling_params or SamplingParams()
        requests = [self._request(p, params, chat_template_kwargs) for p in _as_list(prompts)]
        outputs = []
        for request in requests:
            for _ in self._decoder(speculative).decode(request):
                pass
            outputs.append(self._output(request))
        return outputs

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        speculative: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Piece]:
        """Generate from one prompt and yield pieces as tokens are committed; the last piece holds the output.

        One request runs at a time: finish or close a stream before the next call.
        """
        request = self._request(prompt, sampling_params or SamplingParams(), chat_template_kwargs)
        text = None if self.tokenizer is None else self.tokenizer.stream()
        for tokens in self._decoder(speculative).decode(request):
            yield Piece(tokens, text.push(tokens) if text else "")
        yield Piece([], text.finish() if text else "", self._output(request))

    def encode(self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """Return the token ids of a prompt. Raises RequestError if it is empty, too long, or holds an id without an embedding row."""
        if isinstance(prompt, str):
            text = prompt
            tokens = self._tokenize(lambda t: t.encode(text))
        elif not isinstance(prompt, (Sequence, np.ndarray)):
            raise RequestError(f"prompt {prompt!r:.80}: expected text, token ids, or chat messages")
        elif len(prompt) and all(isinstance(item, Mapping) for item in prompt):
            messages: Any = prompt
            tokens = self._tokenize(lambda t: t.encode(t.apply_chat_template(messages, **(chat_template_kwargs or {}))))
        else:
            tokens = _token_ids(prompt)
        rows = self.manifest.target.vocab_size
        outside = [token for token in tokens if not 0 <= token < rows]
        if outside:
            raise RequestError(f"token ids {outside[:5]} are outside the vocabulary's 0..{rows - 1}")
        if not tokens:
            raise RequestError("the prompt is empty: expected at least one token")
        if len(tokens) >= self._max_seq_len:
            raise RequestError(f"the prompt has {len(tokens)} tokens, max_seq_len is {self._max_seq_len} with at least one for the output")
        return tokens

    def _tokenize(self, use: Any) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("this bundle has no tokenizer: pass the prompt as token ids")
        tokens: list[int] = use(self.tokenizer)
        return tokens

    def _request(self, prompt: Prompt, params: SamplingParams, chat_template_kwargs: Mapping[str, Any] | None) -> Request:
        tokens = self.encode(prompt, chat_template_kwargs)
        own = () if params.ignore_eos else self.end_token_ids
        self._requests += 1
        return Request(self._requests, tokens, StopRule.of([*own, *params.stop_token_ids], params.max_tokens))

    def _decoder(self, speculative: bool | None) -> Decoder:
        return self._decoders[self._speculative if speculative is None else speculative]

    def _output(self, request: Request) -> RequestOutput:
        text = None if self.tokenizer is None else self.tokenizer.decode(request.output)
        assert request.finish_reason is not None
        return RequestOutput(list(request.prompt), request.output, text, request.finish_reason, request.stats)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """Tell one prompt from several."""
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    single = bool(items) and all(isinstance(item, Mapping) or _is_token(item) for item in items)
    return [items] if single else items


def _token_ids(prompt: Any) -> list[int]:
    if not all(_is_token(token) for token in prompt):
        raise RequestError(f"prompt {prompt!r:.80}: expected text, token ids, or chat messages")
    return [int(token) for token in prompt]


def _is_token(item: Any) -> bool:
    return isinstance(item, (int, np.integer)) and not isinstance(item, bool)
