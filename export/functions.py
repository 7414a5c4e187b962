"""Function bodies of dspark's operators in standard ONNX: what every engine without a plugin runs.

Written in ONNX's textual syntax (https://onnx.ai/onnx/repo-docs/Syntax.html). The bodies never repeat keys or values for grouped
queries: the queries of one key/value head are stacked instead. Shape letters as in plugins.contract; g = Hq / G.
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
BlockAttention <scale, window> (query, ring_key, ring_value, block_key, block_value, total, first) => (attended)
{
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    last = Constant <value_ints = [-1]> ()
    rows_axes = Constant <value_ints = [1, 2]> ()
    batch = Shape <start = 0, end = 1> (ring_key)
    kv_heads = Shape <start = 1, end = 2> (ring_key)
    capacity = Shape <start = 2, end = 3> (ring_key)
    head_dim = Shape <start = 3, end = 4> (ring_key)
    block_rows = Shape <start = 2, end = 3> (block_key)

    stacked_shape = Concat <axis = 0> (batch, kv_heads, last, head_dim)
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
    query_shape = Shape (query)
    attended = Reshape (mixed, query_shape)
}
"""

_CACHED_ATTENTION = """
<domain: "dspark", opset_import: ["" : OPSET]>
CachedAttention <scale> (query, key_cache, value_cache, start) => (attended)
{
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    last = Constant <value_ints = [-1]> ()
    batch = Shape <start = 0, end = 1> (key_cache)
    kv_heads = Shape <start = 1, end = 2> (key_cache)
    capacity = Shape <start = 2, end = 3> (key_cache)
    head_dim = Shape <start = 3, end = 4> (key_cache)
    new_rows = Shape <start = 2, end = 3> (query)

    stacked_shape = Concat <axis = 0> (batch, kv_heads, last, head_dim)
    stacked = Reshape (query, stacked_shape)

    zero_scalar = Constant <value_int = 0> ()
    one_scalar = Constant <value_int = 1> ()
    capacity_scalar = Squeeze (capacity)
    slots = Range (zero_scalar, capacity_scalar, one_scalar)
    new_rows_scalar = Squeeze (new_rows)
    row_range = Range (zero_scalar, new_rows_scalar, one_scalar)
    start_column = Unsqueeze (start, one)
    rows = Add (start_column, row_range)
    rows_axes = Constant <value_ints = [1, 2, 4]> ()
    row_positions = Unsqueeze (rows, rows_axes)
    visible = LessOrEqual (slots, row_positions)

    factor = Constant <value_float : float = @scale> ()
    key_t = Transpose <perm = [0, 1, 3, 2]> (key_cache)
    product = MatMul (stacked, key_t)
    product_f = Cast <to = 1> (product)
    scaled = Mul (product_f, factor)
    by_head_shape = Concat <axis = 0> (batch, kv_heads, last, new_rows, capacity)
    by_head = Reshape (scaled, by_head_shape)
    hidden_score = Constant <value_float = -inf> ()
    scores = Where (visible, by_head, hidden_score)
    weights_f = Softmax <axis = -1> (scores)
    weights = CastLike (weights_f, query)
    weights_shape = Concat <axis = 0> (batch, kv_heads, last, capacity)
    stacked_weights = Reshape (weights, weights_shape)
    mixed = MatMul (stacked_weights, value_cache)
    query_shape = Shape (query)
    attended = Reshape (mixed, query_shape)
}
"""


def operator_functions(opset: int) -> dict[str, onnx.FunctionProto]:
    """Return the function body of each operator by name, for ONNX opset `opset` (24 or later: TensorScatter)."""
    functions = {}
    for text in (_RING_WRITE, _BLOCK_ATTENTION, _CACHED_ATTENTION):
        function = onnx.parser.parse_function(text.replace("OPSET", str(opset)))
        functions[function.name] = function
    return functions
