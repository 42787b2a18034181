"""What a rulebook must say: page sizes, chunking, padding, memory that is no cache, and which kernels run."""

import re

from msgspec import Struct
from msgspec.structs import replace

from hwprofiles.rates import Rate, Source, Unit
from twin.errors import BadValue, Impossible
from twin.formats import PAIR, KVFormat
from twin.layouts import load_layout
from twin.operations.occupancy import DecodePlan

DATE = "2026-11-29"  # when the numbers of the rulebooks were looked up
WEIGHT_OPERATIONS = ("linear", "experts")  # whose variant is a format of weights


def stated(value: float, spread: float, note: str, *, unit: Unit = "B", fitted_on: tuple[str, ...] = ()) -> Rate:
    """A number of a rulebook: fitted where it names the rows, else published."""
    n = max(1, len(fitted_on))
    source: Source = "fitted" if fitted_on else "published"
    return Rate(value=value, unit=unit, spread=spread, n=n, source=source, date=DATE, note=note, fitted_on=fitted_on)


class SparseRules(Struct, frozen=True, kw_only=True):
    """How an engine runs sparse attention, in VRAM and from the host."""

    selection_alignment: int  # rows of selected indices are padded to a multiple of this
    index_element_bytes: int | None  # bytes of an element of raw and pooled indexer keys; None: as the cache's format
    score_bytes: int  # bytes of one block score between scoring and top-k
    head_tile: int  # query heads that the sparse kernel computes at once: a smaller group is padded up to it
    splits_selection: bool  # whether a staged prefill issues only a bucket's products, or all of them, masked
    score_rows: int  # query tokens scored against all pooled keys in one go
    staging_bytes: int  # buffer through which a prefill pulls host planes
    copies_whole_buckets: bool  # whether a bucket crosses the link in one run a plane, or page by page
    overlaps_copies: bool  # whether staged copies run beside the kernels unless asked otherwise


class StepLimits(Struct, frozen=True, kw_only=True):
    """Most tokens and sequences of a step where nothing is asked, on devices of so much memory and more."""

    vram_bytes: float
    batched_tokens: int
    max_sequences: int
    but_not: str = ""  # devices with this in their name, in small letters, are left out

    def hold_for(self, device: str, vram_bytes: float) -> bool:
        """Whether they are those of the device of that name and memory."""
        return vram_bytes >= self.vram_bytes and not (self.but_not and self.but_not in device.lower())


class StartupRules(Struct, frozen=True, kw_only=True):
    """What an engine allocates when it starts, beside weights: one pass over a full step and its sampling, profiled.

    Each is taken by itself from a source or a log; `twin/memory/startup.py` puts them together.
    """

    sampled_copies: Rate  # copies in fp32 of a step's logits that the sampler holds at its peak
    plain_sampled_copies: Rate | None = None
    """The same of models without states and experts, where a runner of their own profiles them; its graphs are not
    reserved. None: they have none."""
    forward: Rate  # bytes of the widest layer's pass over those that are counted
    operand_bytes: Rate  # bytes beside an element of what products in fewer bits take as operands
    compiler: Rate  # bytes that compiling adds to the pass, where the start-up compiles
    libraries: dict[str, float]  # bytes of the matrix library's workspace, by least compute capability, largest first
    towers: Rate  # bytes of a pass through a tower over its largest input
    tower_rest: Rate  # bytes of that input and what it became, which lie there while all else is profiled
    reserves_graphs: bool  # whether CUDA graphs are estimated and taken off the pool
    graph_layer: Rate  # bytes of a layer in a graph that is captured in pieces
    whole_graph_layer: Rate  # bytes of a layer in a graph of a whole step
    graph_tokens: int  # most tokens of a step that is captured unless asked otherwise
    context: Rate  # bytes that the engine's own process takes outside the allocator: libraries, communicators
    rank_context: Rate  # the same where several devices share the layers


class BlockPoolRules(Struct, frozen=True, kw_only=True):
    """How an engine that shares one pool of blocks among requests sizes that pool."""

    utilisation: float  # share of the device's memory that the engine may take
    batched_tokens: int  # tokens of one step, decodes and prefill chunks together
    max_sequences: int
    larger: tuple[StepLimits, ...] = ()  # the same on larger devices, the largest first
    bounds_context: bool  # whether it refuses a longest request beyond what the model's own configuration takes
    startup: StartupRules
    draft_graphs: Rate  # bytes of captured CUDA graphs with a block drafter
    long_draft_graphs: Rate  # the same where drafts are longer than the drafter's own block
    backend_workspace: dict[str, Rate]  # bytes that an attention backend keeps for itself, by backend
    dequantises_prefix: dict[str, Rate]
    """Backends whose prefill dequantises the whole cached prefix: copies of it that the profile does not see."""
    untracked: Rate  # bytes outside the engine's share: the context and what other libraries allocate


class CardDefaults(Struct, frozen=True, kw_only=True):
    """What an engine chooses by the memory of a card, where it is not told."""

    below_bytes: float  # of cards with less memory than this
    chunk_tokens: int  # prompt tokens of one prefill pass
    graph_sequences: int  # most sequences of a decode step that is captured in a graph
    graph_sequences_of_four: int  # the same where four cards or more share the layers


class TokenPoolRules(Struct, frozen=True, kw_only=True):
    """How an engine that sizes pools of tokens by what is free before and after it loads weights goes about it.

    A share of what was free before is for weights and pools. Windows have a pool of their own, with a share of the
    other's tokens, and recurrent states one of whole states.
    """

    by_card: tuple[CardDefaults, ...]  # the smallest cards first; the last is of all that are larger
    reserved_bytes: float  # what it leaves for back ends, before any of the following
    reserved_per_chunk_token: float  # bytes, with a least chunk
    least_reserved_chunk: int
    reserved_per_sequence: float  # bytes of a captured sequence of a decode step
    reserved_per_device: float  # bytes for each card that shares the layers
    reserved_per_prefill_graph: float
    prefill_graph_steps: tuple[tuple[int, int], ...]  # up to so many tokens a graph each so many
    floor_from_bytes: float  # cards with more memory than this are left at least `floor_bytes`
    floor_bytes: float
    driver_bytes: float  # of the card that its driver reports and no program can have
    tower_share: float  # of the share, for models with a tower of the size of `tower_parameters`
    tower_parameters: float
    tower_slope: float  # by how much the share falls with each such tower more
    tower_bounds: tuple[float, float]  # of that correction
    window_share: float  # tokens of the pool of windows to one of the other's
    whole_windows_from: int  # windows at least so long, of layers shaped as those without, are kept whole
    state_share: float  # bytes of states to one byte of tokens
    states_per_sequence: int  # states that each running sequence may need: its own and those kept for prefixes
    state_kept_every: int  # tokens of a prompt between two states that later prompts may go on from
    evicted_every: int  # tokens after which what a window no longer sees is given back
    max_sequences: int  # at most, whatever the pool
    drafted_sequences: int  # at most where tokens are drafted
    bounds_context: bool  # whether it refuses a longest request beyond what the model's own configuration takes
    context: Rate  # bytes of a process's context on its card
    collectives: dict[str, dict[int, Rate]]  # bytes of the ranks' buffers, by link and number of cards
    loading: Rate  # bytes that loading leaves beside weights: tables of rotation, reordered scales, what is not reused


class CellRules(Struct, frozen=True, kw_only=True):
    """How an engine that lays its whole context out as it starts sizes caches, states and buffers."""

    slots: int  # sequences that share the cells of one, where no number is asked for; each has states of its own
    input_copies: int  # copies of a step's inputs on every device where several work at the same time
    plain: str  # format of cache that attention reads as it is; of any other a copy in 16 bits is made, layer by layer
    draft_format: str  # format of a drafter's own cache
    fuses: tuple[str, ...]  # attention backends that never write the scores of all heads out
    offloads_from: int  # tokens of a pass from which on matrices in host memory are multiplied on the device
    cpu: str  # whose kernels the processor runs, as their keys name it


class BackendRules(Struct, frozen=True, kw_only=True):
    """Which attention backend runs what, where an engine has several; empty: its own kernels run every format."""

    by_format: dict[str, tuple[str, ...]] = {}  # backends that run a format, the default first
    verify_only: dict[str, tuple[str, ...]] = {}
    """Backends that run a format in steps of several query tokens only, beside those of `by_format`."""
    verify: dict[str, str] = {}  # default backend of a step of several query tokens by format, where it differs
    by_capability: dict[str, dict[str, str]] = {}  # default backend by format on cards of a compute capability
    of_latents: dict[str, str] = {}
    """Default backend of compressed caches by compute capability; under an empty key that of all other cards."""
    without_cuda: str = ""  # default backend on cards without CUDA, where it is another
    widest_heads: dict[str, int] = {}  # elements of the widest heads that a backend runs, where there is such a bound
    piecewise: tuple[str, ...] = ()  # backends whose steps of several query tokens are not captured whole in a graph


class OwnKernelRules(Struct, frozen=True, kw_only=True):
    """What is known of an engine's kernels because they are this project's own."""

    decode_plans: dict[str, DecodePlan] = {}
    """Thread blocks of the decode kernel over a format; `<backend>/<format>` before the format alone. Not named: all
    query rows at once, none of them padding, no tiles or splits that a device would have to be filled with."""
    kv_chunk_tokens: int = 0  # cached tokens that a chunk's dense attention dequantises at a time; 0: none
    interleaved_formats: tuple[str, ...] = ()
    """Formats that it keeps on the host in interleaved blocks: codes and scales of K and V of one block in one run."""


class TensorCacheRules(Struct, frozen=True, kw_only=True):
    """What an engine does that keeps a layer's K and V as two tensors of a framework, made anew as they grow.

    Windows are kept no longer than they see, and a prompt passes whole, so that its transients grow with it.
    """

    residual_tokens: int  # newest tokens that quantised planes are kept without, in 16 bits, until all are made anew
    live_hidden: int  # vectors of the model's width that a token holds at the widest place of a layer
    live_intermediate: int  # vectors of the feed-forward's width there


class EngineRules(Struct, frozen=True, kw_only=True):
    """The rules of one inference engine. Sizes in tokens or bytes; every one has its source in the engine's file."""

    name: str
    summary: str
    version: str = ""  # of the engine that these rules are of; empty: of no release in particular
    asked_version: str = ""  # the one that was asked for, where it is none of those whose source was read
    releases: dict[str, BlockPoolRules] = {}  # how earlier releases size their pool, by the first that does
    makers: dict[str, tuple[str, ...]] = {}
    """Formats that it keeps on devices without CUDA, by the first word of a device's name; empty: wherever they are."""
    machine: str  # shipped machine that a question is about unless it names another
    layouts: tuple[str, ...]  # the first that a model can be asked for is its default
    formats: tuple[str, ...]  # what it keeps in VRAM; the first is the default
    host_formats: tuple[str, ...] = ()  # what it keeps on the host
    weight_formats: tuple[str, ...]  # checkpoints that it loads
    usual_for: tuple[str, ...] = ()  # those of them that are meant for it: it is asked unless another engine is named
    page_tokens: int  # tokens that the cache grows by; where a block pool sizes its own blocks, their smallest step
    chunk_tokens: int  # prompt tokens of one prefill pass
    unprefilled_tokens: int  # prompt tokens left for the first decode step
    ngram: str  # where the n-gram table is read from unless asked otherwise
    workspace: Rate  # bytes that hold neither weights, state nor cache: context, buffers, the largest transient
    shared_workspace: float = 0.0  # of it, that ranks divide among themselves
    compute_dtype: str  # operand type of the weights' matrix products
    embedding_on_host: bool = False  # whether the token embedding is looked up in host memory
    state_element_bytes: int = 2
    heeds_full_states: bool = False  # whether it keeps states in fp32 where the model's makers want them so
    full_states: tuple[str, ...] = ()  # kinds of mixers whose states are kept in fp32 whatever is asked
    loads_as: dict[str, str] = {}  # weights that it converts as it loads them
    splits: tuple[str, ...] = ("layer",)  # how it spreads a model over devices, its default first
    hop_element_bytes: int = 2  # bytes of one element of the residual streams that cross from device to device
    row_tiles: dict[str, int] = {}  # tokens that a product with weights of a format is rounded up to, else 1
    least_capability: str = ""  # of a CUDA card that it starts on at all
    needs: dict[str, str] = {}
    """Least compute capability of its kernels of a format, or of a backend's, where above the format's own."""
    implementations: dict[str, str] = {}  # whose kernel runs `<operation>/<variant>`, where not its own
    host_step: bool = False  # whether scheduling, sampling and launches of a step take time of their own
    kernels_of: str = ""  # whose kernels run all others, where not its own
    weight_families: dict[str, str] = {}  # formats of weights whose products are known by the name of a family
    family_operands: dict[str, str] = {}  # what products of a family multiply in, where not `compute_dtype`
    backends: BackendRules = BackendRules()
    own_kernels: OwnKernelRules = OwnKernelRules()
    sparse_kernels: SparseRules | None = None
    block_pool: BlockPoolRules | None = None
    cells: CellRules | None = None
    token_pool: TokenPoolRules | None = None
    volunteers: bool = True  # whether a question that names no engine may be answered by it
    tensor_cache: TensorCacheRules | None = None

    @property
    def shares_pool(self) -> bool:
        """Whether requests share one pool of the cache."""
        return self.block_pool is not None or self.token_pool is not None

    @property
    def bounds_context(self) -> bool:
        """Whether it refuses requests beyond what the model's own configuration takes."""
        pool = self.block_pool or self.token_pool
        return pool is not None and pool.bounds_context

    @property
    def title(self) -> str:
        """Its name, with the version where there is one."""
        return f"{self.name} {self.version}".rstrip()

    def at(self, version: str) -> "EngineRules":
        """The rules of that release, or of the nearest that is known; Impossible where there is one set of rules."""
        if not self.releases:
            raise Impossible(f"{self.name} is modelled in one version: leave =={version} away")
        if not re.fullmatch(r"\d+(\.\d+){1,3}", version):
            raise BadValue(f"{version!r} is no version of {self.name}", hint=f"such as {self.name}=={self.version}")
        asked, first = version_numbers(version), min(self.releases, key=version_numbers)
        if asked[:2] >= version_numbers(self.version):
            known = asked[:2] == version_numbers(self.version)
            return self if known else replace(self, asked_version=version)
        if asked < version_numbers(first):
            return replace(self, version=first, asked_version=version, block_pool=self.releases[first])
        since = max((each for each in self.releases if version_numbers(each) <= asked), key=version_numbers)
        return replace(self, version=version, block_pool=self.releases[since])

    @property
    def sparse(self) -> SparseRules:
        """Rules of sparse attention; Impossible where the engine has none."""
        if self.sparse_kernels is None:
            raise Impossible(f"{self.name} has no sparse attention", hint="ask for another engine or model")
        return self.sparse_kernels

    def formats_of(self, layout: str) -> tuple[str, ...]:
        """Formats that it keeps under the placement of that name."""
        return self.host_formats if load_layout(layout).host_planes else self.formats

    def keeps(self, fmt: KVFormat, layout: str) -> bool:
        """Whether it keeps K and V in that format, or where it may in those two, under the placement of that name."""
        alike = len(fmt.parts) == 1 or self.cells is not None
        return alike and set(fmt.parts) <= {*self.formats_of(layout)}

    def backends_of(self, fmt: str) -> tuple[str, ...]:
        """Attention backends that run a format, the default first, those of several query tokens only last.

        Where K and V differ, V decides: what cannot run a format of K dequantises it first.
        """
        fmt = fmt.rpartition(PAIR)[2]
        return (*self.backends.by_format.get(fmt, ()), *self.backends.verify_only.get(fmt, ()))

    def all_backends(self) -> set[str]:
        """Attention backends that run any format."""
        return {name for fmt in self.formats for name in self.backends_of(fmt)}

    def pages(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)

    def operands_of(self, weight_format: str) -> str:
        """Operand type of products with weights of a format."""
        return self.family_operands.get(self.weight_families.get(weight_format, ""), self.compute_dtype)

    def kernel(self, operation: str, variant: str) -> str:
        """Key in a machine's profile of the kernel that runs `operation` on `variant` (a format)."""
        implementation = self.implementations.get(f"{operation}/{variant}", self.kernels_of or self.name)
        if operation in WEIGHT_OPERATIONS:
            variant = self.weight_families.get(variant, variant)
        return f"{operation}/{implementation}/{variant}"


def version_numbers(version: str) -> tuple[int, ...]:
    """Of a release or a compute capability, to be compared."""
    return tuple(int(part) for part in version.split("."))
