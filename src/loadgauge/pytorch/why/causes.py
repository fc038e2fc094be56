"""Why memory ran out, by name: what each cause means and what to do about it; texts that say a cause without PyTorch's figures."""

import re

import msgspec

NEEDS = "the program's own tensors"
LARGER = "one tensor is larger than the GPU"
LIMIT = "the limit that the program has set itself"
PIECES = "fragmentation"
OTHERS = "other processes"
ENGINE = "the job's own rollout engine"
BESIDE = "memory beside the allocator"
POOLS = "private pools of CUDA graphs"
ROOM = "refused though there was room"
HOST = "the host's memory"
DRIVER = "the driver refused memory beside PyTorch's allocator"
WAKING = "an engine that sleeps found no room to wake"
SHARE = "vLLM's share of the card"
CACHE = "vLLM's cache is shorter than one request"
STATIC = "SGLang's share of the card"
GGML = "llama.cpp's buffers"
KERNELS = "bitsandbytes' own call of the driver"
XLA = "an XLA program (JAX)"
TENSORFLOW = "a TensorFlow program"
PADDLE = "a PaddlePaddle program"
TENSORRT = "TensorRT-LLM's buffers"
TILES = "a kernel's tiles, not the card's memory"
SPREAD = "weights that the cards do not hold"
PROFILED = "another process while vLLM measured the card"

ADVICE: dict[str, tuple[str, ...]] = {
    NEEDS: (
        "the tensors themselves do not fit: `loadgauge trace` shows which ones, and what would shrink them; a snapshot"
        " (torch.cuda.memory._record_memory_history, _dump_snapshot) names the lines that hold them",
    ),
    LARGER: (
        "no other change helps: the last line of the traceback that is your own asks for it; such sizes are attention"
        " scores (fused attention), logits (a loss in chunks), or a batch that was never cut",
    ),
    LIMIT: ("there is room: raise torch.cuda.set_per_process_memory_fraction",),
    PIECES: ("PyTorch holds enough memory, but in pieces: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",),
    OTHERS: ("other processes hold memory on this GPU: end them, or use another GPU",),
    ENGINE: ("the engine that makes the answers shares this GPU with the training: leave it less, or let it sleep meanwhile",),
    BESIDE: ("much lies beside PyTorch's allocator: NCCL buffers, another library, a second context",),
    POOLS: ("CUDA graphs keep pools of their own: capture fewer, or share a pool between them",),
    ROOM: (
        "as many bytes were free when the error was written: another process held them a moment before (`nvidia-smi` while it"
        " starts), or a pool that may not grow, such as that of an engine that sleeps",
    ),
    HOST: (
        "not the GPU's: what is offloaded lies there, workers of the data loader, and copies of the weights while they are loaded",
        "`dmesg | grep -i oom`, `sacct --format=JobID,MaxRSS` or `kubectl describe pod` say which process it was, and its size",
        "fewer workers and less prefetching (num_workers, prefetch_factor); fewer ranks a node",
        "weights loaded shard by shard, or by one rank alone (low_cpu_mem_usage=True; FSDP: cpu_ram_efficient_loading)",
        "less offloaded, or to NVMe: `loadgauge estimate MODEL --offload optimizer` says what the host must hold",
    ),
    DRIVER: (
        "a context, cuBLAS or NCCL asked for it: `nvidia-smi` says who holds the rest",
        "leave it room: fewer tokens at once, or a cap on PyTorch's share (torch.cuda.set_per_process_memory_fraction)",
    ),
    WAKING: (
        "vLLM maps its weights and cache again beside PyTorch's allocator, and what the trainer still held left no room",
        "a smaller share for the engine (gpu_memory_utilization)",
        "free what the trainer holds before: its weights and optimizer states on the host meanwhile, torch.cuda.empty_cache()",
    ),
    SHARE: (
        "vLLM asks for its share of the card before it begins: raise --gpu-memory-utilization where the card is its own, lower it"
        " where others hold memory, or shorten --max-model-len",
    ),
    CACHE: (
        "what weights, activations and CUDA graphs leave of the card's share holds fewer tokens than --max-model-len: the length"
        " that the error names, or --kv-cache-dtype fp8 for twice as many tokens",
        "a larger --gpu-memory-utilization where the card is its own, or more cards: --tensor-parallel-size",
    ),
    STATIC: (
        "weights and cache have --mem-fraction-static of the card: raise it where the weights alone fill it; lower it, or"
        " --chunked-prefill-size and --cuda-graph-max-bs, where it runs out in a forward",
    ),
    GGML: (
        "weights, cache or the buffer of a batch: fewer layers on the card (--n-gpu-layers), experts on the host (--n-cpu-moe),"
        " a shorter --ctx-size, which Ollama multiplies by OLLAMA_NUM_PARALLEL, a cache in 8 bits (--cache-type-k q8_0 and -v),"
        " or a smaller --ubatch-size",
    ),
    KERNELS: (
        "it is made in csrc/ops.cu, and PyTorch had the rest of the card: fewer tokens, or a cap on PyTorch's share"
        " (torch.cuda.set_per_process_memory_fraction), leave room for it",
    ),
    XLA: (
        "the step is compiled as a whole, and its buffers lie there at once: a smaller batch on each device, jax.checkpoint"
        " on the layers, donate_argnums for parameters and states",
        "JAX takes 75 % of the card when it starts: XLA_PYTHON_CLIENT_MEM_FRACTION=.95 where the card is its own,"
        " XLA_PYTHON_CLIENT_PREALLOCATE=false where it is shared",
    ),
    TENSORFLOW: (
        "a smaller batch, or tf.recompute_grad on the layers; TF_GPU_ALLOCATOR=cuda_malloc_async where it is in pieces",
        "TensorFlow takes the whole card when it starts: tf.config.experimental.set_memory_growth where it is shared",
    ),
    PADDLE: (
        "a smaller per_device_train_batch_size, recompute, a higher sharding stage; FLAGS_allocator_strategy=auto_growth where"
        " the card is shared",
    ),
    TENSORRT: (
        "weights, activations of max_num_tokens, and the cache: a lower kv_cache_config.free_gpu_memory_fraction, a smaller"
        " max_batch_size or max_num_tokens, or more cards (tensor parallelism)",
    ),
    TILES: (
        "the tiles of a Triton kernel are larger than the shared memory of this card's processors: smaller blocks or fewer"
        " num_stages, another release of the library that has the kernel, or that library's way without it",
    ),
    SPREAD: (
        "accelerate put modules on the host, where bitsandbytes does not run them: fewer bits, more or larger cards, or"
        " llm_int8_enable_fp32_cpu_offload=True, which is slow; `loadgauge estimate MODEL --task generate --weight-format nf4`"
        " says what the weights take",
    ),
    PROFILED: (
        "memory became free, or was taken, while vLLM measured: start engines of one card after one another, and end what is"
        " left of earlier ones (`nvidia-smi`)",
    ),
}  # fmt: skip
"""What each cause means and what to do about it, the first step first."""

TOOLS: tuple[tuple[str, str], ...] = (
    (
        r"\((?:WorkerDict|TaskRunner|main_task)\b|\bverl/",
        "verl: a lower actor_rollout_ref.rollout.gpu_memory_utilization, actor_rollout_ref.rollout.free_cache_engine=True, and"
        " actor_rollout_ref.actor.fsdp_config.param_offload=True and optimizer_offload=True while answers are made",
    ),
    (
        r"\bopenrlhf/",
        "OpenRLHF: a lower --vllm_gpu_memory_utilization, --vllm_enable_sleep and --deepspeed_enable_sleep",
    ),
    (r"\bslime/", "slime: a lower --sglang-mem-fraction-static, and --offload"),
    (r"\bnemo_rl/", "NeMo RL: a lower policy.generation.vllm_cfg.gpu_memory_utilization"),
    (
        r"\bswift/.*(?:rlhf|grpo|rollout)",
        "ms-swift: a lower --vllm_gpu_memory_utilization, --sleep_level 1, --offload_model true and --offload_optimizer true",
    ),
    (
        r"\btrl/trainer/(?:grpo|rloo|online_dpo|gkd|gold)",
        "TRL: a lower vllm_gpu_memory_utilization and vllm_enable_sleep_mode=True, or vllm_mode='server' on other GPUs",
    ),
    (
        r"(?is)^(?=.*\b(?:vllm|sglang)\b)(?=.*\b(?:rollout|grpo|ppo|rlhf|colocate)).",
        "a lower gpu_memory_utilization (vLLM) or mem_fraction_static (SGLang), and the engine's sleep while the training runs",
    ),
)
"""Tools whose trainings share their GPUs with an engine: a pattern of their logs, and what leaves the engine less."""


class Bare(msgspec.Struct, frozen=True):
    """A text that says a cause without PyTorch's figures, by a pattern; placed: its traceback is that of what failed."""

    cause: str
    pattern: str
    placed: bool = True


BARE = (
    Bare(TENSORFLOW, r"OOM when allocating tensor with shape", placed=False),
    Bare(PADDLE, r"Out of memory error on GPU \d+\. Cannot allocate", placed=False),
    Bare(XLA, r"RESOURCE_EXHAUSTED|Ran out of memory in memory space hbm", placed=False),
    Bare(TILES, r"out of resource: shared memory", placed=False),
    Bare(SPREAD, r"Some modules are dispatched on the CPU or the disk", placed=False),
    Bare(PROFILED, r"Error in memory profiling", placed=False),
    Bare(TENSORRT, r"\[TensorRT-LLM\]\[ERROR\][^\n]*out of memory", placed=False),
    Bare(WAKING, r"CUDA Error: out of memory at \S*cumem_allocator\.cpp"),
    Bare(KERNELS, r"Error out of memory at line"),
    Bare(
        GGML,
        r"(?:allocating [\d.]+ MiB on device \d+: )?cudaMalloc failed: out of memory|ggml_\w+: failed to allocate"
        r"|vk::Device::allocateMemory: ErrorOutOfDeviceMemory",
    ),
    Bare(CACHE, r"larger than the (?:available KV cache memory|maximum number of tokens that can be stored in KV cache)"),
    Bare(STATIC, r"[Nn]ot enough memory\. Please try to increase --mem-fraction-static"),
    Bare(SHARE, r"No available memory for the cache blocks|is less than desired GPU memory utilization"),
    Bare(
        DRIVER,
        r"(?:CUDA|HIP)(?: driver)? error: out of memory|CUDA_ERROR_OUT_OF_MEMORY|(?:CUBLAS|CUDNN|HIPBLAS)_STATUS_ALLOC_FAILED"
        r"|Cuda failure \d* ?'out of memory'",
    ),
    Bare(
        HOST,
        r"(?m)^\s*Killed\s*$|\d Killed\b|[Kk]illed process \d|signal: Killed|exit ?code:? (?:-9|137)\b|return ?code[ =:]+-9\b"
        r"|requires more system memory|running low on memory|killed due to memory pressure"
        r"|Signal 9 \(SIGKILL\)|Signals\.SIGKILL|signal SIGKILL|oom[-_]kill(?:ed|er| event|:)|OOMKilled",
        placed=False,
    ),
)  # fmt: skip
"""The likeliest first: what a kernel kills may be what another error left behind."""


def bare(text: str) -> tuple[Bare, int] | None:
    """Return what a text without PyTorch's figures says, and where in it; None where it tells of no memory that ran out.

    >>> bare("torchrun: failed (exitcode: -9) local_rank: 1")[0].cause
    "the host's memory"
    """
    matches = ((message, re.search(message.pattern, text)) for message in BARE)
    return next(((message, match.start()) for message, match in matches if match), None)


def tool(text: str) -> str:
    """Return what leaves the engine of a post-training tool less memory, by the frames and prefixes of its log; "" for none.

    >>> tool("(WorkerDict pid=7) torch.OutOfMemoryError")[:4], tool('File "train.py", line 3, in step')
    ('verl', '')
    """
    return next((words for pattern, words in TOOLS if re.search(pattern, text)), "")
