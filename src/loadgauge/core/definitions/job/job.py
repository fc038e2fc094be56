"""`Job`: a training job as the user asks for it. Its fields are the flags of the command line, the controls of the page, the
columns of a sweep and the facts that `job_files/ideas/` reads and writes; their bounds, units and help are stated here once."""

import shlex
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, get_args

import msgspec

from loadgauge.core.base.errors import ConfigError, suggest
from loadgauge.core.definitions.job.file_fields import OfFiles
from loadgauge.core.definitions.job.job_field import Field as Field, about as _field
from loadgauge.core.definitions.job.picture_fields import OfPictures
from loadgauge.core.definitions.job.posttrain_fields import OfModel, OfTask
from loadgauge.core.definitions.layout.axes import RANK_ORDER
from loadgauge.core.definitions.layout.layout import SCHEDULES, CpComm, Padding
from loadgauge.core.definitions.layout.overlap import Overlap
from loadgauge.core.definitions.model.attention_kernels import ATTENTIONS
from loadgauge.core.definitions.model.lora import ADAPTER_DTYPES, BASE_FORMATS, SAVED_MODULES, Upcast
from loadgauge.core.definitions.model.tuners import ADAPTERS
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS, LOW_NAMES, OTHER_NAMES
from loadgauge.core.definitions.training.optimizers import OPTIMIZERS
from loadgauge.core.definitions.training.precision import PRECISIONS


def _degree(help: str, high: int = 10**6) -> msgspec.Meta:
    return _field("whole", "layout", help, low=1, high=high)


class Job(OfFiles, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True,
          repr_omit_defaults=True):  # fmt: skip
    """A training job as asked for. None: not given, so the default applies, which `Estimate.assumed` lists.

    `loadgauge.estimate`, `plan` and `convert` take one; `words`, `flags` and `command` write it for a shell.

    >>> job = Job("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, zero=3)
    >>> job.flags()
    '--gpu h100-sxm5-80gb --gpus 8 --zero 3'
    >>> job.replace(tp=4, zero=None).flags()
    '--gpu h100-sxm5-80gb --gpus 8 --tp 4'
    >>> Job("gpt2", framework="transformers").framework
    'huggingface'
    """

    hub: Annotated[
        bool | None,
        _field(
            "switch", "model",
            "Ask huggingface.co for the config of a model that is neither shipped nor in the local cache (LOADGAUGE_HUB=1).",
        ),
    ] = None  # fmt: skip
    road: Annotated[str | None, _field(
        "choice", "file",
        "How the model is known: by a family written here, or captured from its code (written where there is one).",
        choices=("written", "captured"))] = None  # fmt: skip
    inputs: Annotated[str | None, _field(
        "text", "file",
        "Of a MODEL script.py:function: what the module is called with, such as 'randn(b, 3, 224, 224)', or the function that"
        " makes it.",
        metavar="FILE:FUNCTION")] = None  # fmt: skip
    rows: Annotated[str | None, _field(
        "text", "file",
        "Of a MODEL script.py:function: how many rows its data chooses at a line (boxes.py:41=2000), at each (2000), or most:"
        " all there are.",
        metavar="LINE=N", repeats=True)] = None  # fmt: skip
    gpu: Annotated[str | None, _field(
        "text", "cluster",
        "GPU model (`loadgauge gpus` lists them), or a TOML file of your own; required for the fits / does-not-fit verdict.",
        metavar="GPU")] = None  # fmt: skip
    memory: Annotated[str | None, _field(
        "text", "cluster",
        "Memory of a GPU: with --gpu, what a program may use of it (a shared or limited card); alone, a card of which"
        " nothing else is known, so that there is a verdict but no time.",
        metavar="16GiB")] = None  # fmt: skip
    gpus: Annotated[
        int | None, _field("whole", "cluster", "Total GPUs; dp = gpus / (tp * pp * cp).", low=1, high=10**7)
    ] = None
    tp: Annotated[int | None, _degree("Tensor-parallel ranks.")] = None
    pp: Annotated[int | None, _degree("Pipeline stages.")] = None
    vpp: Annotated[int | None, _degree("Chunks of each pipeline stage (interleaved schedule).")] = None
    cp: Annotated[int | None, _degree("Context-parallel ranks.")] = None
    ep: Annotated[int | None, _degree("Expert-parallel ranks.")] = None
    etp: Annotated[int | None, _degree("Tensor-parallel ranks of one expert.")] = None
    zero: Annotated[
        int | None, _field("whole", "layout", "ZeRO stage; 3 is fully sharded (FSDP).", low=0, high=3)
    ] = None  # fmt: skip
    sequence_parallel: Annotated[
        bool | None, _field("switch", "layout", "Shard norms and dropouts over tp as well.")
    ] = None  # fmt: skip
    schedule: Annotated[
        str | None, _field("choice", "layout", "Pipeline schedule.", choices=SCHEDULES, needs="pp")
    ] = None  # fmt: skip
    recompute: Annotated[str | None, _field(
        "text", "layout",
        "none, selective, full, full:every=N, full:layers=N, full:group=N, full:partitioned (ZeRO-R), memory_budget=0.5"
        " (torch.compile's), remat:POLICY (MaxText's), or what runs again: norm, swiglu, core_attn, mla_up, moe_act, mlp,"
        " names of operations; in `plan` also least: the least of all these that fits.",
        metavar="WHAT", values=("none", "selective", "full", "full:every=2", "full:every=4"))] = None  # fmt: skip
    stage_layers: Annotated[
        str | None,
        _field("text", "layout", "Layers of each pipeline stage, if they differ.", metavar="7,14x8,7"),
    ] = None
    micro_batch: Annotated[
        int | None, _field("whole", "batch", "Sequences of one forward pass on one rank.", low=1, high=10**6)
    ] = None
    global_batch: Annotated[
        int | None, _field("whole", "batch", "Sequences of one optimizer step, over all GPUs.", low=1, high=10**9)
    ] = None
    seq_len: Annotated[int | None, _field("whole", "batch", "Tokens per sequence.", low=1, high=10**9)] = None
    target_len: Annotated[int | None, _field(
        "whole", "batch",
        "Tokens of a model's second text, where it has two: a decoder's beside its encoder's (as many as --seq-len).",
        low=1, high=10**9)] = None  # fmt: skip
    audio: Annotated[
        float | None,
        _field("positive", "batch", "Length of each sound, where a model takes some of any length.", metavar="SECONDS"),
    ] = None
    lengths: Annotated[str | None, _field(
        "file", "batch",
        "Sequence lengths instead of --seq-len: a file, FILE:COLUMN of a data set, or uniform:N; compares padded"
        " with padding-free.",
        metavar="FILE")] = None  # fmt: skip
    padding: Annotated[str | None, _field(
        "choice", "batch",
        "How sequences are put in a micro-batch: of --lengths free (no padding) or dynamic (to its longest), max-length"
        " (to the longest of all, or --seq-len).",
        choices=get_args(Padding))] = None  # fmt: skip
    dynamic_cp: Annotated[
        int | None,
        _field(
            "whole",
            "batch",
            "Tokens of a rank at most: a sequence of --lengths is on 1, 2, 4, ... ranks (Megatron-Core's).",
            low=1,
            high=10**9,
            needs="lengths",
            metavar="TOKENS",
        ),
    ] = None
    precision: Annotated[str | None, _field(
        "text", "method",
        f"bf16, fp16 (the framework's recipe), {', '.join(PRECISIONS)}; products in 8 or 4 bits: {', '.join(LOW_NAMES)}"
        " (those that the framework has).",
        metavar="NAME", values=("bf16", "fp16", *PRECISIONS, *LOW_NAMES))] = None  # fmt: skip
    weights: Annotated[str | None, _field(
        "choice", "method",
        "Dtype in which weights are loaded (auto: the checkpoint's), and trained where the framework makes no copy.",
        choices=("auto", "float32", "bfloat16", "float16"))] = None  # fmt: skip
    version: Annotated[str | None, _field(
        "text", "method",
        "Releases of libraries, whose defaults apply (the newest); a number alone is that of the job file's tool.",
        metavar="transformers=4.57,torch=2.6")] = None  # fmt: skip
    optimizer: Annotated[
        str | None,
        _field(
            "text",
            "method",
            f"{', '.join(OPTIMIZERS)}; adamw:moments=bf16 (fp8) stores moments so, adamw:ema (ema=host) keeps an average of the"
            " weights.",
            metavar="NAME",
            values=tuple(OPTIMIZERS),
        ),
    ] = None
    attention: Annotated[
        str | None, _field(
            "choice", "method", "eager, flash (the kernel that the framework runs on this card), or a kernel of it by name.",
            choices=ATTENTIONS,
        ),
    ] = None  # fmt: skip
    loss: Annotated[
        str | None,
        _field(
            "text", "method",
            "auto (the framework's), float32, float32:N (in N pieces), inplace, fused, liger, tiled (TRL's), chunked:N.",
            metavar="HOW",
            values=("auto", "float32", "inplace", "fused", "compiled", "chunked", "tiled", "plain", "liger"),
        ),
    ] = None  # fmt: skip
    kernels: Annotated[
        str | None,
        _field(
            "choice", "method",
            "Kernels in place of the framework's own: liger's norms, MLPs, rotations and loss; lora: adapters in one function.",
            choices=("native", "liger", "lora", "liger-lora"),
        ),
    ] = None  # fmt: skip
    compile: Annotated[
        bool | None, _field("switch", "method", "Layers and loss in torch.compile.", aliases=("torch-compile",))
    ] = None  # fmt: skip
    determinism: Annotated[
        str | None,
        _field(
            "choice",
            "method",
            "Sums in one order: by kernels, or blocking (full_determinism).",
            choices=("kernels", "blocking"),
        ),
    ] = None
    framework: Annotated[
        str | None,
        _field(
            "text", "method",
            f"{', '.join(FRAMEWORKS)}: its defaults apply (megatron if tp, pp, cp or ep is above 1, else huggingface).",
            metavar="NAME", values=tuple(FRAMEWORKS),
        ),
    ] = None  # fmt: skip
    lora_rank: Annotated[
        int | None, _field("whole", "method", "Train adapters of this rank on a frozen model.", low=1, high=10**5)
    ] = None
    adapter: Annotated[
        str | None,
        _field(
            "choice", "method", "Kind of adapters (lora); --lora-rank is then OFT's block size, p-tuning's encoder width.",
            choices=ADAPTERS,
        ),
    ] = None  # fmt: skip
    virtual_tokens: Annotated[
        int | None,
        _field("whole", "method", "Tokens that prompt tuning or p-tuning trains.", low=1, high=10**6, needs="adapter"),
    ] = None  # fmt: skip
    lora_targets: Annotated[
        str | None,
        _field(
            "text", "method",
            "all-linear, attention, or names (q_proj,v_proj); also embed_tokens, lm_head, experts.gate_up_proj, experts.down_proj.",
            metavar="NAMES",
            values=("all", "all-linear", "attention"), needs="lora_rank",
        ),
    ] = None  # fmt: skip
    qlora: Annotated[
        bool | None, _field("switch", "method", "Adapters on a 4-bit base.", aliases=("quantised", "quantized"))
    ] = None  # fmt: skip
    base: Annotated[
        str | None,
        _field(
            "choice", "method", "How the frozen base of --qlora is stored (nf4).", choices=tuple(BASE_FORMATS),
            needs="qlora",
        ),
    ] = None  # fmt: skip
    lora_dropout: Annotated[
        float | None,
        _field("positive", "method", "Dropout of the adapters' inputs.", low=0, metavar="SHARE", needs="lora_rank"),
    ] = None
    lora_dtype: Annotated[
        str | None,
        _field(
            "choice", "method", "Adapters' weights (float32 beside 16-bit ones, as PEFT makes them).",
            choices=tuple(ADAPTER_DTYPES), needs="lora_rank",
        ),
    ] = None  # fmt: skip
    kbit_upcast: Annotated[
        str | None,
        _field(
            "choice", "method",
            "Frozen weights cast to float32 before training: all that are not quantised (PEFT's"
            " prepare_model_for_kbit_training), norms, or none.",
            choices=get_args(Upcast), needs="lora_rank",
        ),
    ] = None  # fmt: skip
    use_dora: Annotated[
        bool | None, _field("switch", "method", "Adapters with magnitudes (DoRA).", needs="lora_rank")
    ] = None
    modules_to_save: Annotated[
        str | None,
        _field(
            "text", "method", "Trained whole beside the adapters: embed_tokens, lm_head, or both.", metavar="NAMES",
            values=tuple(SAVED_MODULES), needs="lora_rank",
        ),
    ] = None  # fmt: skip
    lora_layers: Annotated[
        str | None,
        _field(
            "text", "method", "Layers that have adapters: places and ranges such as 0,1 or 16: (all).", metavar="PLACES",
            needs="lora_rank",
        ),
    ] = None  # fmt: skip
    train: Annotated[
        str | None,
        _field(
            "text", "method",
            "Train these weights of the model and freeze the rest: layers.-8:, layers.24:32.mlp, embed_tokens, lm_head, norm, a"
            " regular expression on parameters' names, frozen:0.8 (all but the first 80 %), tower (of pictures or sounds), or but:"
            " before one (all else).", metavar="WHAT", values=("layers.-2:", "layers.-8:", "frozen:0.5"),
        ),
    ] = None  # fmt: skip
    offload: Annotated[
        str | None,
        _field(
            "text", "method", "On the host: optimizer states, a part's, between updates alone, or weights too (experts: generate).",
            metavar="none|optimizer|optimizer:SHARE|states|all|experts",
            values=("none", "optimizer", "optimizer:0.5", "states", "all", "experts"),
        ),
    ] = None  # fmt: skip
    offload_to: Annotated[
        str | None,
        _field(
            "choice", "method", "Where --offload puts it (cpu): host memory, or NVMe by way of it.", choices=("cpu", "nvme"),
            needs="offload",
        ),
    ] = None  # fmt: skip
    end_units: Annotated[
        str | None,
        _field(
            "choice", "method", "FSDP units of embedding and head: one with what is in no layer (root), or each its own (apart).",
            choices=("root", "apart"),
        ),
    ] = None  # fmt: skip
    gradient_sync: Annotated[
        str | None,
        _field(
            "choice", "method", "FSDP reduces gradients with each micro-batch, or with the last one, until which they are whole.",
            choices=("each", "last"),
        ),
    ] = None  # fmt: skip
    engine: Annotated[
        str | None,
        _field(
            "text", "method",
            "Settings of DeepSpeed's zero_optimization, such as reduce_bucket_size=auto,overlap_comm=true; auto as transformers"
            " fills it in.",
            metavar="NAME=N,...",
        ),
    ] = None  # fmt: skip
    activation_offload: Annotated[
        str | None,
        _field(
            "text", "method",
            "Activations in host memory between forward and backward: checkpoints (the inputs of recomputed layers), all that is"
            " kept, or what modules or operations do: attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, expert_fc1, moe_act;"
            " in `plan` also least: the least of these that fits, beside what runs again.",
            metavar="none|checkpoints|all|MODULES", values=("none", "checkpoints", "all", "core_attn,moe_act"),
        ),
    ] = None  # fmt: skip
    pin_memory: Annotated[
        bool | None, _field("switch", "method", "Page-locked host memory for what is offloaded (on).")
    ] = None  # fmt: skip
    host_link: Annotated[
        str | None,
        _field(
            "bandwidth", "cluster", "Bandwidth between a GPU and its host, per direction (the card's PCIe link).", unit="GB/s",
            metavar="25GB/s", needs="gpu",
        ),
    ] = None  # fmt: skip
    host_bandwidth: Annotated[
        str | None,
        _field(
            "bandwidth", "cluster", "Bandwidth of a node's host memory, which bounds an optimizer step on the CPU.",
            unit="GB/s", metavar="25GB/s", needs="gpu",
        ),
    ] = None  # fmt: skip
    host_memory: Annotated[
        str | None,
        _field(
            "text", "cluster", "Memory of a node, which must hold what its GPUs keep there: it has a verdict of its own.",
            metavar="512GiB",
        ),
    ] = None  # fmt: skip
    nvme_bandwidth: Annotated[
        str | None,
        _field(
            "bandwidth", "cluster", "Bandwidth of a node's NVMe, for --offload-to nvme.", unit="GB/s", metavar="25GB/s",
            needs="gpu",
        ),
    ] = None  # fmt: skip
    eval_batch: Annotated[
        int | None,
        _field("whole", "batch", "Sequences of an evaluation batch on one rank; its memory is then counted.", low=1, high=10**6),
    ] = None  # fmt: skip
    eval_batches: Annotated[
        int | None,
        _field(
            "whole", "batch",
            "Evaluation batches whose logits are on the GPU at once: eval_accumulation_steps, or all where metrics are"
            " computed without it (0: the loss alone is kept).",
            low=0, high=10**6, needs="eval_batch",
        ),
    ] = None  # fmt: skip
    generate: Annotated[
        int | None,
        _field(
            "whole", "batch", "Tokens that an evaluation generates after each sequence, with a cache.", low=1, high=10**7,
            needs="eval_batch",
        ),
    ] = None  # fmt: skip
    save: Annotated[
        str | None,
        _field(
            "choice", "method", "Checkpoints of sharded weights: sharded, or full (gathered on the first rank).",
            choices=("sharded", "full"),
        ),
    ] = None  # fmt: skip
    gpus_per_node: Annotated[
        int | None,
        _field(
            "whole", "cluster", "GPUs of one node, joined by the fast link (or of a whole rack).", low=1, high=10**6,
            needs="gpu",
        ),
    ] = None  # fmt: skip
    link_bandwidth: Annotated[
        str | None,
        _field(
            "bandwidth", "cluster", "Bandwidth of the link inside a node, per GPU and direction.", unit="GB/s", metavar="25GB/s",
            needs="gpu",
        ),
    ] = None  # fmt: skip
    nic_bandwidth: Annotated[
        str | None,
        _field(
            "bandwidth", "cluster", "Bandwidth of the network adapter, per GPU and direction.", unit="GB/s", metavar="25GB/s",
            needs="gpu",
        ),
    ] = None  # fmt: skip
    topology: Annotated[
        str | None,
        _field(
            "text", "cluster",
            "The network from the node to the site, tier by tier: rail, nvl72, ... or a TOML file of your own; in place of the"
            " links of the GPU's file.",
            metavar="NAME", values=("rail", "fat-tree-4to1", "nvl72", "llama3"), needs="gpu",
        ),
    ] = None  # fmt: skip
    cp_comm: Annotated[
        str | None,
        _field("choice", "layout", "How cp ranks exchange keys and values.", choices=get_args(CpComm), needs="cp"),
    ] = None
    mtp: Annotated[
        bool | None, _field("switch", "method", "Train the model's multi-token prediction modules as well.")
    ] = None
    expert_imbalance: Annotated[
        float | None,
        _field(
            "positive", "layout",
            "Tokens of the busiest expert rank over the mean (1: balanced); the worst case is shown as well.", metavar="X",
        ),
    ] = None  # fmt: skip
    replicas: Annotated[int | None, _degree("Data-parallel groups that hold the same ZeRO shards (HSDP).")] = None
    order: Annotated[
        str | None,
        _field(
            "text", "layout", "Order in which the axes number the ranks, fastest first.", metavar=",".join(RANK_ORDER),
            needs="gpu",
        ),
    ] = None  # fmt: skip
    overlap: Annotated[
        str | None,
        _field(
            "text", "layout",
            f"Communication hidden under compute beside what the framework hides: {', '.join(Overlap.__struct_fields__)}, all;"
            " `none,dp` is dp alone.",
            metavar="WHAT", values=("none", "all", *Overlap.__struct_fields__), needs="gpu",
        ),
    ] = None  # fmt: skip
    tokens: Annotated[
        str | None,
        _field(
            "count", "money", "Tokens of the whole run; adds days, GPU-hours and energy.", metavar="15T", needs="gpu"
        ),
    ] = None
    price: Annotated[
        float | None,
        _field(
            "price",
            "money",
            "Price of one GPU-hour, or of several: lambda=2.75,spot=1.2@6h, taken away every 6 h (list prices).",
            metavar="MONEY",
            needs="tokens",
        ),
    ] = None
    days: Annotated[
        float | None, _field("positive", "money", "Deadline in days; adds how many GPUs would meet it.", needs="tokens")
    ] = None  # fmt: skip
    electricity: Annotated[
        str | None,
        _field(
            "electricity", "money", "Where the electricity is from, or its grams of CO2 a kWh; adds CO2.", metavar="COUNTRY|400",
            needs="tokens",
        ),
    ] = None  # fmt: skip
    mtbf_hours: Annotated[
        float | None,
        _field(
            "positive", "money", "Hours between failures of one GPU, its share of the node's failures included.", needs="tokens"
        ),
    ] = None  # fmt: skip
    checkpoint_seconds: Annotated[
        float | None, _field("positive", "money", "Time to write a checkpoint (60).", needs="mtbf_hours")
    ] = None  # fmt: skip
    restart_seconds: Annotated[
        float | None, _field("positive", "money", "Time until training resumes after a failure (600).", needs="mtbf_hours")
    ] = None  # fmt: skip
    measured: Annotated[
        str | None,
        _field(
            "text", "cluster",
            "A measured run of your own (step, mfu, hfu, tflops or tokens_per_second_per_gpu), followed by the flags in which"
            " it differed, after commas: predicted times are rescaled by it. Or gemm=612TFLOP/s, what a long matrix product"
            " sustains there (`calibrate` prints it): the power at which the GPUs run. Or a file of `anchor` or `calibrate`.",
            metavar="step=12.3s|FILE.toml", needs="gpu", aliases=("anchor",),
        ),
    ] = None  # fmt: skip
    tuning: Annotated[
        str | None,
        _field(
            "choice", "cluster",
            "Who tuned the run, by which step times are known to differ: recipe, the maker of the chips; usual, nobody knows;"
            " first, one who tries it (usual).",
            choices=("recipe", "usual", "first"), needs="gpu",
        ),
    ] = None  # fmt: skip

    def __post_init__(self) -> None:
        """Refuse what a run cannot have, however the job is made: fields about the whole run are numbers above 0.

        A library's name stands for the framework that trains as it does.
        """
        if self.framework in OTHER_NAMES:
            msgspec.structs.force_setattr(self, "framework", OTHER_NAMES[self.framework])
        for name in WHOLE_RUN:
            if (value := getattr(self, name)) is not None:
                try:
                    fields()[name].read(value)
                except ConfigError as error:
                    raise ConfigError(str(error), key=name) from None

    @classmethod
    def of(cls, model: str, values: Mapping[str, object]) -> "Job":
        """Read a job from texts (or numbers, bools and paths) by field name or flag; None is the same as not given.

        Raises `ConfigError`, with the name as its key, for an unknown name and for a value that cannot be read.

        >>> Job.of("gpt2", {"tp": "2", "seq-len": "4_096", "mtp": "true"})
        Job(model='gpt2', tp=2, seq_len=4096, mtp=True)
        """
        read: dict[str, Any] = {}
        for name, value in values.items():
            field = fields().get(name.replace("-", "_"))
            if field is None or name == "model":
                raise ConfigError(f"no flag of a job has this name{_did_you_mean(name)}", key=name[:60])
            if value is not None:
                try:
                    read[name.replace("-", "_")] = field.read(value)
                except ConfigError as error:
                    raise ConfigError(str(error), key=name) from None
        return cls(model=model, **read)

    @property
    def adapts(self) -> bool:
        """Return whether adapters are trained instead of the model. ``Job("gpt2", qlora=True).adapts == True``"""
        return self.lora_rank is not None or bool(self.qlora) or self.adapter is not None

    def replace(self, **fields: Any) -> "Job":
        """Return the job with some fields changed; None removes a field."""
        return msgspec.structs.replace(self, **fields)

    def flags(self) -> str:
        """Return the job as flags for a shell, without the model.

        >>> Job(model="gpt2", tp=2, sequence_parallel=True, lengths="my data.txt").flags()
        "--tp 2 --sequence-parallel --lengths 'my data.txt'"
        """
        return shlex.join(self.words())

    def words(self) -> list[str]:
        """Return the job as words of a command line, without the model.

        >>> Job(model="gpt2", qlora=False, price=2.5).words()
        ['--no-qlora', '--price', '2.5']
        """
        words = []
        for name in self.__struct_fields__[1:]:
            value, flag = getattr(self, name), name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            elif value is not None:
                words += [f"--{flag}", str(value)]
        return words

    def command(self, verb: str = "estimate") -> str:
        """Return the complete command line for a shell. verb: the command of `loadgauge`.

        >>> Job(model="llama-3.1-8b", tp=2).command()
        'loadgauge estimate llama-3.1-8b --tp 2'
        """
        if self.model.startswith("-"):
            return shlex.join(["loadgauge", verb, *self.words(), "--", self.model])
        return shlex.join(["loadgauge", verb, self.model, *self.words()])


@cache
def fields() -> dict[str, Field]:
    """Return the metadata of every field of `Job`, by name, in the order of the flags.

    >>> fields()["zero"].low, fields()["zero"].high, fields()["zero"].group
    (0, 3, 'layout')
    """
    # Not `get_type_hints`: the annotations of this module are no strings, which spares a cold start their compilation.
    annotations = (
        OfModel.__annotations__
        | OfTask.__annotations__
        | OfPictures.__annotations__
        | OfFiles.__annotations__
        | Job.__annotations__
    )
    return {name: annotations[name].__metadata__[0].extra["field"] for name in Job.__struct_fields__}


def _did_you_mean(name: str) -> str:
    flags = [flag.replace("_", "-") if "-" in name else flag for flag in Job.__struct_fields__[1:]]
    return suggest(name[:60], flags) or f" (known: {', '.join(flags)})"


WHOLE_RUN = ("tokens", "price", "electricity", "days", "mtbf_hours", "checkpoint_seconds", "restart_seconds")
"""Fields that describe the whole training run instead of one step."""
POSTTRAIN = OfTask.__struct_fields__[1:]
"""Fields that say what `task` trains, and of what."""
FILES = tuple(name for name in OfFiles.__struct_fields__ if name not in OfPictures.__struct_fields__)
"""Fields that say how job files are read."""
AROUND = ("eval_batch", "eval_batches", "generate", "save")
"""Fields that describe what happens between steps."""
