"""Text to token ids and back: the target's own tokenizer, chat template and end tokens.

Knows the bundle's tokenizer files. The chat template runs in jinja2's sandbox: it comes with a checkpoint, so it is not trusted.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dspark.runtime.errors import BundleError, RequestError
from dspark.runtime.prompts import Message

logger = logging.getLogger(__name__)


class Tokenizer:
    """A Hugging Face tokenizer.json with its chat template."""

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer as Backend

        path = directory / "tokenizer.json"
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:
            raise BundleError(f"{path} cannot be read ({error}): export the bundle again") from error
        self._config = _read_json(directory / "tokenizer_config.json")
        template = directory / "chat_template.jinja"
        self._template = template.read_text(encoding="utf-8") if template.exists() else _default(self._config.get("chat_template"))

    @property
    def has_chat_template(self) -> bool:
        """Whether chat messages can be rendered."""
        return self._template is not None

    @property
    def eos_token_id(self) -> int | None:
        """Id of the tokenizer's own end token, if it names one."""
        token = self._config.get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of raw text, without added special tokens."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        text: str = self._backend.decode(list(tokens), skip_special_tokens=True)
        return text

    def stream(self) -> TextStream:
        """Return a decoder that takes token ids as they come."""
        return TextStream(self)

    def apply_chat_template(self, messages: Sequence[Message], /, **kwargs: Any) -> str:
        """Render chat messages with the generation prompt.

        DSpark drafters are trained on answers without thinking, so `enable_thinking` is false unless asked for.
        """
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if self._template is None:
            raise RequestError("this bundle has no chat template: pass the prompt as text or token ids")
        taken = sorted(kwargs.keys() & {"messages", "add_generation_prompt"})
        if taken:
            raise RequestError(f"chat_template_kwargs {taken} are set by dspark: pass variables of the template only")
        if kwargs.get("enable_thinking"):
            logger.warning("enable_thinking: DSpark drafters are trained without thinking; expect fewer accepted proposals")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _raise_template_error
        arguments = {"add_generation_prompt": True, "enable_thinking": False, **self._special_tokens(), **kwargs}
        try:
            return environment.from_string(self._template).render(messages=list(messages), **arguments)
        except (TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:  # what a template does with odd messages
            raise RequestError(f"the chat template refuses these messages: {error}") from error

    def _special_tokens(self) -> dict[str, str]:
        tokens = {name: self._config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        contents = {name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items()}
        return {name: content for name, content in contents.items() if content is not None}


class TextStream:
    """Turns token ids into text piece by piece; a character split across tokens appears when it is whole."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._context = self._settled = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Take new tokens; return the text they complete."""
        self._tokens += tokens
        text = self._pending()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        return self._take(text)

    def finish(self) -> str:
        """Return what is left, incomplete characters as replacement characters."""
        return self._take(self._pending())

    def _pending(self) -> str:
        # Decoded from a settled token on, so that the work of a piece does not grow with the text; the token before it keeps decoders
        # that strip a leading space from doing so in mid-text.
        before = self._tokenizer.decode(self._tokens[self._context : self._settled])
        return self._tokenizer.decode(self._tokens[self._context :])[len(before) :]

    def _take(self, text: str) -> str:
        self._context, self._settled = self._settled, len(self._tokens)
        return text


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """Return the bundle's tokenizer, or None if it was exported without one."""
    return Tokenizer(directory) if (directory / "tokenizer.json").exists() else None


def end_tokens(directory: Path, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Return the model's end tokens: those of generation_config.json, else the tokenizer's own."""
    eos = _read_json(directory / "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = tokenizer.eos_token_id if tokenizer is not None else None
    return frozenset(_ids(eos))


def _ids(eos: int | list[int] | None) -> Iterator[int]:
    if eos is not None:
        yield from [eos] if isinstance(eos, int) else eos


def _default(template: Any) -> str | None:
    """Return a template, or the one named `default` of a list of named ones."""
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _raise_template_error(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BundleError(f"{path} is not JSON ({error}): mend the target's file and export again") from error
    return values if isinstance(values, dict) else {}
