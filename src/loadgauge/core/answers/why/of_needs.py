"""Why an axis needs the bandwidth that it needs: what it carries, what time it has for that, and what the link reaches."""

from collections.abc import Iterable, Iterator

from loadgauge.core.answers.why.reason import Line, Reason, line
from loadgauge.core.base import ConfigError, Size
from loadgauge.core.base.sources import cite
from loadgauge.core.definitions.layout.axes import COMMUNICATION
from loadgauge.core.definitions.layout.layout import Layout
from loadgauge.core.definitions.model.model import Attention, Moe
from loadgauge.core.estimate.time.bandwidth_needs import Network, NetworkCase
from loadgauge.core.estimate.time.collectives import Fabric, algorithm
from loadgauge.core.estimate.time.flops import step_flops
from loadgauge.core.estimate.time.traffic import Traffic, layout_groups

AXES = tuple(axis for axis in COMMUNICATION if axis != "zero")
"""What can be asked for; ZeRO's traffic is that of dp."""


def need_reason(
    case: NetworkCase, network: Network, axis: str, gpus_per_node: int, closed: tuple[Line, ...] = ()
) -> Reason:
    """Explain the needs of an axis. closed: closed forms with this run's numbers, shown below

    Raises `ConfigError` for an axis without traffic.
    """
    needs = [need for need in network.needs if need.axis == axis]
    if not needs:
        there = ", ".join(dict.fromkeys(need.axis for need in network.needs)) or "no axis"
        raise ConfigError(f"{axis} sends nothing in this layout ({there} does)", key="explain")
    lines: list[Line] = []
    for need in needs:
        outer = need.link == "outer"
        name = f"{need.what.value}, {'between' if outer else 'inside'} nodes"
        carrier = "an adapter" if outer else "a GPU"
        for row in network.traffic:
            if (row.axis, row.link) != (axis, need.link) or case.purpose(row, network) != need.what:
                continue
            each = row.adapter if outer else row.wire
            legend: dict[str, tuple[str, Size]] = {
                "c": ("calls of a step", row.calls_per_step),
                "w": (f"bytes that {carrier} carries in a call", each),
            }
            calls = f"{row.collective.replace('_', '-')} of {row.payload:,.0f} bytes over {row.ranks} ranks"
            lines.append(
                line(f"bytes of a step: {row.what}, {calls}", "c*w", row.calls_per_step * each, "byte", legend)
            )
        letters_of: dict[str, tuple[str, Size]] = {
            "V": ("bytes that the link carries in a step", need.carried),
            "r": ("share of compute that may be exposed", case.share),
            "T": ("seconds of compute of a step", network.compute.total),
            "o": ("seconds of compute it overlaps with", need.beside),
            "s": ("seconds of all its calls", need.seconds),
            "g": ("GPUs of a node", gpus_per_node),
            "b": ("bandwidth that one GPU needs", need.needed),
        }
        formula = "V/(o + r*T)" if need.overlapped else "V/(r*T)"
        lines += [
            line(f"bandwidth needed, per GPU ({name})", formula, need.needed, "byte/s", letters_of),
            line(f"per node ({name})", "b*g", need.needed * gpus_per_node, "byte/s", letters_of),
            line(f"bandwidth reached, latency included ({name})", "V/s", need.reached, "byte/s", letters_of),
        ]
    worst = max(needs, key=lambda need: need.needed / (need.reached or 1))
    return Reason(
        topic=axis,
        what=f"bandwidth that {axis} needs, per GPU and direction",
        value=worst.needed,
        unit="byte/s",
        basis="bytes: derived; compute: " + ("given" if case.achieved is not None else case.machine.efficiencies.basis),
        rule="traffic may take the compute that it overlaps with, and a share of all compute beside that (--share)",
        lines=(*lines, *closed),
        sources=(str(cite("narayanan2021")), str(cite("nccl-tests"))),
        notes=(
            f"the slowest of these links: {worst.bandwidth / 1e9:,.4g} GB/s by its datasheet; "
            + ("enough" if all(need.enough for need in needs) else "NOT enough"),
            *algorithms((row for row in network.traffic if row.axis == axis), case.layout, case.fabric),
        ),
    )


def algorithms(rows: Iterable[Traffic], layout: Layout, fabric: Fabric) -> Iterator[str]:
    """Yield which algorithm each collective takes, and the sizes of the tensor between which it does."""
    groups = layout_groups(layout)
    for row in rows:
        taken = algorithm(row.collective, float(row.payload), groups[row.group], fabric)
        yield f"algorithm of {row.axis} {row.what}, {str(row.collective).replace('_', '-')}: {taken}"


def closed_numbers(case: NetworkCase, network: Network) -> dict[str, float]:
    """Return numbers for the letters of the closed forms of bandwidth. X is what each GPU achieves while it computes."""
    layout, model = case.layout, case.model
    work = step_flops(model, layout, case.training.kernels, case.memory.view).hardware
    numbers: dict[str, Size] = {
        "X": work / (layout.gpus * network.compute.total),
        "r": case.share,
        "t": layout.tp,
        "p": layout.pp,
        "d": layout.dp,
        "c": layout.cp,
        "e": layout.ep,
        "B": layout.global_batch,
        "b": layout.micro_batch,
        "s": layout.seq_len,
        "h": model.hidden_size,
        "l": model.num_hidden_layers,
    }
    block = model.blocks[-1]
    if isinstance(block.attention, Attention):
        mixer = block.attention
        numbers |= {"a": mixer.num_attention_heads, "k": mixer.num_key_value_heads, "w": mixer.head_dim}
    if isinstance(block.mlp, Moe):
        numbers |= {
            "E": block.mlp.num_experts,
            "K": block.mlp.num_experts_per_tok,
            "F_e": block.mlp.moe_intermediate_size,
        }
    return {name: float(value) for name, value in numbers.items()}
