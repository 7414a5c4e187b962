"""dspark's ONNX operators: their contract, a numpy reference and the kernels that run them."""
