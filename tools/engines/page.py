"""`docs/decode.md`: how far off the times of tokens are, by GPU, engine and model, each model left out in turn (`make serving`)."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loadgauge.core.base.sources import cite

if TYPE_CHECKING:
    from engines.fit import Table

PAGE = Path(__file__).parents[2] / "docs" / "decode.md"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown; the first column is left, the others are right."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def errors(predicted: Any, measured: Any) -> list[str]:
    """Median, p90 and bias of an error."""
    off = predicted / measured - 1
    return [f"{np.median(abs(off)):.1%}", f"{np.quantile(abs(off), 0.9):.1%}", f"{np.median(off):+.1%}"]


def repeated(data: Table, name: str, alike: Sequence[str] = ()) -> tuple[int, float, float]:
    """Pairs of points that differ in nothing that is stated: how many, and how far apart half and nine tenths of them are.

    alike: GPUs that count as one
    """
    same: dict[tuple[object, ...], list[float]] = defaultdict(list)
    for point, value in zip(data.found, getattr(data, name), strict=True):
        stated = [getattr(point, field) for field in point.__struct_fields__ if field not in ("first", "token")]
        key = tuple("" if each in alike else each for each in stated)
        same[key].append(value)
    apart = [max(a, b) / min(a, b) - 1 for ones in same.values() for a, b in itertools.combinations(ones, 2) if a != b]
    return len(apart), float(np.median(apart)), float(np.quantile(apart, 0.9))


def by(data: Table, key: str, token: Any, first: Any) -> list[list[str]]:
    """Rows of errors of a field's values."""
    of = np.array([getattr(point, key) for point in data.found])
    return [
        [ENGINES.get(value, value), f"{np.sum(of == value):,}", *errors(token[of == value], data.token[of == value]),
         *errors(first[of == value], data.first[of == value])]
        for value in sorted(set(of))
    ]  # fmt: skip


def held(data: Table, left: tuple[Any, Any]) -> list[float]:
    """Shares of tokens and of first tokens inside a range of 80 % that is read from the errors of the other models."""
    models = np.array([point.model for point in data.found])
    inside = []
    for predicted, measured in zip(left, (data.token, data.first), strict=True):
        over, within = measured / predicted, np.zeros(len(models), bool)
        for name in set(models):
            low, high = np.quantile(over[models != name], (0.1, 0.9))
            within |= (models == name) & (low <= over) & (over <= high)
        inside.append(float(np.mean(within)))
    return inside


def write(data: Table, whole: tuple[Any, Any], left: tuple[Any, Any], others: dict[str, tuple[Any, Any]]) -> None:
    """Write the page. whole: predictions by figures of all points; left: of each point, by figures fitted without its model;
    others: without what a word says"""
    head = ("", "points", "token: median", "p90", "bias", "first: median", "p90", "bias")
    kinds = "\n\n".join(
        f"**{title}**\n\n{table(head, by(data, key, *left))}"
        for title, key in (("Models", "model"), ("Engines", "engine"), ("GPUs", "gpu"), ("Weights", "weights"))
    )
    pairs, half, most = repeated(data, "token")
    _, first_half, first_most = repeated(data, "first")
    twins, _, twin_most = repeated(data, "first", ("b200-sxm-180gb", "b300-sxm-288gb"))
    fitted = abs(whole[1] / data.first - 1)
    inside = held(data, left)
    engines = np.array([point.engine for point in data.found])
    vllm = float(np.median(abs(whole[1] / data.first - 1)[engines == "vllm"]))
    total = [
        ["each model left out", f"{len(data.found):,}", *errors(left[0], data.token), *errors(left[1], data.first)],
        *(
            [f"each {word} left out", f"{len(data.found):,}", *errors(token, data.token), *errors(first, data.first)]
            for word, (token, first) in others.items()
        ),
        ["all points fitted", f"{len(data.found):,}", *errors(whole[0], data.token), *errors(whole[1], data.first)],
    ]
    PAGE.write_text(
        f"""# Time of generation, measured

Times of a token and to the first one, of {len(data.found):,} measured servers under a fixed number of requests
({cite("aiconfigurator")}, `silicon_sample.csv`, Apache-2.0),
beside what `loadgauge` predicts. `make serving` writes this page and `data/serving.toml`.

{table(head, total)}

A step is read off the list of operations: bytes of matrices, of the experts that are reached and of caches over the
bandwidth, FLOPs over the peak, kernels, all-reduces, the host. A prompt is the forward pass of the same list at the rates of
training, but for experts: their matrices are read whatever the prompt's length, and their FLOPs are far from the peak. Prompts
that are read in one step read the experts once; ranks with batches of their own read each its prompts and share the experts.

The server's queue is then followed request by request (`core/serving/loop.py`): all requests come at once, each answer makes room
for the next, ten requests are answered for each one that is there at a time, an engine reads at most so many tokens of prompts a
step and mixes them with tokens or not. Both times are means over those requests. **An engine's options make prompts wait**: SGLang
looks for requests every `scheduler_recv_interval` steps, TensorRT-LLM lets prompts wait `batch_wait_timeout_iters` steps for
others, and of ranks with batches of their own `timeout_iters` until each has one. The launch scripts of the measured servers name
them (`tools/engines/launches.toml`), so that the figures here are those of engines without them; `--server
sglang:scheduler_recv_interval=30` counts them. Of a server that is not told any, no prompt is taken to wait so, as in the rows
without such options, and the printed upper end of a first token holds nine tenths of the rows with them (`unsaid` in
`data/serving.toml`). Beside its queue a first token waits for steps (until it is seen, until its token is
sent), for its prompt on the host, and for the host.

Fitted are: a share of the peak for matrices, experts, caches, arithmetic and links; three factors of prompts' kernels
over training's; experts' FLOPs over the peak's; and, for each engine, its kernels, host, all-reduce, prompts and wait
for a first token. Each figure is held near a round start, as strongly as models that are left out want it. None belongs to
a model or to a source.

**The range** of 80 % that an estimate prints is what the errors of points whose model was left out span. Read from the other
models' errors alone it holds {inside[0]:.0%} of the tokens and {inside[1]:.0%} of the first tokens.

**What the table cannot tell.** {pairs:,} pairs of points agree in all that is stated (engine, model, GPU, formats, ranks,
lengths, requests): half of the pairs are {half:.0%} or more apart in the time of a token and {first_half:.0%} in that of the
first one, a tenth {most:.0%} and {first_most:.0%}. Of those pairs and of 47 rows of TensorRT-LLM's release 1.2.0rc6.post3 it is
known from the launch scripts that one side drafts tokens (MTP), whose acceptance nobody states; the table does not say which.
SGLang's DeepSeek-R1 in NVFP4 without a release is of 2025, when the benchmark did not warm servers up: a first token of it
takes 7 to 9 s, of the same server in release 0.5.9 0.5 s. TensorRT-LLM's servers of Llama 3.1 8B on an H100 (177 rows, of
another benchmark) behave as if one of the n requests always waited: a first token takes longer by the time of a whole answer
over n, which no other series shows; with one place less than requests the model is within 22 % of half of them. vLLM's
MiniMax-M2.5 of release 0.19.0 reads `2 x prompt` tokens a step; told so, first tokens of 1,024 are predicted a fifth too long,
and the row is not told. Prompts and answers of most rows are drawn from 0.8 to 1 of the length that is stated; figures are
those of stated lengths. Half of vLLM's first tokens, of which the table has more and of nearer releases, are within {vllm:.0%}
where the models are fitted.

**How near a first token can come.** Asked were 15 % in the middle and 45 % for a tenth. With every point fitted they
are {np.median(fitted):.0%} and {np.quantile(fitted, 0.9):.0%} off; with three figures of its own for every series of
rows 11 and 60 %; and with the time that a prompt's host takes fitted for every engine 18 and 58 %. The same server on
a B200 and on a B300, which read a prompt equally fast, counts as one question more: of {twins:,} pairs that are alike
but for that, a tenth is {twin_most:.0%} apart (Qwen3.5 in SGLang 0.34 and 0.20 s for one prompt of 1,024 tokens, of
which the GPU takes 0.04). So what is missing is in the servers' hosts and in the warmth of a benchmark, which no
column has.

**What is left out.** Rows of a GB200's rack whose ranks are the GPUs of servers that read prompts and of others that generate,
counted together (55 of 2,263; `engines/convert.py`). Of rows that are equal but for their names one is kept.

Each model left out in turn:

{kinds}
""",
        encoding="utf-8",
    )
