"""Function bodies of dspark's operators in standard ONNX: what every engine without a plugin runs.

Written in ONNX's textual syntax (https://onnx.ai/onnx/repo-docs/Syntax.html). The bodies never repeat keys or values for grouped
queries: the queries of one key/value head are stacked instead. Shape letters as in plugins.contract.
"""

from __future__ import annotations

import onnx
import onnx.parser

_RING_WRITE = """
<domain: "dspark", opset_import: ["" : OPSET]>
RingWrite (ring, rows, start) => (updated)
{
    updated = TensorScatter <axis = 2, mode = "circular"> (ring, rows, start)
}
"""

# Scores are scaled after the product, so that one Mul on float32 scores serves every dtype; they are masked before the two parts
# are joined, and only scores are joined, never keys or values.
_BLOCK_ATTENTION = """
<domain: "dspark", opset_import: ["" : OPSET]>
BlockAttention <scale, window, heads, kv_heads, head_dim> (query, ring_key, ring_value, block_key, block_value, total, first) => (attended)
{
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    rows_axes = Constant <value_ints = [1, 2]> ()
HEADS
    capacity = Shape <start = 2, end = 3> (ring_key)
    block_rows = Shape <start = 2, end = 3> (block_key)

    stacked = Reshape (query, stacked_shape)

    total_column = Unsqueeze (total, one)
    first_column = Unsqueeze (first, one)
    newest = Sub (total_column, one)
    zero_scalar = Constant <value_int = 0> ()
    one_scalar = Constant <value_int = 1> ()
    capacity_scalar = Squeeze (capacity)
    slot_range = Range (zero_scalar, capacity_scalar, one_scalar)
    slots = Unsqueeze (slot_range, zero)
    age_raw = Sub (newest, slots)
    age = Mod (age_raw, capacity)
    position = Sub (newest, age)
    window_size = Constant <value_int : int = @window> ()
    window_start = Sub (total_column, window_size)
    oldest = Max (first_column, window_start, zero)
    seen = GreaterOrEqual (position, oldest)
    visible = Unsqueeze (seen, rows_axes)

    factor = Constant <value_float : float = @scale> ()
    ring_key_t = Transpose <perm = [0, 1, 3, 2]> (ring_key)
    ring_product = MatMul (stacked, ring_key_t)
    ring_product_f = Cast <to = 1> (ring_product)
    ring_scaled = Mul (ring_product_f, factor)
    hidden_score = Constant <value_float = -inf> ()
    ring_scores = Where (visible, ring_scaled, hidden_score)
    block_key_t = Transpose <perm = [0, 1, 3, 2]> (block_key)
    block_product = MatMul (stacked, block_key_t)
    block_product_f = Cast <to = 1> (block_product)
    block_scores = Mul (block_product_f, factor)
    scores = Concat <axis = -1> (ring_scores, block_scores)
    weights_f = Softmax <axis = -1> (scores)
    weights = CastLike (weights_f, query)
    sizes = Concat <axis = 0> (capacity, block_rows)
    ring_weights, block_weights = Split <axis = -1> (weights, sizes)
    from_ring = MatMul (ring_weights, ring_value)
    from_block = MatMul (block_weights, block_value)
    mixed = Add (from_ring, from_block)
    attended = Reshape (mixed, attended_shape)
}
"""

_CACHED_ATTENTION = """
<domain: "dspark", opset_import: ["" : OPSET]>
CachedAttention <scale, heads, kv_heads, head_dim> (query, key_cache, value_cache, start, visible) => (attended)
{
HEADS
    stacked = Reshape (query, stacked_shape)

    factor = Constant <value_float : float = @scale> ()
    key_t = Transpose <perm = [0, 1, 3, 2]> (key_cache)
    product = MatMul (stacked, key_t)
    product_f = Cast <to = 1> (product)
    scaled = Mul (product_f, factor)
    hidden_score = Constant <value_float = -inf> ()
    scores = Where (visible, scaled, hidden_score)
    weights_f = Softmax <axis = -1> (scores)
    weights = CastLike (weights_f, query)
    mixed = MatMul (weights, value_cache)
    attended = Reshape (mixed, attended_shape)
}
"""


# Reshape targets copy the batch (0) and infer the rows (-1); with the head counts as attributes they fold to constants.
_HEADS = """
    flat = Constant <value_ints = [0]> ()
    same = Constant <value_ints = [0]> ()
    rest = Constant <value_ints = [-1]> ()
    heads_scalar = Constant <value_int : int = @heads> ()
    heads_size = Unsqueeze (heads_scalar, flat)
    kv_heads_scalar = Constant <value_int : int = @kv_heads> ()
    kv_heads_size = Unsqueeze (kv_heads_scalar, flat)
    head_dim_scalar = Constant <value_int : int = @head_dim> ()
    head_dim_size = Unsqueeze (head_dim_scalar, flat)
    stacked_shape = Concat <axis = 0> (same, kv_heads_size, rest, head_dim_size)
    attended_shape = Concat <axis = 0> (same, heads_size, rest, head_dim_size)
"""


def operator_functions(opset: int) -> dict[str, onnx.FunctionProto]:
    """Return the function body of each operator by name, for ONNX opset `opset` (24 or later: TensorScatter)."""
    functions = {}
    for text in (_RING_WRITE, _BLOCK_ATTENTION, _CACHED_ATTENTION):
        function = onnx.parser.parse_function(text.replace("OPSET", str(opset)).replace("HEADS", _HEADS))
        functions[function.name] = function
    return functions
