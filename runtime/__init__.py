"""Generate text from a dspark bundle: no torch, no onnx."""

from dspark.runtime.llm import LLM, RequestOutput
from dspark.runtime.sampling import SamplingParams

__all__ = ["LLM", "RequestOutput", "SamplingParams"]
