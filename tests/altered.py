"""Test helper: an engine whose results are changed after it has run, as a wrong kernel or a wrong position would change them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dspark.runtime.engine import Array, Engine, Tensor

Values = dict[str, Array]
Change = Callable[[Values, Values], None]


class AlteredEngine:
    """Runs `inner`; after graph `graph`, `change(before, after)` may alter `after`, the arrays of all bound tensors."""

    def __init__(self, inner: Engine, graph: str, change: Change) -> None:
        self._inner, self._graph, self._change = inner, graph, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def bind(self, graph: str, tensors: Mapping[str, Tensor]) -> Any:
        step = self._inner.bind(graph, tensors)
        return _Altered(step, tensors, self._change) if graph == self._graph else step


class _Altered:
    def __init__(self, step: Any, tensors: Mapping[str, Tensor], change: Change) -> None:
        self._step, self._tensors, self._change = step, tensors, change

    def run(self) -> None:
        before = {name: tensor.read().copy() for name, tensor in self._tensors.items()}
        self._step.run()
        after = {name: tensor.read().copy() for name, tensor in self._tensors.items()}
        self._change(before, after)
        for name, tensor in self._tensors.items():
            tensor.write(after[name])
