"""Software overhead beside the kernels' time, and the error of predicted step times.

Kernels are measured one by one (`spec.calibration`); a step of a framework takes longer than their sum: the host launches them,
small ones are not in the list of operations, ranks wait for each other. All GPUs and frameworks share the factor: published runs
show no class of frameworks that differs from the rest by more than its sources differ from one another (decision 0046), but makers
of chips and people at their first try do. The range around a prediction is what runs of its class show, in tables and in users'
reports, that nothing was fitted to. The figures are in `data/software.toml`, which `make range` writes; none belongs to a run, a
source or a model.
"""

import functools
import tomllib

import msgspec

from loadgauge.core.base import ConfigError, read_table

USUAL = "usual"
TUNINGS = ("recipe", USUAL, "first")
"""Who tuned a run: the maker of the chips; nobody knows; one who tries it for the first time."""
KERNELS = 2.8
"""Kernels that PyTorch launches for an operation of the list, counted over the layers of transformers 5's Llama and GPT-2 (forward:
45 and 59 for 16 and 15 operations; backward as many for each gradient)."""
HOST_LAUNCH = {"eager": 7e-6, "compiled": 2e-6, "graphs": 0.0}
"""Seconds of one CPU core for each of them: of modules, dispatcher, autograd and the driver's launch, measured with the same models
at widths of 16, where nothing else takes time (6 to 7.5 us forward, 2 to 3.5 us for each gradient; 2 to 3 us of launch beside).
torch.compile leaves a wrapper that launches fused kernels; CUDA graphs leave nothing."""


def host_seconds(how: str) -> float:
    """Return the seconds that the host takes for an operation in each direction: the GPU waits where its kernels are shorter.

    >>> host_seconds("eager") > host_seconds("compiled") > host_seconds("graphs") == 0
    True
    """
    return KERNELS * HOST_LAUNCH[how]


class Factor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Time of compute over that of its kernels alone: of a dense model or one whose experts a host drives (`hosted`), in 16 bits or
    fewer.

    runs: of this kind, among those that the factors come from; sources: of those
    """

    experts: bool
    low_precision: bool
    factor: float
    runs: int
    sources: tuple[str, ...]


class Kind(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A class of runs: a stack, `experts`, or who tuned them (`TUNINGS`).

    factor: on the seconds of compute; low, high: factors on the predicted time that span 80 % of the runs of sources that
    nothing was fitted to; sources: how many it comes from, so that of sources left out the share `covered` lies inside
    """

    name: str
    factor: float
    low: float
    high: float
    sources: int
    covered: float


class Software(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of `data/software.toml`.

    transferred: power of `low` and `high` for a GPU without tables of operators, whose kernels are rated as a relative's
    low_measured, high_measured: the range once a run of one's own has rescaled the prediction
    median, most: the error that half and nine tenths of the rows keep below, each source left out in turn
    covered: share of the rows that lie within their range then
    """

    date: str
    transferred: float
    low_measured: float
    high_measured: float
    median: float
    most: float
    covered: float
    factors: tuple[Factor, ...]
    kinds: tuple[Kind, ...]


@functools.cache
def software() -> Software:
    """Return the figures. Raises `ConfigError` where the file is broken.

    >>> known = software()
    >>> known.low_measured < 1 < known.high_measured
    True
    """
    try:
        return msgspec.convert(read_table("software.toml"), Software)
    except (msgspec.ValidationError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(str(error), file="data/software.toml") from None


def hosted(*, experts: bool, graphs: bool) -> bool:
    """Return whether a host counts the rows of experts, and launches their kernels, while the GPU waits.

    >>> hosted(experts=True, graphs=False), hosted(experts=True, graphs=True)
    (True, False)
    """
    return experts and not graphs


@functools.cache
def factor(*, experts: bool = False, low_precision: bool = False, graphs: bool = False) -> Factor:
    """Return the factor of what all classes share.

    graphs: whether one CUDA graph holds the step; no host then waits for the rows of each expert, and software adds to experts
    what it adds to any model

    >>> factor(experts=True).factor > factor().factor, factor(experts=True, graphs=True) == factor()
    (True, True)
    """
    kind = (hosted(experts=experts, graphs=graphs), low_precision)
    return next(row for row in software().factors if (row.experts, row.low_precision) == kind)


@functools.cache
def kind_of(*, stack: str = "pretraining", experts: bool = False, tuning: str = USUAL) -> Kind:
    """Return the class of a run by the stack of its framework, and by who tuned it where that is said.

    >>> kind_of().name, kind_of(experts=True).name, kind_of(tuning="recipe").name
    ('pretraining', 'experts', 'recipe')
    """
    name = tuning if tuning != USUAL else "experts" if experts else stack
    return next(kind for kind in software().kinds if kind.name == name)


POWER = 0.9
"""Factor on the width of a range once the power of the machine is known.

That is a part of what sources differ by: between 0.7 and 1 of a cool chip's rate, on about three quarters of a step. Of a spread of
0.12 between sources, 0.10 between configurations and 0.06 between readings, taken evenly over that part, nine tenths are left."""


def bounds(kind: Kind, *, tables: bool = True, own_run: bool = False, own_power: bool = False) -> tuple[float, float]:
    """Return the factors on a predicted step time between which 80 % of measured ones lie.

    tables: the GPU's kernels were measured, rather than rated as a relative's; own_run: a run of the user's has rescaled it
    own_power: a long product of the user's says at what power the GPUs run

    >>> kind = kind_of()
    >>> bounds(kind, tables=False)[1] > bounds(kind)[1] > bounds(kind, own_power=True)[1]
    True
    """
    all_known = software()
    if own_run:
        return all_known.low_measured, all_known.high_measured
    power = (1.0 if tables else all_known.transferred) * (POWER if own_power else 1.0)
    return kind.low**power, kind.high**power
