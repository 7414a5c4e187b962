"""Errors that a user can cause. Each message says what is wrong, the actual and the expected value, and what to do."""

from __future__ import annotations

from collections.abc import Iterable


class DSparkError(Exception):
    """Base of all errors of this package that a user can cause."""


class ConfigError(DSparkError, ValueError):
    """A model configuration, or a pair of them, is wrong; the message lists all faults."""


class UnsupportedConfigError(ConfigError):
    """A configuration asks for something that dspark does not implement; the message names the key."""


class CheckpointError(DSparkError):
    """A checkpoint's files or tensors are missing, damaged or not what its configuration says."""


class ExportError(DSparkError):
    """An export cannot be done as asked."""


class BundleError(DSparkError):
    """A bundle is incomplete, damaged, of another format version, or its checkpoint is missing or changed."""


class EngineError(DSparkError):
    """An engine cannot load or run this bundle here."""


class LimitError(EngineError, ValueError):
    """A call is outside the limits that the bundle was exported with."""


class RequestError(DSparkError, ValueError):
    """A generation request is malformed or cannot be served."""


class UnknownRequestError(DSparkError, KeyError):
    """A request id was never admitted, or was released."""

    def __str__(self) -> str:
        return str(self.args[0])


def numbered(faults: Iterable[str]) -> str:
    """Join several faults into the body of one message, a line each."""
    return "".join(f"\n  - {fault}" for fault in faults)
