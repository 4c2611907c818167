"""The text of a kernel: as MLX gives it to Apple's compiler, and as the emulator gives it to clang."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

# MLX's names of its types, and how numpy holds their bits.
TYPES: dict[mx.Dtype, tuple[str, type[np.generic]]] = {
    mx.float32: ("float", np.float32),
    mx.float16: ("float16_t", np.float16),
    mx.bfloat16: ("bfloat16_t", np.uint16),
    mx.uint32: ("uint32_t", np.uint32),
    mx.int32: ("int32_t", np.int32),
    mx.uint16: ("uint16_t", np.uint16),
    mx.uint8: ("uint8_t", np.uint8),
}
# What a kernel can know of its place, in the order in which MLX declares it.
ATTRIBUTES = {
    "simdgroup_index_in_threadgroup": "uint",
    "thread_index_in_simdgroup": "uint",
    "thread_index_in_threadgroup": "uint",
    "thread_position_in_grid": "uint3",
    "thread_position_in_threadgroup": "uint3",
    "threadgroup_position_in_grid": "uint3",
    "threadgroups_per_grid": "uint3",
    "threads_per_grid": "uint3",
    "threads_per_simdgroup": "uint",
    "threads_per_threadgroup": "uint3",
}
CONSTANT_BELOW = 8  # elements: smaller inputs are declared in the constant address space

Template = Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class Source:
    """A kernel as it was declared to `mx.fast.metal_kernel`."""

    name: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    body: str
    header: str

    def __post_init__(self) -> None:
        for name in self.input_names:
            for suffix in ("shape", "strides", "ndim"):
                if f"{name}_{suffix}" in self.body:
                    raise NotImplementedError(f"{name}_{suffix}: pass what is needed of it as a scalar")

    @property
    def attributes(self) -> list[str]:
        """MLX declares those whose names stand somewhere in the body."""
        return [name for name in ATTRIBUTES if name in self.body]

    def parameters(self, inputs: Sequence[mx.array], outputs: Sequence[mx.Dtype]) -> list[tuple[str, str]]:
        """Type and name of what the kernel is called with: pointers, and references to scalars."""
        declared = []
        for name, array in zip(self.input_names, inputs, strict=True):
            space = "constant" if array.size < CONSTANT_BELOW else "device"
            declared.append((f"const {space} {TYPES[array.dtype][0]}{'*' if array.ndim else '&'}", name))
        for name, dtype in zip(self.output_names, outputs, strict=True):
            declared.append((f"device {TYPES[dtype][0]}*", name))
        return declared

    def for_mlx(self, inputs: Sequence[mx.array], outputs: Sequence[mx.Dtype], template: Template) -> str:
        """What MLX compiles for these arguments, but for the suffix that it gives the kernel's name."""
        declared = [
            *(
                f"  {kind} {name} [[buffer({i})]]"
                for i, (kind, name) in enumerate(self.parameters(inputs, outputs))
            ),
            *(f"  {ATTRIBUTES[name]} {name} [[{name}]]" for name in self.attributes),
        ]
        name = f"custom_kernel_{self.name}"
        kinds = ", ".join(f"{_kind(value)} {key}" for key, value in template)
        head = f"template <{kinds}>\n" if template else ""
        text = f"{self.header}{head}[[kernel]] void {name}(\n" + ",\n".join(declared)
        text += f") {{\n{self.body}\n}}\n"
        if template:
            instance = name + _arguments(template)
            text += f'\ntemplate [[host_name("{name}")]] [[kernel]] decltype({instance}) {instance};\n'
        return text

    def for_clang(self, inputs: Sequence[mx.array], outputs: Sequence[mx.Dtype], template: Template) -> str:
        """The same with threadgroup arrays in the runtime's memory, and `emulator_entry` that calls it."""
        body = re.sub(
            r"^(\s*)threadgroup ([\w ]+?) (\w+)((?:\[[^\]]+\])+);",
            r"\1threadgroup auto& \3 = *(threadgroup \2(*)\4)emulator_threadgroup_memory(sizeof(\2\4));",
            self.body,
            flags=re.M,
        )
        text = self.for_mlx(inputs, outputs, template).partition("\ntemplate [[host_name")[0]
        text = re.sub(r"^#include <metal_\w+>$", "", text, flags=re.M)  # metal_shim.h is all of them
        values = []
        for i, (kind, _) in enumerate(self.parameters(inputs, outputs)):
            is_scalar = kind.endswith("&")
            values.append(f"*({kind[:-1]}*)values[{i}]" if is_scalar else f"({kind})values[{i}]")
        values += [f"emulator_position()->{name}" for name in self.attributes]
        call = f"custom_kernel_{self.name}{_arguments(template)}({', '.join(values)})"
        return (
            f'#include "metal_shim.h"\n#line 1 "{self.name}"\n{text.replace(self.body, body)}\n'
            f'extern "C" void emulator_entry(void** values) {{\n  {call};\n}}\n'
        )


def _kind(value: object) -> str:
    return "typename" if isinstance(value, mx.Dtype) else "bool" if isinstance(value, bool) else "int"


def _arguments(template: Template) -> str:
    values = (TYPES[v][0] if isinstance(v, mx.Dtype) else str(int(v)) for _, v in template)
    return f"<{', '.join(values)}>" if template else ""
