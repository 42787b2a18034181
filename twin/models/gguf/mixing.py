"""The mixers of a layer, from the matrices that it has and the heads and states that the metadata name.

Dimensions as in `src/models/` of github.com/ggml-org/llama.cpp, from which also follows which mixer a layer has.
"""

from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from twin.models.fields import Fields
from twin.models.gguf.blocks import Block
from twin.models.gguf.header import Tensor
from twin.models.gguf.windows import Windows
from twin.models.mixers import (
    Attention,
    GatedDeltaNet,
    Indexer,
    KimiDelta,
    LatentAttention,
    LightningAttention,
    Mamba,
    Mamba2,
    Mixer,
    ShortConvolution,
)

M = TypeVar("M", bound=Mixer)

_QKV = ("attn_q", "attn_k", "attn_v", "attn_qkv")
_HEADS, _KV_HEADS = "attention.head_count", "attention.head_count_kv"
_KERNEL = "ssm.conv_kernel"
_GEMMA_3N_OWN_KV = 20
"""Layers of Gemma 3n, from the first on, that have a cache of their own; its files do not say it."""


class Reading:
    """What all layers of a model have in common; `fields` are the keys of its architecture."""

    def __init__(self, architecture: str, fields: Fields, hidden: int, layers: int, windows: Windows) -> None:
        self.architecture, self.fields, self.hidden, self.windows = architecture, fields, hidden, windows
        own = _GEMMA_3N_OWN_KV if architecture == "gemma3n" else layers
        shared = fields.integer("attention.shared_kv_layers", default=max(0, layers - own), low=0, high=layers - 1)
        self.own_kv = layers - shared
        self.indexer_seen = False

    def mixers(self, block: Block) -> tuple[Mixer, ...]:
        """The mixers of a layer, whose matrices and vectors they take. Raises BadFile."""
        lightning = ("attn_gate",) if self.architecture == "minimax-01" else ()
        readers: tuple[tuple[tuple[str, ...], Callable[[Block], Mixer]], ...] = (
            (("ssm_conv1d_q",), self._kimi_delta),
            (("ssm_ba", "ssm_alpha"), self._gated_delta_net),
            (("ssm_x",), self._mamba),
            (("ssm_in",), self._mamba2),
            (("shortconv.conv",), self._short_convolution),
            (("attn_kv_a_mqa",), self._latent_attention),
            (lightning, self._lightning_attention),
            (("attn_q", "attn_qkv"), self._attention),
        )
        return tuple(reader(block) for kinds, reader in readers if any(kind in block for kind in kinds))

    def _filled(self, block: Block, mixer: M, taken: dict[str, Tensor], *vectors: str) -> M:
        """The mixer with what its matrices have beyond its shape, and with its vectors."""
        rest = block.rest(taken, mixer.matrices(self.hidden))
        return replace(mixer, other_matrices=rest, vectors=block.take_vectors(*vectors))

    def _attention(self, block: Block) -> Attention:
        query_heads = block.per_layer(self.fields, _HEADS)
        window, chunk = self.windows.window(block.index), self.windows.chunk(block.index)
        variants = ("_swa", "") if window or chunk else ("",)
        head_dim, value_dim = (
            self.fields.integer(
                *(f"attention.{which}_length{variant}" for variant in variants),
                default=self._head_dim(block, query_heads),
            )
            for which in ("key", "value")
        )
        kv_heads = block.per_layer(self.fields, _KV_HEADS, default=query_heads)
        gates = query_heads * value_dim
        gated = "attn_gate" in block and block.rows("attn_gate") == gates
        plain = Attention(
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=value_dim if value_dim != head_dim else None,
            output_gate=gated,
            window=window,
            local_chunk=chunk,
            values_from_keys="attn_k" in block and "attn_v" not in block,
            shares_kv=block.index >= self.own_kv,
        )
        mixer = replace(plain, output_gate=self._check_rows(block, plain, gates) or gated)
        mixer = replace(mixer, indexer=self._pooled_indexer(block))
        taken = block.take(*_QKV, "attn_gate", "attn_output", "indexer.q_proj", "indexer.k_proj")
        vectors = ("attn_q", "attn_k", "attn_v", "attn_output", "attn_sinks", "indexer.")
        return self._filled(block, mixer, taken, *vectors)

    def _head_dim(self, block: Block, heads: int) -> int:
        """Elements of a head where no key says it, from the input of the layer's output matrix."""
        output = block.matrices.get("attn_output")
        return max(1, (output.dims[0] if output else self.hidden) // heads)

    def _check_rows(self, block: Block, attention: Attention, gates: int) -> bool:
        """Whether there are gates among the queries. Raises BadFile where heads and matrices contradict each other."""
        queries = attention.query_heads * attention.head_dim
        keys, values = attention.kv_heads * attention.head_dim, attention.kv_heads * attention.value_width
        if not attention.shares_kv and "attn_k" not in block and "attn_qkv" not in block:
            raise block.wrong("attn_k is missing, and attention.shared_kv_layers does not say that it may be")
        rows = {"attn_q": queries, "attn_k": keys, "attn_v": values, "attn_qkv": queries + keys + values}
        for kind, implied in rows.items():
            if kind in block and block.rows(kind) != implied:
                if kind in ("attn_q", "attn_qkv") and block.rows(kind) == implied + gates:
                    return True
                heads = f"{attention.query_heads} query heads and {attention.kv_heads} kv heads"
                widths = f"keys of {attention.head_dim} and values of {attention.value_width}"
                raise block.wrong(f"{kind} yields {block.rows(kind):,} elements; {heads} of {widths} {implied:,}")
        return False

    def _latent_attention(self, block: Block) -> LatentAttention:
        whole = self.fields.integer("attention.key_length_mla", "attention.key_length")
        rope = self.fields.integer("rope.dimension_count", high=whole - 1)
        mixer = LatentAttention(
            query_heads=block.per_layer(self.fields, _HEADS),
            kv_rank=self.fields.integer("attention.kv_lora_rank"),
            rope_dim=rope,
            nope_dim=whole - rope,
            value_dim=self.fields.integer("attention.value_length_mla", "attention.value_length"),
            query_rank=self.fields.integer("attention.q_lora_rank") if "attn_q_a" in block else 0,
            indexer=self._indexer(block),
        )
        matrices = ("attn_q", "attn_q_a", "attn_q_b", "attn_kv_a_mqa", "attn_kv_b", "attn_k_b", "attn_v_b")
        taken = block.take(*matrices, "attn_output", "indexer.attn_k", "indexer.attn_q_b", "indexer.proj")
        return self._filled(block, mixer, taken, "attn_q_a", "attn_kv_a", "attn_output", "indexer.", "attn_sinks")

    def _indexer(self, block: Block) -> Indexer | None:
        """Layers without an indexer's matrices attend to what the layer before them chose."""
        own = "indexer.attn_k" in block
        self.indexer_seen |= own
        if not self.indexer_seen:
            return None
        return replace(self._indexer_of_ratio(1), weighted=True, shared=not own)

    def _pooled_indexer(self, block: Block) -> Indexer | None:
        """Of Qwen Sparse Attention, which scores one key for each block of tokens."""
        if "indexer.q_proj" not in block:
            return None
        return self._indexer_of_ratio(block.per_layer(self.fields, "attention.compress_ratios"))

    def _indexer_of_ratio(self, ratio: int) -> Indexer:
        return Indexer(
            query_heads=self.fields.integer("attention.indexer.head_count"),
            head_dim=self.fields.integer("attention.indexer.key_length"),
            budget=self.fields.integer("attention.indexer.top_k"),
            ratio=ratio,
        )

    def _lightning_attention(self, block: Block) -> LightningAttention:
        heads = block.per_layer(self.fields, _HEADS)
        head_dim = self.fields.integer("attention.key_length", default=self._head_dim(block, heads))
        taken = block.take("attn_qkv", "attn_gate", "attn_output")
        return self._filled(block, LightningAttention(heads=heads, head_dim=head_dim), taken, "attn_norm_2")

    def _kimi_delta(self, block: Block) -> KimiDelta:
        mixer = KimiDelta(
            heads=block.per_layer(self.fields, _HEADS),
            head_dim=self.fields.integer("kda.head_dim"),
            conv_kernel=self.fields.integer(_KERNEL),
        )
        gates = ("ssm_f_a", "ssm_f_b", "ssm_g_a", "ssm_g_b", "ssm_beta")
        taken = block.take(*_QKV, *gates, "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v", "attn_output")
        return self._filled(block, mixer, taken, "ssm_")

    def _gated_delta_net(self, block: Block) -> GatedDeltaNet:
        mixer = GatedDeltaNet(
            key_heads=self.fields.integer("ssm.group_count"),
            value_heads=self.fields.integer("ssm.time_step_rank"),
            head_dim=self.fields.integer("ssm.state_size"),
            conv_kernel=self.fields.integer(_KERNEL),
        )
        self._channels(block, mixer.value_heads * mixer.head_dim, "ssm.time_step_rank", "ssm.state_size")
        projections = ("ssm_in", "attn_qkv", "attn_gate", "ssm_ba", "ssm_beta", "ssm_alpha")
        taken = block.take(*projections, "ssm_conv1d", "ssm_out")
        return self._filled(block, mixer, taken, "ssm_")

    def _mamba(self, block: Block) -> Mamba:
        if "ssm_a" not in block:
            raise block.wrong("ssm_x is of a recurrence that is not known: its decay is no matrix")
        mixer = Mamba(
            inner=self.fields.integer("ssm.inner_size"),
            state=self.fields.integer("ssm.state_size"),
            conv_kernel=self.fields.integer(_KERNEL),
            time_rank=self.fields.integer("ssm.time_step_rank"),
        )
        taken = block.take("ssm_in", "ssm_conv1d", "ssm_x", "ssm_dt", "ssm_a", "ssm_out")
        return self._filled(block, mixer, taken, "ssm_")

    def _mamba2(self, block: Block) -> Mamba2:
        heads = self.fields.integer("ssm.time_step_rank")
        inner = self.fields.integer("ssm.inner_size")
        mixer = Mamba2(
            heads=heads,
            head_dim=max(1, inner // heads),
            groups=self.fields.integer("ssm.group_count", default=1),
            state=self.fields.integer("ssm.state_size"),
            conv_kernel=self.fields.integer(_KERNEL),
        )
        self._channels(block, mixer.inner, "ssm.time_step_rank")
        return self._filled(block, mixer, block.take("ssm_in", "ssm_conv1d", "ssm_out"), "ssm_")

    def _channels(self, block: Block, channels: int, *keys: str) -> None:
        """Raises BadFile where the channels of all heads are not `ssm.inner_size`, nor what goes into `ssm_out`."""
        if self.fields.integer("ssm.inner_size", default=channels) != channels:
            raise self.fields.contradiction(f"heads have {channels:,} channels", "ssm.inner_size", *keys)
        if "ssm_out" in block and block.matrices["ssm_out"].dims[0] != channels:
            raise block.wrong(f"ssm_out takes {block.matrices['ssm_out'].dims[0]:,} elements, not {channels:,}")

    def _short_convolution(self, block: Block) -> ShortConvolution:
        mixer = ShortConvolution(channels=self.hidden, conv_kernel=self.fields.integer("shortconv.l_cache"))
        taken = block.take("shortconv.in_proj", "shortconv.conv", "shortconv.out_proj")
        return self._filled(block, mixer, taken, "shortconv.")
