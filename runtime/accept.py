"""The acceptance steps on an engine: which proposals stand, and which token follows.

Logits and draft distributions stay in the engine: per row two numbers come back, and log-probabilities where asked. Knows tensors and
the graphs without weights; not requests. B rows, M logit rows, K proposals, V vocabulary rows, L most likely tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dspark.runtime.engine import Array, Engine, Step, Tensor
from dspark.runtime.graphs import ACCEPT, ACCEPT_SAMPLED, LOGPROBS, TRUNCATE
from dspark.runtime.sampling import Draws
from dspark.runtime.state import MOST_BINDINGS, Rows


@dataclass(frozen=True)
class Chosen:
    """What an acceptance step gave, for every row of the view."""

    accepted: Array
    """`[B]`: leading proposals that stand."""
    next_token: Array
    """`[B]`: the token behind them."""
    proposals: Array
    """`[B,K]`: the proposals that were judged; those behind a row's count mean nothing."""
    tensors: Mapping[str, Tensor]


class Acceptance:
    """Acceptance for a view's rows; with count 0 it chooses the next token, as after a prefill and in plain decoding.

    Row i of `logits [B,M,V]` judges proposal i + 1 of `verify_tokens [B,K+1]`; `counts [B]`, at most M - 1, says how many are judged.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._steps: dict[tuple[str | int, ...], tuple[Step, dict[str, Tensor]]] = {}
        self._adjusted: dict[tuple[int, ...], Tensor] = {}

    def greedy(self, logits: Rows, counts: Array, verify_tokens: Tensor | None = None) -> Chosen:
        """Accept what the target would have chosen."""
        shared = {"logits": logits.tensor} | ({} if verify_tokens is None else {"verify_tokens": verify_tokens})
        return self._chosen(self._run(ACCEPT, shared, {"count": self._checked(logits, counts, verify_tokens)}))

    def sampled(
        self, logits: Rows, counts: Array, draws: Draws, verify_tokens: Tensor | None = None, draft_probs: Tensor | None = None
    ) -> Chosen:
        """Accept by rejection sampling; `draft_probs [B,K,V]` are the distributions that the proposals were drawn from."""
        counts = self._checked(logits, counts, verify_tokens)
        inputs = {"count": counts, **draws.of(("temperature", "accept_uniform", "next_uniform"))}
        shared = {"logits": logits.tensor}
        if draws.truncates:
            cut = self._run(TRUNCATE, shared, draws.of(("temperature", "top_k", "top_p", "min_p")))
            shared["threshold"] = cut["threshold"]
        else:
            inputs["threshold"] = np.array(-np.inf, np.float32)
        if verify_tokens is not None:
            assert draft_probs is not None
            shared |= {"verify_tokens": verify_tokens, "draft_probs": draft_probs}
        return self._chosen(self._run(ACCEPT_SAMPLED, shared, inputs))

    def logprobs(self, logits: Rows, chosen: Chosen) -> tuple[Array, Array, Array]:
        """Return log-probabilities of the emitted tokens `[B,M]`, and the largest ones of each row with their tokens `[B,M,L]`."""
        names = ("verify_tokens", "accepted", "next_token")
        tensors = self._run(LOGPROBS, {"logits": logits.tensor, **{name: chosen.tensors[name] for name in names}}, {})
        return tensors["logprobs"].read(), tensors["top_logprobs"].read(), tensors["top_tokens"].read()

    def adjusted(self, logits: Rows, values: Array) -> Rows:
        """Return a tensor of the logits' shape that holds `values`, valid until the next call for that shape."""
        shape = logits.tensor.shape
        if shape not in self._adjusted:
            self._adjusted[shape] = self._engine.allocate(shape, "float32")
        self._adjusted[shape].write(values)
        return Rows(logits.view, self._adjusted[shape])

    def _checked(self, logits: Rows, counts: Array, verify_tokens: Tensor | None) -> Array:
        assert verify_tokens is not None or not counts.any()
        assert counts.max() < logits.tensor.shape[1]
        return counts

    def _chosen(self, tensors: dict[str, Tensor]) -> Chosen:
        accepted, next_token, tokens = self._engine.fetch([tensors[name] for name in ("accepted", "next_token", "verify_tokens")])
        return Chosen(accepted, next_token, tokens[:, 1:], tensors)

    def _run(self, graph: str, shared: Mapping[str, Tensor], values: Mapping[str, Array]) -> dict[str, Tensor]:
        """Run a graph on tensors that others own; the rest are its own, `values` written to them first."""
        key: tuple[str | int, ...] = (graph, *(id(tensor) for tensor in shared.values()))
        if key not in self._steps:
            if len(self._steps) >= MOST_BINDINGS:
                self._steps.clear()
            batch, rows = shared["logits"].shape[:2]
            sizes, signature, tensors = {"B": batch, "M": rows}, self._engine.signatures[graph], dict(shared)
            for spec in (*signature.inputs, *signature.outputs):
                if spec.name not in tensors:
                    shape = tuple(sizes[d] if isinstance(d, str) else d for d in spec.shape)
                    tensors[spec.name] = self._engine.allocate(shape, spec.dtype)
            self._steps[key] = self._engine.bind(graph, tensors), tensors
        step, tensors = self._steps[key]
        for name, array in values.items():
            tensors[name].write(array)
        step.run()
        return tensors
