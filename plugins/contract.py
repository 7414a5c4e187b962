"""Contract of the operators in the ONNX domain `dspark`: names, inputs, attributes, shapes, aliases.

Knows the signatures and the rule of each operator in words. Does not know how a backend computes them: the numpy reference is
`plugins.reference`, the ONNX function bodies are `export.functions`.

B rows of the bound slot range   N new rows          T block rows        R ring capacity   S cache capacity
G key/value heads                Hq query heads      D head dimension    W window
Q stacked query rows
"""

from __future__ import annotations

from dataclasses import dataclass, field

DOMAIN = "dspark"

VERSION = 1
"""Version of this contract. A bundle records it; a runtime with another version refuses the bundle."""

PLUGIN_ATTRIBUTES = {"plugin_version": "1", "plugin_namespace": DOMAIN}
"""Attributes that make TensorRT's parser prefer a registered plugin to the node's function (onnx-tensorrt 10.15 and later)."""


FLOATS = ("fp32", "fp16", "bf16")
"""Dtypes of a graph: every input and output of an operator has the graph's, those named in `Operator.dtypes` excepted."""


@dataclass(frozen=True)
class Operator:
    """One operator: inputs and outputs by name with their shapes, attributes by name with their type, the input an output aliases.

    `dtypes` names the inputs that are not of the graph's dtype.
    """

    name: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    attributes: dict[str, type] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    plugin: bool = False

    @property
    def qualified_name(self) -> str:
        """Name with domain, as torch.onnx.ops.symbolic wants it."""
        return f"{DOMAIN}::{self.name}"


RING_WRITE = Operator(
    name="RingWrite",
    inputs={"ring": "B,G,R,D", "rows": "B,G,N,D", "start": "B"},
    outputs={"updated": "B,G,R,D"},
    aliases={"updated": "ring"},
    dtypes={"start": "int64"},
    plugin=True,
)
"""Row i goes to slot (start + i) mod R; other slots keep their value. N <= R."""

BLOCK_ATTENTION = Operator(
    name="BlockAttention",
    inputs={
        "query": "B,Hq,T,D",
        "ring_key": "B,G,R,D",
        "ring_value": "B,G,R,D",
        "block_key": "B,G,T,D",
        "block_value": "B,G,T,D",
        "total": "B",
        "first": "B",
    },
    outputs={"attended": "B,Hq,T,D"},
    attributes={"scale": float, "window": int, "heads": int, "kv_heads": int, "head_dim": int},
    dtypes={"total": "int64", "first": "int64"},
    plugin=True,
)
"""Softmax over the visible ring slots and all T block rows; no mask inside the block.

Slot c holds position p, the largest p < total with p mod R = c. It is visible iff p >= max(first, total - window, 0).
The softmax is computed in float32. Query head j reads key/value head j // (Hq / G). The attributes `heads`, `kv_heads` and `head_dim`
repeat Hq, G and D: engines then know them as constants.
"""

CACHED_ATTENTION = Operator(
    name="CachedAttention",
    inputs={"query": "B,Hq,N,D", "key_cache": "B,G,S,D", "value_cache": "B,G,S,D", "start": "B", "visible": "B,1,Q,S"},
    outputs={"attended": "B,Hq,N,D"},
    attributes={"scale": float, "heads": int, "kv_heads": int, "head_dim": int},
    dtypes={"start": "int64", "visible": "bool"},
)
"""Row i attends to the cache slots 0..start + i. The softmax is computed in float32. No plugin: backends lower it.

`visible` says the same as `start`, spelled out for the Q = (Hq / G) x N stacked query rows of a key/value head (row i of each of its
query heads in turn): engines that want a mask compute it once for all layers, engines that count lengths leave it out.
"""

OPERATORS = (RING_WRITE, BLOCK_ATTENTION, CACHED_ATTENTION)

PLUGINS = tuple(operator for operator in OPERATORS if operator.plugin)
