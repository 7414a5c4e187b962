"""Export a Qwen3 target and its DSpark drafter to a bundle of ONNX graphs."""
