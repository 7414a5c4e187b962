"""Contract of the operators in the ONNX domain `dspark`: names, inputs, attributes, shapes, aliases.

Knows the signatures and the rule of each operator in words. Does not know how a backend computes them: the numpy reference is
`plugins.reference`, the ONNX function bodies are `export.functions`.

B rows of the bound slot range   N new rows          T block rows        R ring capacity   S cache capacity
G key/value heads                Hq query heads      D head dimension    W window
Q stacked query rows
"""

from __future__ import annotations

from dataclasses import dataclass

DOMAIN = "dspark"

VERSION = 1
"""Version of this contract. A bundle records it; a runtime with another version refuses the bundle."""

PLUGIN_ATTRIBUTES = {"plugin_version": "1", "plugin_namespace": DOMAIN}
"""Attributes that make TensorRT's parser prefer a registered plugin to the node's function (onnx-tensorrt 10.15 and later)."""


@dataclass(frozen=True)
class Operator:
    """One operator: inputs and outputs by name with their shapes, attributes by name, and the input an output aliases."""

    name: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    attributes: tuple[str, ...] = ()
    aliases: dict[str, str] | None = None
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
    attributes=("scale", "window", "heads", "kv_heads", "head_dim"),
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
    attributes=("scale", "heads", "kv_heads", "head_dim"),
)
"""Row i attends to the cache slots 0..start + i. The softmax is computed in float32. No plugin: backends lower it.

`visible` says the same as `start`, spelled out for the Q = (Hq / G) x N stacked query rows of a key/value head (row i of each of its
query heads in turn): engines that want a mask compute it once for all layers, engines that count lengths leave it out.
"""

OPERATORS = (RING_WRITE, BLOCK_ATTENTION, CACHED_ATTENTION)
