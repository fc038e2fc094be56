"""Resolving what is asked of a model that is only run forward, from a `Job` and the flags of inference."""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from loadgauge.core.base import provider
from loadgauge.core.base.errors import ConfigError, LayoutError, NotModelled, refuse
from loadgauge.core.definitions.hardware.cluster import GPUS_PER_NODE
from loadgauge.core.definitions.hardware.hardware import Gpu
from loadgauge.core.definitions.hardware.host import host_link
from loadgauge.core.definitions.hardware.usual import usual_format, usual_node
from loadgauge.core.definitions.job.job import Job
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.serving.by_card import usual_tokens
from loadgauge.core.definitions.serving.inference import PREFILL, WEIGHT_FORMATS, Inference, Task
from loadgauge.core.definitions.serving.rollout import ENGINES, Engine, said_of
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.families.catalogue import Found, find
from loadgauge.core.families.encoders import pictures
from loadgauge.core.families.hub import allowed
from loadgauge.core.resolve.large_runs import usual_line
from loadgauge.core.resolve.resolve import bandwidth, cluster_of, named_card
from loadgauge.core.serving.draft import Draft, block_of
from loadgauge.core.serving.passes import AXES_OF
from loadgauge.core.serving.result import Answer, infer

SEEN = ("pictures", "video", "audio", "max_pixels")
TAKEN = (
    "model", "hub", "gpu", "memory", "gpus", "gpus_per_node", "link_bandwidth", "nic_bandwidth", "topology", "price",
    "offload", "mtp", "host_link", "host_bandwidth", *SEEN, *AXES_OF,
)  # fmt: skip
"""Fields of a job that inference has a use for; of the batch and the sequence it has its own."""
CONTEXT = 4096
USUAL_GGUF = "q4_k_m"
"""The type that llama.cpp and Ollama take from a repository where none is said (llama.cpp, `common/download.cpp`)."""
CALIBRATED = 2048
"""Tokens of a calibration sequence (gptq, `datautils.py`)."""
DRAFTED = ("draft", "draft_tokens", "acceptance")
MANY = 64
"""GPUs up to which more of them are advised."""


def resolve_inference(
    job: Job, task: Task, flags: dict[str, Any], *, whole: bool = True, model: ModelSpec | None = None
) -> tuple[Answer, dict[str, str]]:
    """Return the answer, and what was assumed. given: fields of `Inference` that are flags, None where not given; whole: as `infer`
    model: where it is read already

    Raises `ConfigError` for a flag that is of training, and as `infer`.

    >>> job = Job(model="llama-3.1-8b", gpu="h100-sxm5-80gb")
    >>> answer, _ = resolve_inference(job, "generate", {"context": 4096, "batch": 16})
    >>> answer.memory.cache == 16 * 4096 * 32 * 2 * 8 * 128 * 2
    True
    """
    asked_for = flags
    for name in job.__struct_fields__:
        taken = (name in TAKEN and not (name in SEEN and task == "quantise")) or (
            name == "host_memory" and job.offload == "experts"
        )
        if not taken and getattr(job, name) is not None:
            own = {"micro_batch": "--batch", "seq_len": "--context", "generate": "--answer"}.get(name, "")
            instead = f"; here it is {own}" if own else ""
            raise ConfigError(f"is an option of training; --task {task} only runs the model forward{instead}", key=name)
    refuse(
        job.offload not in (None, "none", "experts"),
        f"is an option of training; --task {task} takes experts",
        key="offload",
    )
    if task != "generate":
        for name in ("answer", "cache_format", "server", *DRAFTED):
            refuse(flags.get(name) is not None, "needs --task generate", key=name)
    card, assumed = named_card(job)
    source = _source(job) if model is None else Found(model, "")
    if source.how:
        assumed["model"] = f"{source.spec.name} ({source.how})"
    if flags.get("weight_format") is None:
        if (stored := source.stored) in WEIGHT_FORMATS:
            why = "the copy that is named"
        elif stored == "gguf":
            stored, why = USUAL_GGUF, "a GGUF copy, whose type is not said"
        elif stored:
            stored, why = (
                "bf16",
                f"the copy is stored in {stored}, which is not modelled: name the format nearest to it",
            )
        else:
            stored, why = usual_format(source.spec.name), "as its publisher stores it"
        if stored:
            flags = flags | {"weight_format": stored}
            assumed["--weight-format"] = f"{stored} ({why})"
    degrees: dict[str, Any] = {name: getattr(job, name) or 1 for name in AXES_OF}
    refuse(degrees["ep"] > 1 and not source.spec.has_experts, f"{source.spec.name} has no experts to shard", key="ep")
    within = degrees["pp"] * max(degrees["tp"], degrees["ep"])
    refuse(
        job.gpus is not None and job.gpus % within,
        f"{job.gpus} GPUs are not whole replicas of {within}",
        LayoutError,
        dimension="gpus",
        size=job.gpus,
        ranks=within,
    )
    refuse(
        job.offload == "experts" and not source.spec.has_experts, f"{source.spec.name} has no experts", key="offload"
    )
    draft = _draft(job, flags, source.spec, assumed) if task == "generate" else None
    spec, seen = _seen(job, source.spec, assumed)
    asked = Inference(
        task=task,
        **degrees,
        replicas=(job.gpus or within) // within,
        experts_from=_from_host(job, card, within, assumed) if job.offload == "experts" else 0.0,
        **{name: value for name, value in _filled(flags, spec, task, assumed, card, seen).items() if value is not None},
    )
    machines, untimed = None, "they need a --gpu"
    if card is not None:
        machines, untimed = cluster_of(job, card, within)
        if machines is not None and (line := usual_line(job, card, machines)):
            assumed["--nic-bandwidth"] = line
    counted = parameters(spec)
    answer = infer(
        spec,
        asked,
        card,
        machines,
        params=int(counted.total),
        active_params=int(counted.active),
        price=job.price,
        untimed=untimed,
        whole=whole,
        draft=draft,
        seen=seen,
    )
    answer = msgspec.structs.replace(answer, host_memory=job.host_memory)
    layout_stated = any(getattr(job, name) is not None for name in AXES_OF)
    if card is None or layout_stated or job.gpus in (None, 1) or answer.memory.verdict == "fits":
        return answer, assumed
    return _shared_out(
        job, card, lambda there: resolve_inference(there, task, asked_for, whole=whole, model=model)
    ) or (
        answer,
        assumed,
    )


def _shared_out(
    job: Job, card: Gpu, resolve: Callable[[Job], tuple[Answer, dict[str, str]]]
) -> tuple[Answer, dict[str, str]] | None:
    """The answer of the fewest GPUs of a replica that hold the model, where nothing is said of them; else of the most."""
    gpus, node, last = job.gpus or 1, usual_node(card), None
    replicas = ((tp, 1) for tp in (2, 4, 8) if tp <= node)
    # A draft runs beside no stages: then layers are split across nodes.
    for tp, pp in (*replicas, *((node, stages) for stages in (2, 4, 8, 16)), (2 * node, 1), (4 * node, 1)):
        if gpus % (tp * pp):
            continue
        try:
            answer, assumed = resolve(job.replace(tp=tp, pp=pp if pp > 1 else None))
        except (ConfigError, LayoutError, NotModelled):
            continue
        stages = {"--pp": f"{pp} (a node does not hold it)"} if pp > 1 else {}
        last = answer, assumed | {"--tp": f"{tp} (fewer GPUs do not hold it)"} | stages
        if answer.memory.verdict == "fits":
            break
    return last


def fitting(
    job: Job, task: Task, asked: dict[str, Any], model: ModelSpec | None = None
) -> Iterator[tuple[str, Answer]]:
    """Changes with which a model fits that does not, as flags, with the answer: narrower weights, and the fewest more GPUs."""
    formats = ("fp8", "awq") if asked.get("weight_format") is None else ()
    narrower = [(f"--weight-format {name}", job, {"weight_format": name}) for name in formats]
    if (server := asked.get("server")) and (share := ENGINES[(engine := Engine.parse(server, "server")).kind].share):
        fuller = (msgspec.structs.replace(engine, **{share: most}).text() for most in (0.9, 0.95))
        narrower = [*((f"--server {text}", job, {"server": text}) for text in fuller), *narrower]
    sizes = ((job.gpus or 1) * 2**power for power in range(1, 8))
    larger: Iterator[tuple[str, Job, dict[str, Any]]] = (
        ("", job.replace(gpus=size, **dict.fromkeys(AXES_OF)), {}) for size in sizes if size <= MANY
    )
    for ways in (narrower, larger):
        for flags, there, more in ways:
            try:
                answer, _ = resolve_inference(there, task, asked | more, model=model)
            except (ConfigError, LayoutError, NotModelled):
                continue
            if answer.memory.verdict == "fits":
                layout = answer.asked
                stages = layout.pp if layout.pp > 1 else None
                yield flags or Job(model="", gpus=there.gpus, tp=layout.tp, pp=stages).flags(), answer
                break


def _from_host(job: Job, card: Gpu | None, ranks: int, assumed: dict[str, str]) -> float:
    """Bytes a second at which a rank's experts are read: by the host that computes them, where its bandwidth is stated, else over
    the link to the card."""
    if (memory := bandwidth(job.host_bandwidth, "host_bandwidth")) is not None:
        return memory / min(ranks, job.gpus_per_node or GPUS_PER_NODE)
    link = host_link(bandwidth(job.host_link, "host_link"), card)
    if job.host_link is None:
        assumed["--host-link"] = (
            f"{link / 1e9:.3g}GB/s, over which experts come (--host-bandwidth: the host computes them)"
        )
    return link


def _draft(job: Job, flags: dict[str, Any], model: ModelSpec, assumed: dict[str, str]) -> Draft | None:
    """Return the model or heads that propose tokens, None without speculation. Raises `ConfigError`."""
    kind = "mtp" if job.mtp else flags.get("draft")
    for name in DRAFTED:
        refuse(
            flags.get(name) is not None and (kind is None or (kind == "mtp" and name == "draft")),
            "needs --draft or --mtp, one of them",
            key=name,
        )
    if kind is None:
        return None
    refuse((job.pp or 1) > 1, "a draft beside pipeline stages", NotModelled)
    usual, share = (1, 0.85) if kind == "mtp" else (3, 0.7)
    acceptance, tokens = flags.get("acceptance") or share, flags.get("draft_tokens") or usual
    refuse(acceptance > 1, f"must be a share from 0 to 1, got {acceptance:g}", key="acceptance")
    for name, value in (("draft_tokens", tokens), ("acceptance", acceptance)):
        if flags.get(name) is None:
            assumed[f"--{name.replace('_', '-')}"] = f"{value:g}"
    if kind in ("mtp", "eagle"):
        own = model.with_mtp() if kind == "mtp" else model
        title = "its MTP module" if kind == "mtp" else "a block of EAGLE's"
        return Draft(name=title, model=block_of(own), tokens=tokens, acceptance=acceptance, shares=True)
    spec = None if kind == "ngram" else find(kind, allowed(job.hub)).spec
    title = "the text's n-grams" if spec is None else spec.name
    return Draft(name=title, model=spec, tokens=tokens, acceptance=acceptance)


def _source(job: Job) -> Found:
    """The model of a job by its family. Raises `ConfigError`, or `NotModelled` for one whose layers its own code alone has."""
    try:
        return find(job.model, allowed(job.hub))
    except ConfigError:
        if getattr(provider("MODEL_SOURCES"), "of_library", bool)(job.model):
            raise NotModelled(
                f"generation of {job.model}, whose layers its own code has alone; without --task, a step of its training is"
                " estimated"
            ) from None
        raise


def _seen(job: Job, model: ModelSpec, assumed: dict[str, str]) -> tuple[ModelSpec, pictures.Seen | None]:
    """Return the model without the towers that a job's prompts need, and with them. Raises `ConfigError` or `NotModelled`."""
    if job.pictures is None and job.video is None and job.audio is None:
        refuse(job.max_pixels is not None, "needs --pictures or --video", key="max_pixels")
        return model, None
    seen = pictures.with_pictures(model, job.pictures or "", job.video or "", "frozen", True, job.max_pixels, job.audio)
    assumed["pictures or sound of a prompt"] = f"{seen.words} of it (by the limits of the published processor)"
    left = msgspec.structs.replace(model, towers=seen.model.left_out, unused_keys=seen.model.unused_keys)
    return left, seen


UNMEASURED = (
    "ollama",
    "llama.cpp",
    "llamacpp",
    "llama-server",
    "lmstudio",
    "mlx",
    "mlx-lm",
    "exllama",
    "tgi",
    "lmdeploy",
    "ktransformers",
    "transformers",
)
"""Servers of which no measurement is here, so that their answers have the time of kernels alone."""


def _filled(
    flags: dict[str, Any],
    model: ModelSpec,
    task: Task,
    assumed: dict[str, str],
    card: Gpu | None,
    seen: pictures.Seen | None,
) -> dict[str, Any]:
    """The flags with a context where none is given; defaults are noted."""
    filled = dict(flags)
    if filled.get("context") is None:
        longest = model.max_position_embeddings
        usual = CALIBRATED if task == "quantise" else CONTEXT + (0 if seen is None else seen.tokens)
        filled["context"] = usual if longest is None else min(usual, longest)
    name = str(filled.get("server") or "").partition(":")[0].lower()
    if name in UNMEASURED:
        filled["server"], assumed["--server"] = None, f"none (no server of {name} is measured: the time of its kernels)"
    if filled.get("server") is not None:
        engine = Engine.parse(filled["server"], "server")
        if filled.get("prefill_tokens") is None:
            budget: int = engine.max_batched_tokens or PREFILL
            if "max_batched_tokens" not in said_of(filled["server"]):
                why = "an engine reads its prompts in pieces"
                if card is not None and (tokens := usual_tokens(engine.kind, card)) is not None:
                    budget, why = tokens, f"as {ENGINES[engine.kind].title} takes on {card.id}"
                filled["server"] = msgspec.structs.replace(engine, max_batched_tokens=budget).text()
                assumed["--prefill-tokens"] = f"{budget} ({why})"
            filled["prefill_tokens"] = budget
    if task == "quantise":
        filled["weight_format"] = filled.get("weight_format") or "gptq"
    more = {"generate": ("answer", "cache_format"), "quantise": ("calibration",)}.get(task, ())
    for name in ("context", "batch", "weight_format", *more):
        if flags.get(name) is None and f"--{name.replace('_', '-')}" not in assumed:
            default = filled.get(name) or next(
                field.default for field in msgspec.structs.fields(Inference) if field.name == name
            )
            assumed[f"--{name.replace('_', '-')}"] = str(default)
    return filled
