"""TensorRT plugins of dspark's operators: one class body for `tensorrt` and `tensorrt_rtx`, which is passed in as `trt`.

`register(trt)` must run before a graph is parsed and before an engine is deserialised. Knows TensorRT's plugin interfaces. Does not know
shapes, dtypes and attributes (`plugins.rules` reads them off the contract) nor kernels (`plugins.launch`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np

from dspark.plugins import launch
from dspark.plugins.contract import PLUGIN_ATTRIBUTES, PLUGINS, Operator
from dspark.plugins.rules import PluginError, check_agreement, checked_attributes, dtype_fits, exact_sizes, letters, sizes, source_of

NAMESPACE, VERSION = PLUGIN_ATTRIBUTES["plugin_namespace"], PLUGIN_ATTRIBUTES["plugin_version"]

_DTYPES = {"FLOAT": "fp32", "HALF": "fp16", "BF16": "bf16", "INT64": "int64", "INT32": "int32", "BOOL": "bool"}
_INTERFACES = ("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuildV2", "IPluginV3OneRuntime")

_registered: dict[str, list[Any]] = {}
"""Creators by module name: TensorRT keeps no reference to a Python creator."""


faults: list[str] = []
"""What plugins refused since a caller last cleared it: TensorRT prints an exception of a callback and reports only that there was one."""


def _noted(callback: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(callback)
    def call(*arguments: Any) -> Any:
        try:
            return callback(*arguments)
        except PluginError as error:
            faults.append(str(error))
            raise

    return call


class _Plugin:
    """Answers TensorRT's callbacks from the operator's contract. Subclasses add TensorRT's interfaces behind this class."""

    trt: Any
    operator: Operator
    interfaces: tuple[Any, ...]

    def __init__(self, attributes: dict[str, int | float]) -> None:
        for interface in self.interfaces:
            interface.__init__(self)
        self.plugin_name, self.plugin_version, self.plugin_namespace = self.operator.name, VERSION, NAMESPACE
        self.num_outputs = len(self.operator.outputs)
        self.attributes = attributes
        self._launches: Sequence[Any] = ()

    def get_capability_interface(self, _kind: Any) -> _Plugin:
        return self

    def clone(self) -> _Plugin:
        return type(self)(self.attributes)

    def attach_to_context(self, _context: Any) -> _Plugin:
        return self.clone()

    def get_fields_to_serialize(self) -> Any:
        kinds = self.operator.attributes
        return self.trt.PluginFieldCollection([_field(self.trt, name, kinds[name], value) for name, value in self.attributes.items()])

    def get_output_data_types(self, inputs: Sequence[Any]) -> list[Any]:
        return [inputs[0]] * self.num_outputs

    @_noted
    def get_output_shapes(self, inputs: Sequence[Any], _shape_inputs: Any, _builder: Any) -> list[Any]:
        shapes = [[d.get_constant_value() if d.is_constant() else None for d in shape] for shape in inputs]
        check_agreement(self.operator, self.attributes, sizes(self.operator, shapes))
        outputs = []
        for declared in self.operator.outputs.values():
            output = self.trt.DimsExprs(len(letters(declared)))
            for axis, letter in enumerate(letters(declared)):
                position, source = source_of(self.operator, letter)
                output[axis] = inputs[position][source]
            outputs.append(output)
        return outputs

    def supports_format_combination(self, position: int, tensors: Sequence[Any], _inputs: int) -> bool:
        described = [tensor.desc for tensor in tensors[: position + 1]]
        linear: bool = described[-1].format == self.trt.TensorFormat.LINEAR
        return linear and dtype_fits(self.operator, position, [_DTYPES.get(d.type.name) for d in described])

    def get_aliased_input(self, output: int) -> int:
        """Return the input whose memory an output takes, -1 for none."""
        source = self.operator.aliases.get(list(self.operator.outputs)[output])
        return -1 if source is None else list(self.operator.inputs).index(source)

    @_noted
    def configure_plugin(self, inputs: Sequence[Any], _outputs: Sequence[Any]) -> None:
        """Check the largest shapes of the profile."""
        exact_sizes(self.operator, [tuple(tensor.max) for tensor in inputs])

    def get_valid_tactics(self) -> list[int]:
        return []

    def set_tactic(self, _tactic: int) -> None:
        pass

    def get_workspace_size(self, inputs: Sequence[Any], _outputs: Sequence[Any]) -> int:
        known = exact_sizes(self.operator, [tuple(tensor.max) for tensor in inputs])
        return launch.workspace(self.operator, _DTYPES[inputs[0].desc.type.name], known, self.attributes)

    @_noted
    def on_shape_change(self, inputs: Sequence[Any], _outputs: Sequence[Any]) -> None:
        """Choose and compile the kernels, so that `enqueue` only launches."""
        known = exact_sizes(self.operator, [tuple(tensor.dims) for tensor in inputs])
        self._launches = launch.prepare(self.operator, _DTYPES[inputs[0].type.name], known, self.attributes)

    @_noted
    def enqueue(self, _in: Any, _out: Any, inputs: Sequence[int], outputs: Sequence[int], workspace: int, stream: int) -> None:
        names = [*self.operator.inputs, *self.operator.outputs, launch.WORKSPACE]
        launch.launch(self._launches, dict(zip(names, [*inputs, *outputs, workspace], strict=True)), stream)


class _Creator:
    """Makes plugins of one operator from a node's or an engine's fields."""

    trt: Any
    base: Any
    plugin: type[_Plugin]

    def __init__(self) -> None:
        self.base.__init__(self)
        self.name, self.plugin_version, self.plugin_namespace = self.plugin.operator.name, VERSION, NAMESPACE
        kinds = self.plugin.operator.attributes.items()
        self.field_names = self.trt.PluginFieldCollection([_field(self.trt, name, kind) for name, kind in kinds])

    @_noted
    def create_plugin(self, _name: str, fields: Any, _phase: Any) -> _Plugin:
        """Raises PluginError, which TensorRT logs, with each attribute that is missing or of a wrong type."""
        given = {field.name: np.asarray(field.data).reshape(-1)[0].item() for field in fields}
        return self.plugin(checked_attributes(self.plugin.operator, given))


def register(trt: Any) -> None:
    """Register the plugins with a TensorRT module; a second call does nothing."""
    if trt.__name__ in _registered:
        return
    registry, creators = trt.get_plugin_registry(), []
    for operator in PLUGINS:
        interfaces = tuple(getattr(trt, name) for name in _INTERFACES)
        plugin = type(operator.name, (_Plugin, *interfaces), {"trt": trt, "operator": operator, "interfaces": interfaces})
        base = trt.IPluginCreatorV3One
        creator = type(f"{operator.name}Creator", (_Creator, base), {"trt": trt, "base": base, "plugin": plugin})()
        if not registry.register_creator(creator, NAMESPACE):
            raise PluginError(f"{trt.__name__} {trt.__version__} refuses {_label(operator)}; {_listing(trt)}")
        creators.append(creator)
    _registered[trt.__name__] = creators


def check_registered(trt: Any) -> None:
    """Raise PluginError naming the plugins that are not registered, and those that are."""
    registry = trt.get_plugin_registry()
    missing = [_label(operator) for operator in PLUGINS if registry.get_creator(operator.name, VERSION, NAMESPACE) is None]
    if missing:
        raise PluginError(
            f"{', '.join(missing)} not registered with {trt.__name__} {trt.__version__}; {_listing(trt)}: "
            "call dspark.plugins.registry.register first"
        )


def _label(operator: Operator) -> str:
    return f"{NAMESPACE}::{operator.name} version {VERSION}"


def _listing(trt: Any) -> str:
    creators = trt.get_plugin_registry().all_creators
    names = sorted(f"{creator.plugin_namespace}::{creator.name} version {creator.plugin_version}" for creator in creators)
    return f"registered are {', '.join(names) or 'none'}"


def _field(trt: Any, name: str, kind: type, value: float | None = None) -> Any:
    dtype, code = (np.float32, trt.PluginFieldType.FLOAT32) if kind is float else (np.int64, trt.PluginFieldType.INT64)
    return trt.PluginField(name, np.array([] if value is None else [value], dtype), code)
