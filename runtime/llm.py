"""`LLM`: prompts in, text out.

Knows prompts, text and parameters. The decoding is runtime.decode.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from dspark.runtime.backend import ONNXRUNTIME, open_engine
from dspark.runtime.bundle import load_bundle
from dspark.runtime.decode import Decoder
from dspark.runtime.drafter import Drafter
from dspark.runtime.engine import Engine
from dspark.runtime.errors import LimitError, RequestError
from dspark.runtime.graphs import ACCEPT, CONTEXT, DRAFT, TARGET
from dspark.runtime.processors import LogitsProcessor
from dspark.runtime.prompts import Prompt
from dspark.runtime.request import Request, room
from dspark.runtime.sampling import SamplingParams
from dspark.runtime.state import Slots
from dspark.runtime.stop import STOP, OutputText, StopRule
from dspark.runtime.stream import RequestOutput, Stream
from dspark.runtime.target import Qwen3Target, Target
from dspark.runtime.tokenizer import end_tokens, load_tokenizer


class LLM:
    """A target with its drafter, loaded from a bundle.

    `speculative=False` decodes plainly on the same target graph. `num_speculative_tokens` may be less than the bundle serves,
    `max_seq_len` less than it allows. `max_num_seqs` is the number of requests decoded at once (default: all the bundle allows; on the
    CPU memory grows with those in use); the others wait. `threads` is the number of threads a graph runs on (default: one a physical core).
    `backend` is `onnxruntime` (the CPU), `onnxruntime-cuda`, `tensorrt-rtx` or `tensorrt`; the last two run engines of the bundle.
    `prepacked_cache` is a folder for graphs with weights packed for this CPU: written at the first load, then processes load faster from
    it and share the memory.
    `target` makes another target than the bundle's own, from the engine and the slots; see `runtime.target.Target`.
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        speculative: bool = True,
        num_speculative_tokens: int | None = None,
        max_num_seqs: int | None = None,
        max_seq_len: int | None = None,
        threads: int | None = None,
        backend: str = ONNXRUNTIME,
        prepacked_cache: str | Path | None = None,
        target: Callable[[Engine, Slots], Target] | None = None,
    ) -> None:
        loaded = load_bundle(bundle)
        manifest = self.manifest = loaded.manifest
        most = manifest.num_speculative_tokens
        k = most if num_speculative_tokens is None else num_speculative_tokens
        if not 1 <= k <= most:
            raise LimitError(f"num_speculative_tokens is {k}, this bundle serves 1..{most} proposals (verify width {most + 1})")
        seqs = manifest.limits.max_batch_size if max_num_seqs is None else max_num_seqs
        if not 1 <= seqs <= manifest.limits.max_batch_size:
            raise LimitError(f"max_num_seqs is {seqs}, this bundle allows 1..{manifest.limits.max_batch_size} requests at once")
        self._max_seq_len = manifest.limits.seq_len(max_seq_len)
        self.tokenizer = load_tokenizer(loaded.directory)
        self.end_token_ids = end_tokens(loaded.directory, self.tokenizer)
        cache = None if prepacked_cache is None else Path(prepacked_cache)
        engine, slots = open_engine(loaded, backend, threads=threads, prepacked=cache), Slots(seqs)
        engine.load([CONTEXT, DRAFT, ACCEPT] + ([TARGET] if target is None else []))
        self._decoder = Decoder(
            engine,
            slots,
            Qwen3Target(engine, slots, max_seq_len) if target is None else target(engine, slots),
            Drafter(engine, slots),
            num_speculative_tokens=k,
            max_seq_len=self._max_seq_len,
        )
        self._speculative = speculative
        self._ids = count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate from one prompt or several: strings, lists of token ids, or lists of chat messages; one output each, in order.

        Several prompts are decoded together; each may have parameters of its own. Every prompt is checked before the first is decoded.
        Raises RequestError.
        """
        streams = self.streams(prompts, sampling_params, speculative=speculative, chat_template_kwargs=chat_template_kwargs)
        try:
            return [stream.result() for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        speculative: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Stream:
        """Generate from one prompt and iterate over pieces as tokens are committed; the last piece holds the output.

        Streams share the engine: whichever is read moves all of them on. One that is closed frees its place at once, one that is
        forgotten with the next step.
        """
        (stream,) = self._streams([prompt], [_or_default(sampling_params)], speculative, chat_template_kwargs)
        return stream

    def streams(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculative: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Stream]:
        """Return a stream for each prompt, all checked first; they are decoded together. Raises RequestError."""
        items = _as_list(prompts)
        params = list(sampling_params) if isinstance(sampling_params, Sequence) else [_or_default(sampling_params)] * len(items)
        if len(params) != len(items):
            raise RequestError(f"{len(params)} sampling parameters for {len(items)} prompts: expected one for all, or one for each")
        return self._streams(items, params, speculative, chat_template_kwargs)

    def _streams(
        self,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams],
        speculative: bool | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> list[Stream]:
        use = self._speculative if speculative is None else speculative
        requests = [self._request(*pair, use, chat_template_kwargs) for pair in zip(prompts, params, strict=True)]
        return [Stream(self._decoder, request, self._output) for request in requests]

    def encode(self, prompt: Prompt, chat_template_kwargs: Mapping[str, Any] | None = None) -> list[int]:
        """Return the token ids of a prompt. Raises RequestError if it is empty, too long, or holds an id without an embedding row."""
        if isinstance(prompt, str):
            text = prompt
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(f"the prompt is no valid text: {error}") from None
            tokens = self._tokenize(lambda t: t.encode(text))
        elif isinstance(prompt, bytes) or not isinstance(prompt, (Sequence, np.ndarray)):
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
        room(len(tokens), self._max_seq_len)
        return tokens

    def _tokenize(self, use: Any) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("this bundle has no tokenizer: pass the prompt as token ids")
        tokens: list[int] = use(self.tokenizer)
        return tokens

    def _request(
        self, prompt: Prompt, params: SamplingParams, speculative: bool, chat_template_kwargs: Mapping[str, Any] | None
    ) -> Request:
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling parameters {params!r:.80}: expected SamplingParams")
        tokens, rows = self.encode(prompt, chat_template_kwargs), self.manifest.target.vocab_size
        outside = sorted(token for token in params.token_ids() if token >= rows)
        if outside:
            raise RequestError(f"token ids {outside[:5]} of the sampling parameters are outside the vocabulary's 0..{rows - 1}")
        if params.stop_strings and self.tokenizer is None:
            raise RequestError("this bundle has no tokenizer: use stop_token_ids instead of stop strings")
        own = () if params.ignore_eos else self.end_token_ids
        longest = self._max_seq_len if params.max_tokens is None else params.max_tokens
        rule = StopRule(frozenset(int(i) for i in (*own, *(params.stop_token_ids or ()))), longest, params.min_tokens)
        if params.min_tokens and params.allowed_token_ids is not None and rule.stop_ids.issuperset(params.allowed_token_ids):
            raise RequestError("allowed_token_ids are all stop tokens, which min_tokens forbids: allow another token")
        text = None
        if self.tokenizer is not None:
            text = OutputText(self.tokenizer.stream(), params.stop_strings, include=params.include_stop_str_in_output)
        seed = secrets.randbits(64) if params.seed is None else int(params.seed)
        processor = LogitsProcessor(params, tokens, rule.stop_ids, rows)
        return Request(next(self._ids), tokens, rule, params, seed, speculative, processor, text)

    def _output(self, request: Request) -> RequestOutput:
        params, text, output = request.params, None, list(request.output)
        matched = None if request.text is None else request.text.matched
        if request.text is not None and self.tokenizer is not None:
            text = request.text.text if matched is not None else self.tokenizer.decode(request.shown(output))
        assert request.finish_reason is not None
        by_token = output[-1] if request.finish_reason == STOP and output[-1] in (params.stop_token_ids or ()) else None
        logprobs = None if params.logprobs is None else request.logprobs
        reason = by_token if matched is None else matched
        return RequestOutput(list(request.prompt), output, text, request.finish_reason, reason, logprobs, request.stats)


def _or_default(params: SamplingParams | None) -> SamplingParams:
    return SamplingParams() if params is None else params


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Any]:
    """Tell one prompt from several."""
    if isinstance(prompts, (str, bytes)):
        return [prompts]
    if not isinstance(prompts, (Sequence, np.ndarray)):
        raise RequestError(f"prompts {prompts!r:.80}: expected text, token ids, chat messages, or a list of these")
    items = list(prompts)
    single = bool(items) and all(isinstance(item, Mapping) or _is_token(item) for item in items)
    return [items] if single else items


def _token_ids(prompt: Any) -> list[int]:
    if not all(_is_token(token) for token in prompt):
        raise RequestError(f"prompt {prompt!r:.80}: expected text, token ids, or chat messages")
    return [int(token) for token in prompt]


def _is_token(item: Any) -> bool:
    return isinstance(item, (int, np.integer)) and not isinstance(item, bool)
