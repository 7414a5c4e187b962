"""Prompts, and reading them from files: a text, or .jsonl with an object a line. Knows no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from dspark.runtime.errors import RequestError

Message = dict[str, str]
"""A chat message: role and content."""
Prompt = str | Sequence[int] | Sequence[Message]


def read_prompts(path: Path, limit: int | None = None) -> Iterator[Prompt]:
    """Yield the prompts of a file: all of its text, or of a .jsonl file the `ids`, `messages` or `text` of the first `limit` lines.

    Raises RequestError naming the line that holds none.
    """
    text = _text_of(path)
    if path.suffix != ".jsonl":
        yield text
        return
    if not text.strip():
        raise RequestError(f"{path} holds no prompt")
    lines = text.removesuffix("\n").split("\n")
    for number, line in enumerate(lines[:limit], 1):
        try:
            fields = json.loads(line)
            prompt = next(fields[key] for key in ("ids", "messages", "text") if key in fields)
        except (json.JSONDecodeError, RecursionError, TypeError, StopIteration):
            prompt = None
        if not isinstance(prompt, str | list):
            raise RequestError(f"{path}, line {number}: expected a JSON object with ids, messages or text")
        yield prompt


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}") from None
