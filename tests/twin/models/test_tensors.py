"""Every tensor of a checkpoint belongs to one part of the model or to what lies beside it, by its published name."""

import pytest

from tests.twin.models.checkpoints import CHECKPOINTS, PLAIN
from twin.errors import BadFile
from twin.models.config import read_config
from twin.models.tensors import Stored, part_of, with_bytes

FOREIGN = {
    # name: (axes, part), of kinds that are not among the checkpoints
    "model.layers.3.block_sparse_moe.experts.7.w1.weight": (2, "experts"),
    "model.layers.3.block_sparse_moe.gate.weight": (2, "router"),
    "model.layers.3.block_sparse_moe.e_score_correction_bias": (1, "vectors"),
    "model.layers.3.moe.down_proj.weight": (3, "experts"),
    "model.layers.3.moe.gate.weight": (2, "router"),
    "model.layers.3.moe.router_bias": (1, "vectors"),
    "model.layers.3.share_expert.up_proj.weight": (2, "feed_forward"),
    "model.language_model.layers.3.router.proj.weight": (2, "router"),
    "model.language_model.layers.3.router.scale": (1, "vectors"),
    "model.language_model.layers.3.per_layer_input_gate.weight": (2, "feed_forward"),
    "model.layers.3.mlp.gate.wg.weight": (2, "router"),
    "model.layers.3.self_attn.gate_proj.weight": (2, "attention"),
    "model.layers.3.self_attn.indexer.wq_b.weight": (2, "attention"),
    "model.layers.3.self_attn.k_proj.k_scale": (0, "attention"),
    "model.layers.3.mamba.in_proj.weight": (2, "attention"),
    "model.layers.3.conv.conv.weight": (3, "attention"),
    "transformer.blocks.3.ffn.experts.mlp.w1": (2, "experts"),
    "transformer.blocks.3.ffn.router.layer.weight": (2, "router"),
    "transformer.blocks.3.ff_proj.weight": (2, "feed_forward"),
    "transformer.blocks.3.ff_out.weight": (2, "feed_forward"),
    "transformer.ff_out.weight": (2, "head"),
    "transformer.encoder.layers.3.mlp.dense_h_to_4h.weight": (2, "feed_forward"),
    "transformer.output_layer.weight": (2, "head"),
    "transformer.rotary_pos_emb.inv_freq": (1, "unused"),
    "model.layers.3.self_attn.rotary_emb.inv_freq": (1, "unused"),
    "output.weight": (2, "head"),
    "lm_head.bias": (1, "vectors"),
    "lm_head.weight.absmax": (1, "head"),
    "word_embeddings_layernorm.weight": (1, "vectors"),
    "model.layers.9.shared_head.head.weight": (2, "mtp"),
    "model.mtp_layers.0.input_proj.weight": (2, "mtp"),
    "model.vision_backbone.image_vit.transformer.resblocks.3.feed_forward.w1.weight": (2, "vision"),
    "vit_large_projector.weight": (2, "vision"),
    "audio_tower.layers.3.self_attn.q_proj.weight": (2, "audio"),
    "talker.model.layers.3.mlp.up_proj.weight": (2, "audio"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_tensor_belongs_to_a_part_by_its_name(name: str) -> None:
    axes, part = FOREIGN[name]
    assert part_of(name, axes, layers=9) == part


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_each_tensor_of_a_checkpoint_belongs_to_its_part(case: str) -> None:
    kept = CHECKPOINTS[case]
    layers = read_config(kept.config, "config.json", name="toy").spec.layers
    for part, tensors in kept.parts.items():
        for name, (_, shape) in tensors.items():
            if not name.startswith("lm_head"):  # of a tied model, which the name does not say
                assert part_of(name, len(shape), layers) == part, name


SPEC = read_config(PLAIN.config, "config.json", name="toy").spec


def test_tensors_of_another_model_are_refused_by_the_part_that_is_missing_or_has_another_size() -> None:
    def stored(part: str, size_bytes: int) -> list[Stored]:
        tensors = PLAIN.parts[part]
        return [Stored(name, tuple(shape), size_bytes // len(tensors)) for name, (_, shape) in tensors.items()]

    rest = [tensor for part in PLAIN.parts if part != "attention" for tensor in stored(part, 20_000)]
    with pytest.raises(BadFile, match=r"^here: no tensor of the attention of toy is among them$"):
        with_bytes(SPEC, rest, "here")
    for size_bytes in (800, 800_000):
        with pytest.raises(
            BadFile, match=rf"^here: tensors of the attention have {size_bytes:,} bytes, .* contradict$"
        ):
            with_bytes(SPEC, stored("attention", size_bytes) + rest, "here")
    assert with_bytes(SPEC, stored("attention", 80_000) + rest, "here").weight_bytes["attention"] == 80_000
