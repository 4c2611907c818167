"""What a drafter's config.json means, validated.

Knows nothing of MLX. `DrafterConfig.from_dict` reads both public generations of DFlash configs
(reference: the released configs of the z-lab and incoai collections) and names what it rejects.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dflash_mlx.errors import ConfigError

FULL = "full_attention"
SLIDING = "sliding_attention"
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of base `theta`; `scaling` holds a scaled kind's parameters by mlx-lm's names."""

    theta: float
    kind: str = "default"
    scaling: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Quantization:
    """Affine quantization of a drafter's linear layers."""

    bits: int
    group_size: int = 64


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash or DFlash 2 drafter, as understood.

    Attributes:
        block_size: rows of a block, the anchor included; the drafter proposes `block_size - 1` tokens.
        target_layer_ids: target layers whose outputs condition the drafter, each in `[0, num_target_layers)`.
        layer_types: per layer, `full_attention` or `sliding_attention` (`sliding_window` rows of context).
        is_causal: per layer, whether block rows see only block rows before them.
        conv_kernel_size: taps of the dynamic convolution; 0 for the first generation, which has none.
        selector_rank: width of the candidate selector's codebooks; 0 for the first generation.
        draft_head_size: how many token ids the drafter proposes from, listed in its checkpoint; 0: all.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    rope: Rope
    layer_types: tuple[str, ...]
    is_causal: tuple[bool, ...]
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    sliding_window: int | None = None
    attention_bias: bool = False
    final_logit_softcapping: float | None = None
    output_multiplier: float = 1.0
    input_embedding_scale: float = 1.0
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    draft_head_size: int = 0
    quantization: Quantization | None = None

    @property
    def generation(self) -> int:
        """2 with dynamic convolutions and a candidate selector, else 1."""
        return 2 if self.selector_rank else 1

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "DrafterConfig":
        """Read a config.json.

        Raises:
            ConfigError: naming the key, its value, and what to do.
        """
        return _Reader(raw).read()


class _Reader:
    """One reading of one config: where each field may be, and what it must satisfy."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.nested = self._mapping("dflash_config")
        self.architectures = self._list("architectures")

    def read(self) -> DrafterConfig:
        self._check_format()
        hidden = self._positive("hidden_size")
        layers = self._positive("num_hidden_layers")
        heads = self._positive("num_attention_heads")
        kv_heads = self._positive("num_key_value_heads")
        if heads % kv_heads:
            raise _bad("num_key_value_heads", kv_heads, f"it must divide num_attention_heads ({heads})")
        if "head_dim" not in self.raw and hidden % heads:
            raise _bad(
                "head_dim",
                None,
                f"hidden_size {hidden} is not a multiple of {heads} heads, so state it",
            )
        vocab = self._positive("vocab_size")
        num_target_layers = self._positive("num_target_layers")
        layer_types = self._layer_types(layers)
        conv_kernel, conv_group, rank, top_k = self._second_generation(hidden, vocab)
        return DrafterConfig(
            hidden_size=hidden,
            intermediate_size=self._positive("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=self._positive("head_dim", hidden // heads),
            vocab_size=vocab,
            block_size=self._block_size(),
            mask_token_id=self._mask_token_id(vocab),
            target_layer_ids=self._target_layer_ids(num_target_layers),
            num_target_layers=num_target_layers,
            rope=self._rope(),
            layer_types=layer_types,
            is_causal=self._is_causal(layer_types),
            rms_norm_eps=self._number("rms_norm_eps", 1e-6),
            max_position_embeddings=self._positive("max_position_embeddings", 32768),
            sliding_window=self._sliding_window(layer_types),
            attention_bias=self._boolean("attention_bias"),
            final_logit_softcapping=self._softcap(),
            output_multiplier=self._number("output_multiplier", 1.0, self.nested),
            input_embedding_scale=self._number("input_embedding_scale", 1.0, self.nested),
            conv_kernel_size=conv_kernel,
            conv_group_size=conv_group,
            selector_rank=rank,
            selector_top_k=top_k,
            draft_head_size=self._draft_head_size(vocab, top_k),
            quantization=self._quantization(),
        )

    # --- the format ---------------------------------------------------------------------------

    def _check_format(self) -> None:
        known = any(name in ("DFlashDraftModel", "DFlash2DraftModel") for name in self.architectures)
        if not known and not self.nested and "aux_hidden_state_layer_ids" not in self.raw:
            raise _bad(
                "architectures",
                list(self.architectures),
                "this is not a DFlash drafter (expected DFlash2DraftModel or DFlashDraftModel); "
                "check that the drafter and the target were not swapped",
            )

    def _second_generation(self, hidden: int, vocab: int) -> tuple[int, int, int, int]:
        keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
        if "DFlash2DraftModel" not in self.architectures and not any(k in self.nested for k in keys):
            return 0, 0, 0, 0
        kernel, group, rank, top_k = (self._positive(k, source=self.nested) for k in keys)
        if hidden % group:
            raise _bad("dflash_config.conv_group_size", group, f"it must divide hidden_size ({hidden})")
        if top_k > vocab:
            raise _bad("dflash_config.selector_top_k", top_k, f"it exceeds vocab_size ({vocab})")
        return kernel, group, rank, top_k

    def _draft_head_size(self, vocab: int, top_k: int) -> int:
        key = "draft_head_size"
        if key not in self.nested:
            return 0
        size = self._positive(key, source=self.nested)
        if not max(top_k, 1) <= size <= vocab:
            raise _bad(
                f"dflash_config.{key}", size, f"it must lie between selector_top_k ({top_k}) and {vocab}"
            )
        return size

    # --- the block ----------------------------------------------------------------------------

    def _block_size(self) -> int:
        """Nested, else top level, else 16: the default of the first generation's configs."""
        source = self.nested if "block_size" in self.nested else self.raw
        size = self._positive("block_size", 16, source)
        if size < 2:
            raise _bad("block_size", size, "a block is the anchor and at least one draft token")
        return size

    def _mask_token_id(self, vocab: int) -> int:
        mask = self._either("mask_token_id")
        if not _is_int(mask):
            raise _bad(
                "dflash_config.mask_token_id",
                mask,
                "the id that the drafter was trained with is required; it cannot be guessed from pad or eos",
            )
        if not 0 <= mask < vocab:
            raise _bad("dflash_config.mask_token_id", mask, f"it must lie in [0, vocab_size = {vocab})")
        return int(mask)

    def _target_layer_ids(self, layers: int) -> tuple[int, ...]:
        ids = self._either("target_layer_ids", "aux_hidden_state_layer_ids")
        if not isinstance(ids, list | tuple) or not ids or not all(_is_int(i) for i in ids):
            raise _bad(
                "dflash_config.target_layer_ids",
                ids,
                "the list of tapped target layers is required; it differs between drafters",
            )
        resolved = tuple(i + layers if i < 0 else i for i in ids)
        if not all(0 <= i < layers for i in resolved):
            raise _bad(
                "dflash_config.target_layer_ids",
                list(ids),
                f"each must lie in [0, {layers}), or count from the end",
            )
        return resolved

    # --- attention ----------------------------------------------------------------------------

    def _layer_types(self, layers: int) -> tuple[str, ...]:
        types = self._list("layer_types") or (FULL,) * layers
        if unknown := [t for t in types if t not in (FULL, SLIDING)]:
            raise _bad("layer_types", unknown, f"known types are {FULL} and {SLIDING}")
        if len(types) != layers:
            raise _bad(
                "layer_types",
                f"{len(types)} entries",
                f"there must be one for each of the {layers} layers",
            )
        return types

    def _sliding_window(self, layer_types: tuple[str, ...]) -> int | None:
        if SLIDING not in layer_types:
            return None
        return self._positive("sliding_window")

    def _is_causal(self, layer_types: tuple[str, ...]) -> tuple[bool, ...]:
        """An explicit flag wins; else sliding layers are causal inside the block and full layers are not."""
        flag = self._either("is_causal", "causal")
        if flag is None:
            return tuple(t == SLIDING for t in layer_types)
        if not isinstance(flag, bool):
            raise _bad("is_causal", flag, "it must be true or false")
        return (flag,) * len(layer_types)

    def _rope(self) -> Rope:
        entry = {**self._mapping("rope_scaling"), **self._mapping("rope_parameters")}
        if FULL in entry or SLIDING in entry:
            raise _bad("rope_parameters", entry, "a rope of its own for each layer type is not supported")
        kind = entry.pop("rope_type", None) or entry.pop("type", None) or "default"
        entry.pop("type", None)
        if kind not in ROPE_KINDS:
            raise _bad("rope_type", kind, f"known types are {', '.join(ROPE_KINDS)}")
        nested_theta = entry.pop("rope_theta", 10000.0)
        theta = self.raw.get("rope_theta", nested_theta)
        if not _is_number(theta) or theta <= 0:
            raise _bad("rope_theta", theta, "it must be a positive number")
        if kind == "default":
            return Rope(float(theta))
        factor: Any = entry.get("factor")
        if not _is_number(factor) or factor <= 0:
            raise _bad("rope_scaling.factor", factor, f"a {kind} rope needs a positive number here")
        scaling = {k: v for k, v in entry.items() if _is_number(v)}
        return Rope(float(theta), kind, tuple(sorted(scaling.items())))

    # --- the rest -----------------------------------------------------------------------------

    def _softcap(self) -> float | None:
        key = "final_logit_softcapping"
        cap = self._either(key)
        if cap is None or cap == 0:
            return None
        if not _is_number(cap) or cap < 0:
            raise _bad(key, cap, "it must be a positive number, or absent")
        return float(cap)

    def _quantization(self) -> Quantization | None:
        # MLX writes its own entry under both names; another library's names its method.
        if method := self._mapping("quantization_config").get("quant_method"):
            raise _bad(
                "quantization_config.quant_method",
                method,
                "only MLX's affine quantization is supported; use the drafter's bfloat16 folder",
            )
        entry = self.raw.get("quantization")
        if entry is None:
            return None
        if not isinstance(entry, Mapping) or entry.get("mode", "affine") != "affine":
            raise _bad("quantization", entry, "only MLX's affine quantization is supported")
        bits, group = entry.get("bits"), entry.get("group_size", 64)
        if not (_is_int(bits) and bits in (4, 8) and _is_int(group) and group in (32, 64, 128)):
            raise _bad("quantization", dict(entry), "bits must be 4 or 8 and group_size 32, 64 or 128")
        return Quantization(bits, group)

    # --- reading ------------------------------------------------------------------------------

    def _either(self, *keys: str) -> Any:
        """The first of `keys` that is set, nested before top level."""
        return next((s[k] for k in keys for s in (self.nested, self.raw) if s.get(k) is not None), None)

    def _mapping(self, key: str) -> Mapping[str, Any]:
        value = self.raw.get(key)
        if not isinstance(value, Mapping | None):
            raise _bad(key, value, "it must be an object")
        return value or {}

    def _list(self, key: str) -> tuple[Any, ...]:
        value = self.raw.get(key)
        if not isinstance(value, list | tuple | None):
            raise _bad(key, value, "it must be a list")
        return tuple(value or ())

    def _boolean(self, key: str) -> bool:
        value = self.raw.get(key)
        if not isinstance(value, bool | None):
            raise _bad(key, value, "it must be true or false")
        return bool(value)

    def _positive(self, key: str, default: int | None = None, source: Mapping[str, Any] | None = None) -> int:
        value = (self.raw if source is None else source).get(key, default)
        where = f"dflash_config.{key}" if source is self.nested else key
        if value is None:
            raise _bad(where, None, "it is required; is the config complete?")
        if not _is_int(value) or value < 1:
            raise _bad(where, value, "it must be a positive integer")
        return int(value)

    def _number(self, key: str, default: float, source: Mapping[str, Any] | None = None) -> float:
        value = (self.raw if source is None else source).get(key, default)
        if not _is_number(value) or value <= 0:
            raise _bad(key, value, "it must be a positive number")
        return float(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _bad(key: str, value: object, remedy: str) -> ConfigError:
    found = "is missing" if value is None else f"is {value!r}"
    return ConfigError(f"drafter config: {key} {found}: {remedy}")
