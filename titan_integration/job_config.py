"""The sections that this integration adds to torchtitan's JobConfig.

Named in the TOML by `[job] custom_config_module = "titan_integration.job_config"`; torchtitan merges them field by
field, so every key is also an option of the command line (`--gtp.look_ahead 2`). An unknown key is refused by
torchtitan with its name, from the TOML and from the command line. Annotations must be types, not strings: torchtitan
looks at them. `titan_integration.settings` turns the values into degrees and a `GTPConfig`.
"""

from dataclasses import dataclass, field


@dataclass
class Gtp:
    """Generalized tensor parallelism: each weight is sharded over TP x GTP ranks and gathered one at a time."""

    tensor_parallel_num_weight_shards: int | None = None
    """Shards of every large weight: TP x GTP. A multiple of tensor_parallel_degree; default: TP, so GTP is off."""

    expert_tensor_parallel_num_weight_shards: int | None = None
    """
    The same for routed experts: ETP x EGTP, whatever GTP is. Default: ETP. EGTP divides the ranks that have the same
    slice of the experts. With expert_parallel_degree 1 torchtitan cuts experts over TP beside, whatever ETP is.
    """

    exclude: list[str] = field(default_factory=list)
    """FQN patterns (fnmatch) of weights that stay whole on every GTP rank, e.g. "layers.*.attention.wk"."""

    min_numel: int = 1024
    """Weights with fewer elements stay whole on every GTP rank."""

    pad_for_alignment: int = 0
    """Rows of a rank are padded to a multiple of this in communication buffers. 0: what the wire format needs."""

    weight_prefetch: bool = True
    """Gather weights ahead of their use, from the recorded schedule."""

    async_reduction: bool = True
    """Reduce weight gradients one step behind the backward."""

    check_param_states: bool = False
    """Check every state transition of every weight (for debugging)."""

    calculate_per_token_loss: bool = True
    """Sum gradients over GTP ranks. Must be true: torchtitan divides the loss by the global number of tokens."""

    reduce_scatter_with_fp32_accumulation: bool = False
    """
    Over axis gtp, and over egtp for experts: exchange 16-bit gradients by all-to-all and sum them in float32. Bypassed on
    an axis of size 2 or less, and without effect where reduce_dtype is float32, torchtitan's default.
    """

    replicate_reduce_with_fp32_accumulation: bool = False
    """The same over dp_shard (with cp) and dp_replicate, each by its own size; independent of the other."""

    graph_wgrad_ring_size: int = 2
    """How many unsharded weight gradients may be in flight at once; with cuda_graph = "block", how many blocks' of them."""

    wgrad_before_dgrad: bool = False
    """The backward of a linear computes its weight's gradient, and starts its reduction, before its input's gradient."""

    look_ahead: int = 1
    """How many uses before its own use a weight is gathered."""

    look_ahead_bytes: int = 0
    """
    Instead, weights are gathered as early as they have to be, by times measured in one of the first steps, while those that
    wait for their uses stay within this many bytes on an axis. 0: look_ahead holds.
    """

    wire_format: str = "auto"
    """
    How a shard travels: "bf16" (as it is, in param_dtype), or quantized once a step and dequantized where it is used:
    "fp8", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4". Embeddings and the output layer travel as they are. "auto": what the
    weight's own GEMM reads.
    """

    wire_format_overrides: dict[str, str] = field(default_factory=dict)
    """Formats by FQN pattern of weights; the first that matches holds."""

    param_dtype: str = ""
    """Dtype that is gathered and computed in. "": training.mixed_precision_param."""

    reduce_dtype: str = ""
    """Dtype that gradients are reduced in. "": training.mixed_precision_reduce."""

    transport: str = "auto"
    """How bytes move."""

    recompute_keep_bytes: int = -1
    """Bytes of weights, gathered for recomputation, that may wait for their backward use. -1: chosen by the library."""

    linear_backend: str = "torch"
    """
    Whose linears a model has: "torch", or "transformer_engine" (2.19 or later; llama3, and qwen3 without experts; all but
    the output layer; with GTP off too).
    """

    te_recipe: str = "bf16"
    """
    What TransformerEngine's linears compute in: "bf16", or FP8 by delayed scaling ("delayed"), current scaling ("current") or
    blocks of 128 x 128 ("block"). With GTP on, weights are gathered in FP8 then. "delayed" works without checkpoints, and
    with activation checkpointing "full" (by TransformerEngine, with GTP on) or "none".
    """

    cuda_graph: str = "off"
    """
    "step": each training step, from the first forward to the optimizer, is one CUDA graph, captured after two steps; for
    small batches, where the host is the limit. Needs a fused Adam or AdamW, and activation_checkpoint.preserve_rng_state =
    false. "block": each module of cuda_graph_modules is two, one for its forward and one for its backward; what is between
    stays eager, dispatch to experts for one. "off": none.
    """

    cuda_graph_modules: list[str] = field(default_factory=lambda: ["layers.*"])
    """
    FQN patterns of what is graphed with cuda_graph = "block". In models with experts on several ranks, name what is before and
    beside them: ["layers.*.attention", "layers.*.moe.shared_experts"], with activation_checkpoint.mode = "none".
    """

    high_priority_stream_groups: list[str] = field(default_factory=list)
    """
    Axes of torchtitan's, such as ["tp", "ep"], whose NCCL communicators run on streams of high priority, which graphs keep.
    Gathers and reductions of GTP do always. Where GTP is off, or there is no CUDA device, it changes nothing.
    """

    skip_nonfinite_steps: bool = False
    """
    Skip the update of a step whose global gradient norm is not finite: parameters, optimizer state (step counters
    too) and learning-rate schedule stay as they were; the batch is spent and the step number goes on. A warning names
    the step and how many have been skipped since the start of the job. All ranks decide alike. Reads the norm on the
    host in every step. Works where GTP is off, too.
    """


@dataclass
class Metrics:
    """Added to torchtitan's [metrics]."""

    enable_jsonl: bool = False
    """Write loss, gradient norm, learning rate and token count of every step to {job.dump_folder}/metrics.jsonl."""


@dataclass
class Optimizer:
    """Added to torchtitan's [optimizer], for name = "Muon": it orthogonalizes whole matrices; embeddings, the output layer and
    all that is no matrix get AdamW, with beta1, beta2 and eps. lr, weight_decay and the schedule are of both."""

    muon_momentum: float = 0.95
    """Nesterov momentum."""

    muon_adjust_lr_fn: str = "match_rms_adamw"
    """How updates are scaled: "match_rms_adamw", as large as AdamW's, for AdamW's learning rates; or "original"."""

    muon_algorithm: str = "home_rank"
    """Each matrix is computed with on one rank ("home_rank"), or on all that hold a piece of it ("duplicated")."""

    muon_adamw: list[str] = field(default_factory=list)
    """FQN patterns of further parameters for AdamW."""

    muon_row_layouts: dict[str, list[int]] = field(default_factory=dict)
    """FQN pattern -> rows of the matrices that a weight joins, e.g. "*.wqkv.weight" = [512, 128, 128] for each group of heads."""


@dataclass
class Training:
    """Added to torchtitan's [training]."""

    data_seed: int = 0
    """Seed of the sample order of the data sets "python_stdlib" and "text_files"."""

    token_cache_folder: str = ""
    """Where those data sets keep their tokens. "": {job.dump_folder}/token_cache."""

    logical_init: bool = False
    """
    Draw whole weights on every rank and keep the rank's part also where GTP is off, so that initial weights are those
    of a single rank. Always done under GTP and on CPUs, where DTensor gives every shard the same numbers.
    """

    exact_grad_norm: bool = False
    """
    Clip by the exact gradient norm (gtp_dtensor's) also where GTP is off. torch sums the squares of a large float32
    gradient in float32, which on a CPU was seen 7e-5 off; false leaves torchtitan's clipping as it is.
    """


@dataclass
class Debug:
    """Added to torchtitan's [debug]."""

    first_gradients_folder: str = ""
    """Write all whole gradients of step 1, before clipping, to this folder: one file for each rank of axis pp."""


@dataclass
class JobConfig:
    """Merged into torchtitan's JobConfig."""

    gtp: Gtp = field(default_factory=Gtp)
    metrics: Metrics = field(default_factory=Metrics)
    optimizer: Optimizer = field(default_factory=Optimizer)
    training: Training = field(default_factory=Training)
    debug: Debug = field(default_factory=Debug)
