"""Writes the generated pages of this folder: `make docs`. Each page is one function that returns its text."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, get_args

from loadgauge.core.answers.equations.equation import Equation, equations
from loadgauge.core.base.sources import cite
from loadgauge.core.command_line.equation import arguments as command_arguments, command
from loadgauge.core.command_line.estimate import command as estimate
from loadgauge.core.command_line.options.grouped import groups
from loadgauge.core.definitions.job import spoken
from loadgauge.core.definitions.job.flag_types import CaptureFlags, Flags, TaskFlags, TraceFlags, kinds_of_flags
from loadgauge.core.definitions.model.model import (
    Attention,
    Block,
    CompressedAttention,
    LatentAttention,
    ModelSpec,
    Moe,
)
from loadgauge.core.estimate.states.parameters import parameters
from loadgauge.core.families import model, model_sources, model_types, models
from loadgauge.core.text.show import How
from loadgauge.pytorch.capture.requests.world import tried

HERE = Path(__file__).parent
MIXERS = {
    "KimiDelta": "Kimi delta attention",
    "Mamba1": "Mamba",
    "Mamba2": "Mamba-2",
    "GatedDeltaNet": "gated delta net",
    "ShortConvolution": "short convolution",
    "LightningAttention": "lightning attention",
}


def heads(attention: Attention) -> str:
    """How many heads, and what is unusual about them.

    >>> heads(Attention(num_attention_heads=32, num_key_value_heads=8, head_dim=128, sinks=True))
    '32 heads, 8 key-value heads, sinks'
    """
    words = [f"{attention.num_attention_heads} heads"]
    if attention.num_key_value_heads != attention.num_attention_heads:
        each = "heads" if attention.num_key_value_heads != 1 else "head"
        words.append(f"{attention.num_key_value_heads} key-value {each}")
    unusual = {
        "both directions": not attention.causal,
        "ALiBi": attention.alibi,
        "q/k norm": attention.qk_norm is not None,
        "part of each head rotated": attention.rotary and attention.rotary_dim is not None,
        "sinks": attention.sinks,
        "output gate": attention.output_gate,
        "values made as keys": attention.keys_are_values,
        "keys and values of an earlier layer": attention.borrowed,
        "softcap": attention.softcap,
        "clamped": attention.clip,
    }
    return ", ".join([*words, *(word for word, holds in unusual.items() if holds)])


def mixer(block: Block) -> str:
    """What mixes the tokens of a block.

    >>> mixer(model("deepseek-v2-lite").blocks[0])
    '16 heads, latent 512'
    """
    kind = block.attention
    if kind is None:
        return "no mixer"
    if isinstance(kind, LatentAttention):
        queries = "" if kind.q_lora_rank is None else f", queries {kind.q_lora_rank}"
        chosen = "" if kind.index_topk is None else f", {kind.index_topk} tokens chosen"
        return f"{kind.num_attention_heads} heads, latent {kind.kv_lora_rank}{queries}{chosen}"
    if isinstance(kind, CompressedAttention):
        entries = "" if kind.compress_rate is None else f", entries of {kind.compress_rate} tokens"
        return f"{kind.num_attention_heads} heads, window {kind.sliding_window}{entries}"
    text = heads(kind) if isinstance(kind, Attention) else MIXERS[type(kind).__name__]
    return f"{text} beside {MIXERS[type(block.beside).__name__]}" if block.beside is not None else text


def attention(spec: ModelSpec) -> str:
    """How a model attends, and in how many of its layers where they differ.

    >>> attention(model("gemma-2-2b"))
    '8 heads, 4 key-value heads, softcap; window 4096 in 13'
    """
    counts: Counter[str] = Counter()
    windows: Counter[str] = Counter()
    rotated = rotating = 0
    for block, count in zip(spec.blocks, spec.layer_counts(), strict=True):
        counts[mixer(block)] += count
        kind = block.attention
        if isinstance(kind, Attention):
            rotated += count * kind.rotary
            rotating += count
            if kind.sliding_window is not None:
                windows[f"window {kind.sliding_window}"] += count
    parts = list(counts) if len(counts) == 1 else [f"{text} in {count}" for text, count in counts.items()]
    parts += [f"{text} in {count}" for text, count in windows.items()]
    if 0 < rotated < rotating:
        parts.append(f"rotation in {rotated}")
    return "; ".join(parts)


def experts(spec: ModelSpec) -> str:
    """The experts of a model, and in how many of its layers.

    >>> experts(model("deepseek-v3"))
    '8 of 256, shared 2048 wide, in 58'
    """
    counts: Counter[str] = Counter()
    for block, count in zip(spec.blocks, spec.layer_counts(), strict=True):
        moe = block.mlp
        if isinstance(moe, Moe):
            shared = "" if moe.shared is None else f", shared {moe.shared.intermediate_size} wide"
            counts[f"{moe.num_experts_per_tok} of {moe.num_experts}{shared}, in "] += count
    return "; ".join(f"{text}{count}" for text, count in counts.items())


def models_page() -> str:
    """Every family that can be read, and every model that comes with loadgauge."""
    sources = model_sources()
    by_type: dict[str, list[str]] = {kind: [] for kind in model_types()}
    for name in models():
        by_type[model(name).model_type].append(name)
    lines = [
        "# Models",
        "",
        f"Made by `make docs`. loadgauge reads configs of {len(by_type)} values of `model_type` and comes with",
        f"{len(models())} models. `tests/core/families/` compares the parameters of all of them with transformers' own",
        "classes, without what turns images into features. Active parameters are those a token passes through: the",
        "experts it is sent to, and both tables.",
        "",
        "| model_type | model | parameters | active | layers | attention | experts |",
        "|---|---|--:|--:|--:|---|---|",
    ]
    for kind, names in by_type.items():
        lines += [_row(kind, name, str(sources[name])) for name in names] or [f"| {kind} | | | | | | |"]
    return "\n".join([*lines, "", *_roads()]) + "\n"


def _roads() -> list[str]:
    """What takes the types of transformers that have no family, by the shipped results."""
    known, families = tried(), set(model_types())
    by_road = {
        road: [kind for kind, (found, _) in known.types.items() if found == road and kind not in families]
        for road in ("formulas", "numbers", "not captured")
    }
    words = {
        "formulas": "captured, with formulas of batch and length",
        "numbers": "captured at the sizes asked for",
        "not captured": "not captured ([what stops each](models-captured.md))",
    }
    return [
        "## Every other type",
        "",
        f"`loadgauge models --check` says this of the transformers that is installed; here {known.transformers}. Types with a",
        "head for causal, sequence-to-sequence or masked language modelling, or for pictures and text, beside those above:",
        "",
        *(
            f"- {words[road]}: {len(kinds)}. {', '.join(f'`{kind}`' for kind in kinds)}"
            for road, kinds in by_road.items()
            if kinds
        ),
    ]


def _row(kind: str, name: str, source: str) -> str:
    spec = model(name)
    found = parameters(spec)
    link = source.partition(" ")[0]
    named = f"[{name}](https://{link})" if link.startswith("huggingface.co/") else f"{name} ({link})"
    active = f"{found.active:,}" if found.idle else ""
    cells = (kind, named, f"{found.total:,}", active, str(spec.num_hidden_layers), attention(spec), experts(spec))
    return f"| {' | '.join(cells)} |"


# -- equations ---------------------------------------------------------------------------------------------------------

EQUATIONS = {
    "GPT: `--layer gpt`": (
        "The layer that Narayanan et al. and Korthikanti et al. analyse: LayerNorm, biases, dropout, as many key-value"
        " heads as heads, an MLP of width 4h.",
        "--layer gpt",
        (
            "params", "params --tp", "forward-flops", "backward-flops", "training-flops",
            "training-flops --recompute full", "recompute-flops --recompute selective",
            "activations", "activations --tp", "activations --tp --sequence-parallel",
            "activations --tp --sequence-parallel --recompute selective", "activations --tp --recompute selective",
            "activations --recompute full", "activations --precision fp32", "activations --attention flash",
            "activations --attention flash --padding-free", "wire --tp", "wire --tp --sequence-parallel",
            "wire --tp --recompute full", "model-params", "model-flops", "model-flops --recompute full",
        ),
    ),
    "Llama: `--layer llama`": (
        "RMSNorm, a gated MLP, rotary positions, grouped-query attention, no biases, no dropout.",
        "--layer llama",
        (
            "params", "params --tp", "forward-flops", "backward-flops", "training-flops",
            "training-flops --recompute full", "activations", "activations --tp --sequence-parallel",
            "activations --tp --sequence-parallel --recompute selective", "activations --attention flash",
            "activations --attention flash --tp --sequence-parallel --cp", "wire --tp", "wire --tp --sequence-parallel",
            "wire --cp --attention flash", "model-params", "model-flops",
        ),
    ),
    "Experts: `--layer mixtral`, or `moe`": (
        "Mixtral: the attention and norms of a Llama, and routed experts in place of its MLP.",
        "--layer moe",
        (
            "params", "params --tp --ep --etp", "active-params", "forward-flops", "backward-flops", "training-flops",
            "forward-flops --tp --sequence-parallel --ep --etp", "activations", "activations --attention flash",
            "activations --attention flash --experts fused",
            "activations --attention flash --tp --sequence-parallel --ep",
            "activations --attention flash --experts fused --tp --sequence-parallel --ep --etp",
            "wire --ep", "wire --tp --sequence-parallel --ep --etp", "model-params", "model-active-params",
            "model-flops",
        ),
    ),
    "Latent attention: `--layer deepseek`, or `mla`": (
        "DeepSeek-V3: multi-head latent attention, routed experts and a shared one; in the model's first layers an MLP"
        " stands in place of the experts.",
        "--layer mla",
        (
            "params", "params --tp --ep --etp", "active-params", "forward-flops", "backward-flops", "training-flops",
            "forward-flops --tp --sequence-parallel --ep --etp", "activations", "activations --attention flash",
            "activations --attention flash --experts fused",
            "activations --attention flash --tp --sequence-parallel --ep",
            "activations --attention flash --experts fused --tp --sequence-parallel --ep --etp",
            "wire --ep", "wire --tp --sequence-parallel --ep --etp", "model-params", "model-active-params",
            "model-flops",
        ),
    ),
    "Model states": (
        "Weights, gradients and optimizer states on one of d data-parallel ranks, whatever the layers are.",
        "",
        ("states", "states --precision bf16-mixed-18", "states --precision fp32"),
    ),
}  # fmt: skip
"""A section: what it is about, what is said on each of its command lines, and the command lines."""


def equations_page() -> str:
    """The closed forms of each open layer, as `loadgauge equation` prints them."""
    lines = [
        "# Equations",
        "",
        "Made by `make docs`: each is what the command above it prints, read off the same list of operations that gives",
        "the numbers of `loadgauge estimate`. `tests/core/answers/equations/test_equation.py`, `test_equation_experts.py` and",
        "`tests/core/paper/` compare them with the papers' and with derivations by hand. `loadgauge equation` takes any model",
        "of [the catalogue](models.md) as `--layer` too, a number in place of each letter of ranks (`--tp 8`), and",
        "prints LaTeX (`--latex`) and JSON (`--json`).",
        "",
        "A tensor that two operations keep is kept once, and belongs to the first of them.",
        "",
    ]
    cited: dict[str, None] = {}
    for title, (introduction, always, commands) in EQUATIONS.items():
        lines += [f"## {title}", "", introduction, ""]
        for words in commands:
            lines += _asked([*words.split(), *always.split()], words, cited)
    lines += ["## Sources", ""]
    lines += [f"- `{key}`: {cite(key)}" for key in cited]
    return "\n".join(lines) + "\n"


def _asked(arguments: list[str], heading: str, cited: dict[str, None]) -> list[str]:
    """One command line and what it prints. The works named are added to those cited."""
    found = equations_of(arguments)
    first = found[0]
    cited.update(dict.fromkeys(first.keys))
    source = first.source
    for key in first.keys:
        source = source.replace(str(cite(key)), f"`{key}`")
    # The equations that everybody knows by their number are found by it.
    number = source.rpartition(", ")[2] if len(first.keys) == 1 else ""
    number = f" ({cite(first.keys[0]).authors}, {number})" if number.startswith("equation") else ""
    lines = [f"### {heading}{number}", "", "```", f"loadgauge equation {' '.join(arguments)}", "```", ""]
    if len(found) > 1:
        what = first.what.rpartition(",")[0]
        lines += [f"{_sentence(what)} [{first.unit}]:", "", "| ZeRO stage | | |", "|--:|---|---|"]
        lines += [f"| {one.what.rpartition(' ')[2]} | ${one.latex}$ | `{one.text}` |" for one in found]
        lines += ["", "where d: data-parallel ranks.", ""]
    else:
        lines += [f"{_sentence(first.what)} [{first.unit}]:", "", "$$", first.latex, "$$", "", "```"]
        lines += [*_text(first), "```", ""]
        lines += [f"where {'; '.join(f'{name}: {meaning}' for name, meaning in first.legend.items())}.", ""]
    if first.validity:
        lines += [f"Holds for: {'; '.join(first.validity)}.", ""]
    return [*lines, f"Source: {source}.", ""]


def _sentence(words: str) -> str:
    return words[0].upper() + words[1:]


def _text(found: Equation) -> list[str]:
    """The closed form as Python, and part by part.

    >>> _text(equations_of(["activations"])[0])[:2]
    ['34*b*h*s + 5*a*b*s**2', '= b*h*s*(34 + 5*a*s/h)']
    """
    whole = [] if found.is_long else [found.text, *([f"= {found.factored}"] if found.factored else [])]
    return [*whole, *(["", *found.lines] if len(found.parts) > 1 and whole else found.lines if not whole else [])]


def equations_of(arguments: list[str]) -> tuple[Equation, ...]:
    """What `loadgauge equation` finds for the words after it.

    >>> equations_of(["params", "--layer", "gpt"])[0].text
    '12*h**2 + 13*h'
    """
    typed = command.make_context("equation", list(arguments)).params
    given = {name: value for name, value in typed.items() if name not in How._fields}
    quantity = given.pop("quantity")
    return equations(quantity, **command_arguments(quantity, given))


def flags_page() -> str:
    """The flags of `estimate` under the headings of its help, and the words of other tools that are taken for them."""
    lines = [
        "# Flags",
        "",
        "Made by `make docs`. `loadgauge estimate --help` shows the first ten, `--help-all` these; `plan`, `fleet`, `network`,",
        "`check`, `convert` and `why` have most of them too.",
        "",
    ]
    for title, options in groups(estimate).items():
        lines += [f"## {title}", "", "| flag | |", "|---|---|"]
        for option in options:
            names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
            lines.append(f"| {names} | {(option.help or '').replace('|', chr(92) + '|')} |")
        lines.append("")
    lines += [
        "## What people type",
        "",
        "Flags and values of other tools are taken where one of these says the same, and the answer says so in a line on standard",
        "error. Where none does, the error names the flag that is meant.",
        "",
        "| typed | taken as |",
        "|---|---|",
    ]
    lines += [f"| `--{name}` | `{flag}` |" for name, flag in spoken.RENAMED.items()]
    lines += [
        f"| `--{name}` | {f'`{words[0]}`' if words[0] else 'nothing: it is so anyway'} |"
        for name, words in spoken.SWITCHES.items()
    ]
    for name, values in spoken.VALUES.items():
        flag = f"--{name.replace('_', '-')}"
        lines += [f"| `{flag} {typed}` | `{flag} {taken}` |" for typed, taken in values.items()]
    lines += [f"| `--{name}` | nothing: it changes neither memory nor time |" for name in spoken.HARMLESS]
    worded = {(flag, word): words for flag, each in spoken.WORDED.items() for word, words in each.items()}
    lines += [f"| `--{flag} {word}` | `{words or 'nothing'}` |" for (flag, word), words in worded.items()]
    lines += [f"| `--{flag} N` | `{words} N` |" for flag, words in spoken.NUMBERED.items()]
    lines += [f"| `--{name}` | not taken: {text} |" for name, text in spoken.ASKED.items()]
    lines += [
        "",
        "`--gpu 8xh100` and `4090x2` are a card and `--gpus`, `--gpu 24GB` is `--memory 24GB`, `--price $2` is `--price 2`, and",
        "`--seq-len 8k` is 8,192 tokens.",
    ]
    return "\n".join(lines) + "\n"


def flag_types() -> str:
    """Return the text of `flag_types.pyi`, which type checkers read in place of the module."""
    kinds = kinds_of_flags()

    def lines(names: list[str]) -> list[str]:
        words = {name: ", ".join(f'"{word}"' for word in get_args(kinds[name])) for name in names}
        flat = {name: f"Literal[{words[name]}]" if words[name] else kinds[name].__name__ for name in names}
        # As the formatter has them: on a line, on one of their own, or one a line.
        apart = {
            name: f"{text}\n" if len(text) < 112 else ",\n        ".join([*text.split(", "), ""]).rstrip(" ")
            for name, text in words.items()
        }
        return [
            f"    {name}: {kind}" if len(kind) < 110 else f"    {name}: Literal[\n        {apart[name]}    ]"
            for name, kind in flat.items()
        ]

    def classes(name: str, kind: Any, base: Any = TypedDict) -> list[str]:
        own = [field for field in kind.__annotations__ if field not in getattr(base, "__annotations__", ())]
        return [f"class {name}({base.__name__}, total=False):", *lines(own), ""]

    return "\n".join(
        [
            '"""The fields of `Job` as keywords with types: written by docs/generate.py."""',
            "",
            "from typing import Any, Literal, TypedDict",
            "",
            "STEP: tuple[str, ...]",
            "SPLIT: tuple[str, ...]",
            "",
            *classes("Flags", Flags),
            *classes("TaskFlags", TaskFlags, Flags),
            *classes("CaptureFlags", CaptureFlags),
            *classes("TraceFlags", TraceFlags, CaptureFlags),
            "def kinds_of_flags() -> dict[str, Any]: ...",
            "",
        ]
    )


def beside(name: str) -> Any:
    """Return a module of this folder, by its file's name."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES: dict[str, Callable[[], str]] = {
    "models.md": models_page,
    "equations.md": equations_page,
    "flags.md": flags_page,
    "learn.md": lambda: str(beside("learn").page("en")),
    "zh/learn.md": lambda: str(beside("learn").page("zh")),
    "loadgauge.1": lambda: str(beside("man").page()),
    "../src/loadgauge/core/definitions/job/flag_types.pyi": flag_types,
}
"""Each generated page, and what makes it."""


def main() -> None:
    """Writes all of them."""
    for name, page in PAGES.items():
        (HERE / name).write_text(page(), encoding="utf-8")
        print(f"docs/{name}")


if __name__ == "__main__":
    main()
