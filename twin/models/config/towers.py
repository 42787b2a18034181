"""Towers of multimodal models for images and sound: their parameters, with what joins them to the language model.

Sources: the modeling files of transformers 5.24, by the names of the classes. A tower that is not known is not counted,
and its table is named among what was ignored.
"""

from collections.abc import Callable

from twin.models.config.blocks import HEADS, LAYERS, WIDTH
from twin.models.fields import Fields


def towers_of(outer: Fields, hidden: int) -> dict[str, int]:
    """Parameters of the towers that the table of the whole model describes, beside a language model so wide.

    Raises BadFile where a known tower lacks a size.
    """
    names = [*outer.texts("architectures", default=[])[:1], outer.text("model_type", default="")]
    counts = {}
    for tower, known in (("vision", _VISION), ("audio", _AUDIO)):
        read = next((known[name] for name in names if name in known), None)
        table = outer.table(f"{tower}_config") if read is not None else None
        if read is None or table is None or not table.raw:
            continue
        counts[tower] = read(table, outer, hidden)
        table.rest_without_effect()
    return counts


Tower = Callable[[Fields, Fields, int], int]
"""From the tower's table, that of the whole model and the language model's width to the tower's parameters."""


def _size(fields: Fields, *keys: str, default: int | None = None) -> int:
    return fields.integer(*keys, default=default, high=WIDTH)


def _depth(fields: Fields, *keys: str) -> int:
    return fields.integer(*(keys or ("num_hidden_layers", "depth")), high=LAYERS)


def _norm(width: int) -> int:
    """A layer norm: scales and biases."""
    return 2 * width


def _linear(inputs: int, outputs: int) -> int:
    """A matrix with biases."""
    return inputs * outputs + outputs


def _block(width: int, intermediate: int) -> int:
    """Two norms, attention of four matrices and a feed-forward of two, all with biases."""
    feed = _linear(width, intermediate) + _linear(intermediate, width)
    return 2 * _norm(width) + 4 * _linear(width, width) + feed


def _patch(fields: Fields) -> int:
    """Numbers of one patch of an image, or of frames one after the other."""
    side, channels = _size(fields, "patch_size"), _size(fields, "in_channels", "num_channels", "in_chans", default=3)
    return channels * side**2 * _size(fields, "temporal_patch_size", default=1)


def _siglip(fields: Fields, outer: Fields, hidden: int) -> int:
    """SigLIP as in Gemma 3: joined by one matrix behind an RMS norm."""
    width, intermediate = _size(fields, "hidden_size"), _size(fields, "intermediate_size")
    fields.only("vision_use_head", expected=False)
    positions = (_size(fields, "image_size") // _size(fields, "patch_size")) ** 2
    outer.without_effect("mm_tokens_per_image")
    embedding = _linear(_patch(fields), width) + positions * width
    return embedding + _depth(fields) * _block(width, intermediate) + _norm(width) + width * hidden + width


def _qwen3_vl(fields: Fields, outer: Fields, hidden: int) -> int:
    """Qwen3-VL and Qwen3.5: blocks of patches are merged by two matrices, for some layers again."""
    del outer, hidden
    width, intermediate = _size(fields, "hidden_size"), _size(fields, "intermediate_size")
    merged = width * _size(fields, "spatial_merge_size") ** 2
    joined = _linear(merged, merged) + _linear(merged, _size(fields, "out_hidden_size"))
    again = len(fields.integers("deepstack_visual_indexes", default=[]))
    embedding = _linear(_patch(fields), width) + _size(fields, "num_position_embeddings") * width
    blocks = _depth(fields) * _block(width, intermediate)
    return embedding + blocks + _norm(width) + joined + again * (_norm(merged) + joined)


def _qwen2_5_vl(fields: Fields, outer: Fields, hidden: int) -> int:
    """Qwen2.5-VL: RMS norms and gated feed-forwards."""
    del outer, hidden
    width, intermediate = _size(fields, "hidden_size"), _size(fields, "intermediate_size")
    merged = width * _size(fields, "spatial_merge_size") ** 2
    gated = 2 * _linear(width, intermediate) + _linear(intermediate, width)
    block = 2 * width + 4 * _linear(width, width) + gated
    joined = width + _linear(merged, merged) + _linear(merged, _size(fields, "out_hidden_size"))
    return _patch(fields) * width + _depth(fields) * block + joined


def _qwen2_vl(fields: Fields, outer: Fields, hidden: int) -> int:
    """Qwen2-VL: `hidden_size` is the language model's width, `embed_dim` the tower's."""
    del outer, hidden
    width = _size(fields, "embed_dim")
    merged = width * _size(fields, "spatial_merge_size", default=2) ** 2
    blocks = _depth(fields) * _block(width, width * _size(fields, "mlp_ratio", default=4))
    joined = _norm(width) + _linear(merged, merged) + _linear(merged, _size(fields, "hidden_size"))
    return _patch(fields) * width + blocks + joined


def _pixtral(fields: Fields, outer: Fields, hidden: int) -> int:
    """Pixtral as in Mistral 3: no biases, joined by a merger of patches and two matrices."""
    width, intermediate = _size(fields, "hidden_size"), _size(fields, "intermediate_size")
    if not isinstance(outer.raw.get("vision_feature_layer", -1), int):
        raise outer.wrong("vision_feature_layer", "names several layers, which is not known of this architecture")
    outer.without_effect("vision_feature_layer", "projector_hidden_act")
    heads = fields.integer("num_attention_heads", high=HEADS) * _size(fields, "head_dim", default=0) or width
    block = 2 * width + 4 * width * heads + 3 * width * intermediate
    merged = width * _size(outer, "spatial_merge_size", default=2) ** 2
    biases = 2 * hidden if outer.flag("multimodal_projector_bias", default=False) else 0
    joined = width + merged * width + width * hidden + hidden**2 + biases
    return _patch(fields) * width + width + _depth(fields) * block + joined


def _llama4(fields: Fields, outer: Fields, hidden: int) -> int:
    """Llama 4: a token for the whole image, an adapter of two matrices and one more to the language model."""
    del outer
    width, intermediate = _size(fields, "hidden_size"), _size(fields, "intermediate_size")
    positions = (_size(fields, "image_size") // _size(fields, "patch_size")) ** 2 + 1
    embedding = width + positions * width + _patch(fields) * width + 2 * _norm(width)
    inside, outside = _size(fields, "projector_input_dim"), _size(fields, "projector_output_dim")
    adapter = intermediate * inside + outside**2
    return (
        embedding + _depth(fields) * _block(width, intermediate) + adapter + _size(fields, "vision_output_dim") * hidden
    )


def _kimi(fields: Fields, outer: Fields, hidden: int) -> int:
    """MoonViT as in Kimi K2.5: learned positions of a grid, joined by two matrices behind a norm."""
    outer.without_effect("media_placeholder_token_id", "use_unified_vision_chunk", "video_placeholder", "ignore_index")
    width, intermediate = _size(fields, "vt_hidden_size"), _size(fields, "vt_intermediate_size")
    grid = _size(fields, "init_pos_emb_height") * _size(fields, "init_pos_emb_width")
    rows, columns = (*fields.integers("merge_kernel_size", low=1, high=64), 1)[:2]
    merged = width * rows * columns
    embedding = _linear(_patch(fields), width) + grid * width
    joined = _norm(_size(fields, "mm_hidden_size")) + _linear(merged, merged) + _linear(merged, hidden)
    return embedding + _depth(fields, "vt_num_hidden_layers") * _block(width, intermediate) + _norm(width) + joined


def _gemma4(fields: Fields, outer: Fields, hidden: int) -> int:
    """Gemma 4: positions of rows and columns, gated feed-forwards, four norms a layer."""
    outer.without_effect("vision_soft_tokens_per_image")
    width, intermediate = _size(fields, "hidden_size"), _size(fields, "intermediate_size")
    heads, head = fields.integer("num_attention_heads", high=HEADS), _size(fields, "head_dim")
    kv_heads = fields.integer("num_key_value_heads", default=heads, high=HEADS)
    attention = 2 * width * head * (heads + kv_heads) + 2 * head
    block = attention + 3 * width * intermediate + 4 * width
    positions = 2 * _size(fields, "position_embedding_size") * width
    return positions + _patch(fields) * width + _depth(fields) * block + width * hidden


MEL_BANDS = 128
"""Bands of the spectrogram that Gemma 4's audio tower reads; two convolutions halve them twice."""


def _gemma4_audio(fields: Fields, outer: Fields, hidden: int) -> int:
    """Gemma 4: convolutions, and layers of two feed-forwards around attention and a convolution."""
    outer.without_effect("audio_soft_tokens_per_image")
    width, heads = _size(fields, "hidden_size"), fields.integer("num_attention_heads", high=HEADS)
    first, second = (*fields.integers("subsampling_conv_channels", default=[128, 32], low=1, high=WIDTH), 0)[:2]
    convolved = 9 * first + first + 9 * first * second + second + second * (MEL_BANDS // 4) * width
    feeds = 2 * (2 * width * 4 * width + 2 * width)
    attention = 5 * width**2 + width // heads
    convolution = 3 * width**2 + width * _size(fields, "conv_kernel_size", default=5) + 2 * width
    block = feeds + attention + convolution + 3 * width
    outside = _size(fields, "output_proj_dims", default=1536)
    return convolved + _depth(fields) * block + _linear(width, outside) + outside * hidden


MOBILENET_V5 = {"mobilenetv5_300m_enc": 294_126_912}
"""Parameters of the encoders that Gemma 3n names: what the published totals of E2B and of E4B leave for them."""


def _gemma3n(fields: Fields, outer: Fields, hidden: int) -> int:
    """Gemma 3n: a convolutional encoder by its name, and what joins it to the language model."""
    outer.without_effect("vision_soft_tokens_per_image")
    name = fields.text("architecture", default="mobilenetv5_300m_enc")
    if name not in MOBILENET_V5:
        raise fields.unknown("architecture", name, MOBILENET_V5)
    return MOBILENET_V5[name] + _gemma3n_joined(fields, hidden, default=2048)


def _gemma3n_joined(fields: Fields, hidden: int, default: int) -> int:
    """Embeddings of the tower's own tokens, two norms and a matrix."""
    width = _size(fields, "hidden_size", default=default)
    return _size(fields, "vocab_size", default=128) * width + 2 * width + width * hidden


def _gemma3n_audio(fields: Fields, outer: Fields, hidden: int) -> int:
    """Gemma 3n: as Gemma 4's, with a scale a channel of a head and a norm in each feed-forward; convolutions' norms."""
    outer.without_effect("audio_soft_tokens_per_image")
    width, heads = _size(fields, "hidden_size", default=1536), fields.integer("conf_num_attention_heads", default=8)
    first, second = (*fields.integers("sscp_conv_channel_size", default=[128, 32], low=1, high=WIDTH), 0)[:2]
    bands = _size(fields, "input_feat_size", default=MEL_BANDS)
    convolved = 9 * first + first + 9 * first * second + second + second * (bands // 4) * width
    feeds = 2 * (2 * width * 4 * width + 2 * width)
    attention = 5 * width**2 + width // heads + 2 * width
    convolution = 3 * width**2 + width * _size(fields, "conf_conv_kernel_size", default=5) + 2 * width
    block = feeds + attention + convolution + width
    layers = fields.integer("conf_num_hidden_layers", default=12, high=LAYERS)
    return convolved + layers * block + _gemma3n_joined(fields, hidden, default=1536)


_VISION: dict[str, Tower] = {
    "Gemma3nForConditionalGeneration": _gemma3n,
    "gemma3n": _gemma3n,
    "Gemma3ForConditionalGeneration": _siglip,
    "gemma3": _siglip,
    "Gemma4ForConditionalGeneration": _gemma4,
    "gemma4": _gemma4,
    "KimiK25ForConditionalGeneration": _kimi,
    "Llama4ForConditionalGeneration": _llama4,
    "llama4": _llama4,
    "Mistral3ForConditionalGeneration": _pixtral,
    "mistral3": _pixtral,
    "Qwen2VLForConditionalGeneration": _qwen2_vl,
    "qwen2_vl": _qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": _qwen2_5_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "Qwen3VLForConditionalGeneration": _qwen3_vl,
    "qwen3_vl": _qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "Qwen3_5ForConditionalGeneration": _qwen3_vl,
    "qwen3_5": _qwen3_vl,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_vl,
    "qwen3_5_moe": _qwen3_vl,
    "Qwen4ExpForConditionalGeneration": _qwen3_vl,
    "qwen4_exp": _qwen3_vl,
}

_AUDIO: dict[str, Tower] = {
    "Gemma3nForConditionalGeneration": _gemma3n_audio,
    "gemma3n": _gemma3n_audio,
    "Gemma4ForConditionalGeneration": _gemma4_audio,
    "gemma4": _gemma4_audio,
}
