"""The plain text of an estimate of inference."""

from loadgauge.core.answers.answer import Answer
from loadgauge.core.base.units import count, flops, gib, in_gib, seconds
from loadgauge.core.definitions.serving.releases import measured_since
from loadgauge.core.definitions.serving.rollout import ENGINES
from loadgauge.core.definitions.serving.serving import serving
from loadgauge.core.serving.decode import Steady
from loadgauge.core.serving.passes import AXES_OF
from loadgauge.core.serving.result import Answer as Inferred, known_range
from loadgauge.core.serving.time import Pass
from loadgauge.core.text.estimate.brief import short
from loadgauge.core.text.estimate.setup import print_assumed
from loadgauge.core.text.table import Column, Paper, draw, first_line, points, section
from loadgauge.core.text.verdict import WORDS, host_verdict, host_words, left_out_words, verdict_words


def write(served: Answer, target: Paper, *, brief: bool = False) -> None:
    """Write memory, the largest batch, the work and time of the prompts and of a token, traffic and what is not counted; brief:
    the verdict, what is run, the parts of the memory, the largest batch and the times"""
    answer: Inferred = served.shown
    asked, memory = answer.asked, answer.memory
    head = [*left_out_words(answer.model, 2), _run(answer)]
    tried = served.alternatives() if memory.verdict in ("tight", "does not fit") else ()
    steps = [f"Try {flags}: {tried_words(other)}" for flags, other in tried]
    host = host_verdict(answer.on_host, answer.host_memory)
    if brief:
        beside = () if answer.served is None else (*_release(answer), *_waits(answer))
        lines = (*_largest(answer), *_beside(answer), *_headline(answer), *steps[:1])
        length = f"{asked.batch:,} x {asked.context:,} tokens"
        if asked.task == "generate":
            length += f", {asked.answer:,} generated"
        run = f"{answer.model.name}, {asked.task}, {answer.gpus:,} x {'GPU' if answer.gpu is None else answer.gpu.id}, {length}"
        short(memory, memory.parts, [*head[:-1], run], lines, target, beside, host)
        return
    outside = f"with what lies outside PyTorch, on the fullest rank (stage {memory.stage} of {asked.pp})"
    first_line(target, f"{verdict_words(memory)} {outside}{host}", *WORDS[memory.verdict])
    measured = (*_release(answer), *_waits(answer)) if answer.served is not None else ()
    points(target, [*head, *_largest(answer), *_beside(answer), *_headline(answer), *measured, *steps], "")
    rows = [
        [name, in_gib(value), note]
        for name, value, note in (
            ("weights", memory.weights, WHOLE.get(asked.task, f"in {asked.weight_format}")),
            ("cache", memory.cache, _cache_note(answer) if memory.cache else ""),
            (
                "activations",
                memory.activations,
                SOLVED.get(asked.task) or f"most alive at once in a layer, {asked.at_once:,} tokens of prompts",
            ),
            ("logits", memory.logits, "of the last tokens" if asked.task == "generate" else "of every token"),
            *((name, value, BESIDE[name]) for name, value in memory.beside.items()),
            ("outside", memory.outside, "CUDA context and communicators, assumed"),
        )
        if value
    ]
    rows.append(["together", in_gib(memory.total), ""])
    draw(
        target,
        [Column("memory"), Column("GiB", "right"), Column("", wrap=True)],
        rows,
        "Where it goes",
        [len(rows) - 1],
    )
    if answer.served is not None:
        _working(target, answer, answer.served)
    _work(target, answer)
    _traffic(target, answer)
    unread = {"keys that are not read": ", ".join(item["key"] for item in served.unread)} if served.unread else {}
    print_assumed(target, {**served.assumed, **unread})
    planner = "" if answer.asked.task == "quantise" else ": this is no planner of serving"
    section(target, f"Not counted{planner}", answer.not_counted)
    if answer.first is not None:
        points(target, [f"Range of times: {_source(answer)}."])


WHOLE = {"quantise": "of the largest block, in 16 bits"}
SOLVED = {"quantise": "the forward of a sequence, or solving a matrix in float32"}
BESIDE = {
    "draft": "the draft model: weights and cache",
    "calibration": "inputs and outputs of a block, of all calibration sequences",
    "statistics": "GPTQ: Hessians of the matrices with the same input; AWQ: inputs of all products",
    "tower": "what sees pictures or hears sounds, in 16 bits",
    "graphs": "CUDA graphs of every size of batch that the engine captures, assumed",
}
"""Notes on parts of the memory that few runs have."""


def _beside(answer: Inferred) -> list[str]:
    """Return lines on a draft, on quantising, and on experts in host memory."""
    lines, draft, memory, asked = [], answer.draft, answer.memory, answer.asked
    if draft is not None:
        lines.append(
            f"Speculating: {draft.tokens} token{'s' if draft.tokens > 1 else ''} a step proposed by {draft.name}, each accepted at"
            f" {draft.acceptance:.0%}: a step makes {draft.expected:.2f} in the mean, and the time of a token is its share."
        )
    if asked.task == "quantise":
        lines.append(
            f"Quantised layer by layer: one block is on the card, and the model in 16 bits, {gib(memory.host)}, in host memory."
        )
    elif memory.host:
        lines.append(
            f"Host memory: {gib(memory.host)} of experts per rank, {host_words(answer.on_host, answer.host_memory)}; read at"
            f" {asked.experts_from / 1e9:.3g} GB/s a rank."
        )
    return lines


def tried_words(tried: Inferred) -> str:
    """Return what a change comes to."""
    return f"{gib(tried.memory.total, 1)}, {WORDS[tried.memory.verdict][0]}"


def _run(answer: Inferred) -> str:
    """Return what is run, and on what."""
    asked = answer.asked
    work = f"{asked.batch:,} sequence{'s' if asked.batch > 1 else ''} of {asked.context:,} tokens"
    if asked.task == "generate":
        work += f", of which {asked.answer:,} {'are' if asked.answer > 1 else 'is'} generated"
    degrees = ", ".join(f"{name} {getattr(asked, name)}" for name in AXES_OF if getattr(asked, name) > 1)
    card = "GPU" if answer.gpu is None else answer.gpu.name
    return (
        f"{answer.model.name}, {count(answer.params)} parameters, {asked.task}: {work}"
        f" on {answer.gpus:,} x {card}{': ' + degrees if degrees else ''}."
    )


def _source(answer: Inferred) -> str:
    if answer.served is not None:
        dataset = serving()
        return f"80 % of {dataset.points:,} measured points of servers ({dataset.source}), each model left out in turn"
    return (
        known_range().source if answer.asked.task == "generate" else "that of training steps, whose kernels these are"
    )


def _working(target: Paper, answer: Inferred, steady: Steady) -> None:
    """Prints what a first token and a token of a server wait for."""
    assert answer.engine is not None
    asked, engine = answer.asked, serving().engines[answer.engine.kind]
    read = "with it" if engine.mixed else "between"
    alone = steady.token == steady.step
    parts = (
        ("first token", steady.queue, f"its prompt ({seconds(steady.prompt)} alone) and those before it"),
        ("", steady.place, "a place in the cache"),
        ("", steady.waited, "steps until it is seen and its token is sent"),
        ("", steady.host, f"the host: {asked.prompt:,} tokens, {asked.batch * asked.attentions:,} requests"),
        ("", steady.first, "together"),
        ("token", steady.step, f"a step of {steady.running:,.0f} sequences, half answered"),
        ("", steady.token - steady.step, f"prompts of others that are read {read}"),
        ("", 0 if alone else steady.token, "together"),
    )
    rows = [[of, seconds(value), note] for of, value, note in parts if value]
    title = f"The server: {asked.batch:,} requests come at once, then one whenever one is answered, ten times as many in all"
    draw(target, [Column("of a"), Column("time", "right"), Column("", wrap=True)], rows, title)


def _largest(answer: Inferred) -> list[str]:
    if answer.largest is None:
        return []
    if not answer.largest:
        return ["Not even one such sequence fits."]
    if answer.pool is not None and answer.engine is not None:
        engine, (nbytes, tokens) = answer.engine, answer.pool
        share, sequences = ENGINES[engine.kind].share, tokens // answer.asked.context
        holds = f"{sequences:,} such sequences a replica" if sequences else "not one such sequence: it does not start"
        return [
            f"{ENGINES[engine.kind].title} gives its cache {gib(nbytes, 1)} of a GPU at {share}={getattr(engine, share):g}:"
            f" {tokens:,} tokens of cache, {holds}."
        ]
    kept = " of cache" if answer.asked.task == "generate" else ""
    return [
        f"The largest batch that fits: {answer.largest:,} such sequences a replica,"
        f" {answer.largest * answer.asked.context:,} tokens{kept}."
    ]


def _cache_note(answer: Inferred) -> str:
    asked = answer.asked
    each = answer.memory.cache / (asked.batch * asked.context)
    return (
        f"of {asked.batch:,} x {asked.context:,} tokens in {asked.cache_format}: {each:,.0f} bytes a token on this rank"
    )


def _headline(answer: Inferred) -> list[str]:
    ranges = known_range()
    if answer.first is None:
        return [f"No times: {answer.untimed}."]
    took, (low, high) = answer.first.seconds, answer.first_range
    spread = f"{seconds(took * low)} to {seconds(took * high)}"
    took *= answer.software
    if answer.asked.task == "forward":
        tokens = answer.asked.batch * answer.asked.prompt * answer.asked.replicas * answer.asked.attentions
        return [f"A forward pass: {seconds(took)} ({spread}), {tokens / took:,.0f} tokens/s."]
    assert answer.last is not None
    assert answer.token is not None
    if answer.served is not None:
        return _served(answer, answer.served)
    if answer.draft is not None:
        last, where = answer.token, "in the mean"
    else:
        last, where = answer.last.seconds, "at the whole context"
    lines = [
        f"Time to first token: {seconds(took)} by its kernels, all prompts at once; in servers {spread}.",
        f"Time per token {where}: {seconds(last)}"
        f" ({seconds(last * ranges.token_low)} to {seconds(last * ranges.token_high)});"
        f" {answer.tokens_per_second:,.0f} tokens/s over all GPUs in the mean.",
    ]
    return lines + _money(answer)


def _money(answer: Inferred) -> list[str]:
    price = answer.money_per_million
    return [] if price is None else [f"A million generated tokens: {price:,.2f}, prompts included."]


def _served(answer: Inferred, steady: Steady) -> list[str]:
    asked, engine = answer.asked, answer.engine
    assert engine is not None
    low, high = (steady.token * factor for factor in answer.token_range)
    first_low, first_high = (steady.first * factor for factor in answer.served_range)
    more = asked.answer > 1
    lines = [
        f"{asked.server} with {asked.batch:,} requests at a time: a token takes {seconds(steady.token)}"
        f" ({seconds(low)} to {seconds(high)}){'' if more else ' at this context'}, the first one"
        f" {seconds(steady.first)} ({seconds(first_low)} to {seconds(first_high)}).",
        f"{answer.tokens_per_second:,.0f} tokens/s over all GPUs."
        if more
        else f"{answer.tokens_per_second:,.1f} requests/s over all GPUs, each answered by one token; --answer N says by how many.",
    ]
    if steady.running < asked.batch:
        whole = serving().engines[engine.kind].reserved == 1
        held = "its whole answer reserved" if whole else "half answered"
        lines.append(f"The cache holds {steady.running:,.0f} of them, each {held}; the others wait.")
    return lines + _money(answer)


def _waits(answer: Inferred) -> list[str]:
    """Return a line on options of a queue that nobody says, where servers have been measured with them."""
    if answer.unsaid == 1 or answer.engine is None:
        return []
    option = f"{answer.engine.kind}:{ENGINES[answer.engine.kind].waits}"
    return [
        f"No prompt is taken to wait by an option; the first token's upper end is of servers with {option} (=N says it)."
    ]


def _release(answer: Inferred) -> list[str]:
    """Return a line on a release that was not measured, or that nobody names."""
    engine, age = answer.engine, answer.age
    assert engine is not None
    since = f"{ENGINES[engine.kind].title} {measured_since(engine.kind)} and newer"
    if engine.version is None:
        return [f"Measured releases: {since}; the upper end is of one a year older ({engine.kind}:version=N names it)."]
    if age.taken == 1:
        return []
    return [
        f"{engine.version} is older than what was measured ({since}): its kernels are taken to need {age.taken:.2f} times as long"
        f" (1 to {age.most:.2f})."
    ]


def _work(target: Paper, answer: Inferred) -> None:
    passes: list[tuple[str, Pass, int]] = []
    asked = answer.asked
    sequences = asked.batch * asked.attentions
    if answer.first is not None:
        passes.append(("prompts" if asked.task == "generate" else "forward", answer.first, sequences * asked.prompt))
    if answer.last is not None:
        passes.append(("one more token each", answer.last, sequences))
    if passes:
        lanes = ("products", "attention", "rest", *(() if answer.tower is None else ("pictures",)))
        rows = [
            [
                name,
                flops(pass_of_model.flops),
                f"{pass_of_model.flops / (answer.active_params * tokens):.2f}",
                in_gib(pass_of_model.moved),
                *(seconds(pass_of_model.lanes.get(lane, 0.0)) for lane in lanes),
                seconds(sum(row.seconds for row in pass_of_model.traffic)),
                seconds(pass_of_model.seconds),
            ]
            for name, pass_of_model, tokens in passes
        ]
        heads = ("FLOPs a parameter and token", "GiB moved a rank", *lanes, "traffic", "together")
        draw(
            target,
            [Column("pass"), Column("FLOPs", "right"), *(Column(head, "right") for head in heads)],
            rows,
            "Work and time, by roofline",
        )


def _traffic(target: Paper, answer: Inferred) -> None:
    rows = [
        [name, row.axis, row.collective, f"{row.calls:,.0f}", f"{row.wire / 1e6:,.2f} MB", seconds(row.seconds)]
        for name, pass_of_model in (("prompts", answer.first), ("one more token each", answer.last))
        if pass_of_model is not None
        for row in pass_of_model.traffic
    ]
    if rows:
        columns = [Column("pass"), Column("axis"), Column("collective"), Column("calls", "right")]
        columns += [Column("sent by a rank", "right"), Column("time", "right")]
        draw(target, columns, rows, "Traffic")
