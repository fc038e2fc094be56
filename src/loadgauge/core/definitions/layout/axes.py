"""The axes of a layout: what each splits, how it is named, and where it appears. Lists of axes are views of this table."""

import msgspec


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """One way to split a training run.

    name: the field of `Layout` and of `Job`, and the flag
    label: in words, as equations print it; symbol: in equations, as the papers write it
    rank: its place in the order in which Megatron-LM numbers ranks, the fastest first; None: its ranks are those of others
    multiplies: whether the number of GPUs is a product that it is a factor of
    degree: whether the job states it (data parallelism follows from the number of GPUs)
    model: whether it splits the model, or a sequence, over GPUs; stage: of these, whether within one pipeline stage
    experts: whether it divides routed experts, so that a model without them has none
    traced: whether the ranks of a tracer can be split by it
    lane: its place among the communication of a step, None: it has no lane of its own
    counted_with: the axis in whose lane its communication is counted
    """

    name: str
    label: str
    symbol: str = ""
    rank: int | None = None
    multiplies: bool = False
    degree: bool = True
    model: bool = False
    stage: bool = False
    experts: bool = False
    traced: bool = False
    lane: int | None = None
    counted_with: str = ""


AXES: dict[str, Axis] = {
    axis.name: axis
    for axis in (
        Axis(name="dp", label="data parallelism", symbol="d", rank=3, multiplies=True, degree=False, lane=5),
        Axis(
            name="tp", label="tensor parallelism", symbol="t", rank=0, multiplies=True, model=True, stage=True, traced=True,
            lane=0,
        ),
        Axis(name="pp", label="pipeline parallelism", symbol="p", rank=4, multiplies=True, model=True, traced=True, lane=3),
        Axis(name="vpp", label="chunks of a pipeline stage", symbol="v", traced=True),
        Axis(name="cp", label="context parallelism", symbol="c", rank=1, multiplies=True, model=True, stage=True, lane=1),
        Axis(name="ep", label="expert parallelism", symbol="e", rank=2, model=True, stage=True, experts=True, lane=2),
        Axis(
            name="etp", label="tensor parallelism of experts", symbol="t_e", model=True, stage=True, experts=True,
            counted_with="ep",
        ),
        Axis(name="zero", label="ZeRO stage", degree=False, lane=4),
        Axis(name="replicas", label="groups with the same ZeRO shards", degree=False),
    )
}  # fmt: skip
"""Every axis by name, in the order of the flags."""

RANK_ORDER = tuple(
    name for _, name in sorted((axis.rank, axis.name) for axis in AXES.values() if axis.rank is not None)
)
"""The order in which Megatron-LM numbers its ranks, the fastest axis first: tp, cp, ep, dp, pp."""
RANK_AXES = tuple(name for name in AXES if name in RANK_ORDER)
"""The same axes in the order of the table: dp, tp, pp, cp, ep."""
FACTORS = tuple(name for name in RANK_ORDER if AXES[name].multiplies)
"""The axes whose degrees multiply to the number of GPUs: tp, cp, dp, pp."""
REPLICA = tuple(name for name in FACTORS if name != "dp")
"""The axes whose degrees multiply to the GPUs of a replica: tp, cp, pp."""
DEGREES = tuple(name for name, axis in AXES.items() if axis.degree)
"""The parallel degrees that a job states: tp, pp, vpp, cp, ep, etp."""
MODEL_PARALLEL = tuple(name for name, axis in AXES.items() if axis.model)
"""The axes that split the model or a sequence over GPUs: tp, pp, cp, ep, etp."""
TRAINER_AXES = tuple(name for name in MODEL_PARALLEL if AXES[name].lane is not None and name != "cp")
"""The axes of a trainer beside a rollout that a plan tries: tp, pp, ep."""
STAGE_AXES = tuple(name for name, axis in AXES.items() if axis.stage)
"""The axes that split a layer: tp, cp, ep, etp."""
COMMUNICATION = tuple(
    name for _, name in sorted((axis.lane, axis.name) for axis in AXES.values() if axis.lane is not None)
)
"""The communication of a step by axis, as its time is divided: tp, cp, ep, pp, zero, dp."""
LANE_OF = {name: axis.counted_with or name for name, axis in AXES.items()}
"""The lane in which an axis' communication is counted: `ep` for `etp`, its own for all others."""
SIZES = (*(name for name in ("dp", *MODEL_PARALLEL)), "vpp")
"""The degrees of a layout as reports list them: dp, tp, pp, cp, ep, etp, vpp."""
TRACED = tuple(name for name in DEGREES if AXES[name].traced)
"""The degrees that `trace` can run: tp, pp, vpp."""
