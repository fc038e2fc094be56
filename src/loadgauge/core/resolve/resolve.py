"""Resolving a `Job` into a `Setup`: defaults are filled in and recorded, and what does not go together is refused."""

import math
import os
from typing import Any

import msgspec

from loadgauge.core.base import (
    ConfigError,
    LayoutError,
    NotModelled,
    NotStated,
    above_zero,
    gib,
    host_holds,
    is_command,
    is_script,
    need,
    place_of,
    port,
    provider,
    rate,
    refuse,
    refuse_fields,
)
from loadgauge.core.base.lengths import Lengths
from loadgauge.core.definitions.hardware.calibration import slowed
from loadgauge.core.definitions.hardware.cluster import cluster
from loadgauge.core.definitions.hardware.gpu_names import names_one, variants
from loadgauge.core.definitions.hardware.hardware import Cluster, Gpu, card_of, gpu, gpu_ids, with_memory
from loadgauge.core.definitions.hardware.host import Host, host_link
from loadgauge.core.definitions.hardware.topology import topology
from loadgauge.core.definitions.hardware.usual import one_of, usual_network, with_usual
from loadgauge.core.definitions.job.job import POSTTRAIN, Job, fields
from loadgauge.core.definitions.job.job_text import offload_words
from loadgauge.core.definitions.job.uncounted import Uncounted
from loadgauge.core.definitions.layout.axes import DEGREES, MODEL_PARALLEL, RANK_ORDER
from loadgauge.core.definitions.layout.layout import Layout, in_group
from loadgauge.core.definitions.model.lora import BASE_FORMATS
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.around import Around
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS, default_framework
from loadgauge.core.definitions.training.stacks import Stack
from loadgauge.core.definitions.training.training import Training, training
from loadgauge.core.families.encoders import pictures
from loadgauge.core.resolve.adapters import adapters, below_adapters, trained_part
from loadgauge.core.resolve.large_runs import (
    BY_ZERO,
    MANY,
    by_batch,
    chunks,
    dynamic_groups,
    full_batch,
    overlapped,
    ragged,
    schedule_of,
    sequence_parallel,
    stage_layers,
    usual_line,
    whole_batches,
    with_alternatives,
)
from loadgauge.core.resolve.model import found_model
from loadgauge.core.resolve.recompute_words import recompute_policy, taken_for
from loadgauge.core.resolve.rescale import anchor_of, is_run, measured_by, sustained
from loadgauge.core.resolve.setup import Setup
from loadgauge.core.resolve.unsaid import (
    attention_of,
    determined,
    kernels_of,
    optimizer_of_own,
    others,
    says_what_is_loaded,
    with_kernel,
)

JOB_FILES = ("py", "ipynb", "json", "toml", "yaml", "yml", "sh", "txt", "args", "bash", "slurm", "sbatch", "env")
"""Endings of files that may be another tool's."""
SEQ_LEN = 4096


def asks_for_files(job: Job) -> bool:
    """Return whether job files of other tools say something of a job: as its model, or beside it.

    >>> asks_for_files(Job(model="gpt2")), asks_for_files(Job(model="gpt2", beside="ds_config.json"))
    (False, True)
    """
    read = job.dialect is not None and os.path.isfile(job.model)
    return read or (job.beside, job.base_model) != (None, None) or names_job_file(job.model)


def names_job_file(model: str) -> bool:
    """Return whether the name of a model is the path of another tool's job file, or a command that starts a run.

    Dialects are imported only where it may be.

    >>> names_job_file("llama-3.1-8b"), names_job_file("./axolotl.yaml")
    (False, True)
    """
    named = os.path.splitext(model)[1].lower().lstrip(".") in JOB_FILES or os.path.exists(place_of(model)[0])
    if not named and not is_command(model):
        return False
    dialects = provider("DIALECTS")
    return dialects is not None and bool(dialects.is_job_file(model))


def resolve_job(job: Job, model: ModelSpec | None = None) -> Setup:
    """Fill in what a job does not state and return the run; `model`: the model where it is loaded already.
    Raises `ConfigError`, `LayoutError` or `NotModelled`.

    >>> setup = resolve_job(Job(model="llama-3.1-8b", gpus=16, tp=8))
    >>> setup.layout.dp, setup.layout.seq_len, setup.training.framework.name
    (2, 4096, 'megatron')
    """
    file, uncounted = "", tuple[Uncounted, ...]()
    refuse(model is not None and job.beside is not None, "needs the name of a model or of a job file", key="beside")
    if job.dialect is not None and not os.path.isfile(job.model):
        need("DIALECTS").dialect(job.dialect)  # in whose words remedies are told
    if model is None and asks_for_files(job):
        dialects = need("DIALECTS")  # only then are they imported
        posttrain_flags = {name for name in POSTTRAIN if getattr(job, name) is not None}
        job, model, file, uncounted, _ = dialects.from_job_file(job)
        if not posttrain_flags and job.task is not None:
            job, beside = dialects.update_alone(job)
            uncounted = (*beside, *uncounted)
    refuse_fields(job, POSTTRAIN, "is an option of `loadgauge estimate --task`")
    card, assumed = named_card(job)
    chosen, job = _model(job, assumed) if model is None else (pictures.without_pictures(model), job)
    if not file and job.framework in FRAMEWORKS and FRAMEWORKS[job.framework].unties and chosen.own.rewritten:
        chosen = msgspec.structs.replace(chosen, tie_word_embeddings=False)

    def fill(name: str, default: Any, why: str = "") -> Any:
        if (value := getattr(job, name)) is None:
            assumed[f"--{name.replace('_', '-')}"] = f"{default}{f' ({why})' if why else ''}"
            return default
        return value

    _applies(job, chosen)
    if job.mtp:
        modules = chosen.num_nextn_predict_layers
        assumed |= {} if modules else {"--mtp": f"1 module as the last layer ({chosen.name} comes with none)"}
        chosen = chosen.with_mtp(modules or 1)
    chosen = trained_part(job, chosen)
    _whole_run(job)
    dp, degrees = _degrees(job, fill)
    lengths = None if job.lengths is None else Lengths.parse(job.lengths)
    groups = dynamic_groups(job, lengths, dp * degrees["cp"], degrees["pp"], assumed)
    if groups is not None:
        dp, degrees["cp"] = dp * degrees["cp"] // groups.largest, groups.largest
    if job.vpp is None and job.schedule == "interleaved" and degrees["pp"] > 1:
        degrees["vpp"] = fill(
            "vpp", chunks(chosen.num_hidden_layers, degrees["pp"]), "the interleaved schedule has several"
        )
    if (within := chosen.within_experts(degrees["tp"], degrees["ep"])) > 1:
        why = "experts that no ranks share out are split as the layer is"
        degrees["etp"] = within if chosen.own.states_splits and job.etp is None else fill("etp", within, why)
    micro_batch = fill("micro_batch", 1)
    stated = fill("global_batch", *full_batch(dp, micro_batch, degrees["pp"]))
    global_batch, shared_out = whole_batches(stated, dp, micro_batch)
    usual = "bf16" if card is None or card.bf16 else "fp16"
    if is_script(job.model):
        usual = "bf16-pure" if chosen.dtype in ("bfloat16", "float16") else "fp32"
    recipe: dict[str, Any] = {
        "framework": fill("framework", *_framework(job, chosen)),
        "precision": fill("precision", usual),
        "optimizer": optimizer_of_own(job, fill("optimizer", "adamw"), assumed),
        "attention": fill("attention", *attention_of(job)),
        "loss": fill("loss", "auto"),
        "lora": adapters(job, chosen, job.framework or framework_of(job), fill, assumed),
        "offload": offload_words(job.offload or "none"),
        "host": _host(job, card, assumed, file),
        "kernels": kernels_of(job, chosen),
        "compiled": job.compile or False,
        "weights": job.weights,
        "checkpoint": chosen.dtype,
        "stack": (stack := Stack.parse(job.version)),
    }
    chosen = below_adapters(chosen, recipe["lora"])
    kind = _with_engine(job, chosen, training(**recipe))
    if not kind.framework.fully_shards:
        why = f"is an FSDP option, and {kind.framework.name} does not shard by FSDP"
        refuse_fields(job, ("end_units", "gradient_sync"), why)
    if job.end_units is not None:
        kind = msgspec.structs.replace(kind, ends_apart=job.end_units == "apart")
    if job.gradient_sync is not None:
        own = msgspec.structs.replace(kind.framework, reduces_once=job.gradient_sync == "last")
        kind = msgspec.structs.replace(kind, framework=own)
    usually = kind.framework.scripts_zero * (dp * degrees["cp"] > 1)
    zero, around = (
        fill("zero", usually, f"{kind.framework.name}'s scripts" * (usually > 0)),
        _around(job, degrees["pp"]),
    )
    kind = with_kernel(
        job,
        msgspec.structs.replace(kind.under(zero), around=around, tuning=job.tuning or "usual"),
        card,
        stack,
        assumed,
    )
    says_what_is_loaded(job, chosen, kind, stack, assumed)
    kind = determined(
        job, overlapped(job, kind, dp * degrees["tp"] * degrees["pp"] * degrees["cp"], card, assumed), card
    )
    if job.precision in (None, "bf16", "fp16"):
        why = f"{kind.framework.name}'s recipe of {job.precision or usual}"
        if job.precision is None and usual == "fp16":
            why += f": {card.name if card else ''} has no bf16"
        assumed["--precision"] = f"{kind.precision.name} ({why})"
    if chosen.head.kind != "lm":
        assumed.pop("--loss", None)
    elif job.loss in (None, "auto"):
        assumed["--loss"] = f"{kind.kernels.loss} ({kind.framework.name}'s)"
    seq_len = _seq_len(job, chosen, lengths, fill)
    if groups is not None:
        seq_len += -seq_len % (2 * groups.largest)  # as it is padded
    chosen = pictures.seeing(job, chosen, degrees, seq_len, fill, assumed, file)
    layout = Layout(
        **degrees,  # type: ignore[arg-type]
        dp=dp,
        zero=zero,
        sequence_parallel=sequence_parallel(job, chosen, degrees["tp"], fill),
        recompute=recompute_policy(fill("recompute", *_recompute(job, file)), chosen, kind),
        micro_batch=micro_batch,
        global_batch=global_batch,
        seq_len=seq_len,
        schedule=schedule_of(job, assumed),
        stage_layers=stage_layers(job, chosen, degrees, assumed),
        cp_comm=job.cp_comm or "ring",  # type: ignore[arg-type]
        expert_imbalance=_imbalance(job, chosen, fill),
        replicas=job.replicas or 1,
        order=_order(job.order),
        **ragged(job, lengths, groups, (dp, micro_batch, global_batch), kind, assumed),
    )
    _runs(kind, layout)
    if layout.schedule == "interleaved" and (group := in_group(layout.num_microbatches, layout.pp)) != layout.pp:
        why = f"{layout.num_microbatches} micro-batches are no whole groups of {layout.pp}, the stages"
        assumed["--schedule"] = f"interleaved, in groups of {group} ({why}; microbatch_group_size_per_vp_stage)"
    if remark := taken_for(job.recompute or "", kind):
        assumed["--recompute"] = remark
    if card is not None and job.overlap is None and not kind.overlap.dp and layout.zero < 3 and layout.zero_ranks > 1:
        why = f"{kind.framework.name}'s: with dp, gradients hide"
        assumed["--overlap"] = f"{kind.overlap.text()} ({why})"
    for key, size in chosen.defaults:
        assumed[key] = f"{size} (not in the config: {chosen.model_type}'s default)"
    machines, untimed = cluster_of(job, card, layout.gpus)
    if machines is not None and card is not None and (line := usual_line(job, card, machines)):
        assumed["--nic-bandwidth"] = line
    if card is not None and not card.bf16 and kind.precision.name.startswith("bf16"):
        uncounted = (*uncounted, Uncounted(no_bf16(card), "precision"))
    setup = Setup(
        job=job,
        model=chosen,
        layout=layout,
        training=kind,
        gpu=card,
        lengths=lengths,
        assumed=assumed,
        cluster=machines,
        untimed=untimed,
        file=file,
        uncounted=(*uncounted, *shared_out),
        overlap_open=not file and job.overlap is None and job.measured is None and layout.gpus >= MANY,
        others=tuple(
            msgspec.structs.replace(
                other,
                around=kind.around,
                overlap=kind.overlap,
                kernels=msgspec.structs.replace(other.kernels, flash=kind.kernels.flash),
            )
            for other in others(job, recipe, kind, chosen, stack, assumed)
        )
        if not file
        else (),
    )
    if not file:
        setup = with_alternatives(setup, resolve_job)
    anchor = anchor_of(job, card)
    if anchor is None and not is_run(job):
        return setup
    slower = (
        measured_by(job, lambda there: resolve_job(there, chosen)) if anchor is None else anchor.slower(resolve_job)
    )
    return msgspec.structs.replace(setup, cluster=machines and slowed(machines, slower))


def named_card(job: Job) -> tuple[Gpu | None, dict[str, str]]:
    """The GPU of a job, and what was taken for it."""
    if job.gpu is None:
        if job.memory is None:
            return None, {}
        return card_of(job.memory), {"--gpu": f"none, only its memory: {job.memory}"}
    package = gpu(job.gpu)
    card, figures = with_usual(gpu(one_of(package)))
    assumed = {f"{name} of the GPU": f"{text} (no source states it)" for name, text in figures.items()}
    if package.id != card.id:
        assumed["--gpu"] = f"{card.id} (a program sees each part of {package.name} as a GPU)"
    elif job.gpu != card.id:
        others = variants(card.id, gpu_ids()) if not names_one(job.gpu, card.id) else ()
        rest = f": the commonest {job.gpu}; there is also {', '.join(others[:3])}" if others else f": {card.name}"
        assumed["--gpu"] = f"{card.id} ({rest[2:]})"
    if job.memory is not None:
        card = with_memory(card, job.memory)
    elif card.memory.shared:
        of = f"{gib(card.capacity, 1)} of {card.memory.label.text}" if card.memory.usable else card.memory.label.text
        assumed["--memory"] = f"{of}, shared with the system, whose part is not counted"
    return card, assumed


def _model(job: Job, assumed: dict[str, str]) -> tuple[ModelSpec, Job]:
    """The model of a job, and the job with how the copy that it names is stored; what was taken is noted in `assumed`."""
    source = found_model(job)
    if source.how:
        assumed["model"] = f"{source.spec.name} ({source.how})"
    for name, value in source.usual:
        assumed[f"--{name.replace('_', '-')}"] = f"{value} (as {source.spec.name}'s trainers do)"
    job = job.replace(**dict(source.usual))
    if not source.stored or job.qlora is not None:
        return source.spec, job
    refuse(
        source.stored not in BASE_FORMATS,
        f"training on {job.model}, whose weights are stored in {source.stored}: known are {', '.join(BASE_FORMATS)};"
        " --no-qlora trains the model it was made from, in 16 bits",
        NotModelled,
    )
    assumed["--qlora"] = f"the copy that is named is stored in {source.stored}"
    return source.spec, job.replace(qlora=True, base=job.base or source.stored)


def _with_engine(job: Job, model: ModelSpec, kind: Training) -> Training:
    """The training with the settings of DeepSpeed's engine that are asked for. Raises `ConfigError`."""
    if job.engine is None:
        return kind
    if (engine := kind.framework.engine) is None:
        raise ConfigError("needs --framework deepspeed", key="engine")
    framework = msgspec.structs.replace(kind.framework, engine=engine.told(job.engine, model.hidden_size))
    return msgspec.structs.replace(kind, framework=framework)


def no_bf16(card: Gpu) -> str:
    """Return the remark on bf16 for a GPU without it."""
    return (
        f"bf16 on {card.name}, which has none (compute capability {card.compute_capability}, below 8.0): PyTorch emulates it"
        " at the price of time and memory, and libraries may refuse it; --precision fp16 is the usual choice there"
    )


def _recompute(job: Job, file: str) -> tuple[str, str]:
    """The default of recomputation, and why."""
    own = FRAMEWORKS.get(job.framework or "")
    if job.qlora and not file and not (own is not None and own.joint_adapters):  # a job file says it itself
        return "full", "as QLoRA's tools do when they prepare the model; --recompute none turns it off"
    if not file and _offloads_checkpoints(job):
        return "full", f"as {job.framework} does; --recompute none turns it off"
    return "none", ""


def _offloads_checkpoints(job: Job) -> bool:
    framework = FRAMEWORKS.get(job.framework or "")
    return framework is not None and framework.offloads_checkpoints


NEEDED = {
    "gpu": "needs --gpu",
    "tokens": "needs --tokens, the length of the whole run",
    "mtbf_hours": "needs --mtbf-hours, how often a GPU fails",
}
"""Fields without which those that need them (`Field.needs`) are refused."""


def _whole_run(job: Job) -> None:
    """Refuses flags that need others that are not there."""
    for name, field in fields().items():
        spot = field.needs == "mtbf_hours" and "@" in str(job.price)  # instances are taken away
        if field.needs in NEEDED and not spot and getattr(job, field.needs) is None and getattr(job, name) is not None:
            raise ConfigError(NEEDED[field.needs], key=name)
    refuse(job.cp_comm is not None and (job.cp or 1) == 1, "needs --cp above 1", key="cp_comm")


def bandwidth(text: str | None, name: str) -> float | None:
    """Read a bandwidth [byte/s] of the flag `name`; None stays None. Raises `ConfigError`."""
    if text is None:
        return None
    words = port(text) if name == "nic_bandwidth" else text
    return above_zero(words, name, "byte/s", "a bandwidth such as 50GB/s or 400Gbit/s")


def cluster_of(job: Job, card: Gpu | None, gpus: int) -> tuple[Cluster | None, str]:
    """Return so many of the GPUs that a job runs on, joined as it says; or why there are none. Raises `ConfigError`."""
    if card is None:
        return None, ""
    link, adapter = (bandwidth(getattr(job, name), name) for name in ("link_bandwidth", "nic_bandwidth"))
    network = None
    if job.topology is not None:
        beside = ("gpus_per_node", "link_bandwidth", "nic_bandwidth")
        refuse_fields(job, beside, "is stated by --topology; give one of them")
        network = topology(job.topology)
    elif adapter is None and (usual := usual_network(card)) is not None:
        adapter = usual[0]
    try:
        machines = cluster(card, gpus, job.gpus_per_node, link, adapter, topology=network)
        kernels = None if (anchor := anchor_of(job, card)) is None else anchor.kernels
        return msgspec.structs.replace(machines, sustained=sustained(job), kernels=kernels), ""
    except NotStated as error:
        return None, str(error)


def _applies(job: Job, model: ModelSpec) -> None:
    """Refuses flags that mean nothing for this model."""
    refuse(
        job.loss is not None and model.head.kind != "lm",
        f"{model.name} has no language-model head, so it has no such loss",
        key="loss",
    )
    for name in ("target_len", "audio"):
        hears = name == "audio" and any(tower.name.endswith("audio_config") for tower in model.towers)
        refuse(
            getattr(job, name) is not None and not model.own.names and not hears,
            f"{model.name} is trained on one text, whose tokens are --seq-len",
            key=name,
        )
    for name in () if model.has_experts else ("ep", "etp"):
        refuse((getattr(job, name) or 1) > 1, f"{model.name} has no experts to shard", key=name)


def _degrees(job: Job, fill: Any) -> tuple[int, dict[str, int]]:
    """The parallel degrees; data parallelism is what is left of the GPUs."""
    degrees = {name: 1 if getattr(job, name) is None else getattr(job, name) for name in DEGREES}
    if (share := by_batch(job)) > 1:
        degrees["tp"] = fill("tp", share, f"{job.global_batch:,} sequences are for as many ranks at the most")
    within = degrees["tp"] * degrees["pp"] * degrees["cp"]
    fewest = degrees["pp"] * math.lcm(degrees["tp"] * degrees["cp"], degrees["ep"] * degrees["etp"])
    gpus = fill("gpus", fewest, "one replica" if fewest > 1 else "")
    refuse(
        gpus % within,
        f"{gpus} GPUs are not divisible by tp {degrees['tp']} x pp {degrees['pp']} x cp {degrees['cp']} = {within}:"
        f" leaves {gpus % within}",
        LayoutError,
        dimension="gpus",
        size=gpus,
        ranks=within,
    )
    return gpus // within, degrees


def _framework(job: Job, model: ModelSpec) -> tuple[str, str]:
    """The framework of a job that names none, and why."""
    if model.own.framework:
        return model.own.framework, "its code was captured"
    return framework_of(job), _why_framework(job)


def framework_of(job: Job) -> str:
    """Return the framework of a job that names none."""
    chosen = default_framework({axis: (getattr(job, axis) or 1,) for axis in MODEL_PARALLEL})
    if (job.gpus or 1) >= MANY and not job.adapts and chosen == "huggingface":
        return BY_ZERO[job.zero or 0]
    return chosen


def _why_framework(job: Job) -> str:
    used = [axis for axis in MODEL_PARALLEL if (getattr(job, axis) or 1) > 1]
    if not used and (job.gpus or 1) >= MANY and not job.adapts:
        return f"as on {MANY} and more GPUs with --zero {job.zero or 0}"
    return f"because of {' and '.join(used)}" if used else ""


def _host(job: Job, card: Gpu | None, assumed: dict[str, str], file: str = "") -> Host:
    """Return the storage of tensors that are off the card. Raises `ConfigError`."""
    whole = (job.recompute or _recompute(job, file)[0]).partition(":")[0] == "full"
    if job.activation_offload is None and whole and _offloads_checkpoints(job):
        job = job.replace(activation_offload="checkpoints")
        assumed["--activation-offload"] = f"checkpoints (as {job.framework} does; none: they stay on the card)"
    moved = job.offload not in (None, "none")
    hosted = job.activation_offload or "none"
    refuse(job.offload_to is not None and not moved, "needs --offload optimizer or all", key="offload_to")
    refuse(
        job.pin_memory is not None and not moved and hosted == "none",
        "needs --offload or --activation-offload",
        key="pin_memory",
    )
    refuse(
        "checkpoints" in hosted.split(",") and not whole,
        "checkpoints: needs --recompute full",
        key="activation_offload",
    )
    nvme = job.offload_to == "nvme"
    refuse(job.nvme_bandwidth is not None and not nvme, "needs --offload-to nvme", key="nvme_bandwidth")
    link = host_link(bandwidth(job.host_link, "host_link"), card)
    if job.host_link is None and card is not None and (moved or hosted != "none"):
        assumed["--host-link"] = (
            f"{rate(link)} ({card.interconnect.kind if card.interconnect.topology == 'PCIe' else 'PCIe 4'})"
        )
    host_holds(0, job.host_memory)  # refuses what is no size
    return Host(
        pinned=job.pin_memory is not False,
        nvme=nvme,
        activations=hosted,
        link=link,
        bandwidth=bandwidth(job.host_bandwidth, "host_bandwidth"),
        nvme_bandwidth=bandwidth(job.nvme_bandwidth, "nvme_bandwidth"),
    )


def _runs(kind: Training, layout: Layout) -> None:
    """Refuses optimizers and offload where the framework or the layout has none."""
    optimizer = kind.optimizer
    refuse(
        not optimizer.sharded and layout.zero,
        f"{optimizer.name} under ZeRO {layout.zero}: its states are those of whole tensors (--zero 0)",
        NotModelled,
    )
    refuse(
        optimizer.in_backward and (layout.num_microbatches > 1 or layout.gpus > 1),
        f"{optimizer.name} updates each tensor in backward: on one GPU, without gradient accumulation"
        f" ({layout.gpus} GPUs, {layout.num_microbatches:g} micro-batches a step here)",
        key="optimizer",
    )
    engine = kind.framework.engine is not None
    whole = not kind.framework.host.parts or kind.host.nvme or (engine and layout.zero != 3)
    refuse(
        kind.offloaded_share % 1 and whole,
        f"--offload {kind.offload}: a part is of Megatron-Core's, and of DeepSpeed's ZeRO 3 in host memory",
        NotModelled,
    )
    refuse(
        kind.offload == "states" and (engine or kind.host.nvme),
        "--offload states without DeepSpeed, in host memory: the card makes the update",
        NotModelled,
    )
    refuse(
        kind.host.nvme and not (engine and layout.zero == 3),
        "--offload-to nvme is DeepSpeed's ZeRO-Infinity: with --framework deepspeed --zero 3",
        NotModelled,
    )
    refuse(
        engine and layout.pp > 1 and layout.zero >= 2,
        f"{kind.framework.name} refuses ZeRO 2 and 3 with a pipeline (its runtime/pipe/engine.py); ZeRO 1 goes with it",
        key="zero",
    )
    refuse(
        kind.host.activations != "none" and layout.splits_backward,
        f"--activation-offload {kind.host.activations} with --schedule {layout.schedule}",
        NotModelled,
    )
    refuse(
        layout.ranks_each is not None and (layout.zero > 1 or not kind.framework.transformer_engine),
        f"--dynamic-cp with {kind.framework.name} and ZeRO {layout.zero}: it is Megatron-Core's, with ZeRO 0 or 1",
        NotModelled,
    )
    refuse(
        (optimizer.in_backward or optimizer.one_block) and kind.framework.gradients_persist,
        f"{optimizer.name} with {kind.framework.name}, whose gradients are a buffer that stays",
        NotModelled,
    )
    refuse(
        (optimizer.in_backward or optimizer.one_block) and kind.offload != "none",
        f"{optimizer.name} with --offload {kind.offload}",
        NotModelled,
    )


def _around(job: Job, stages: int) -> Around:
    """Return the evaluation and saving between the steps. Raises `ConfigError` or `NotModelled`."""
    if job.eval_batch is None:
        refuse_fields(job, ("eval_batches", "generate"), "needs --eval-batch")
    refuse(
        stages > 1 and (job.eval_batch is not None or job.save == "full"),
        "evaluation, generation and full checkpoints over pipeline stages",
        NotModelled,
    )
    return Around(
        eval_batch=job.eval_batch or 0,
        eval_batches=job.eval_batches or 0,
        generate=job.generate or 0,
        save=job.save or "",  # type: ignore[arg-type]
    )


def _seq_len(job: Job, model: ModelSpec, lengths: Lengths | None, fill: Any) -> int:
    if lengths is not None:
        refuse(
            job.seq_len is not None,
            "the lengths file says how long the sequences are; leave --seq-len out",
            key="seq_len",
        )
        return lengths.longest
    names = model.own.names
    if "n" in names:
        fill("audio", f"{model.own.seconds:g}", "seconds of each sound")
        if "s" not in names:
            return int(model.own.beside["n"])
    longest = model.max_position_embeddings
    seq_len: int = fill("seq_len", SEQ_LEN if longest is None else min(SEQ_LEN, longest))
    if "t" in names:
        fill("target_len", seq_len, "of the second text as many as --seq-len")
    return seq_len


def _order(text: str | None) -> tuple[str, ...]:
    """The axes, the fastest first; ep may be left out, and then comes before dp."""
    if text is None:
        return RANK_ORDER
    names = [name.strip() for name in text.split(",")]
    if "ep" not in names and "dp" in names:
        names.insert(names.index("dp"), "ep")
    refuse(
        sorted(names) != sorted(RANK_ORDER),
        f"must name each of {', '.join(RANK_ORDER)} once, got {text!r}",
        key="order",
    )
    return tuple(names)


def _imbalance(job: Job, model: ModelSpec, fill: Any) -> float:
    """Tokens of the busiest expert rank over the mean; balanced where nothing is said, and said so."""
    if model.has_experts:
        return float(fill("expert_imbalance", 1.0, "balanced routing"))
    refuse(job.expert_imbalance is not None, f"{model.name} has no experts", key="expert_imbalance")
    return 1.0
