"""What a prompt gives: pieces as they come, and the whole output.

Knows requests and text. Whoever reads a stream moves the decoder on, with all that it decodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dspark.runtime.decode import Decoder
from dspark.runtime.errors import RequestError
from dspark.runtime.request import Request
from dspark.runtime.stats import Stats
from dspark.runtime.stop import ABORT


@dataclass(frozen=True)
class RequestOutput:
    """What one prompt gave. `text` is None for a bundle without a tokenizer; it ends before a stop string or a stop token."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str
    """`stop` or `length`."""
    stop_reason: int | str | None
    """The stop string or the stop token id of the parameters that ended the output."""
    logprobs: list[dict[int, float]] | None
    """For each token, log-probabilities by token id, its own first; None unless asked for."""
    stats: Stats


@dataclass(frozen=True)
class Piece:
    """Newly committed tokens of a stream, the text they complete, and at the end the whole output."""

    token_ids: list[int]
    text: str
    output: RequestOutput | None = None


class Stream:
    """The pieces of one request's output, as they come; the last holds the output.

    Streams of one engine may be read in turn or by several threads, which then take turns. An error in the engine is raised to the readers
    of the requests that it hit.
    """

    def __init__(self, decoder: Decoder, request: Request, output: Callable[[Request], RequestOutput]) -> None:
        self._decoder, self._request, self._output = decoder, request, output
        self._read, self._ended = 0, False
        with decoder.lock:
            decoder.add(request)

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        request = self._request
        with self._decoder.lock:
            while request.finish_reason is None and self._read == len(request.output):
                self._decoder.step()
            if request.error is not None:
                raise request.error
            if self._ended or request.finish_reason == ABORT:
                raise StopIteration
            tokens, self._read = request.output[self._read :], len(request.output)
            self._ended = not tokens
            text = "" if request.text is None else request.text.take(final=self._ended)
            return Piece(tokens, text, self._output(request) if self._ended else None)

    def result(self) -> RequestOutput:
        """Decode to the end and return the output. Raises RequestError if the stream was closed before."""
        while self._request.finish_reason is None:
            with self._decoder.lock:
                if self._request.finish_reason is None:
                    self._decoder.step()
        if self._request.error is not None:
            raise self._request.error
        if self._request.finish_reason == ABORT:
            raise RequestError("this stream was closed before its end")
        return self._output(self._request)

    def close(self) -> None:
        """End the request if it goes on, and free its slot."""
        with self._decoder.lock:
            self._decoder.cancel(self._request)

    def __del__(self) -> None:
        request = getattr(self, "_request", None)
        if request is not None and request.finish_reason is None:
            self._decoder.abandon(request)
