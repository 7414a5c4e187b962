"""One line of progress on a terminal, and none anywhere else."""

from __future__ import annotations

import time
from typing import TextIO


class ProgressLine:
    """A status line that is overwritten in place; prints nothing when the stream is no terminal."""

    def __init__(self, stream: TextIO, *, enabled: bool = True) -> None:
        self._stream = stream
        self._enabled = enabled
        self._terminal = enabled and stream.isatty()
        self._shown = 0.0

    def show(self, text: str) -> None:
        """Replace the line, at most twenty times a second."""
        now = time.monotonic()
        if self._terminal and now - self._shown > 0.05:
            self._shown = now
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()

    def log(self, text: str) -> None:
        """Print a lasting line."""
        self.clear()
        if self._enabled:
            print(text, file=self._stream, flush=True)

    def clear(self) -> None:
        """Remove the line."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
