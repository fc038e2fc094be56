"""`PlanRequest`: what is asked of a plan; and `cases`, the searches that answer it.

The fields of `spec.Job` are asked for as everywhere. Those that `Space` has axes for are open: a value locks one, several
values narrow it down. The questions of a plan are fields of `PlanRequest`, with the same kind of metadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache, partial
from typing import Annotated, Any, Literal, get_args, get_type_hints

import msgspec

from loadgauge.core.base import GIB, ConfigError, Error, LayoutError, NotStated, need, provider
from loadgauge.core.definitions.hardware.prices import read_prices, usual_prices
from loadgauge.core.definitions.job.job import AROUND, POSTTRAIN, WHOLE_RUN, Field, Job, fields
from loadgauge.core.definitions.layout.axes import AXES, MODEL_PARALLEL
from loadgauge.core.definitions.layout.layout import LEAST, UNSPLIT
from loadgauge.core.definitions.model.model import ModelSpec
from loadgauge.core.definitions.training.frameworks import FRAMEWORKS, default_framework
from loadgauge.core.estimate.memory.recompute import offload_words
from loadgauge.core.estimate.result import Estimate
from loadgauge.core.families.catalogue import models as catalogue
from loadgauge.core.plan.search import OBJECTIVES, Case, Objective
from loadgauge.core.plan.space.axis_values import ALL, space_for
from loadgauge.core.plan.space.space import Space
from loadgauge.core.resolve import unsaid
from loadgauge.core.resolve.model import found_model
from loadgauge.core.resolve.rescale import is_run
from loadgauge.core.resolve.resolve import asks_for_files, resolve_job
from loadgauge.core.resolve.setup import Setup

Find = Literal[
    "seq-len", "micro-batch", "batch", "gpus", "gpu", "nic", "link", "model", "days", "tokens",
    "checkpoint-interval", "spares", "oversubscription", "sites", "answers", "samples", "utilization", "staleness",
]  # fmt: skip
FINDS = {
    "seq-len": ("seq_len", "lengths"),
    "micro-batch": ("micro_batch", "lengths"),
    "nic": ("nic_bandwidth",),
    "link": ("link_bandwidth",),
    "batch": ("global_batch",),
}
"""Quantities that `find` looks for, and the fields that would state each already."""
OF_TASKS = ("answers", "samples", "utilization", "staleness")
"""Of these, what only a task after pre-training has."""
OPEN_AXES = tuple(field.name for field in msgspec.structs.fields(Space) if isinstance(field.default, tuple))
"""Fields of a job that the search tries all values of, unless they are locked."""
JOB_FIELDS = tuple(name for name in fields() if name not in ("model", *AROUND, *WHOLE_RUN, *POSTTRAIN))
"""Fields of a job that a plan may be asked with."""
RANKING = ("objective", "fleet", "margin", "price")
"""Questions that decide which layout is the best; the others are about what is shown."""
USUAL_BATCH = 2**22
"""Tokens of a step of a whole run, where none is said: those of GPT-3's and LLaMA's largest, to the next power of two."""
MOST_GPUS = 1024
"""Most GPUs of a search for the fewest, where no number is given."""
FLAGS = "flags"
"""In the place of a dialect to export to: the command line of loadgauge itself."""
ANY = "any"
"""In the place of a MODEL: the whole catalogue, for `find="model"`."""


def _question(kind: Any, help: str, **more: Any) -> msgspec.Meta:
    return msgspec.Meta(extra={"field": Field(kind=kind, group="plan", help=help, **more)})


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request for a plan.

    job: the run, its open axes and `gpus` left out; gpus: numbers of GPUs to compare; locks: the values that an open axis
    may have, by its name; why_not_locks, gpu_prices: `why_not` and `prices` as read

    >>> request = PlanRequest.of("gpt2", {"gpu": "l4", "gpus": "8,16", "tp": "1,2", "margin": "2"})
    >>> request.gpus, request.locks, request.margin, request.job.flags()
    ((8, 16), {'tp': (1, 2)}, 2.0, '--gpu l4')
    """

    job: Job
    gpus: tuple[int, ...] = ()
    locks: dict[str, tuple[Any, ...]] = {}
    # fmt: off
    objective: Annotated[Objective, _question(
        "choice", "What makes a layout the best (time); network: least traffic, of those within 5 % of the fastest;"
        " goodput: most progress with failures (--fleet).",
        choices=OBJECTIVES,
    )] = "time"
    fleet: Annotated[str | None, _question(
        "text", "Failures, spares and recovery for --objective goodput, as the flags of `fleet`"
        " (recover=elastic,failures=studies,spares=1%); for --find sites also between=100Gbit/s and its like.",
        metavar="NAME=VALUE,...")] = None
    margin: Annotated[float, _question(
        "positive", "Memory to leave free on each GPU.", unit="GiB", metavar="GiB")] = 0.0
    price: Annotated[float | None, _question("price", "Price of one GPU-hour, in your currency.", metavar="MONEY")] = None
    top: Annotated[int, _question("whole", "How many layouts to print (5).", low=1, high=100)] = 5
    find: Annotated[Find | None, _question(
        "choice",
        "The inverse question: the longest sequence, the largest micro-batch, the smallest global batch (--exposed), the fewest"
        " GPUs (by a date with --tokens and --days), the cheapest kind of GPU (--prices), the slowest sufficient network adapter"
        " or link inside a node (--exposed), the largest model (MODEL: any, or a prefix of names), the days of --tokens, the"
        " tokens of --days; of a fleet's whole run (--tokens, --fleet) the best interval between checkpoints, the best number"
        " of spares, the most oversubscription of its --topology, the most sites; with --task the longest answers, the most"
        " samples, the largest share of a card for the engine (utilization), the fewest updates that answers may be old for the"
        " step to be as short as with more (staleness).",
        choices=get_args(Find),
    )] = None
    tokens: Annotated[str | None, _question(
        "count", "Tokens of the whole run: with --days, how many GPUs finish it in time.", metavar="300B")] = None
    days: Annotated[float | None, _question("positive", "Days that the whole run may take.", metavar="DAYS")] = None
    mfu: Annotated[str | None, _question(
        "text", "Model FLOPs utilisation to assume for --tokens and --days, in place of the predicted one.", metavar="40%")] = None
    hfu: Annotated[str | None, _question(
        "text", "The same with recomputation counted.", metavar="50%")] = None
    exposed: Annotated[float | None, _question(
        "positive", "Largest share of the step for exposed communication (0.1).", metavar="SHARE", needs="find")] = None
    prices: Annotated[str | None, _question(
        "text", "Prices of one GPU-hour by kind of GPU, for --find gpu: also a file, spot or reserved (on demand).",
        metavar="GPU=2.5,GPU=1.8")] = None
    why_not: Annotated[str | None, _question(
        "text", "Explain why no layout with these values is the best.", metavar="tp=16,pp=4")] = None
    what_next: Annotated[bool, _question("switch", "Re-plan with each single change and show the gain.")] = False
    export: Annotated[str | None, _question(
        "text", "Write the best layout as another tool's job file (see `convert`), or as flags.", metavar="DIALECT")] = None
    onto: Annotated[str | None, _question(
        "text", "Your own file for --export to patch; its comments stay.", metavar="FILE", needs="export")] = None
    out: Annotated[str | None, _question(
        "text", "File that --export writes, instead of to the terminal.", metavar="FILE", needs="export")] = None
    # fmt: on
    why_not_locks: dict[str, tuple[Any, ...]] = {}
    gpu_prices: dict[str, float] = {}

    @classmethod
    def of(cls, model: str, flags: Mapping[str, Any]) -> PlanRequest:
        """Reads a request; raises `ConfigError` for what cannot be read, is unknown, or does not go together.

        given: values by the name of a field of `Job` or of a question, as text or as what the field holds (None: not
        given); open axes and `gpus` may have several, with commas between them or as a tuple
        """
        job: dict[str, Any] = {}
        asked: dict[str, Any] = {}
        locks: dict[str, tuple[Any, ...]] = {}
        for name, value in flags.items():
            if value is None:
                continue
            if name in OPEN_AXES:
                locks[name] = read_values(name, value)
            elif name == "gpus":
                asked[name] = read_values(name, value)
            elif name in questions():
                asked[name] = _read(name, questions()[name], value)
            elif name in JOB_FIELDS:
                job[name] = value
            else:
                raise ConfigError("is no flag of a plan", key=name)
        if asked.get("prices") is not None:
            asked.setdefault("find", "gpu")
            asked["gpu_prices"] = read_prices(asked["prices"])
        elif asked.get("find") == "gpu":
            asked["gpu_prices"] = usual_prices()
        if "gpu_prices" in asked and "gpu" not in job:
            job["gpu"] = next(iter(asked["gpu_prices"]))  # every one of them is tried
        if asked.get("why_not"):
            asked["why_not_locks"] = _pairs(asked["why_not"])
        if asked.get("export") not in (None, FLAGS):
            asked["export"] = need("DIALECTS").dialect(asked["export"]).name
        dated = [name for name in ("tokens", "days") if asked.get(name) is not None]
        if len(dated) == 2:
            asked.setdefault("find", "gpus")
        elif dated and asked.get("gpus"):
            asked.setdefault("find", "days" if dated == ["tokens"] else "tokens")
        request = cls(job=Job.of(model, job), locks=locks, **asked)
        request._check()
        return request

    def _check_dates(self) -> None:
        """Refuses tokens, days and utilisation where they answer nothing."""
        dates = {name for name in ("tokens", "days") if getattr(self, name) is not None}
        wanted = {
            "days": {"tokens"},
            "tokens": {"days"},
            **dict.fromkeys(("gpus", "gpu"), {"tokens", "days"} if dates else set()),
            **{name: {"tokens"} for name in fleet_finds()},
        }.get(self.find or "", set())
        for name in sorted(wanted - dates):
            raise ConfigError(f"is missing: --find {self.find} needs it", key=name)
        for name in sorted(dates - wanted):
            needs = {"tokens": "--gpus (how long?) or --days (on how many GPUs?)", "days": "--gpus or --tokens"}[name]
            raise ConfigError(
                f"does not affect --find {self.find}; leave it out" if self.find else f"needs {needs}", key=name
            )
        if self.mfu is not None and self.hfu is not None:
            raise ConfigError("is another way to say --mfu; give one of them", key="hfu")
        for name in ("mfu", "hfu"):
            if getattr(self, name) is not None and (not dates or self.find in fleet_finds()):
                raise ConfigError(
                    f"does not affect --find {self.find}; leave it out" if dates else "needs --tokens or --days",
                    key=name,
                )
        if self.find in ("days", "tokens", *fleet_finds()) and not self.gpus:
            raise ConfigError(f"is missing: --find {self.find} needs it", key="gpus")

    @property
    def dated(self) -> bool:
        """Return whether a whole run is asked about."""
        return self.tokens is not None or self.days is not None

    @property
    def margin_bytes(self) -> float:
        """Memory to be left free on each GPU [bytes]."""
        return self.margin * GIB

    def _check(self) -> None:
        """Refuses questions that do not go together."""
        find = self.find
        if is_run(self.job):
            raise ConfigError("is a run of one layout, and a plan has many; --anchor FILE.toml says it", key="measured")
        if self.fleet is not None and self.objective != "goodput" and find not in fleet_finds():
            raise ConfigError("needs --objective goodput", key="fleet")
        if find == "oversubscription" and self.job.topology is None:
            raise ConfigError("needs --topology", key="find")
        if find == "sites" and self.job.topology is None and "between" not in fleet_options(self.fleet, find)[1]:
            raise ConfigError(
                "--find sites needs the bandwidth from a site to the others: between=100Gbit/s", key="fleet"
            )
        for name, needs in (("exposed", ("nic", "link", "batch")), ("prices", ("gpu",))):
            if getattr(self, name) is not None and find not in needs:
                raise ConfigError(f"needs --find {' or '.join(needs)}", key=name)
        self._check_dates()
        for name in FINDS.get(find or "", ()):
            if name in self.locks or getattr(self.job, name) is not None:
                raise ConfigError(f"is what --find {find} searches; leave it out", key=name)
        if find is not None:
            for name in ("what_next", "why_not", "export"):
                if getattr(self, name):
                    raise ConfigError(f"cannot be combined with --find {find}", key=name)
            if find != "gpu" and len(self.gpus) > 1:
                raise ConfigError(f"--find {find} asks about one number of GPUs", key="gpus")
        if self.export is None:
            for name in ("onto", "out"):
                if getattr(self, name) is not None:
                    raise ConfigError("needs --export", key=name)
        elif self.export == FLAGS and self.onto is not None:
            raise ConfigError("flags are no file to patch", key="onto")
        if self.job.gpu is None:
            raise ConfigError(
                "is missing: a plan is for a kind of GPU (`loadgauge gpus` lists them); --find gpu compares them",
                key="gpu",
            )


@cache
def questions() -> dict[str, Field]:
    """Return the allowed values of each question of a plan, by name.

    >>> questions()["top"].low, questions()["top"].high
    (1, 100)
    """
    hints = get_type_hints(PlanRequest, include_extras=True)
    return {name: hint.__metadata__[0].extra["field"] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def _read(name: str, field: Field, value: Any) -> Any:
    try:
        return field.read(value)
    except ConfigError as error:
        raise ConfigError(str(error), key=name) from None


def read_values(name: str, raw: Any) -> tuple[Any, ...]:
    """The values of an open axis or of `gpus`, each once: a text with commas between them (semicolons for `recompute`,
    whose values have commas), one value, or several.

    >>> read_values("tp", "4,8,4"), read_values("zero", 3), read_values("schedule", ("1f1b", "zb-v"))
    ((4, 8), (3,), ('1f1b', 'zb-v'))
    """
    field = fields()[name]
    if isinstance(raw, str):
        raw = raw.split(";" if name == "recompute" else ",")
    elif not isinstance(raw, tuple | list):
        raw = (raw,)
    if name == "schedule":
        field = msgspec.structs.replace(field, choices=(*field.choices, ALL))

    def read(value: Any) -> Any:
        if name == "recompute":
            return str(value).strip()
        return _read(name, field, value.strip() if isinstance(value, str) else value)

    return tuple(dict.fromkeys(map(read, raw)))


def _pairs(text: str) -> dict[str, tuple[Any, ...]]:
    """Values of axes, as in `tp=16,pp=4`."""
    locks: dict[str, tuple[Any, ...]] = {}
    for word in text.replace(",", " ").split():
        name, _, value = word.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if name not in OPEN_AXES or not value:
            raise ConfigError(f"must be axis=value pairs such as tp=16,pp=4, got {word!r}", key="why_not")
        locks[name] = read_values(name, {"yes": "true", "no": "false"}.get(value, value))
    return locks


def models_named(text: str) -> list[str]:
    """The models of the catalogue that a MODEL means for `find="model"`: all of them, or those whose names begin so.

    >>> models_named("qwen3-3")
    ['qwen3-30b-a3b', 'qwen3-32b']
    """
    names = [name for name in catalogue() if text.lower() == ANY or name.startswith(text.lower())]
    if not names:
        raise ConfigError(f"no model of the catalogue begins with {text!r}; {ANY!r} means all of them")
    return names


# -- from the request to the search -------------------------------------------------------------------------------------


def cases(request: PlanRequest, model: ModelSpec | None = None) -> tuple[Setup, list[Case]]:
    """The job that all cases share, with what was assumed for it, and a search for each number of GPUs.

    model: where it is at hand already. Raises `ConfigError` for locks that contradict each other or the model,
    `NotStated` where the links of the cluster are unknown.
    """
    job, locks, sizes = request.job, request.locks, request.gpus
    if job.dynamic_cp is not None:
        raise ConfigError(
            "shares each sequence over ranks of one layout; `loadgauge estimate` takes it, with the layout that a plan finds",
            key="dynamic_cp",
        )
    if not sizes and (request.find == "gpus" or (request.find == "gpu" and request.dated)):
        sizes = (MOST_GPUS,)
    usual_batch = ""
    if request.dated and job.global_batch is None and not asks_for_files(job):
        job, usual_batch = _with_usual_batch(job)
    if request.find == "model":
        job = job.replace(model=models_named(job.model)[0])
    layers, assumed_framework, hosted = job.stage_layers, None, job.activation_offload
    own = None if model is not None else _setup_of_file(job, sizes)
    if own is not None:
        open_axes = {name: fields()[name].low for name in OPEN_AXES if fields()[name].kind == "whole"}
        framework, batch = own.training.framework.name, own.layout.global_batch
        job = job.replace(**open_axes, recompute="none", global_batch=batch, framework=framework)
        hosted = own.job.activation_offload
        sizes = sizes or (own.layout.gpus,)
    elif job.framework is None:
        spec = found_model(job).spec if model is None else model
        assumed_framework = _framework(spec, job, locks, max(sizes or (1,)), request.export)
        job = job.replace(framework=assumed_framework)
    locks = _of_the_file(locks, request.export)
    own_engine = job.framework in FRAMEWORKS and FRAMEWORKS[job.framework].engine is not None
    if own_engine and (":" in (job.offload or "") or job.offload_to == "nvme"):
        stages = locks.get("zero", (3,))  # what only its ZeRO 3 has
        locks = {**locks, "zero": (3,) if 3 in stages else stages}
        job = job.replace(zero=locks["zero"][0])
    if "checkpoints" in (hosted or "").split(","):  # of which there are none without it
        again = tuple(word for word in locks.get("recompute", ("full",)) if word.startswith(("full", LEAST)))
        job = job.replace(recompute="full" if again else locks["recompute"][0])
        locks = {**locks, "recompute": again}
    setup: Setup | None = None
    searches = []
    mixed = job.activation_offload == LEAST
    job = job.replace(activation_offload=None) if mixed else job
    for gpus in sizes or (1,):
        # How cp ranks exchange keys and values goes with cp, which is open.
        setup = resolve_job(job.replace(gpus=gpus, cp_comm=None), model)
        _check_locks(locks, setup, job.cp_comm)
        if job.cp_comm is not None:
            setup = msgspec.structs.replace(setup, layout=msgspec.structs.replace(setup.layout, cp_comm=job.cp_comm))
        if setup.cluster is None:
            raise NotStated(setup.untimed)
        of_batch = partial(
            space_for,
            setup.model,
            setup.training,
            gpus,
            seq_len=setup.layout.seq_len,
            locks=locks,
            stage_layers=None if own is not None and layers is None else setup.layout.stage_layers,
            lengths=None if setup.layout.tokens is None else setup.lengths,
            padded=setup.padded,
            base=setup.layout,
        )
        space = of_batch(setup.layout.global_batch)
        # Fewer sequences than ranks are for layouts with tp, pp and cp, where the job's own one has none; and where the number
        # of GPUs is sought, the most of them do not round the batch.
        few = job.global_batch or setup.layout.global_batch
        if request.find == "gpus" or few < setup.layout.dp <= few * max(space.tp) * max(space.pp) * max(space.cp):
            space = of_batch(few)
        searches.append(
            Case(
                space=space,
                training=setup.training,
                cluster=setup.cluster,
                price=request.price,
                locks=locks,
                others=setup.others,
                fleet=fleet_options(request.fleet)[0] if request.objective == "goodput" else None,
                overlap_open=setup.overlap_open,
            )
        )
    if setup is not None and setup.padded:
        searches = [part for case in searches for part in _padded(case)]
    if setup is not None:
        searches = [part for case in searches for part in _two_directions(case, setup)]
    if mixed:
        searches += [other for case in searches for other in _offloaded(case)]
    assert setup is not None
    hidden = {f"--{name.replace('_', '-')}" for name in OPEN_AXES}
    batch = {"--global-batch"}
    hidden |= {"seq-len": {"--seq-len"}, "micro-batch": batch, "batch": batch}.get(request.find or "", set())
    assumed = {flag: value for flag, value in setup.assumed.items() if flag not in hidden}
    if request.find == "gpus" and "--global-batch" in assumed:
        usual_batch = usual_batch or f"the multiple of the GPUs nearest to {searches[-1].space.global_batch:,}"
    if usual_batch:
        assumed["--global-batch"] = usual_batch
    if assumed_framework is not None:
        assumed["--framework"] = assumed_framework
    return msgspec.structs.replace(setup, assumed=assumed), searches


def _padded(case: Case) -> Iterator[Case]:
    """Yield the case with micro-batches of one sequence, which nothing pads, and that of several, where attention has a mask."""
    space, masked = case.space, unsaid.masked(case.training)
    if masked == case.training:
        yield case
        return
    for several, training in ((False, case.training), (True, masked)):
        sizes = tuple(size for size in space.micro_batch if (size > 1) == several)
        if sizes:
            own = msgspec.structs.replace(space, micro_batch=sizes)
            yield msgspec.structs.replace(case, space=own, training=training)


def _two_directions(case: Case, setup: Setup) -> Iterator[Case]:
    """Yield the case with schedules of two directions apart from the others: they hide the exchange of experts."""
    kind, gpus, running = case.training, case.space.gpus, setup.running
    trained = {word: kind if running is None else running(word, kind, gpus) for word in case.space.schedule}
    for training in (case.training, next((kind for kind in trained.values() if kind != case.training), None)):
        some = tuple(word for word, kind in trained.items() if kind == training)
        if training is not None and some:
            own = msgspec.structs.replace(case.space, schedule=some)
            yield msgspec.structs.replace(case, space=own, training=training)


def _offloaded(case: Case) -> Iterator[Case]:
    """Yield a case with each kind of tensors off the card: checkpoints, of layers that run again; all; what one module keeps,
    where not all layers run again.

    A schedule that splits the backward has nothing off the card.
    """
    space, kind = case.space, case.training
    again = tuple(policy for policy in space.recompute if policy.mode == "full")
    some = tuple(policy for policy in space.recompute if policy not in again or policy.layers or policy.every > 1)
    usual = tuple(word for word in space.schedule if word in UNSPLIT)
    for word in offload_words(space.model, kind):
        policies = {"checkpoints": again, "all": space.recompute}.get(word, some)
        if policies and usual:
            host = msgspec.structs.replace(kind.host, activations=word)
            yield msgspec.structs.replace(
                case,
                space=msgspec.structs.replace(space, recompute=policies, schedule=usual),
                training=msgspec.structs.replace(kind, host=host),
            )


def fleet_finds() -> tuple[str, ...]:
    """Return the inverse questions about a fleet; none where no room answers them."""
    fleets = provider("OBJECTIVES")
    return () if fleets is None else fleets.FINDS


def fleet_options(text: str | None, find: str | None = None) -> tuple[Any, dict[str, str]]:
    """Read `--fleet`: the options of a fleet, and with `--find sites` those of its sites. Raises `ConfigError`."""
    fields = {} if text is None else dict(_pair(word) for word in text.split(","))
    options: tuple[Any, dict[str, str]] = need("OBJECTIVES").options(fields, find)
    return options


def _pair(word: str) -> tuple[str, str]:
    name, sign, value = word.partition("=")
    if not sign:
        raise ConfigError(f"must be like spares=2%,recover=elastic, got {word!r}", key="fleet")
    return name.strip().replace("-", "_"), value.strip()


def _with_usual_batch(job: Job) -> tuple[Job, str]:
    """The job with the batch of a long run, and what is said of it."""
    seq_len = resolve_job(job.replace(gpus=None, cp_comm=None)).layout.seq_len
    batch = max(1, USUAL_BATCH // seq_len)
    millions = USUAL_BATCH // 2**20
    reason = f"{batch} or the multiple of the GPUs nearest to it ({millions} M tokens, as GPT-3's and LLaMA's)"
    return job.replace(global_batch=batch), reason


def file_estimate(request: PlanRequest) -> Estimate | None:
    """The estimate of the layout that the request's job file has; None where the model is no job file, or it has none."""
    own = _setup_of_file(request.job, request.gpus)
    try:
        return None if own is None else own.estimate()
    except Error:
        return None


def _setup_of_file(job: Job, sizes: tuple[int, ...]) -> Setup | None:
    """The run of another tool's job file on the first of some numbers of GPUs, or else on as many as its own layout has."""
    if not asks_for_files(job):
        return None
    try:
        return resolve_job(job.replace(gpus=sizes[0] if sizes else None))
    except (LayoutError, ConfigError):
        if not sizes:
            raise
        return resolve_job(job)


def _check_locks(locks: dict[str, tuple[Any, ...]], setup: Setup, cp_comm: str | None) -> None:
    """Refuses locks that no layout of the model can have, or that contradict each other."""

    def only(name: str, value: int) -> bool:
        return locks.get(name) == (value,)

    model, layers = setup.model, setup.layout.stage_layers
    if not model.has_experts:
        for name in ("ep", "etp"):
            if min(locks.get(name, (1,))) > 1:
                raise ConfigError(f"{model.name} has no experts to shard", key=name)
    if cp_comm is not None and only("cp", 1):
        raise ConfigError("needs --cp above 1", key="cp_comm")
    if min(locks.get("vpp", (1,))) > 1:
        if only("pp", 1):
            raise ConfigError("chunks of a stage need --pp above 1", key="vpp")
        if "schedule" in locks and not {"interleaved", ALL} & set(locks["schedule"]):
            raise ConfigError("needs the interleaved schedule", key="vpp")
    if layers is not None:
        if sum(layers) != model.num_hidden_layers:
            message = f"are {sum(layers)} layers, and {model.name} has {model.num_hidden_layers}"
            raise ConfigError(message, key="stage_layers")
        if len(layers) not in locks.get("pp", (len(layers),)):
            raise ConfigError(f"are {len(layers)} stages, and --pp is {locks['pp'][0]}", key="stage_layers")


def _of_the_file(locks: dict[str, tuple[Any, ...]], export: str | None) -> dict[str, tuple[Any, ...]]:
    """The locks, and those of the file to write."""
    if export in (None, FLAGS) or "zero" in locks:
        return locks
    stages = need("DIALECTS").dialect(export).zero_stages
    return locks if stages is None else {**locks, "zero": stages}


def _framework(model: ModelSpec, job: Job, locks: dict[str, tuple[Any, ...]], gpus: int, export: str | None) -> str:
    """The framework of the file to write; else the default of a run whose open axes may have any degree."""
    if export not in (None, FLAGS):
        return str(need("DIALECTS").dialect(export).framework)
    if model.own.framework:
        return str(model.own.framework)
    experts = model.has_experts
    free = [axis for axis in MODEL_PARALLEL if experts or not AXES[axis].experts]
    degrees = {axis: locks.get(axis, (1, gpus) if axis in free else (1,)) for axis in MODEL_PARALLEL}
    return default_framework(degrees, adapters=job.adapts)
