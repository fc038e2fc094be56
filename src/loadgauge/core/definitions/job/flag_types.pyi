"""The fields of `Job` as keywords with types: written by docs/generate.py."""

from typing import Any, Literal, TypedDict

STEP: tuple[str, ...]
SPLIT: tuple[str, ...]

class Flags(TypedDict, total=False):
    encoders: Literal["cached", "vae", "texts", "all"]
    pictures: str
    video: str
    max_pixels: int
    tower: Literal["frozen", "projector", "adapters", "trained"]
    beside: str
    dialect: str
    base_model: str
    strict: bool
    ignore: str
    variables: str
    hub: bool
    road: Literal["written", "captured"]
    inputs: str
    rows: str
    memory: str
    gpus: int
    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    etp: int
    zero: int
    sequence_parallel: bool
    schedule: Literal["1f1b", "gpipe", "interleaved", "zb-h1", "zb-2p", "zb-v", "dualpipe", "dualpipev"]
    recompute: str
    stage_layers: str
    micro_batch: int
    global_batch: int
    seq_len: int
    target_len: int
    audio: float
    lengths: str
    padding: Literal["free", "dynamic", "max-length"]
    dynamic_cp: int
    precision: str
    weights: Literal["auto", "float32", "bfloat16", "float16"]
    version: str
    optimizer: str
    attention: Literal["flash", "eager", "fa1", "fa2", "fa3", "fa4", "cudnn", "aiter", "vendor"]
    loss: str
    kernels: Literal["native", "liger", "lora", "liger-lora"]
    compile: bool
    determinism: Literal["kernels", "blocking"]
    framework: str
    lora_rank: int
    adapter: Literal["lora", "ia3", "vera", "adalora", "loha", "lokr", "oft", "prompt", "p-tuning"]
    virtual_tokens: int
    lora_targets: str
    qlora: bool
    base: Literal[
        "nf4",
        "nf4-experts",
        "int8-experts",
        "nf4-single",
        "fp4",
        "int8",
        "gptq",
        "awq",
        "hqq",
        "int4-torchao",
        "mxfp4",
        "nvfp4",
    ]
    lora_dropout: float
    lora_dtype: Literal["float32", "bfloat16", "float16"]
    kbit_upcast: Literal["none", "norms", "all"]
    use_dora: bool
    modules_to_save: str
    lora_layers: str
    train: str
    offload: str
    offload_to: Literal["cpu", "nvme"]
    end_units: Literal["root", "apart"]
    gradient_sync: Literal["each", "last"]
    engine: str
    activation_offload: str
    pin_memory: bool
    host_link: str
    host_bandwidth: str
    host_memory: str
    nvme_bandwidth: str
    eval_batch: int
    eval_batches: int
    generate: int
    save: Literal["sharded", "full"]
    gpus_per_node: int
    link_bandwidth: str
    nic_bandwidth: str
    topology: str
    cp_comm: Literal["ring", "all_gather", "all_to_all"]
    mtp: bool
    expert_imbalance: float
    replicas: int
    order: str
    overlap: str
    tokens: str
    price: float
    days: float
    electricity: str
    mtbf_hours: float
    checkpoint_seconds: float
    restart_seconds: float
    measured: str
    tuning: Literal["recipe", "usual", "first"]

class TaskFlags(Flags, total=False):
    task: str
    prompts: int
    samples: int
    prompt_len: int
    answers: str
    epochs: int
    old_logprobs: Literal["pass", "none"]
    logprob_batch: int
    logprob_tokens: int
    on_policy: float
    rollout: str
    placement: str
    staleness: int
    reference: Literal["model", "adapter", "adapter-off", "precomputed", "none"]
    loss_terms: Literal["kl", "no-kl", "nll", "no-nll", "jsd", "forward-kl", "reverse-kl", "top-k"]
    teacher: str
    reward_model: str
    critic: str
    critic_batch: int
    steps: int
    frozen_offload: bool
    frozen_weights: Literal["float32", "bfloat16", "float16"]
    rollout_offload: Literal["none", "weights", "optimizer", "all", "states", "idle"]
    gpu: str

class CaptureFlags(TypedDict, total=False):
    global_batch: int
    precision: str
    optimizer: str
    attention: Literal["flash", "eager", "fa1", "fa2", "fa3", "fa4", "cudnn", "aiter", "vendor"]
    recompute: str

class TraceFlags(CaptureFlags, total=False):
    seq_len: int
    micro_batch: int
    gpus: int
    tp: int
    pp: int
    vpp: int
    sequence_parallel: bool
    schedule: Literal["1f1b", "gpipe", "interleaved", "zb-h1", "zb-2p", "zb-v", "dualpipe", "dualpipev"]
    stage_layers: str
    zero: int
    replicas: int

def kinds_of_flags() -> dict[str, Any]: ...
