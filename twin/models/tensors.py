"""Which part of a model a tensor of a checkpoint belongs to, by its name, and the exact bytes of every part.

Names are those of Hugging Face checkpoints. What a quantised matrix consists of (codes, scales, zeros) lies under the
name of its module and counts with it; norms and biases are `vectors` wherever they lie.
"""

import re
from collections.abc import Iterable
from math import prod
from typing import NamedTuple, get_args

from msgspec.structs import replace

from twin.errors import BadFile
from twin.models.spec import ModelSpec, Part

UNUSED = "unused"
"""What no engine loads: masks, rotary frequencies."""
_TOWERS = {
    "vision": {"vision_tower", "visual", "vision_model", "vision_encoder", "multi_modal_projector", "mm_projector"}
    | {"patch_merger", "embed_vision", "vision_embed_tokens", "vision_embedder", "vision_language_adapter", "vision"}
    | {"img_processor", "image_newline", "img_projection", "aligner", "vit", "mlp1", "resampler", "vpm"}
    | {"vision_backbone", "pre_mm_projector_norm", "vit_large_projector"},
    "audio": {"audio_tower", "audio_model", "embed_audio", "audio_encoder", "speech_encoder", "apm", "audio"}
    | {"talker", "token2wav", "code2wav"},
}
_EMBEDDING = {"embed_tokens", "wte", "wpe", "word_embeddings", "tok_embeddings", "embed_in", "embeddings"}
_EMBEDDING |= {"embed_tokens_per_layer", "embed_positions", "word_embedding", "token_embd", "position_embeddings"}
_HEAD = {"lm_head", "embed_out"}
_HEAD_OUTSIDE = {"output", "output_layer", "ff_out"}  # names that mean the head where no layer has them
_MIXERS = {"self_attn", "attn", "attention", "self_attention", "linear_attn", "mamba"}
_FEED_FORWARD = {"mlp", "feed_forward", "ffn", "moe", "block_sparse_moe", "shared_mlp", "ff", "mixer_mlp"}
_FEED_FORWARD |= {"shared_expert", "shared_experts", "share_expert", "residual_mlp", "feedforward"}
_LOOSE = {"fc1", "fc2", "dense_h_to_4h", "dense_4h_to_h", "gate_proj", "up_proj", "down_proj", "input_linear"}
_LOOSE |= {"output_linear", "ff_proj", "ff_out", "fc1_latent_proj", "fc2_latent_proj"}
_LOOSE |= {"per_layer_input_gate", "per_layer_projection", "per_layer_model_projection"}
_SHARED = {"shared_expert", "shared_experts", "share_expert", "shared_mlp", "shared_expert_gate"}
_FUSED = {"moe", "block_sparse_moe"}  # in which a matrix of three axes is that of all experts
_FREQUENCIES = {"masked_bias", "inv_freq"}
_QUANTISED = {
    "scales", "qzeros", "qweight", "g_idx", "weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale",
    "weight_global_scale", "input_global_scale", "weight_shape", "weight_zero_point", "weight_packed", "weight_g_idx",
    "absmax", "quant_map", "nested_absmax", "nested_quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4", "SCB",
    "suh", "svh", "trellis", "mcg", "mul1", "su", "sv", "q_scale", "q_scale_max", "q_groups", "q_perm", "q_invperm",
    "q_weight", "weight_format", "k_scale", "v_scale", "scale", "activation_scale",
}  # fmt: skip
"""Last names of what a quantised matrix consists of: never norms, though some have one axis."""
_MTP = {"mtp", "eh_proj", "enorm", "hnorm", "mtp_block", "mtp_layers"}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,5})\.")


class Stored(NamedTuple):
    """A tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    size_bytes: int


def part_of(name: str, axes: int, layers: int) -> Part | str:
    """The part, the tower (vision, audio, mtp) or UNUSED, of a tensor of a model with so many layers."""
    names = name.split(".")
    words, last, numbered = set(names), names[-1], _LAYER.search(name)
    single = axes <= 1 and (last not in _QUANTISED or "router" in words)
    rules: tuple[tuple[Part | str, bool], ...] = (
        *((tower, bool(words & own)) for tower, own in _TOWERS.items()),
        ("mtp", bool(words & _MTP) or (numbered is not None and int(numbered[1]) >= layers)),
        (UNUSED, last in _FREQUENCIES or (last == "bias" and axes == 4)),
        ("vectors", last == "bias" or last.endswith("_bias") or single),
        ("embedding", bool(words & _EMBEDDING)),
        ("head", bool(words & _HEAD) or (numbered is None and bool(words & _HEAD_OUTSIDE))),
        ("attention", bool(words & _MIXERS)),
        ("experts", "experts" in words or (axes >= 3 and bool(words & _FUSED))),
        ("feed_forward", bool(words & _SHARED)),
        ("router", "router" in words or ("gate" in words and bool(words & {*_FEED_FORWARD, "mixer"}))),
        ("feed_forward", bool(words & (_FEED_FORWARD | _LOOSE))),
    )
    return next((part for part, holds in rules if holds), "attention")


def with_bytes(spec: ModelSpec, tensors: Iterable[Stored], where: str) -> ModelSpec:
    """The model with the exact bytes of every part of its checkpoint. Raises BadFile for tensors of another model.

    A tied head may be stored beside the embedding, or instead of it: engines keep one of them.
    """
    sizes: dict[str, int] = {}
    elements: dict[str, int] = {}
    for tensor in tensors:
        part = part_of(tensor.name, len(tensor.shape), spec.layers)
        sizes[part] = sizes.get(part, 0) + tensor.size_bytes
        elements[part] = elements.get(part, 0) + prod(tensor.shape)
    if spec.tied and "head" in sizes:
        kept = UNUSED if "embedding" in sizes else "embedding"
        sizes[kept] = sizes.get(kept, 0) + sizes.pop("head")
    if not spec.parameters.get("router") and "router" in sizes:
        sizes["feed_forward"] = sizes.get("feed_forward", 0) + sizes.pop("router")
    _check(spec, sizes, where)
    known = {part: sizes.pop(part) for part in get_args(Part) if part in sizes}
    towers = {tower: elements[tower] for tower in sizes if tower != UNUSED} | spec.towers
    return replace(spec, towers=towers, weights=replace(spec.weights, part_bytes=known, beside_bytes=sizes))


def _check(spec: ModelSpec, sizes: dict[str, int], where: str) -> None:
    """Raise BadFile where a part has no tensors, or a size that no type could give it."""
    for part, count in spec.parameters.items():
        said = part.replace("_", " ")
        if count and part != "vectors" and not sizes.get(part):
            raise BadFile(f"{where}: no tensor of the {said} of {spec.name} is among them")
        if count and part not in {"vectors", "router"} and not _FEWEST <= 8 * sizes[part] / count <= _MOST:
            raise BadFile(
                f"{where}: tensors of the {said} have {sizes[part]:,} bytes, and config.json gives it {count:,.0f} "
                "parameters: they contradict"
            )


_FEWEST, _MOST = 0.5, 66.0
"""Bits of a parameter, scales and padding included."""
