"""Generate text from a dspark bundle: no torch, no onnx."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark.runtime.llm import LLM
    from dspark.runtime.sampling import SamplingParams
    from dspark.runtime.stream import RequestOutput, Stream

__all__ = ["LLM", "RequestOutput", "SamplingParams", "Stream"]


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: the commands and the exporter need only parts of the package."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dspark.runtime import llm, sampling, stream

    return {"LLM": llm.LLM, "SamplingParams": sampling.SamplingParams, "RequestOutput": stream.RequestOutput, "Stream": stream.Stream}[name]
