"""Which part of a model a tensor of a checkpoint belongs to, by its name, and the exact bytes of every part.

Names are those of Hugging Face checkpoints. What a quantised matrix consists of (codes, scales, zeros) lies under the
name of its module and counts with it; norms and biases are `vectors` wherever they lie.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple, get_args

from msgspec.structs import replace

from twin.errors import BadFile
from twin.models.spec import ModelSpec, Part

_TOWERS = {
    "vision": {"vision_tower", "visual", "vision_model", "vision_encoder", "multi_modal_projector", "mm_projector"}
    | {"patch_merger", "embed_vision", "vision_embed_tokens", "vision_embedder", "vision_language_adapter"}
    | {"img_processor", "image_newline", "img_projection", "aligner", "vit", "mlp1", "resampler", "vpm"},
    "audio": {"audio_tower", "audio_model", "embed_audio", "audio_encoder", "speech_encoder", "apm"},
}
_EMBEDDING = {"embed_tokens", "wte", "wpe", "word_embeddings", "tok_embeddings", "embed_in", "embeddings"}
_EMBEDDING |= {"embed_tokens_per_layer", "embed_positions", "word_embedding", "token_embd", "position_embeddings"}
_HEAD = {"lm_head", "embed_out"}
_FEED_FORWARD = {"mlp", "feed_forward", "ffn", "moe", "block_sparse_moe", "shared_mlp", "ff", "mixer_mlp"}
_FEED_FORWARD |= {"shared_expert", "shared_experts", "fc1", "fc2", "dense_h_to_4h", "dense_4h_to_h", "feedforward"}
_FEED_FORWARD |= {"gate_proj", "up_proj", "down_proj", "input_linear", "output_linear"}
_SHARED = {"shared_expert", "shared_experts", "shared_mlp", "shared_expert_gate"}
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
    axes: int
    size_bytes: int


def part_of(tensor: Stored, layers: int) -> Part | str:
    """The part, or the tower (vision, audio, mtp), of a tensor of a model with so many layers."""
    names = tensor.name.split(".")
    words, last, numbered = set(names), names[-1], _LAYER.search(tensor.name)
    rules: tuple[tuple[Part | str, bool], ...] = (
        *((tower, bool(words & own)) for tower, own in _TOWERS.items()),
        ("mtp", bool(words & _MTP) or (numbered is not None and int(numbered[1]) >= layers)),
        ("embedding", bool(words & _EMBEDDING)),
        ("head", bool(words & _HEAD) or names == ["output", "weight"]),
        ("vectors", last == "bias" or last.endswith("_bias") or (tensor.axes <= 1 and last not in _QUANTISED)),
        ("experts", "experts" in words),
        ("feed_forward", bool(words & _SHARED)),
        ("router", bool(words & {"gate", "router"}) and bool(words & _FEED_FORWARD)),
        ("feed_forward", bool(words & _FEED_FORWARD)),
    )
    return next((part for part, holds in rules if holds), "attention")


def with_bytes(spec: ModelSpec, tensors: Iterable[Stored], where: str) -> ModelSpec:
    """The model with the exact bytes of every part of its checkpoint. Raises BadFile for tensors of another model.

    A tied head may be stored beside the embedding: engines drop it.
    """
    sizes: dict[str, int] = {}
    for tensor in tensors:
        part = part_of(tensor, spec.layers)
        sizes[part] = sizes.get(part, 0) + tensor.size_bytes
    lacking = [part for part, count in spec.parameters.items() if count and part != "vectors" and not sizes.get(part)]
    if lacking:
        raise BadFile(f"{where}: no tensor of the {lacking[0].replace('_', ' ')} of {spec.name} is among them")
    known = {part: sizes[part] for part in get_args(Part) if part in sizes and not (part == "head" and spec.tied)}
    if not spec.parameters.get("router") and "router" in known:
        known["feed_forward"] = known.get("feed_forward", 0) + known.pop("router")
    return replace(spec, weights=replace(spec.weights, part_bytes=known))
