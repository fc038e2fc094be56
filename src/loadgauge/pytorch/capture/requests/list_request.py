"""A model's captured list, in a process of its own: the configuration is cut to as few layers as show every kind of block."""

import contextlib
import gc
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
import torch
from torch.utils._pytree import tree_leaves

from loadgauge.core.base.errors import ConfigError, Error, NotModelled, first_line, refuse
from loadgauge.core.base.files import is_script
from loadgauge.core.definitions.job.flag_types import CaptureFlags
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.training.optimizers import torch_optimizers
from loadgauge.core.definitions.training.training import training
from loadgauge.core.families.encoders import pictures
from loadgauge.pytorch.capture.call import capture, inputs_of, module_of, with_rows
from loadgauge.pytorch.capture.capture import APART, PLACED, ROWS, reason, recorded, stopped_at
from loadgauge.pytorch.capture.captured import Captured
from loadgauge.pytorch.capture.inputs.heads import contrasts, head_class
from loadgauge.pytorch.capture.inputs.kinds import PATCHED, of_config
from loadgauge.pytorch.capture.inputs.libraries import is_library, of_keys, of_library, usual_sizes
from loadgauge.pytorch.capture.inputs.pictures import Pictures, processed
from loadgauge.pytorch.capture.inputs.pretrained import without_weights
from loadgauge.pytorch.capture.inputs.small import shallow
from loadgauge.pytorch.capture.inputs.target import (
    LENGTH,
    ONE,
    SECOND,
    SOUND,
    config_keys,
    longest_of,
    processor_keys,
    rows_of,
    sized,
    usual_of_heads,
)
from loadgauge.pytorch.capture.lists.blocks import Blocks, Unordered, blocks
from loadgauge.pytorch.capture.lists.compose import Shown, in_order
from loadgauge.pytorch.capture.lists.listed import Listing
from loadgauge.pytorch.capture.lists.listing import Lister, guards_of
from loadgauge.pytorch.capture.lists.quantised import as_on_cuda, elements
from loadgauge.pytorch.capture.lists.store import reading, seals, version_of
from loadgauge.pytorch.capture.recognise import recognised
from loadgauge.pytorch.capture.record import Recorded, record, sparse_tables
from loadgauge.pytorch.capture.requests.regime import Document, Regime
from loadgauge.pytorch.capture.requests.sharding import mark_experts, shard, splits_of, unsplit
from loadgauge.pytorch.capture.requests.tuning import cast_by_fsdp, tuned
from loadgauge.pytorch.capture.symbols.splits import Splits
from loadgauge.pytorch.capture.symbols.symbolic import Symbols
from loadgauge.pytorch.trace.programs import own_loops
from loadgauge.pytorch.trace.programs.script import function
from loadgauge.pytorch.trace.programs.target import config_object
from loadgauge.pytorch.trace.programs.training import Around, Sized
from loadgauge.pytorch.trace.subprocess import Request
from loadgauge.pytorch.trace.torch_run import TorchRun

DEEPEST = 16
"""Layers of the deepest model that is run in place of a deeper one."""
TUNED = "adapters, or a part of the model that is trained, are captured with all experts on each rank"


ALONE = "text"
"""The head of a model that is called with one text."""
FOUR = "matrices in 4 bits are packed as they lie, and no plan splits them"


def list_request(
    request: Request,
    how: dict[str, Any],
    inputs: str,
    sizes: dict[str, int],
    pairs: dict[str, str] | None = None,
    rows: str = "",
) -> Document:
    """Capture the list of the model of a request, at some sizes and wherever its guards hold then.

    how: a `Regime`; rows: of a script, how many its data chooses, as `--rows` has them
    pairs: a plan of tensor parallelism that was recognised on one rank (`recognise`)
    Raises ConfigError, LayoutError or NotModelled.
    """
    regime = msgspec.convert(how, Regime)
    run = _run(regime)
    keys = {} if is_script(request.job.model) else config_keys(request.job.model)
    if is_library(keys):
        return _of_library(keys, request.job.model, run, regime, inputs, rows, sizes)
    if is_script(request.job.model):
        with reading() as paths, without_weights(request.job.model.rpartition(":")[0]):
            document = _of_script(request.job.model, inputs, run, sizes, regime, rows)
        document.files = seals(paths)
        return document
    left_out: set[str] = set()
    while True:
        try:
            return _of_transformers(keys, request.job.model, run, regime, inputs, sizes, pairs or {}, left_out)
        except Unordered as error:
            if error.path in left_out:
                raise
            left_out.add(error.path)


def _of_transformers(
    keys: dict[str, Any],
    target: str,
    run: TorchRun,
    regime: Regime,
    inputs: str,
    sizes: Mapping[str, int],
    pairs: dict[str, str],
    left_out: Collection[str],
) -> Document:
    """The list of a model from its configuration; of all its layers where lists of them are left out. Raises Unordered."""
    whole = config_object(keys, target)
    full = _blocks_of(whole, run).without(left_out)
    config, stacks = whole, full
    for layers in range(2, 0 if regime.tuned.by_layer or left_out else DEEPEST + 1):
        try:
            cut = shallow(config_object(keys, target), layers)
            less = _blocks_of(cut, run)
        except Exception as error:  # not every configuration can be cut so, which its own code says
            if not stopped_at(error):
                raise
            continue
        if not _smaller(less, full):
            break
        if _stands_for(less, full) is not None:
            config, stacks = cut, less
            break
    seen = _seen(whole, inputs, target)
    job = _of_config(config, run, regime, seen)
    job = _split(tuned(job, regime), regime, pairs)
    learnt: dict[str, str] = {}
    if regime.tuned.by_layer:
        shown, listings = _by_layer(job, target, regime, sizes)
        pattern = shown.pattern(listings[0])
    else:
        listings, learnt = _listings(job, target, stacks, regime, sizes)
        pattern = _pattern(stacks, full, listings[0])
    text = _text(whole)
    model = tuned(_of_config(whole, run, regime, seen), regime).build("meta")
    return Document(
        name=str(keys.get("_name_or_path") or whole.model_type),
        model_type=whole.model_type,
        hidden_size=int(getattr(text, "hidden_size", 0) or getattr(text, "d_model", 0) or 0),
        vocab_size=int(getattr(text, "vocab_size", 0) or 0),
        pattern=pattern,
        listings=listings,
        parameters=elements(model),
        longest=longest_of({name: getattr(text, name, None) for name in dir(text) if name.startswith("max_")}),
        tied=bool(getattr(whole, "tie_word_embeddings", False)),
        torch=str(torch.__version__),
        transformers=version_of("transformers"),
        dtype=str(keys.get("dtype") or keys.get("torch_dtype") or ""),
        splits=_splits(model, regime, pairs or learnt),
        given=_given(job, model, sizes),
        sample=_samples(job, model, sizes),
    )


def _given(job: Sized, model: Any, sizes: Mapping[str, int]) -> str:
    """The pictures and sounds of one size that a model is called with for each sequence, by the name of its argument, in words.

    Sounds of any length beside a text are not among them.
    """
    shown: list[dict[str, str]] = []
    named = [name for name in PATCHED if not {LENGTH, SOUND} <= set(job.names) or name.startswith("pixel")]
    for less in (1, 2):  # a sound of half the length, a text that is a little shorter
        lengths = {
            name: 1 if name == ONE else max(1, size // less if name == SOUND else size - 16 * (less - 1))
            for name, size in {"t": sizes["s"], **sizes}.items()
        }
        try:
            _, arguments = job.inputs("meta", model, **sized(job.names, {}, lengths))
        except RuntimeError:  # values that are read, which a tensor without any cannot have
            return ""
        shown.append(
            {
                name: f"{name} {' x '.join(map(str, tensor.shape[1:]))}"
                for name, tensor in arguments.items()
                if isinstance(tensor, torch.Tensor) and name in named
            }
        )
    return ", ".join(text for name, text in shown[0].items() if text == shown[1].get(name))


def _split(job: Sized, regime: Regime, pairs: dict[str, str]) -> Sized:
    """The training of the part of the model that one rank has."""

    def build(device: str) -> Any:
        model = job.build(device)
        if regime.tuned.whole or regime != regime.whole:
            mark_experts(model)
            shard(model, regime.tp, regime.ep, pairs)
        return model

    return msgspec.structs.replace(job, build=build)


def _seen(config: Any, inputs: str, target: str) -> Pictures | None:
    """Return what the processor of a model makes of the pictures of a sequence; None where they are not stated."""
    sizes = (
        [(width, height) for count, width, height in pictures.read_pictures(inputs, "pictures") for _ in range(count)]
        if inputs
        else []
    )
    refuse(
        sizes and head_class(config, "") is not None,
        "with another head, a model has pictures of its own size",
        key="pictures",
    )
    return processed(config, sizes, processor_keys(target)) if sizes else None


def _of_config(config: Any, run: TorchRun, regime: Regime, seen: Pictures | None = None) -> Sized:
    job = _trained(config, run, seen)
    usual = {name: size for name, size in usual_of_heads().items() if name in job.names}
    names = tuple(name for name in job.names if name not in usual)
    job = msgspec.structs.replace(job, inputs=partial(job.inputs, **usual), names=names) if usual else job
    return cast_by_fsdp(job) if regime.buffer else job


def _run(regime: Regime) -> TorchRun:
    precision = (
        ("bf16-autocast" if regime.weight == 4 else "bf16-autocast-8")
        if regime.autocast
        else ("fp32" if regime.weight == 4 or regime.buffer else "bf16-pure")
    )
    layout = Layout(micro_batch=1, global_batch=1, seq_len=1)
    return TorchRun(layout, training("huggingface", precision, "sgd", regime.attention))


SIZES = frozenset({ONE, LENGTH, SECOND})
"""Sizes that an estimate has; others of a function of inputs are at their defaults, and so is the second text's."""


def _of_script(
    target: str, inputs: str, run: TorchRun, sizes: Mapping[str, int], regime: Regime, rows: str
) -> Document:
    make = function(target)
    job = module_of(make, inputs_of(make, target, inputs), run)
    names = tuple(name for name in job.names if name in (ONE, LENGTH) or name not in job.usual)
    if unknown := sorted(set(names) - SIZES):
        raise ConfigError(
            f"{inputs}: an estimate has the sizes b (--micro-batch) and s (--seq-len), not {', '.join(names)}:"
            f" `def batch(b{''.join(f', {name}=NUMBER' for name in unknown)})`; loadgauge capture has --size",
            key="inputs",
        )
    if ONE not in names:  # such as one graph, as large as it is
        refuse(
            sizes[ONE] > 1,
            f"{inputs} makes one batch, whatever --micro-batch {sizes[ONE]} is: leave it out, or give the function a size b",
            NotModelled,
        )
        of_sizes = job.inputs

        def of_one(device: str, module: Any, b: Any, **sizes: Any) -> Any:
            return of_sizes(device, module, **sizes)

        note = f"{inputs} makes one batch, whatever --micro-batch is: a sample is such a batch"
        job, names = msgspec.structs.replace(job, inputs=of_one, notes=(*job.notes, note)), (ONE, *names)
    job = msgspec.structs.replace(job, names=names)
    try:
        return _of_module(job, target, regime, rows, sizes)
    except ConfigError as error:
        if APART not in str(error):
            raise
    return _of_module(
        msgspec.structs.replace(job, placed=True, notes=(*job.notes, PLACED)), target, regime, rows, sizes
    )


def _of_library(
    keys: Mapping[str, Any],
    target: str,
    run: TorchRun,
    regime: Regime,
    inputs: str,
    rows: str,
    sizes: Mapping[str, int],
) -> Document:
    """The list of a library's model from as few blocks as show each kind; from all, where those do not run without the others."""
    fixed = usual_sizes(keys, target) | {name: int(size) for name, size in re.findall(r"(\w)=(\d+)", inputs)}

    def job_of(keys: Mapping[str, Any]) -> Sized:
        job = of_keys(keys, target, run)
        free = tuple(name for name in job.names if name not in fixed)
        return msgspec.structs.replace(job, inputs=partial(job.inputs, **fixed), names=free)

    whole, shown = job_of(keys), Shown.of_all(Blocks(()))
    if not regime.tuned.by_layer:
        module = whole.build("meta")
        config = getattr(module, "config", None)
        shown = Shown.of(module, config)
    document = None
    if shown.few != shown.all:
        counts = shown.keys(config)
        few = job_of({**keys, **counts})
        try:
            if not counts or blocks(few.build("meta")) != shown.few:
                few = msgspec.structs.replace(whole, build=shown.cut(whole.build, module))
            document = _of_module(few, target, regime, rows, sizes, shown)
        except Exception as error:
            if not (isinstance(error, NotModelled) or stopped_at(error)):
                raise
    document = document or _of_module(whole, target, regime, rows, sizes)
    return msgspec.structs.replace(document, given=", ".join(f"{name} = {size}" for name, size in fixed.items()))


def _of_module(
    job: Sized, target: str, regime: Regime, rows: str, sizes: Mapping[str, int], shown: Shown | None = None
) -> Document:
    """The list of a module with all its layers, or of one with those that are shown."""
    job = with_rows(job, rows_of(rows))
    dtype = _dtype_of(job.build("meta"))
    if (dtype == "float32") != (regime.weight == 4 or regime.buffer > 0):
        words = "fp32 or bf16-autocast" if dtype == "float32" else "bf16-pure or bf16-autocast-8"
        raise ConfigError(
            f"a module of one's own has the dtype that its function gives it, {dtype}: {words}", key="precision"
        )
    if regime.buffer:
        job = cast_by_fsdp(job)
    job = tuned(job, regime)
    module = job.build("meta")
    table = next((name for name, _ in sparse_tables(module)), "")
    stacks = blocks(module) if shown is None else shown.few
    splits = _splits(module, regime, {})
    listings, _ = _listings(_split(job, regime, {}), target, stacks, regime, sizes)
    return Document(
        name=target,
        model_type=type(module).__name__,
        hidden_size=0,
        vocab_size=0,
        pattern=tuple(range(len(listings[0].blocks))) if shown is None else shown.pattern(listings[0]),
        listings=listings,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        torch=str(torch.__version__),
        dtype=dtype,
        splits=splits,
        optimizer=_configured(module) or ("adagrad" if table else ""),
        rows=table,
        sample=_samples(job, module, sizes),
    )


def _samples(job: Sized, module: Any, sizes: Mapping[str, int]) -> str:
    """A word for the samples of a batch, by the shape of the first tensor of numbers that the module is called with."""
    batch: Any = ()
    with contextlib.suppress(Exception):  # whatever the function of inputs does with values
        batch = job.inputs("meta", module, **sized(job.names, {}, {SECOND: sizes[LENGTH], **sizes}))
    return samples_of(
        leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    )


def samples_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return a word for the samples of a batch, from its first tensor.

    >>> samples_of([torch.empty(2, 3, 64, 64)]), samples_of([torch.empty(2, 4, 9, 9, 9)]), samples_of([torch.empty(2, 13)])
    ('images', 'volumes', 'samples')
    """
    shape = next((tuple(tensor.shape) for tensor in tensors), ())
    if len(shape) == COLOURS and shape[0] == COLOURS:  # a list of pictures
        return "images"
    if len(shape) < 4 or shape[1] > CHANNELS:
        return "samples"
    return "images" if len(shape) == 4 else "volumes" if len(set(shape[-3:])) == 1 else "videos"


COLOURS, CHANNELS = 3, 64
"""Colours of a picture, and the most channels that one has, latents among them."""


def _configured(module: Any) -> str:
    """The optimizer that a LightningModule configures, "" of any other module and where it is not one alone that is known."""
    own = {spoken(optimizer) for optimizer in own_loops.configured(module)} if own_loops.takes_steps(module) else set()
    return own.pop() if len(own) == 1 else ""


def spoken(optimizer: torch.optim.Optimizer) -> str:
    """Return the word of `--optimizer` for one of PyTorch's; "" where it keeps or does something else.

    >>> spoken(torch.optim.SGD([torch.zeros(2)], momentum=0.9, nesterov=True))
    'sgd-momentum'
    """
    own, name = optimizer.defaults, type(optimizer).__name__.lower()
    name = "adamw" if name == "adam" else "sgd-momentum" if name == "sgd" and own.get("momentum") else name
    more = own.get("amsgrad") or own.get("centered") or (name == "rmsprop" and own.get("momentum"))
    way = "fused" if own.get("fused") else "loop" if own.get("foreach") is False else ""
    words = torch_optimizers().keys() if type(optimizer).__module__.startswith("torch.optim") and not more else ()
    return next((word for word in (f"{name}-{way}", name) if word in words), "")


def _dtype_of(module: torch.nn.Module) -> str:
    """The dtype of most of a module's weights; those in float32 beside 16 bits are told apart (`Weight.wide`)."""
    numbers: Counter[str] = Counter()
    for parameter in module.parameters():
        if parameter.is_floating_point():
            numbers[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return numbers.most_common(1)[0][0] if numbers else "float32"


def _by_layer(job: Sized, target: str, regime: Regime, sizes: Mapping[str, int]) -> tuple[Shown, list[Listing]]:
    """The same of as few blocks as show each way in which one is trained; of all, where those cannot run without the others."""
    module = job.build("meta")
    shown = Shown.of(module, getattr(module, "config", None))
    try:
        return shown, _listings(job, target, shown.few, regime, sizes, shown.within)[0]
    except Exception as error:  # what the model says of its layers elsewhere, or numbers that a block has
        if shown.few == shown.all or not (isinstance(error, Error) or stopped_at(error)):
            raise
    shown = Shown.of_all(shown.all)
    return shown, _listings(job, target, shown.all, regime, sizes)[0]


def _listings(
    job: Sized, target: str, stacks: Blocks, regime: Regime, sizes: Mapping[str, int], around: Around | None = None
) -> tuple[list[Listing], dict[str, str]]:
    """The list at some sizes, and on the other side of one sequence, which PyTorch treats apart; and matrices that can be split."""
    fixed = {"t": sizes["s"], **sizes}
    try:
        first, pairs = _listing(job, target, stacks, regime, fixed, around)
    except ConfigError as error:
        if ROWS not in str(error) or job.rows:
            raise
        job = with_rows(job, "most")
        first, pairs = _listing(job, target, stacks, regime, fixed, around)
    listings = [first]
    if not listings[0].plain and job.names != (
        ONE,
    ):  # where the batch alone is a symbol, the other side is seldom asked for
        # Code that refuses one sequence, as batch norm does of one row, has one list.
        with contextlib.suppress(ConfigError):
            other, _ = _listing(job, target, stacks, regime, {**fixed, ONE: 2 if fixed[ONE] == 1 else 1}, around)
            if not other.plain and [len(block.operations) for block in other.blocks]:
                listings.append(other)
    return listings, pairs


def _listing(
    job: Sized, target: str, stacks: Blocks, regime: Regime, fixed: Mapping[str, int], around: Around | None = None
) -> tuple[Listing, dict[str, str]]:
    """The list, with formulas where the code runs with symbols and a plain run agrees, else with the numbers of these sizes."""
    sizes = sized(job.names, {}, fixed)
    if regime.tuned.base:
        around = _in_four_bits(around)
    why = ""
    try:
        if sizes != {ONE: 1}:  # which is no symbol
            _, run, symbols = recorded(job, target, sizes, around)
            lister = _lister(run, target, stacks, symbols, regime)
            return lister.listing(job.names, sizes, guards_of(symbols)), _recognised(lister, regime)
    except Exception as error:  # whatever stops symbols
        why = first_line(error)[:200]
    try:
        run = record(job, sizes, around=around)
    except Error:
        raise
    except Exception as error:
        if regime != regime.whole:
            ranks = f"tp = {regime.tp}, ep = {regime.ep}"
            raise NotModelled(f"{target} does not run over {ranks} (--zero 3 shares it out): {reason(error)}") from None
        raise ConfigError(f"{target} cannot be captured: {reason(error)}") from None
    guards = tuple(f"({name} == {value})" for name, value in sizes.items())
    lister = _lister(run, target, stacks, None, regime)
    return msgspec.structs.replace(lister.listing(job.names, sizes, guards), plain=why), _recognised(lister, regime)


def _lister(run: Recorded, target: str, stacks: Blocks, symbols: Symbols | None, regime: Regime) -> Lister:
    """Read a recording; a module of one's own that runs blocks more than once is one block."""
    try:
        return Lister(run, stacks, symbols, regime.weight, regime.wide)
    except Unordered:
        if not (is_script(target) or of_library(target)):
            raise
        return Lister(run, Blocks(()), symbols, regime.weight, regime.wide)


def _in_four_bits(around: Around | None) -> Around:
    """The same context, in which 4-bit layers run as on CUDA."""

    @contextlib.contextmanager
    def both(module: torch.nn.Module) -> Iterator[None]:
        with as_on_cuda(), contextlib.nullcontext() if around is None else around(module):
            yield

    return both


def _recognised(lister: Lister, regime: Regime) -> dict[str, str]:
    return recognised(lister) if regime.tuned.whole else {}


def _splits(model: Any, regime: Regime, pairs: dict[str, str]) -> Splits:
    """Over which ranks it may be split."""
    splits = splits_of(model, pairs)
    if regime.tuned.whole:
        return splits
    if regime.tuned.base:
        return msgspec.structs.replace(splits, tp=(), tp_closed=FOUR, ep_closed=TUNED)
    return msgspec.structs.replace(splits, tp_closed=splits.tp_closed or unsplit(model), ep_closed=TUNED)


def _blocks_of(config: Any, run: TorchRun) -> Blocks:
    """The blocks of what is trained for a configuration, built without memory."""
    return blocks(_trained(config, run).build("meta"), config)


def _trained(config: Any, run: TorchRun, seen: Pictures | None = None) -> Sized:
    """The training of a model; of one text where two would be compared, whose blocks would run twice."""
    named = head_class(config, "")
    return of_config(config, run, seen, head=ALONE if named is not None and contrasts(named[0]) else "")


def _smaller(less: Blocks, full: Blocks) -> bool:
    return sum(len(stack.paths) for stack in less.stacks) < sum(len(stack.paths) for stack in full.stacks)


def _stands_for(less: Blocks, full: Blocks) -> dict[str, str] | None:
    """For each block of the whole model the one of the smaller model that is like it: of its kind, and first, between, or last.

    None where one has no like.
    """
    likes: dict[str, str] = {}
    if [stack.path for stack in less.stacks] != [stack.path for stack in full.stacks]:
        return None
    for small, whole in zip(less.stacks, full.stacks, strict=True):
        if small.paths == whole.paths:  # not cut: each is its own, as layers of one kind may run at different lengths
            likes |= dict(zip(whole.paths, small.paths, strict=True))
            continue
        last, end = len(whole.pattern) - 1, len(small.pattern) - 1
        for index, kind in enumerate(whole.pattern):
            if index in (0, last):
                like = 0 if not index else end
                if small.pattern[like] != kind:
                    return None
            else:
                inner = [at for at in range(1, end) if small.pattern[at] == kind]
                if not inner:
                    return None
                like = inner[0]
            likes[whole.paths[index]] = small.paths[like]
    return likes


def _pattern(less: Blocks, full: Blocks, listing: Listing) -> tuple[int, ...]:
    """For each block of the whole model, in the order in which they run, the place of its like in the list."""
    like = _stands_for(less, full) or {path: path for stack in full.stacks for path in stack.paths}
    return in_order(listing, {stack.path: [like[path] for path in stack.paths] for stack in full.stacks})


def _text(config: Any) -> Any:
    text_config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return config if text_config is None else text_config


def capture_request(
    request: Request,
    inputs: str,
    own_sizes: dict[str, int],
    defaults: dict[str, int],
    step: str = "",
    pictures: tuple[tuple[int, int], ...] = (),
    freeze: tuple[str, ...] = (),
    head: str = "",
    rows: tuple[tuple[str, tuple[int, ...] | str], ...] = (),
) -> Captured:
    """Capture the job of a request in this process.

    inputs, step: of a script, script.py:function; given, defaults: see `sized`; pictures, freeze, head, rows: see `capture`

    Raises ConfigError, LayoutError or NotModelled.
    """
    job = request.job
    fields: dict[str, Any] = {
        name: value
        for name in CaptureFlags.__annotations__
        if name != "global_batch" and (value := getattr(job, name)) is not None
    }
    if job.global_batch is not None:
        fields["global_batch"] = TorchRun.of(job.replace(micro_batch=(defaults | own_sizes)[ONE])).accumulate
    target: Any = function(job.model) if is_script(job.model) else job.model
    beside, own = (inputs_of(target, job.model, expression) if expression else None for expression in (inputs, step))
    gc.disable()  # while transformers and the model's code are imported, as in `in_child`
    captures = capture(
        target,
        beside,
        step=own,
        layers=request.layers,
        pictures=pictures,
        freeze=freeze,
        head=head,
        rows=dict(rows),
        **fields,
    )
    gc.freeze()
    gc.enable()
    captures.target = job.model
    return captures.at(**sized(captures.job.names, own_sizes, {**defaults, **captures.job.usual}))
