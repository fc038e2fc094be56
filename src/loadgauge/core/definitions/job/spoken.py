"""Words of other tools for flags and their values, and what each is here."""

RENAMED = {
    **dict.fromkeys(
        ("batch-size", "b", "bs", "mbs", "batchsize", "per-device-train-batch-size", "per-device-batch-size", "micro-batch-size",
         "train-micro-batch-size-per-gpu", "micro-bs", "device-batch-size", "local-batch-size", "per-gpu-train-batch-size",
         "train-batch-size-per-gpu", "ppo-micro-batch-size-per-gpu", "per-gpu-batch", "per-gpu-batch-size",
         "micro-train-batch-size", "bsz", "micro-bsz", "microbatch", "device-batch"),
        "--micro-batch",
    ),
    **dict.fromkeys(("global-batch-size", "gbs", "train-batch-size", "effective-batch-size", "total-batch-size",
                     "global-bs"), "--global-batch"),
    **dict.fromkeys(
        ("max-seq-len", "max-seq-length", "seq-length", "sequence-length", "sequence-len", "seqlen", "seq", "context-length",
         "context-len", "ctx", "ctx-len", "cutoff-len", "max-length", "model-max-length", "block-size", "n-ctx",
         "max-len", "max-context-len", "max-tokens-per-sample", "tokens-per-sample"), "--seq-len"),
    **dict.fromkeys(("max-model-len", "ctx-size", "c", "num-ctx", "context-window", "context-size"), "--context"),
    **dict.fromkeys(("max-num-seqs", "max-running-requests", "max-concurrency", "max-batch-size", "parallel", "np", "concurrency",
                     "users", "num-users", "num-parallel", "concurrent-requests", "concurrent-users", "num-concurrent"), "--batch"),
    **dict.fromkeys(("ttft", "target-ttft", "ttft-slo"), "--max-ttft"),
    **dict.fromkeys(("tpot", "itl", "target-tpot", "inter-token-latency"), "--max-tpot"),
    **dict.fromkeys(("qps", "rps", "request-rate"), "--requests"),
    **dict.fromkeys(("ib", "nic", "network", "fabric", "interconnect", "infiniband", "roce", "network-bandwidth",
    "inter-node-bandwidth",
                     "internode-bandwidth", "internode-bw", "network-bw"), "--nic-bandwidth"),
    **dict.fromkeys(("nvlink", "nvlink-bandwidth", "intra-node-bandwidth", "intranode-bandwidth"), "--link-bandwidth"),
    **dict.fromkeys(("virtual-pipeline-model-parallel-size", "num-virtual-stages-per-pipeline-rank"), "--vpp"),
    **dict.fromkeys(("deepspeed-config", "ds-config", "deepspeed-config-file", "config-file", "accelerate-config"), "--with"),
    "n-predict": "--answer", "zero-optimization-stage": "--zero", "recompute-granularity": "--recompute",
    "expert-tensor-parallel-size": "--etp", "speculative-model": "--draft",
    "model-draft": "--draft", "md": "--draft", "speculative": "--draft", "spec": "--draft", "g": "--gpus",
    **dict.fromkeys(("num-speculative-tokens", "speculative-num-draft-tokens", "draft-max"), "--draft-tokens"),
    **dict.fromkeys(("input-len", "isl", "input-length", "input-tokens", "prefill", "prompt-tokens", "max-input-length",
                     "random-input-len"), "--prompt-len"),
    **dict.fromkeys(("output-len", "osl", "output-length", "output-tokens", "decode", "random-output-len", "gen-len"), "--answers"),
    **dict.fromkeys(("gguf", "quant-type", "model-quant", "weight-quant", "weights-format"), "--weight-format"),
    **dict.fromkeys(("count", "cards", "num-cards", "gpu-num", "total-gpus", "num-devices"), "--gpus"),
    **dict.fromkeys(("cluster", "instance", "instance-type", "machine", "machine-type", "node-type"), "--gpu"),
    **dict.fromkeys(("ram", "system-ram", "host-ram", "cpu-ram", "cpu-memory", "host-mem"), "--host-memory"),
    **dict.fromkeys(("ds-offload", "deepspeed-offload"), "--offload"),
    **dict.fromkeys(("critic-model", "value-model", "critic-pretrain"), "--critic"),
    **dict.fromkeys(("completion-tokens", "completion-len", "max-output-tokens", "num-predict"), "--answers"),
    **dict.fromkeys(("input", "prompt-size", "prompt"), "--prompt-len"),
    **dict.fromkeys(("p99-ttft", "p90-ttft", "p95-ttft", "ttft-ms"), "--max-ttft"),
    **dict.fromkeys(("p99-tpot", "p90-tpot", "p99-itl", "tpot-ms", "itl-ms"), "--max-tpot"),
    **dict.fromkeys(("pipeline-schedule", "pipeline-parallel-schedule", "pp-schedule"), "--schedule"), "vp": "--vpp",
    "virtual-pipeline": "--vpp", "kv": "--cache-format", "max-seqs": "--batch", "link": "--link-bandwidth",
    "rate": "--requests",
    **dict.fromkeys(("algo", "rl", "algorithm", "rl-algo", "rl-algorithm"), "--task"),
    **dict.fromkeys(("kv-cache-dtype", "kv-dtype", "cache-dtype", "kv-cache", "kv-quant"), "--cache-format"),
    **dict.fromkeys(("num-generations", "n-samples-per-prompt", "rollout-n", "group-size", "n-samples", "rollouts", "num-rollouts",
                     "responses-per-prompt"), "--samples"),
    **dict.fromkeys(("max-completion-length", "max-response-length", "max-new-tokens", "response-length",
                     "generate-max-len"), "--answers"),
    **dict.fromkeys(("max-prompt-length", "prompt-length", "prompt-max-len"), "--prompt-len"), "rollout-batch-size": "--prompts",
    **dict.fromkeys(("gpu-type", "gpu-name", "gpu-model", "card", "device", "hardware", "accelerator"), "--gpu"),
    **dict.fromkeys(
        ("num-gpus", "n-gpus", "ngpus", "ngpu", "gpu-count", "world-size", "world", "num-processes", "devices"), "--gpus"
    ),
    **dict.fromkeys(("vram", "gpu-memory", "gpu-mem", "vram-limit", "memory-limit"), "--memory"),
    **dict.fromkeys(("nproc-per-node", "n-gpus-per-node", "ngpus-per-node", "ntasks-per-node", "num-gpus-per-node",
                     "gpus-per-host"), "--gpus-per-node"),
    "ntasks": "--gpus", "gres": "--gpu", "mem": "--host-memory",
    "per-device-eval-batch-size": "--eval-batch", "eval-batch-size": "--eval-batch", "eval-accumulation-steps": "--eval-batches",
    **dict.fromkeys(("tensor-parallel-size", "tensor-model-parallel-size", "tensor-parallel", "tp-size"), "--tp"),
    **dict.fromkeys(("pipeline-parallel-size", "pipeline-model-parallel-size", "pipeline-parallel", "pp-size"), "--pp"),
    **dict.fromkeys(
        ("context-parallel-size", "context-parallel", "cp-size", "ulysses-sequence-parallel-size", "sequence-parallel-size",
         "ulysses-degree", "context-parallel-degree", "sp-size", "ring-attn-size", "ulysses", "ring", "ring-attention",
         "seq-parallel-size", "sequence-parallel-degree", "ulysses-size"),
        "--cp",
    ),
    "tensor-parallel-degree": "--tp", "pipeline-parallel-degree": "--pp", "expert-parallel-degree": "--ep",
    **dict.fromkeys(("expert-parallel-size", "expert-model-parallel-size", "expert-parallel", "ep-size", "expert-parallelism"),
    "--ep"),
    **dict.fromkeys(("tensor-parallelism", "tp-degree"), "--tp"), **dict.fromkeys(("pipeline-parallelism", "pp-degree"), "--pp"),
    **dict.fromkeys(("context-parallelism", "cp-degree"), "--cp"),
    **dict.fromkeys(("zero-stage", "stage", "ds-stage", "deepspeed-stage", "zero-level"), "--zero"),
    "optimizer-offload-fraction": "--offload", "max-seqlen-per-dp-cp-rank": "--dynamic-cp",
    "checkpointing": "--recompute", "vocab-size": "--vocab", "num-experts": "--experts",
    **dict.fromkeys(("num-layers", "n-layer", "n-layers", "num-hidden-layers", "depth"), "--layers"),
    **dict.fromkeys(("hidden-size", "d-model", "n-embd", "embed-dim", "hidden-dim", "dim"), "--hidden"),
    **dict.fromkeys(("num-attention-heads", "n-head", "n-heads", "num-heads"), "--heads"),
    **dict.fromkeys(("num-query-groups", "num-key-value-heads", "n-kv-heads", "num-kv-heads"), "--kv-heads"),
    **dict.fromkeys(("ffn-hidden-size", "intermediate-size", "d-ff", "ffn-dim", "mlp-dim"), "--ffn"),
    **dict.fromkeys(("params", "model-size", "parameters", "num-params", "param-count"), "--size"),
    **dict.fromkeys(("dtype", "mixed-precision", "compute-dtype", "bnb-4bit-compute-dtype"), "--precision"),
    **dict.fromkeys(("torch-dtype", "weight-dtype", "param-dtype"), "--weights"),
    **dict.fromkeys(("lora-r", "r", "rank", "lora-dim", "network-dim", "adapter-rank", "peft-lora-r"), "--lora-rank"),
    **dict.fromkeys(("target-modules", "lora-target", "lora-modules", "lora-target-modules"), "--lora-targets"),
    "optim": "--optimizer", "optimiser": "--optimizer", "attn-implementation": "--attention", "attn": "--attention",
    "attn-impl": "--attention", "lora-modules-to-save": "--modules-to-save", "actor-rollout-ref.rollout.n": "--samples",
    "critic.model.path": "--critic",
    **dict.fromkeys(("trainer", "library", "backend"), "--framework"),
    **dict.fromkeys(("co2", "co2e", "carbon", "carbon-intensity", "country"), "--electricity"),
    **dict.fromkeys(("pipeline", "stages", "num-stages", "pipeline-stages"), "--pp"), "tensor": "--tp",
    "mtbf": "--mtbf-hours", "data-parallel-replicate-degree": "--replicas", "dp-replicate": "--replicas",
    **dict.fromkeys(("mb", "per-device-bs"), "--micro-batch"), "ac": "--recompute",
    **dict.fromkeys(("usd-per-gpu-hour", "dollars-per-hour", "gpu-hour-price"), "--price"),
    **dict.fromkeys(("virtual-pipeline-stages", "virtual-stages", "num-virtual-stages"), "--vpp"), "goal": "--objective",
    **dict.fromkeys(("max-concurrent-requests", "max-concurrent", "max-users", "max-sequences"), "--batch"),
    **dict.fromkeys(("deadline", "time-limit", "max-days", "in-days", "max-time", "duration"), "--days"),
    **dict.fromkeys(("train-tokens", "total-tokens", "num-tokens", "max-tokens"), "--tokens"),
    **dict.fromkeys(("cost-per-hour", "price-per-hour", "hourly-price", "hourly-rate", "gpu-price", "cost", "cost-per-gpu-hour",
                     "price-per-gpu-hour", "usd-per-hour", "gpu-cost", "hourly-cost"), "--price"),
    **dict.fromkeys(("target-mfu", "assumed-mfu"), "--mfu"),
}  # fmt: skip
"""Flags with a value, and the flag here that takes it."""

SWITCHES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("fsdp", "fsdp2", "full-shard", "zero3", "zero-3", "stage3", "use-fsdp", "use-megatron-fsdp", "use-torch-fsdp2"),
        ("--zero 3", "--zero 0"),
    ),
    **dict.fromkeys(("zero2", "stage2"), ("--zero 2",)), "zero1": ("--zero 1",), "ddp": ("--zero 0",),
    "distributed-optimizer": ("--zero 1", "--zero 0"),
    "use-distributed-optimizer": ("--zero 1", "--zero 0"),
    **dict.fromkeys(
        ("gradient-checkpointing", "grad-checkpointing", "gradient-checkpoint", "activation-checkpointing", "gc", "grad-ckpt",
         "gradient-ckpt", "act-ckpt", "activation-ckpt", "grad-checkpoint",
         "checkpoint-activations", "activation-checkpoint", "use-gradient-checkpointing", "enable-gradient-checkpointing"),
        ("--recompute full", "--recompute none"),
    ),
    **dict.fromkeys(("partition-activations", "distribute-saved-activations"), ("--recompute full:partitioned", "")),
    "cpu-checkpointing": ("--activation-offload checkpoints", ""), "contiguous-memory-optimization": ("", ""),
    **dict.fromkeys(("zero3-offload", "zero-3-offload"), ("--zero 3 --offload all",)),
    **dict.fromkeys(("zero2-offload", "zero-2-offload"), ("--zero 2 --offload optimizer",)),
    **dict.fromkeys(("cpt", "mla", "gqa", "fit", "fits", "exclusive", "requeue", "rocm", "cuda", "training", "gpu-only"), ("",)),
    **dict.fromkeys(("rail", "rail-optimized", "rail-optimised"), ("--topology rail",)), "reference-free": ("--reference none",),
    **dict.fromkeys(("ref-offload", "offload-ref", "offload-reference"), ("--frozen-offload", "--no-frozen-offload")),
    **dict.fromkeys(("deterministic", "deterministic-mode", "use-deterministic-algorithms", "deterministic-algorithms"),
                    ("--determinism kernels", "")),
    **dict.fromkeys(("full-determinism", "enable-full-determinism"), ("--determinism blocking", "")),
    "float8-kv-cache": ("--cache-format fp8",), "precompute-ref-log-probs": ("--reference precomputed", ""),
    "recompute-activations": ("--recompute selective", "--recompute none"),
    **dict.fromkeys(("load-in-4bit", "4bit", "4-bit", "int4", "nf4", "bnb", "bnb-4bit", "use-4bit", "use-bnb"),
                    ("--qlora", "--no-qlora")),
    **dict.fromkeys(("lora", "peft", "use-peft", "use-lora"), ("--adapter lora", "")), "dora": ("--adapter lora --use-dora",),
    **dict.fromkeys(("offload-param", "offload-params", "param-offload", "offload-parameters", "fsdp-offload", "fsdp-cpu-offload"),
                    ("--offload all", "")),
    **dict.fromkeys(("infiniband", "ib", "roce"), ("", "")),  # as is taken
    **dict.fromkeys(("activation-offloading", "enable-activation-offloading"), ("--activation-offload all", "")),
    **dict.fromkeys(("load-in-8bit", "use-8bit", "8-bit"), ("--qlora --base int8", "")),
    **dict.fromkeys(("overlap-grad-reduce", "overlap-param-gather", "tp-comm-overlap"), ("", "--overlap none")),  # as assumed
    **{name: (f"--precision {name}",) for name in ("bf16", "fp16", "fp32", "fp8")},
    **dict.fromkeys(("flash-attn", "flash-attention", "use-flash-attn", "flash-attention-2", "flash-attn-2"),
                    ("--attention fa2", "--attention eager")),
    **dict.fromkeys(("flash-attention-3", "flash-attn-3", "use-flash-attention-3", "fa3"), ("--attention fa3",)),
    **dict.fromkeys(("bnb-4bit-use-double-quant", "use-bnb-nested-quant", "use-nested-quant", "double-quant"),
                    ("--base nf4", "--base nf4-single")),
    "xformers": ("--attention fa1",), "sdpa": ("--attention flash",), "eager": ("--attention eager",),
    **dict.fromkeys(("liger", "use-liger", "use-liger-kernel", "liger-kernel", "enable-liger-kernel"), ("--kernels liger",)),
    **dict.fromkeys(("use-liger-loss", "fused-linear-cross-entropy", "use-fused-kernels", "liger-loss",
         "liger-fused-linear-cross-entropy"),
        ("--loss fused", ""),
    ),
    "cut-cross-entropy": ("--loss chunked", ""), "pure-bf16": ("--precision bf16-pure", ""),
    **dict.fromkeys(("packing", "sample-packing", "packed", "packing-samples"), ("", "")),  # full sequences, as is taken
    **dict.fromkeys(("swiglu", "untie-embeddings-and-output-weights", "disable-bias-linear", "group-query-attention"), ("",)),
    "use-remove-padding": ("", ""), "colocate-all-models": ("--placement colocated", ""),
    **dict.fromkeys(("unsloth", "use-unsloth"), ("--framework unsloth",)), "deepspeed": ("--framework deepspeed",),
    "megatron": ("--framework megatron",), "sp": ("--sequence-parallel",),
    **dict.fromkeys(("mlock", "no-mmap", "no-warmup", "trust-remote-code", "fa", "enable-chunked-prefill", "load-in-16bit",
                     "disable-log-requests", "disable-log-stats", "cont-batching", "no-context-shift"), ("",)),
    **dict.fromkeys(("full-finetune", "full-fine-tuning", "full-ft", "full-finetuning", "fft", "full-param", "no-lora",
         "sft"), ("",)),
    **dict.fromkeys(("inference", "serve", "serving", "ollama", "llamacpp", "llama-cpp", "lmstudio", "tgi", "chat", "deploy",
    "infer"),
    ("--task generate",)),
    **dict.fromkeys(
        ("disaggregated", "disaggregation", "disagg", "pd-disaggregation", "prefill-decode-disaggregation", "pd"), ("--apart",)
    ),
    **{name: (f"--task {name}",) for name in ("grpo", "dpo", "ppo", "kto", "orpo", "rlhf")}, "rlhf": ("--task ppo",),
    **dict.fromkeys(("adam-8bit", "adam8bit", "8bit-adam", "adamw-8bit", "use-8bit-adam"), ("--optimizer adamw-8bit",)),
    **dict.fromkeys(("offload-optimizer", "optimizer-offload", "optimizer-cpu-offload", "adam-offload"), ("--offload optimizer",)),
    **dict.fromkeys(("cpu-moe", "cmoe"), ("--offload experts",)), "use-dpo": ("--task dpo",), **dict.fromkeys(("distill",
    "distillation", "kd"), ("--task gkd",)),
    **dict.fromkeys(("reward-modeling", "reward-modelling", "train-reward-model"), ("--task rm",)),
    **dict.fromkeys(("verbose", "v", "long", "details"), ("--full",)),
    **dict.fromkeys(("short", "summary", "quiet", "q"), ("--brief",)),
}  # fmt: skip
"""Flags without a value, and the words here; where it is followed by false, the second ones (none: it is left out)."""

_SHARE = "give --server vllm:utilization=0.9, or of a rollout --rollout vllm:utilization=0.6"
ASKED = {
    **dict.fromkeys(("max-batch", "max-batch-that-fits", "largest-batch"), "give plan --find micro-batch (to serve: --find batch)"),
    **dict.fromkeys(("max-context", "max-seq", "longest"), "give plan --find seq-len"),
    **dict.fromkeys(
        ("hours", "step-time", "tokens-per-sec", "duration", "eta", "profile", "report"),
        "an answer has it where --gpu is given; of a whole run with --tokens",
    ),
    **dict.fromkeys(("max-hours", "wall-hours", "hours-limit"), "give --days, and --tokens"),
    **dict.fromkeys(("budget", "max-cost"), "give --price and --tokens, and read the cost; plan --objective money"),
    **dict.fromkeys(
        ("fsdp-sharding", "fsdp-shard"), "give --zero 3, 2 or 0; of HYBRID_SHARD --zero 3 --replicas NODES"
    ),
    **dict.fromkeys(
        ("deepep", "moe-enable-deepep", "use-deepep"), "experts' tokens are counted as all-to-alls, by bytes; leave it out"
    ),
    **dict.fromkeys(
        ("prefix-cache-hit-rate", "prefix-hit-rate", "cache-hit-rate"), "give --server vllm:cached=N, tokens of each prompt"
    ),
    **dict.fromkeys(("exl2", "bpw"), "give --task generate --weight-format, the nearest of its formats (q4_k_m, awq)"),
    **dict.fromkeys(("input-shape", "model-def", "input-size"), "give script.py:function and --inputs FILE:FUNCTION"),
    **dict.fromkeys(("num-requests", "num-prompts"), "give --batch, how many run at once, or plan --requests RATE"),
    **dict.fromkeys(
        ("dataset-size", "examples", "num-examples", "max-samples", "train-size", "num-samples", "dataset-tokens"),
        "give --tokens, of the whole run: examples x tokens of one x epochs",
    ),
    **dict.fromkeys(("chinchilla", "compute-optimal"), "give --tokens: 20 for each parameter (Hoffmann et al. 2022)"),
    **dict.fromkeys(
        ("flops-budget", "compute-budget", "flops-limit", "total-flops"), "give --tokens: C FLOP are C / (6 x parameters) of them"
    ),
    **dict.fromkeys(
        ("async", "fully-async", "rollout-gpus", "inference-gpus", "vllm-gpus", "async-rollout"),
        "give --placement split:A+B, GPUs of the trainer and of the rollout, and --staleness N",
    ),
    **dict.fromkeys(
        ("img-size", "imgsz", "image-size", "resolution", "image-resolution"),
        "a picture model's name says it (vit-large); to other models give --pictures 1x224x224, to a script --inputs",
    ),
    **dict.fromkeys(("ref-model", "reference-model"), "a frozen copy of MODEL is; --reference says how it is kept"),
    **dict.fromkeys(("hsdp", "fsdp-shard-size", "shard-size"), "give --zero 3 --replicas N, copies of what is sharded"),
    **dict.fromkeys(("zero++", "zeropp"), "its second shares of weights are not counted; give --zero 3"),
    **dict.fromkeys(("beam-width", "max-beam-width", "num-beams", "beams"), "give --batch, sequences x beams: each has a cache"),
    **dict.fromkeys(
        ("tokens-per-second", "tps", "throughput", "toks", "tok-s"),
        "an answer has it; to ask for one, give plan --max-tpot TIME (of each user) or --requests RATE (of all)",
    ),
    **dict.fromkeys(("slo", "sla", "latency"), "give plan --max-ttft 1s --max-tpot 50ms"),
    **dict.fromkeys(("nccl-algo", "nccl-proto"), "give network --busbw all_reduce=340GB/s:1GiB, as it was measured"),
    **dict.fromkeys(("lisa", "lisa-layers"), "give --train layers.A:B, the layers that train at once"),
    **dict.fromkeys(("q4", "q8", "q5", "q6"), "give --qlora, or --task generate --weight-format q4_k_m"),
    "bias": "biases beside adapters are not counted; leave it out",
    "nvme": "give --framework deepspeed --zero 3 --offload all --offload-to nvme",
    "ppo-mini-batch-size": "give --global-batch, the answers of an update",
    "tokens-per-batch": "give --micro-batch and --seq-len", "max-prefill-tokens": "give --server sglang:max_batched_tokens=N",
    "moe-grouped-gemm": "one kernel multiplies for all experts of a rank where the framework has one; --version says which it is",
    **dict.fromkeys(
        ("int8", "8bit"), "--qlora --base FORMAT stores a frozen base; to serve: --task generate --weight-format"
    ),
    **dict.fromkeys(("mem-util", "gpu-util", "rollout-gpu-util", "gpu-memory-utilization"), _SHARE),
    **dict.fromkeys(("no-flash", "disable-flash"), "give --attention eager, or flash, which PyTorch chooses"),
    "nvlink": "a card has the links of its datasheet (loadgauge gpus CARD); give --link-bandwidth 900GB/s to say others",
    **dict.fromkeys(("model-parallel", "model-parallel-size", "mp"), "give --tp, shares of each layer, or --pp, stages of layers"),
    "no-kl": "give --reference none",
    **dict.fromkeys(("reduce-bucket-size", "allgather-bucket-size"), "DeepSpeed's own file says it: --with ds_config.json"),
    "overlap-comm": "give --overlap dp,prefetch",
    **dict.fromkeys(("use-cpu", "no-cuda"), "what is estimated runs on a GPU: give --gpu, or --memory 24GB"),
    **dict.fromkeys(("kv-cache-memory", "kv-cache-memory-bytes"), "give --server vllm:utilization=0.9"),
    **dict.fromkeys(("ubatch-size", "ub"), "give --server vllm:max_batched_tokens=N"), "cpu-offload-gb": "give --offload experts",
    "enforce-eager": "give --server vllm:graphs=0",
    "max-num-batched-tokens": "give --server vllm:max_batched_tokens=N",
    "speculative-config": "give --draft MODEL|eagle|ngram, or --mtp",
    **dict.fromkeys(("override-tensor", "ot"), "give --offload experts"),
    **dict.fromkeys(("tensor-split", "split-mode", "sm", "ts"), "give --pp (layers, as llama.cpp does) or --tp (rows)"),
    **dict.fromkeys(("enable-lora", "max-loras", "max-lora-rank"), "a server's adapters are not counted; leave it out"),
    **dict.fromkeys(("num-gpu-blocks-override", "max-total-tokens"), "give --batch and --context, whose product the cache holds"),
    **dict.fromkeys(
        ("speculative-num-steps", "speculative-algorithm", "speculative-eagle-topk", "speculative-num-draft-tokens",
         "num-speculative-tokens", "draft-max"),
        "give --draft MODEL|eagle|ngram and --draft-tokens, or --mtp",
    ),
    "attention-backend": "give --attention flash, fa2 or fa3",
    **dict.fromkeys(("no-kv-offload", "nkvo"), "the cache is on the card; leave it out"),
    **dict.fromkeys(
        ("steps-per-generation", "generation-batch-size", "num-iterations"),
        "give --prompts, of all that is generated at once, and --global-batch, the answers of an update",
    ),
    "max-position-embeddings": "give --seq-len",
    "overhead": "memory beside the tensors is estimated; more is left free by `loadgauge plan`, --margin GiB",
    **dict.fromkeys(("freeze-layers", "unfreeze-layers"), "give --train, for a part of a model"),
    **dict.fromkeys(("finetune-vision-layers", "freeze-vision-tower", "freeze-vit"), "give --pictures and --tower"),
    **dict.fromkeys(("fast-inference", "use-vllm"), "give --rollout vllm:utilization=0.6"),
    **{name: f"give --task generate --server {name}" for name in ("vllm", "sglang", "trtllm")},
    "mem-fraction-static": "give --server sglang:mem_fraction_static=0.85",
    **dict.fromkeys(("cache-type-k", "cache-type-v", "ctk", "ctv"), "give --cache-format int8 (q8_0) or int4 (q4_0), for both"),
    **dict.fromkeys(("n-gpu-layers", "gpu-layers", "ngl", "n-cpu-moe", "ncmoe"), "all layers lie on the card; of experts:"
                    " --offload experts"),
    **dict.fromkeys(
        ("hybrid-context-parallel", "dynamic-context-parallel"), "give --dynamic-cp with the most tokens of a rank, and --lengths"
    ),
    **dict.fromkeys(("cpu-offload",), "give --offload optimizer or --offload all"),
    "mtbf": "give fleet --failures 50000h, between those of one GPU",
    **dict.fromkeys(
        ("spot", "reserved", "preemption", "preemptions", "reclaim", "interruptions"),
        "give --price on-demand=3,spot=1.2@6h: an instance at 1.2 a GPU-hour is taken away every 6 hours in the mean;"
        " plan --find gpu --prices spot has list prices",
    ),
    **dict.fromkeys(
        ("quantization", "quant", "quantize", "bits", "quant-bits"), "give --qlora, or --task generate --weight-format awq"
    ),
    **dict.fromkeys(("ema", "use-ema", "ema-decay"), "give --optimizer adamw:ema, or adamw:ema=host for one in host memory"),
    **dict.fromkeys(
        ("moment-dtype", "optimizer-dtype"),
        "give --optimizer adamw:moments=bf16",
    ),
    **dict.fromkeys(
        ("grad-reduce-in-fp32", "accumulate-allreduce-grads-in-fp32", "reduce-dtype", "grad-dtype",
         "grad-reduce-in-bf16"),
        "--precision says it: bf16-mixed-18 accumulates and reduces gradients in float32, bf16-mixed-16 in 16 bits",
    ),
    **dict.fromkeys(
        ("moe-router-group-topk", "moe-router-num-groups", "topk-group", "n-group"),
        "a model's config.json says it (n_group, topk_group)",
    ),
}  # fmt: skip
"""Flags that are no one flag here, and what says the same."""

_SHARED = {
    **dict.fromkeys(("ddp", "zero0", "no_shard"), "--zero 0"), "zero1": "--zero 1",
    **dict.fromkeys(("zero2", "shard_grad_op"), "--zero 2"), **dict.fromkeys(("zero3", "fsdp", "fsdp2", "full_shard"), "--zero 3"),
    "deepspeed_stage_1": "--zero 1", "deepspeed_stage_2": "--zero 2", "deepspeed_stage_3": "--zero 3",
    "deepspeed_stage_2_offload": "--zero 2 --offload optimizer", "deepspeed_stage_3_offload": "--zero 3 --offload all",
    "zero2_offload": "--zero 2 --offload optimizer", "zero3_offload": "--zero 3 --offload all",
}  # fmt: skip
_METHODS = {"lora": "--adapter lora", "qlora": "--qlora", "dora": "--adapter lora --use-dora", "full": "", "fft": ""}
_STORED = {
    name: f"--weight-format {name}"
    for name in ("awq", "gptq", "fp8", "nvfp4", "mxfp4", "q4_0", "q4_k_m", "q5_k_m", "q6_k", "q8_0")
}
_UNSLOTH = {
    "unsloth": "--recompute full --framework unsloth",
    **{word: f"--recompute {word}" for word in ("full", "selective")},
}
_CACHES = {"q8_0": "--cache-format int8", "q4_0": "--cache-format int4", "f16": "", "bf16": ""}
_OFFLOADED = {
    what: {"cpu": f"--offload {what}", "nvme": f"--offload {what} --offload-to nvme", "none": ""}
    for what in ("optimizer", "all")
}
ENGINES = {
    "enable-sleep-mode": "sleep=1",
    "free-cache-engine": "sleep=1",
    "disable-cuda-graph": "graphs=0",
    "enforce-eager": "graphs=0",
}
"""Switches of engines, and the options of `--server` and `--rollout` that they are."""
EACH = ("nproc-per-node", "n-gpus-per-node", "ngpus-per-node", "ntasks-per-node")
"""Flags with the GPUs of a node: all there are where no nodes are counted."""
WORDED = {
    **dict.fromkeys(("deepspeed", "strategy", "distributed", "distributed-type", "sharding", "sharding-strategy", "fsdp"), _SHARED),
    **dict.fromkeys(("peft", "method", "peft-method", "peft-type", "finetuning-type",
                      "train-type", "train-mode", "train-method", "tuner-type", "mode"), _METHODS),
    **dict.fromkeys(("quantization", "quant", "quantize", "q"), _STORED),
    **dict.fromkeys(("n-gpu-layers", "gpu-layers", "ngl"), dict.fromkeys(("99", "999", "all", "_1", "auto"), "")),
    **dict.fromkeys(("offload-optimizer", "offload-optimizer-device"), _OFFLOADED["optimizer"]),
    **dict.fromkeys(("offload-device", "offload-to-cpu"), _OFFLOADED["all"]),
    **dict.fromkeys(("offload-param", "offload-param-device", "offload-params"), _OFFLOADED["all"]),
    **dict.fromkeys(("fp8-format", "fp8"), dict.fromkeys(("hybrid", "e4m3"), "--precision fp8")),
    "flash-attn": {"fa2": "--attention fa2", "sdpa": "--attention flash", "disabled": "--attention eager", "on": "", "auto": ""},
    "stage": {"sft": "", "pt": ""} | {task: f"--task {task}" for task in ("dpo", "kto", "ppo", "rm")},
    "fp8-recipe": {
        "mxfp8": "--precision mxfp8", **{name: f"--precision fp8-{name}" for name in ("delayed", "tensorwise", "blockwise")},
    },
    **dict.fromkeys(("use-gradient-checkpointing", "gradient-checkpointing"), _UNSLOTH),
    **dict.fromkeys(("cache-type-k", "cache-type-v", "ctk", "ctv"), _CACHES),
    "bias": {"none": ""}, "exclusive": dict.fromkeys(("user", "mcs"), ""),
    **dict.fromkeys(EACH, dict.fromkeys(("gpu", "auto", "cuda"), "")),
    "dynamo-backend": {"inductor": "--torch-compile", "no": ""},
    "attention-backend": {"flash": "--attention flash", "fused": "", "unfused": "--attention eager"},
    "loss-type": {**dict.fromkeys(("sigmoid", "hinge", "robust"), ""), "ipo": "--task ipo"},
    "bnb-4bit-quant-type": {"nf4": "--qlora", "fp4": "--qlora --base fp4"},
    "activation-checkpoint.mode": {"full": "--recompute full", "selective": "--recompute per-op", "none": "--recompute none"},
    "quant-method": {"bnb": "--qlora", **{name: f"--qlora --base {name}" for name in ("hqq", "gptq", "awq")}},
    "quant-bits": {"4": "--qlora", "8": "--qlora --base int8"},
    "algorithm.adv-estimator": {"grpo": "--task grpo", "gae": "--task ppo"},
    "amp": {word: f"--precision {word}" for word in ("bf16", "fp16")}, "parallel": _SHARED,
    "bf16": {"auto": "--precision bf16"}, "vllm-mode": {"colocate": ""},
    "show": dict.fromkeys(("network", "all", "front"), "--full"),
}  # fmt: skip
"""Flags with a word of a few, and the words here."""
NUMBERED = {"lora": "--lora-rank", "sp": "--cp"}
"""Switches that a number follows, and the flag here that takes it."""
MODEL = ("model-name", "model-name-or-path", "model-path", "model-id", "pretrained", "pretrained-model", "m")
"""Flags of the model, which stands by itself here."""
COUNTS = {
    **dict.fromkeys(
        (
            "global-batch-tokens",
            "batch-tokens",
            "tokens-per-step",
            "global-batch-size-tokens",
            "batch-size-tokens",
            "tokens-per-global-batch",
        ),
        "tokens",
    ),
    **dict.fromkeys(("dp", "data-parallelism", "dp-size", "data-parallel-size", "data-parallel"), "dp"),
    **dict.fromkeys(("nodes", "nnodes", "num-nodes", "n-nodes", "num-machines", "n"), "nodes"),
    **dict.fromkeys(EACH, "each"),
    **dict.fromkeys(("data-parallel-shard-degree", "dp-shard", "fsdp-size"), "shards"),
    **dict.fromkeys(
        (
            "gradient-accumulation-steps",
            "accumulate-grad-batches",
            "grad-accum",
            "gradient-accumulation",
            "accumulation-steps",
            "accumulate",
            "num-microbatches",
            "ga",
            "grad-acc",
            "microbatches",
            "num-micro-batches",
        ),
        "accumulation",
    ),
}
"""Flags with a count that another flag here follows from: GPUs from replicas or nodes, the batch from accumulation."""

HARMLESS = (
    "time", "partition", "account", "qos", "job-name", "mail-type", "cpus-per-task", "constraint", "nodelist", "keep-alive",
    "learning-rate", "lr", "lora-alpha", "weight-decay", "warmup-steps", "warmup-ratio", "seed", "logging-steps", "output-dir",
    "lr-scheduler-type", "save-steps", "save-every", "save-strategy", "eval-strategy", "report-to", "run-name", "warmup",
    "swap-space", "threads", "t", "port", "host", "hf-repo", "hf-file", "random-state", "main-gpu", "gradient-clipping",
    "model-impl", "defrag-thold", "kl-coeff", "entropy-coeff", "entropy-coef", "clip-ratio", "kl-loss-coef", "cliprange",
    "val-set-size", "limit-val-batches", "template", "gradient-clip-val", "clip-grad-norm", "hf-token", "served-model-name",
    "tool-call-parser", "num-train-epochs", "max-steps", "num-epochs", "train-iters", "dataset", "dataset-name",
    "gradient-checkpointing-kwargs", "kl-coef", "init-kl-coef", "init-lora-weights", "epsilon",
    "epsilon-high", "clip-range", "tuner-backend", "data-path", "train-data", "currency",
    "lr-scheduler", "max-grad-norm", "dataloader-num-workers", "num-workers", "temperature", "top-p", "beta", "wd", "num-rollout",
    "project-name", "wandb-project", "project", "experiment-name", "save-total-limit", "eval-steps", "cache-dir", "tokenizer",
)  # fmt: skip
"""Flags with a value that changes neither memory nor time."""

TORCH_OPTIMIZERS = {
    "adamw_torch_fused": "adamw-fused", "adamw_torch": "adamw-foreach", "adamw_hf": "adamw-loop",
    "adamw_anyprecision": "adamw-anyprecision",
    "paged_adamw_32bit": "paged-adamw-32bit", "paged_adamw": "paged-adamw-32bit", "adamw_apex_fused": "adamw-fused",
    "adamw_torch_xla": "adamw-fused",
    "adamw_bnb_8bit": "adamw-8bit", "adamw_8bit": "adamw-8bit", "paged_adamw_8bit": "paged-adamw-8bit",
    "adamw_torch_8bit": "adamw-torchao-8bit", "adamw_torch_4bit": "adamw-4bit", "adafactor": "adafactor",
    "lion_32bit": "lion-bnb-32bit", "lion_8bit": "lion-8bit", "paged_lion_32bit": "paged-lion-32bit",
    "paged_lion_8bit": "paged-lion-8bit", "sgd": "sgd", "adagrad": "adagrad", "rmsprop": "rmsprop",
    "rmsprop_bnb": "rmsprop-bnb-32bit", "rmsprop_bnb_32bit": "rmsprop-bnb-32bit", "rmsprop_bnb_8bit": "rmsprop-8bit",
    "ademamix": "ademamix", "ademamix_8bit": "ademamix-8bit", "galore_adamw": "galore", "galore_adamw_8bit": "galore-8bit",
    "galore_adafactor": "galore-adafactor", "galore_adamw_layerwise": "galore-layerwise",
    "galore_adamw_8bit_layerwise": "galore-8bit-layerwise", "apollo_adamw": "apollo",
    "apollo_adamw_layerwise": "apollo-layerwise", "lomo": "lomo", "adalomo": "adalomo", "grokadamw": "grokadamw",
    "schedule_free_adamw": "schedule-free-adamw", "schedule_free_radam": "schedule-free-adamw",
    "schedule_free_sgd": "schedule-free-sgd", "stable_adamw": "stable-adamw",
}  # fmt: skip
"""`TrainingArguments.optim`."""

ATTENTION = {
    "sdpa": "flash", "flash_attention_2": "fa2", "flash_attention_3": "fa3", "flash_attention_4": "fa4", "eager": "eager",
    "flash_attention": "fa2", "kernels-community/flash-attn": "fa2", "kernels-community/flash-attn2": "fa2",
    "kernels-community/flash-attn3": "fa3", "kernels-community/vllm-flash-attn3": "fa3", "flex_attention": "fa2",
}  # fmt: skip
"""`attn_implementation` of transformers, as `--attention`; `flash` is what PyTorch chooses. FlexAttention's own kernels are made
from FlashAttention-2's, of which they reach nine tenths (source: pytorch.org/blog/flexattention)."""

_ON = {"true": "full", "on": "full", "all": "full", "yes": "full", "false": "none", "off": "none"}
VALUES: dict[str, dict[str, str]] = {
    "precision": {
        "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16", "torch.bfloat16": "bf16", "16": "fp16",
        "amp": "bf16", "mixed": "bf16",
        "32": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16", "float8": "fp8", "bf16-true": "bf16-pure",
        "16-true": "fp16-pure", "fp16-true": "fp16-pure",
        "fp16-mixed": "fp16", **dict.fromkeys(("fp8-hybrid", "fp8-e4m3", "e4m3"), "fp8"), "fp8-block": "fp8-blockwise",
    },
    "weights": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "torch.bfloat16": "bfloat16", "half": "float16"},
    "attention": {**{name: kind for name, kind in ATTENTION.items() if name != kind}, "flash2": "fa2", "flash-attn": "fa2",
                  "flash_attn": "fa2", "math": "eager", "xformers": "fa1"},
    "optimizer": {**{name: kind for name, kind in TORCH_OPTIMIZERS.items() if name != kind}, "adam": "adamw",
                  "dist_muon": "muon", "dist-muon": "muon", "adam8bit": "adamw-8bit", "adamw-ema": "adamw:ema",
                  **dict.fromkeys(("adamw-bf16", "adam-bf16"), "adamw:moments=bf16")},
    "recompute": _ON,
    "cache_format": {"q8": "int8", "q8_0": "int8", "q4": "int4", "q4_0": "int4", **dict.fromkeys(("fp8_e5m2", "fp8_e4m3"), "fp8"),
    "f16": "fp16"},
    "weight_format": {"4bit": "nf4", "8bit": "int8"},
    "framework": {
        **dict.fromkeys(("megatron", "mcore", "megatron-core", "mindspeed", "megablocks", "megatron-lm"), "megatron"),
        **dict.fromkeys(("deepspeed", "ds"), "deepspeed"), **dict.fromkeys(("composer", "mosaicml"), "llm-foundry"),
        **dict.fromkeys(("fsdp", "pytorch-fsdp", "pytorch", "torch", "fairscale", "metaseq", "lingua"), "fsdp"),
        **dict.fromkeys(("jax", "levanter"), "maxtext"), "neox": "gpt-neox", "olmo": "olmo-core", "nemo": "nemo",
    }, "schedule": {
        **dict.fromkeys(("1f1b", "pipedream-flush"), "1f1b"), **dict.fromkeys(("gpipe", "afab"), "gpipe"),
        **dict.fromkeys(("interleaved", "interleaved-1f1b", "interleaved1f1b"), "interleaved"),
        **dict.fromkeys(("zb-h1", "zbh1", "zb", "zero-bubble", "zerobubble", "zb1p", "zb-1p"), "zb-h1"),
        **dict.fromkeys(("zb-2p", "zb2p", "zbh2", "zb-h2"), "zb-2p"), **dict.fromkeys(("zb-v", "zbv"), "zb-v"),
        "dualpipe": "dualpipe", **dict.fromkeys(("dualpipev", "dualpipe-v"), "dualpipev"),
    }, "zero": {"stage0": "0", "stage1": "1", "stage2": "2", "stage3": "3", "zero2": "2", "zero3": "3"},
    "task": {"pretrain": "train", "finetune": "train", "diffusion": "train", "dreambooth": "train", "rlhf": "ppo",
             "inference": "generate", "infer": "generate", "serve": "generate", "serving": "generate", "quantize": "quantise",
             **dict.fromkeys(("embed", "embedding", "embeddings", "score", "rerank", "pooling", "classify"), "forward")},
    "offload": {"optim": "optimizer", "optimizer_states": "optimizer", "params": "all", "full": "all", "cpu": "all"},
    "at": {"loading": "setup", "load": "setup", "init": "setup", "save": "saving", "eval": "evaluation", "optimizer": "step"},
    "objective": {**dict.fromkeys(("throughput", "speed", "fastest"), "time"), **dict.fromkeys(("cost", "cheapest"), "money")},
    "find": {**dict.fromkeys(("context", "length", "sequence", "max-model-len", "seq_len"), "seq-len"), "card": "gpu",
             **dict.fromkeys(("micro_batch", "batch-size"), "micro-batch"), "fewest": "gpus", "cheapest": "gpu"},
}  # fmt: skip
"""Values that other tools have, by the field, and what each is here."""

COUNT = r"\d{1,6}"
PATTERNS: tuple[tuple[str, str, str], ...] = (
    ("lora_dropout", r"0(?:\.0*)?", ""),
    ("precision", r"none|auto", ""),
    ("adapter", r"qlora", "--qlora"),
    ("adapter", r"dora", "--use-dora"),
    ("gpu", rf"gpu:([a-z][^:]*):({COUNT})", r"--gpu \1 --gpus \2"),
    ("gpu", rf"gpu:({COUNT})", r"--gpus \1"),
    ("gpus", rf"([a-z][^:]*):({COUNT})", r"--gpu \1 --gpus \2"),
    ("host_memory", r"(\d[\d.]*) ?gb?", r"--host-memory \1GB"),
    ("host_memory", r"(\d[\d.]*) ?tb?", r"--host-memory \1TB"),
    ("gpu", rf"({COUNT})(?: ?[x*×] ?| )(\d+) ?gi?b?(?: gpus?| cards?)?", r"--memory \2GB --gpus \1"),
    ("gpu", rf"({COUNT}) ?[x*×] ?(.*[a-z].*|\d{{4,}})", r"--gpu \2 --gpus \1"),
    ("gpu", rf"(.*\d.*?) ?[x*×:] ?({COUNT})", r"--gpu \1 --gpus \2"),
    ("gpu", r"(\d+(?:\.\d+)?) ?(?:GB|G)", r"--memory \1GB"),
    ("gpu", r"(\d+(?:\.\d+)?) ?GiB", r"--memory \1GiB"),
    ("gpu", r"(?:google )?(?:colab|kaggle)(?: pro\+?)?[ -](.+)", r"--gpu \1"),
    ("gpu", r"[x×](\d{1,3})|(\d{1,3})[x×]", r"--gpus \1\2"),
    ("nic_bandwidth", r"(?:(?:infiniband|ib|roce)[- ]?|8 ?x ?)(.+)", r"--nic-bandwidth \1"),
    ("nic_bandwidth", r"infiniband|ib|roce|rdma|efa", ""),
    ("steps", r"(\d+) ?k", r"--steps \g<1>000"),
    ("steps", r"(\d+) ?m", r"--steps \g<1>000000"),
    ("engine", r"(deepspeed|megatron|fsdp|trl|axolotl|verl|nemo|torchtitan)", r"--framework \1"),
    ("host_memory", r"0", ""),
    ("gpus", rf"({COUNT}) ?[x*×] ?(.*[a-z].*)", r"--gpus \1 --gpu \2"),
    ("memory", r"(\d+(?:\.\d+)?)", r"--memory \1GB"),
    ("memory", r"(\d+(?:\.\d+)?) ?(?:g|gb)", r"--memory \1GB"),
    ("offload", r"(0?\.\d+)", r"--offload optimizer:\1"),
    ("exposed", r"(\d) ?%", r"--exposed 0.0\1"),
    ("exposed", r"(\d\d) ?%", r"--exposed 0.\1"),
    ("margin", r"(\d[\d.]*) ?GiB", r"--margin \1"),
    ("mfu", r"(\d\d(?:\.\d+)?)", r"--mfu \1%"),
    ("hfu", r"(\d\d(?:\.\d+)?)", r"--hfu \1%"),
    ("max_ttft", r"(\d{3,5})", r"--max-ttft \1ms"),
    ("max_tpot", r"(\d{2,4})", r"--max-tpot \1ms"),
    ("engine", r"((?:vllm|sglang|trtllm)(?:[:=].*)?)", r"--server \1"),
    ("server", r"tensorrt[-_]llm(.*)", r"--server trtllm\1"),
    ("draft", r"mtp", "--mtp"),
    ("task", r"prefill", "--task generate --answer 1"),
    *((name, r"(\d{1,3})[, ](\d{3})", f"--{name.replace('_', '-')} \\1\\2") for name in ("seq_len", "context")),
    ("tokens", r"(\d{1,3})" + 3 * r"(?:[, ](\d{3}))?" + r"[, ](\d{3})", r"--tokens \1\2\3\4\5"),
    ("price", r"(\d+),(\d{1,2})", r"--price \1.\2"),
    (
        "price",
        r"[$€£¥]? ?(\d[\d.]*) ?(?:[$€£¥]|usd|eur|dollars?|euros?)?"
        r" ?(?:(?:/|per|an?) ?(?:gpu)?[- /]?h(?:ou)?r?)?",
        r"--price \1",
    ),
)
"""Values by their form: the field, what the whole text matches, and the words here."""
LENGTHS = ("seq_len", "target_len", "prompt_len", "context", "answer")
"""Fields in which k is 1,024 tokens and m as many thousands, as lengths of context are written."""
SERVING = (
    "weight_format",
    "cache_format",
    "server",
    "draft",
    "acceptance",
    "prefill_tokens",
    "prompt_len",
    "answers",
    "max_ttft",
    "max_tpot",
    "requests",
)
"""Fields that only a model which is served has."""
LAYOUTS = ("layout", "parallelism", "parallel-config", "strategy", "mesh")
"""Flags of degrees that are written together, as tp8pp2 or tp=8,pp=2."""
WHOLE = ("epochs", "steps")
"""Fields of a step's answers, which of training say how long it runs."""
ALONE = {"batch": "micro_batch", "context": "seq_len"}
"""Fields of a model that is served, and what the same word says of training."""
OF_SERVING = {own: name for name, own in ALONE.items()} | {"precision": "weight_format"}
"""Fields of training, and what the same word says of a model that is served."""
SERVED = {"--seq-len": "--context", "--tokens": "--answers"}
"""Flags of training that words stand for, and what they stand for with a server."""
ENGINES_OWN = ("max-model-len", "max-num-seqs", "kv-cache-dtype", "mem-fraction-static", "max-running-requests", "n-gpu-layers",
               "chunked-prefill-size", "max-num-batched-tokens", "num-ctx", "cache-type-k", "ctk", "ngl", "n-cpu-moe",
               "gguf", "num-parallel", "users", "num-users", "concurrent-users", "concurrent-requests", "num-concurrent",
               "concurrency", "max-concurrency", "qps", "rps", "request-rate")  # fmt: skip
"""Words that only engines have, which serve."""
ELSEWHERE = ("--max-ttft", "--max-tpot", "--requests")
"""Flags of one command alone, which another one names."""
ROLLING = ("ppo", "grpo", "rloo", "dapo", "gspo")
"""Tasks whose prompts are answered."""
TAKEN = (RENAMED, SWITCHES, HARMLESS)
"""Tables of words that are taken for others, also after the section of a tool's configuration."""
OWN_SECTIONS = {
    *"cbmn",
    "data",
    "rollout",
    "ref",
    "critic",
    "reward",
    "vllm",
    "sglang",
    "device",
    "mode",
    "name",
    "type",
    "size",
}
"""Parts of keys with sections that do not mean there what they mean alone."""
ALONE_SAID = (
    "task",
    "schedule",
    "optimizer",
    "attention",
    "framework",
    "precision",
    "topology",
    "offload",
    "recompute",
    "adapter",
    "loss",
    "weight_format",
)
"""Fields whose values are also typed as flags, in this order."""
WITH_NAME = ("offload", "recompute", "loss")
"""Of these, those whose values say nothing without the field's name."""
COMMON = ("use", "enable", "num", "max", "min", "size", "disable", "with", "per", "the", "len", "length")
"""Words of flags that many have."""
BESIDE = "counts beside other keys"
"""Of a reason why a key alone says nothing."""
TOKENS = r"(\d+(?:\.\d+)?)([km]?)(?: ?tok(?:en)?s?)?"
"""Pattern of a count of tokens, in whose thousands are 1,024."""
