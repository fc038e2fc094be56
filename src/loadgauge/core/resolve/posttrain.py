"""Resolving a `Job` with a task: its roles, each a model on the trainer's GPUs, its sequences, and the rollout's engine."""

import contextlib
import math
from typing import Any

import msgspec

from loadgauge.core.base import ConfigError, Error, LayoutError, is_script, need, refuse, refuse_fields
from loadgauge.core.base.lengths import Lengths
from loadgauge.core.definitions.hardware.cluster import GPUS_PER_NODE
from loadgauge.core.definitions.job.job import AROUND, POSTTRAIN, Job
from loadgauge.core.definitions.job.uncounted import Uncounted
from loadgauge.core.definitions.model.model import Head, ModelSpec
from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.core.definitions.training.stacks import LOSS_LOGPROBS, Stack
from loadgauge.core.definitions.training.tasks import DIVERGENCES, TASKS, Role, Task
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.families.encoders import pictures
from loadgauge.core.post_training.answers import answers, stated_longest
from loadgauge.core.post_training.memory import engine_of
from loadgauge.core.post_training.roles import Member, Placement, Run, Sequences, replicas_of
from loadgauge.core.resolve.model import found_model
from loadgauge.core.resolve.resolve import asks_for_files, cluster_of, framework_of, resolve_job
from loadgauge.core.resolve.setup import Setup
from loadgauge.core.resolve.unsaid import masked

OF_WHOLE = ("tokens", "days", "mtbf_hours", "checkpoint_seconds", "restart_seconds")
"""Fields of a whole run of training, which `steps` says of a task."""
OF_ROLLOUT = (
    "prompts",
    "samples",
    "prompt_len",
    "answers",
    "epochs",
    "old_logprobs",
    "on_policy",
    "rollout",
    "placement",
    "staleness",
    "rollout_offload",
)
"""Fields of tasks that generate their answers."""
OF_ADAPTERS = (
    "lora_rank",
    "adapter",
    "virtual_tokens",
    "qlora",
    "base",
    "lora_targets",
    "lora_dropout",
    "lora_dtype",
    "kbit_upcast",
    "use_dora",
    "modules_to_save",
    "lora_layers",
    "train",
)
"""Fields about what of the trained model is trained, which its other models know nothing of."""
SHARED = "shared"
"""`--critic`: a value of each token beside the actor's logits, so that the actor's passes are the critic's too."""
SECOND = "adapter"
"""`--reward-model`: a second set of adapters on the actor, of the same shape, and a value of each token beside its logits."""
PROMPTS, SAMPLES, PROMPT, ANSWER = 64, 8, 1024, 3072
"""Assumed sizes of a step: prompts, answers to each, tokens of a prompt and of an answer."""


def scalar(model: ModelSpec, columns: int = 1) -> ModelSpec:
    """Return the model with a head of one column over every token, as a reward model or a critic has; `columns`: of more.

    Source: transformers, `modeling_layers.py`, `GenericForSequenceClassification` (`score`, without a bias).
    """
    head = Head(kind="classifier", num_labels=columns, per_token=True)
    return msgspec.structs.replace(model, head=head, tie_word_embeddings=False, mtp_layers=0)


def resolve_posttrain(job: Job, model: ModelSpec | None = None, reading: Any = None) -> tuple[Run, Setup]:
    """Return the run of a task, and the resolved training of its policy. Raises `ConfigError`, `LayoutError` or `NotModelled`.

    reading: what a job file that was read says (`FromFile`), whose flags the job has

    >>> run, setup = resolve_posttrain(Job("llama-3.1-8b", task="dpo", gpus=8, zero=3, micro_batch=1))
    >>> setup.layout.micro_batch, [member.role.name for member in run.members.values()]
    (2, ['policy', 'reference'])
    """
    file, trainers = "", "trl"
    uncounted: tuple[Uncounted, ...] = ()
    if reading is None and model is None and asks_for_files(job):
        reading = need("DIALECTS").from_job_file(job)
        job = reading.job
    if reading is not None:
        model, file, trainers, uncounted = reading.model, reading.note, reading.trainers, reading.uncounted
        job = job.replace(beside=None, dialect=None, base_model=None)
    if job.task is None:
        raise ConfigError("is missing: name one, such as --task grpo", key="task")
    task = _passes(job, TASKS[job.task])
    _belongs(job, task)
    assumed: dict[str, str] = {"file": file} if file else {}
    placement = Placement.parse(job.placement or "colocated", job.gpus)
    refuse(
        job.staleness and placement.colocated,
        "needs GPUs for each side (--placement split:16+16): on the same ones answers are new",
        key="staleness",
    )
    sequences = _sequences(job, task, assumed, model)
    trained = _training(job, task, sequences, placement, assumed, trainers)
    setup = _laid_out(resolve_job(trained, model), trained)
    if task.rollout and any(item.key == "global_batch" for item in setup.uncounted):
        each = int(setup.layout.dp) * setup.layout.micro_batch
        share, rest = divmod(sequences.number, int(setup.layout.dp))
        fits = (size for size in range(setup.layout.micro_batch, 0, -1) if share % size == 0)
        fewer = 0 if rest else next(fits)
        assumed["--micro-batch"] = f"{fewer} (a rank has {share} of the {sequences.number} sequences)"
        setup = resolve_job(trained.replace(micro_batch=fewer), model) if fewer else setup
    if task.rollout and any(item.key == "global_batch" for item in setup.uncounted):
        raise LayoutError(
            f"the {sequences.number} sequences of a step over dp x micro_batch: {sequences.number} over {each} leaves"
            f" {sequences.number % each}",
            dimension="global_batch",
            size=sequences.number,
            ranks=each,
        )
    setup = _of_logprobs(setup, task, job.loss_terms, trainers)
    setup.layout.check(setup.model)
    setup.training.check(setup.model)
    placement = msgspec.structs.replace(placement, trainer=setup.layout.gpus)
    if task.rollout and job.placement is None:
        assumed["--placement"] = "colocated"
    _longest(job, setup.model, sequences, assumed)
    reference = _reference(job, task, setup, assumed)
    engine, replicas, machines, joined, apart = None, 1, None, None, ""
    if task.rollout:
        engine = Engine.parse(job.rollout or "vllm")
        if job.rollout is None:
            assumed["--rollout"] = engine.text()
        refuse(
            engine.seen >= sequences.answers.mean,
            f"{engine.turns} turns and {engine.observed} tokens of each observation leave nothing of"
            f" {sequences.answers.mean:,.0f} tokens of an answer",
            key="rollout",
        )
        refuse(
            engine.inside and not placement.colocated,
            f"{engine.kind} generates in the trainer, on its GPUs",
            key="placement",
        )
        alone = {"ipc": True, "delta": False, "delta-disk": False}.get(engine.sync or "", placement.colocated)
        if placement.colocated != alone:
            where = "the same GPUs (--placement colocated)" if alone else "GPUs of each side (--placement split:8+8)"
            raise ConfigError(f"sync={engine.sync} needs {where}", key="rollout")
        if not placement.colocated and (engine.sleep or job.rollout_offload not in (None, "none", "states")):
            assumed["--placement"] = f"{job.placement} (sleep= and --rollout-offload change nothing on GPUs of its own)"
        if not job.staleness and (engine.partial is not None or engine.every > 1 or engine.inflight):
            assumed["--staleness"] = (
                "0 (partial=, every= and inflight= of the rollout change nothing: no answer is old)"
            )
        replicas = replicas_of(engine, placement)
        if setup.cluster is not None:
            machines, apart = cluster_of(job, setup.cluster.gpu, engine.replica)
            joined = setup.cluster
            if not placement.colocated and not apart:
                node = job.gpus_per_node or GPUS_PER_NODE
                joined, apart = cluster_of(job, setup.cluster.gpu, -(-placement.gpus // node) * node)
    members = {
        role.name: _member(role, job, task, setup, reference, placement) for role in _roles(job, task, reference)
    }
    for name in (name for names, _ in placement.apart for name in names if name not in members):
        raise ConfigError(f"{task.name} has no {name} here", key="placement")
    if not file:
        _used(job, task, members)
    rows = job.logprob_batch
    if job.logprob_tokens is not None:
        refuse(rows is not None, "says it in sequences; give --logprob-tokens or --logprob-batch", key="logprob_batch")
        refuse(
            job.logprob_tokens < sequences.longest,
            f"{job.logprob_tokens:,} do not hold the longest sequence of {sequences.longest:,}",
            key="logprob_tokens",
        )
        rows = max(1, job.logprob_tokens // max(1, sequences.longest))
    run = Run(
        task=task,
        members=members,
        sequences=sequences,
        placement=placement,
        gpu=setup.gpu,
        rollout_cluster=machines,
        joined=joined,
        apart=apart,
        engine=engine,
        replicas=replicas,
        on_policy=job.on_policy or 1.0,
        staleness=job.staleness or 0,
        reference=reference,
        rollout_offload=job.rollout_offload or "none",
        logprob_rows=setup.layout.micro_batch if rows is None else rows * task.rows,
        logprob_tokens=job.logprob_tokens,
        padding=job.padding if task.rollout else None,
        assumed=assumed | setup.assumed,
        uncounted=uncounted,
    )
    if job.rollout is None and reading is None and run.engine is not None and run.gpu is not None:
        return _started(job, run, model) or run, setup
    return run, setup


def _started(job: Job, run: Run, model: ModelSpec | None) -> Run | None:
    """Return the run whose engine is on as few GPUs as hold it, where nothing is said of it; None where it is, or none does."""
    if not engine_of(run).unstarted:
        return None
    for tp in (2, 4, 8, 16, 32):
        with contextlib.suppress(Error):
            there, _ = resolve_posttrain(job.replace(rollout=f"vllm:tp={tp}"), model)
            if not engine_of(there).unstarted:
                why = f"{there.engine.text()} (fewer GPUs do not hold it)" if there.engine else ""
                return msgspec.structs.replace(there, assumed=there.assumed | {"--rollout": why})
    return None


def _laid_out(setup: Setup, trained: Job) -> Setup:
    """Return a training of which no layout is said in the one that its estimate assumes, at the micro-batch as it stands."""
    if not setup.open_layout or setup.cluster is None or setup.gpu is None:
        return setup
    there: Setup = resolve_job(trained.replace(micro_batch=setup.layout.micro_batch), setup.model).estimate().setup
    return (
        setup if there.layout == setup.layout else msgspec.structs.replace(there, assumed=setup.assumed | there.assumed)
    )


def _used(job: Job, task: Task, members: dict[str, Member]) -> None:
    """Refuses flags that change nothing in this run. Another tool's job file may have them: its trainer reads over them too."""
    if all("train" in member.role.uses for member in members.values()):
        for name in ("frozen_offload", "frozen_weights"):
            refuse(
                getattr(job, name) not in (None, False),
                "changes nothing: this run has no frozen model beside the trained one",
                key=name,
            )
    if not any(each.does == "forward" and each.within is None for each in task.passes):
        refuse_fields(
            job,
            ("logprob_batch", "logprob_tokens"),
            f"changes nothing: {task.name} scores in the micro-batches of its update (--micro-batch)",
        )


def _passes(job: Job, task: Task) -> Task:
    """The task without the passes that are not run: of old log-probs, where nothing is compared with them (answers that are trained
    on once, before anything is updated, have those of the update, and an engine's may be taken), and of KTO's estimate of KL."""
    if job.loss_terms is not None and job.loss_terms not in task.objectives:
        refuse(not task.objectives, f"{task.name} has one form of its loss", key="loss_terms")
        raise ConfigError(f"{task.name} has {', '.join(task.objectives)}, not {job.loss_terms}", key="loss_terms")
    refuse(
        job.on_policy is not None and (task.name != "opd" or job.on_policy > 1),
        "is a share, 1 at the most" if task.name == "opd" else "needs --task opd",
        key="on_policy",
    )
    passes = task.passes
    if job.loss_terms in DIVERGENCES and task.rollout:  # whole distributions are compared as soon as there are both
        passes = tuple(
            msgspec.structs.replace(each, within="update") if each.role == "teacher" else each for each in passes
        )
    if job.old_logprobs == "none":
        passes = tuple(each for each in passes if each.phase != "old log-probs")
    if job.loss_terms == "no-kl":
        passes = tuple(msgspec.structs.replace(each, times=1) for each in passes if each.phase != "KL log-probs")
    return msgspec.structs.replace(task, passes=passes)


def _of_logprobs(setup: Setup, task: Task, objective: str | None, trainers: str) -> Setup:
    """The training with a head that makes log-probabilities, or one value a sequence, in place of a loss over tokens.

    objective: the form of the loss, None: the usual one; trainers: as in `_training`
    """
    job, training = setup.job, setup.training
    alike = job.attention in (None, "flash") and job.padding != "free" and training.framework.peft
    if alike and task.name != "sft" and (task.rollout or setup.layout.micro_batch > 1):
        setup = msgspec.structs.replace(setup, training=masked(training))
    if task.trained.scalar:
        return msgspec.structs.replace(setup, model=scalar(setup.model))
    wanted = objective or next(iter(task.objectives), None)
    diverges = wanted in DIVERGENCES and setup.job.loss in (None, "auto")
    if task.name in ("sft", "gkd", "opd") and not diverges:
        return setup
    sliced = "whole" if objective == "no-nll" else "slices"
    usual = sliced if task.slices else "policy" if task.rollout else "pairs" if task.rows == 2 else "rows"
    unit = "softmax" if trainers == "softmax" else str(wanted) if diverges else usual
    kernels = msgspec.structs.replace(setup.training.kernels, logprobs=unit)
    paired = setup.training.framework.engine is not None and unit in ("pairs", "rows")
    if (
        trainers == "trl"
        and (task.slices or diverges or paired)
        and setup.job.loss in (None, "auto")
        and not _widens(setup)
    ):
        kernels = msgspec.structs.replace(kernels, loss="plain")
    return msgspec.structs.replace(setup, training=msgspec.structs.replace(setup.training, kernels=kernels))


def _widens(setup: Setup) -> bool:
    """Return whether a loss outside the model sees float32 logits, as TRL's losses do not convert them.

    Under autocast accelerate makes a model's outputs float32 (1.15, `Accelerator.prepare_model`), but not where FSDP2 shards it
    (as traced), nor under DeepSpeed, which runs in 16 bits without autocast (`_prepare_deepspeed`).
    """
    training, layout = setup.training, setup.layout
    if training.framework.engine is not None:
        return False
    if not training.framework.returns_float32:
        return True
    if layout.zero >= training.framework.weights_stage and layout.zero_ranks > 1:
        return False
    autocast = training.precision.autocast or training.precision.wrapped
    return autocast or (training.lora is not None and training.lora.autocast)


def _belongs(job: Job, task: Task) -> None:
    """Refuses fields that mean nothing to the task. Raises `ConfigError`."""
    if not task.rollout:
        refuse_fields(job, OF_ROLLOUT, f"needs a task that generates its answers; {task.name} does not")
    refuse_fields(job, (*AROUND, "measured"), f"needs --task train; with {task.name} it is not counted")
    refuse_fields(job, OF_WHOLE, f"needs --task train; for {task.name} give --steps")
    refuse(job.price is not None and job.steps is None, "needs --steps, the length of the whole run", key="price")
    fields = {role.field for role in task.roles}
    for name, field in (
        ("teacher", "teacher"),
        ("reward_model", "reward_model"),
        ("critic", "critic"),
        ("critic_batch", "critic"),
    ):
        refuse(getattr(job, name) is not None and field not in fields, f"{task.name} has none", key=name)
    refuse(
        job.critic == SHARED and job.critic_batch is not None,
        "follows the actor with --critic shared; leave it out",
        key="critic_batch",
    )
    refuse(
        "teacher" in fields and job.teacher is None,
        f"{task.name} needs the model that is distilled (--teacher MODEL)",
        key="teacher",
    )
    refuse(
        task.rollout and job.lengths is not None, f"{task.name} says it by --prompt-len and --answers", key="lengths"
    )
    refuse(
        task.rollout and None not in (job.seq_len, job.prompt_len, job.answers),
        "is what --prompt-len and --answers say already",
        key="seq_len",
    )


def _sequences(job: Job, task: Task, assumed: dict[str, str], model: ModelSpec | None) -> Sequences:
    """Return the sequences that a step trains on; of tasks that generate nothing, sequences as they are in the data."""
    if not task.rollout:
        return Sequences(prompts=1, samples=1, prompt=0, answers=Lengths.of([job.seq_len or 1]))
    values: dict[str, Any] = {}
    if model is None and not is_script(job.model):
        model = found_model(job).spec
    seen = 0 if model is None else pictures.tokens_of(job, model)
    prompt, answer = _usual_lengths(job, model, seen)
    for name, default in (("prompts", PROMPTS), ("samples", SAMPLES), ("prompt_len", prompt), ("answers", answer)):
        value = getattr(job, name)
        if value is None:
            value = default
            assumed[f"--{name.replace('_', '-')}"] = str(value)
        values[name] = value
    if values["prompt_len"] < seen:
        raise ConfigError(
            f"are {seen:,} tokens of each prompt, which has --prompt-len {values['prompt_len']:,}", key="pictures"
        )
    return Sequences(
        prompts=values["prompts"],
        samples=values["samples"],
        prompt=values["prompt_len"],
        answers=answers(values["answers"]),
        epochs=job.epochs or 1,
    )


def _usual_lengths(job: Job, model: ModelSpec | None, seen: int) -> tuple[int, str]:
    """Return the tokens of a prompt and of answers where nothing says: as many as there is room for in `seq_len`, in the engine's
    context and in the model's, of which a prompt's text takes a quarter beside the tokens that are `seen`."""
    of_engine = Engine.parse(job.rollout or "vllm").context
    if job.answers is not None:
        beside = PROMPT if of_engine is None else of_engine - stated_longest(job.answers, answers(job.answers))
        return (beside if 0 < beside < PROMPT else PROMPT + seen), job.answers
    own = None if model is None else model.max_position_embeddings
    room = min(size for size in (of_engine, own, job.seq_len or PROMPT + ANSWER + seen) if size)
    prompt = job.prompt_len or seen + max(1, min(PROMPT, (room - seen) // 4))
    return prompt, str(room - prompt if room > prompt and (job.seq_len or room - prompt < ANSWER) else ANSWER)


def _training(
    job: Job, task: Task, sequences: Sequences, placement: Placement, assumed: dict[str, str], trainers: str
) -> Job:
    """The training of the policy alone, as `resolve_job` reads it: a pair is two sequences.

    trainers: whose they are (`formats.table.Dialect.trainers`)
    """
    unseen = (
        {} if job.pictures or job.video or job.audio else {"tower": None, "max_pixels": None}
    )  # a file says them whatever its data is
    alone = job.replace(**dict.fromkeys(POSTTRAIN), **unseen, price=None if job.steps is not None else job.price)
    changes: dict[str, Any] = {}
    if task.rows > 1:
        for name in ("micro_batch", "global_batch"):
            value = getattr(job, name)
            changes[name] = (
                task.rows * (1 if value is None else value) if value is not None or name == "micro_batch" else None
            )
    if (
        task.tiled
        and trainers == "trl"
        and job.loss in (None, "auto")
        and (job.framework or framework_of(job)) == "huggingface"
    ):
        habit = LOSS_LOGPROBS.at(Stack.parse(job.version))
        changes["loss"] = habit.value
        assumed["--loss"] = f"{habit.value} ({habit.source})"
    if task.rollout:
        changes["seq_len"] = sequences.longest
        changes["padding"] = None
        refuse(
            job.padding == "free" and job.attention == "eager",
            "free needs --attention flash: eager attention pads",
            key="padding",
        )
        if job.placement is not None and placement.gpus != placement.trainer:
            changes["gpus"] = placement.trainer
            node = job.gpus_per_node or GPUS_PER_NODE
            if job.topology is None and placement.trainer > node and placement.trainer % node:
                # Of some nodes the trainer has a part: as many nodes as have all the same.
                changes["gpus_per_node"] = part = math.gcd(placement.trainer, node)
                assumed["--gpus-per-node"] = (
                    f"{part} of the trainer's ({placement.trainer} are no whole nodes of {node})"
                )
        if job.global_batch is None:
            changes["global_batch"] = sequences.number
            assumed["--global-batch"] = f"{sequences.number} (prompts x samples: one update a step)"
        elif sequences.number % job.global_batch:
            raise ConfigError(
                f"{sequences.number} sequences of a step ({sequences.prompts} prompts x {sequences.samples}) are not whole"
                f" batches of {job.global_batch}",
                key="global_batch",
            )
    return alone.replace(**changes)


def _longest(job: Job, model: ModelSpec, sequences: Sequences, assumed: dict[str, str]) -> None:
    """Refuses answers that are longer than the model's context, or than the engine's. What is only trained on may be longer, as
    other sequences, but for a table of positions; so may what a job file asks for, which says so to its engine."""
    longest = sequences.answers.longest if job.answers is None else stated_longest(job.answers, sequences.answers)
    engine = Engine.parse(job.rollout or "vllm") if sequences.prompt else None
    of_engine = None if engine is None else engine.context
    limited = TASKS[job.task or ""].rollout or model.learned_positions
    own = model.max_position_embeddings if limited else None
    for most, whose in ((own, model.name), (of_engine, "the engine")):
        if most is None or sequences.prompt + longest <= most:
            continue
        if whose == model.name and "file" in assumed and not model.learned_positions:
            assumed["positions"] = f"up to {sequences.prompt + longest:,}, as the file asks; {whose} has {most:,}"
        else:
            raise ConfigError(
                f"{sequences.prompt:,} tokens of a prompt and {longest:,} of an answer are more than the {most:,} of"
                f" {whose}'s context",
                key="answers",
            )


def _reference(job: Job, task: Task, setup: Setup, assumed: dict[str, str]) -> Any:
    """Where the reference's log-probs come from; with adapters, the model without them."""
    if task.reference is None:
        refuse(job.reference not in (None, "none"), f"{task.name} has no reference model", key="reference")
        return None
    adapts = setup.training.lora is not None
    if job.reference is None:
        reference = "adapter-off" if adapts else task.reference
        assumed["--reference"] = f"{reference}{' (the policy without its adapters)' if adapts else ''}"
        return reference
    refuse(
        job.reference in ("adapter", "adapter-off") and not adapts,
        f"{job.reference} needs adapters (--lora-rank)",
        key="reference",
    )
    return None if job.reference == "none" else job.reference


def _roles(job: Job, task: Task, reference: str | None) -> list[Role]:
    """The roles that this run has: a reference only where one is run, a reward model where one is named."""
    left_out = {"reward_model": job.reward_model is None, "critic": job.critic == SHARED}
    alone = reference in (None, "precomputed")
    return [role for role in task.roles if not (alone if role.name == "reference" else left_out.get(role.field, False))]


def _member(role: Role, job: Job, task: Task, setup: Setup, reference: str | None, placement: Placement) -> Member:
    """A role's model, on the layout of the trained one, or as that would be on its own GPUs; what is frozen has no states."""
    chosen, training, layout, cluster = setup.model, setup.training, setup.layout, setup.cluster
    side, own = placement.side(role.name)
    named = None if role.field == "model" else getattr(job, role.field)
    trains = "train" in role.uses
    second = role.field == "reward_model" and named == SECOND
    refuse(second and setup.training.lora is None, f"{SECOND} needs adapters (--lora-rank)", key=role.field)
    named = None if second else named
    if named is not None:
        other = setup.job.replace(model=named, seq_len=layout.seq_len, lengths=None, **dict.fromkeys(OF_ADAPTERS))
        resolved = resolve_job(other)
        chosen, training, layout = resolved.model, resolved.training, resolved.layout
        layout.check(chosen)
    if side != "trainer":
        refuse(
            second or (role.name == "reference" and reference in ("adapter", "adapter-off")),
            f"the {role.name} is the trained model's, on its GPUs",
            key="placement",
        )
        node = job.gpus_per_node or GPUS_PER_NODE
        width = None if own <= node or own % node == 0 else math.gcd(own, node)
        there = resolve_job(
            setup.job.replace(gpus=own, **({} if width is None else {"gpus_per_node": width})), setup.model
        )
        if trains and any(item.key == "global_batch" for item in there.uncounted):
            batch = int(setup.layout.global_batch)
            raise LayoutError(
                f"the {batch} sequences of an update over {own} GPUs of the {role.name}",
                dimension="global_batch",
                size=batch,
                ranks=own,
            )
        layout, cluster = there.layout, there.cluster
    if role.field == "critic" and job.critic_batch is not None:
        layout = msgspec.structs.replace(layout, micro_batch=job.critic_batch)
    if role.scalar and not second:
        chosen = scalar(chosen)
    refuse(
        not trains and role.name != "reference" and named is None and not second,
        f"{task.name} needs a model for its {role.name}",
        key=role.field,
    )
    return Member(
        role=role,
        model=chosen,
        layout=layout,
        training=training,
        params=int(parameters(chosen).total),
        cluster=cluster,
        offloaded=not trains and bool(job.frozen_offload),
        shares=second or (role.name == "reference" and reference in ("adapter", "adapter-off")),
        second=second or (role.name == "reference" and reference == "adapter"),
        loaded=None if trains else job.frozen_weights,
    )
