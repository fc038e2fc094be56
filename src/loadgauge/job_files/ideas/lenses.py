"""Lenses: ideas that are put together of smaller ones, each of which reads keys into facts and writes facts into keys."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec

from loadgauge.core.definitions.serving.rollout import Engine
from loadgauge.job_files.ideas.table import STAYS, Facts, Idea, Keys, names_in, row
from loadgauge.job_files.ideas.words import stored

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Linear layers of attention, by the names of most models."""
Test = Callable[[Keys], Any]


def product(*ideas: Idea) -> Idea:
    """The idea that says what each of several does; where two have a fact or a key, the later counts that says something."""

    def read(keys: Keys) -> Facts:
        facts: Facts = {}
        for idea in ideas:
            facts |= {name: value for name, value in idea.read(keys).items() if value is not None or name not in facts}
        return facts

    return Idea(
        keys=tuple(dict.fromkeys(key for idea in ideas for key in idea.keys)),
        facts=tuple(dict.fromkeys(fact for idea in ideas for fact in idea.facts)),
        read=read,
        write=lambda facts, keys: {key: value for idea in ideas for key, value in idea.write(facts, keys).items()},
    )


def when(test: Test, *ideas: Idea) -> Idea:
    """The idea of several that count in some files only; in others they say nothing, and nothing of them is written."""
    inner = product(*ideas)
    return Idea(
        keys=inner.keys,
        facts=inner.facts,
        read=lambda keys: inner.read(keys) if test(keys) else {},
        write=lambda facts, keys: inner.write(facts, keys) if test(keys) else {},
    )


def fixed(*keys: str, **facts: Any) -> Idea:
    """The idea of facts that a tool has whatever its files say; a value may be a function of the keys. Nothing is written."""

    def read(document: Keys) -> Facts:
        return {name: value(document) if callable(value) else value for name, value in facts.items()}

    return Idea(keys=keys, facts=tuple(facts), read=read)


class Named(SimpleNamespace):
    """The keys of an idea, by what its two functions call them; of several for one thing a tuple or a dict."""

    inner: Idea


def reads(
    *keys: str,
    facts: str | tuple[str, ...] = "",
    write: Callable[..., dict[str, Any]] | None = None,
    when: Test = lambda keys: True,
    can: Mapping[str, tuple[Any, ...]] | None = None,
    needs: str = "",
    bases: tuple[str, ...] | None = None,
    options: Mapping[str, Any] | None = None,
    **named: Any,
) -> Callable[[Callable[..., Facts]], Idea]:
    """Make a function that reads keys an idea; where keys have names, it and `write` take them as a last argument.

    facts: those that it returns, by their names; write: nothing is, by default; when: files of which it says something
    inner, among the named: an idea that this one reads otherwise; its facts come first, and what it writes is written by default
    can: values of facts that the tool has words for, without which nothing is written; needs: facts that must be there for it
    bases: quantised bases that it has words for
    named: a key, several, or an idea that is a part; options: what the two functions are told beside them, by name

    >>> reads("dtype", facts="precision")(lambda keys: {"precision": keys.word("dtype")}).facts
    ('precision',)
    >>> reads(size="tp_size", also=("a", "b"), facts="tp")(lambda keys, at: {"tp": keys.whole(at.size)}).keys
    ('tp_size', 'a', 'b')
    """
    at = (Named(**named, **(options or {})),) if named or options else ()
    inner = named.get("inner") or Idea(keys=(), facts=(), read=lambda keys: {})
    own = names_in(facts) if isinstance(facts, str) else facts

    def writes(values: Facts, document: Keys) -> dict[str, Any]:
        there = all(values.get(name) for name in names_in(needs))
        fits = all(values.get(name) is None or values[name] in words for name, words in (can or {}).items())
        if not (there and fits and (bases is None or sayable(values, bases))):
            return {}
        return changes(write(values, document, *at)) if write else inner.write(values, document)

    return lambda read: Idea(
        keys=tuple(dict.fromkeys((*keys, *_listed(list(named.values()))))),
        facts=own if set(inner.facts) <= set(own) else (*inner.facts, *own),
        read=lambda document: read(document, *at) if when(document) else {},
        write=writes,
    )


def changes(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of keys without those that stay as they are.

    >>> changes({"tp": 2, "pp": None, "cp": STAYS})
    {'tp': 2, 'pp': None}
    """
    return {key: value for key, value in values.items() if value is not STAYS}


def writes(inner: Idea) -> Callable[[Callable[[Facts, Keys, Idea], dict[str, Any]]], Idea]:
    """Make a function that writes what another idea reads an idea; it takes that one as its last argument

    >>> writes(row("tp", "tp"))(lambda facts, keys, inner: {"tp": 1}).facts
    ('tp',)
    """
    return lambda write: msgspec.structs.replace(inner, write=lambda facts, keys: changes(write(facts, keys, inner)))


def _listed(keys: Any) -> Iterator[str]:
    """Every key in a value that `reads` takes."""
    inner = keys.keys if isinstance(keys, Idea) else keys.values() if isinstance(keys, dict) else keys
    for key in inner:
        yield from (key,) if isinstance(key, str) else _listed(key)


class Spelled(Keys):
    """Look-ups by names that a file spells otherwise; what is noted is noted of the file's own keys.

    spell: how a file spells a name; over: values that go before the file's; instead: what is said of the document in its place
    """

    def __init__(
        self, keys: Keys, spell: Callable[[Keys, str], str], over: Mapping[str, Any] | None = None, **instead: Any
    ) -> None:
        super().__init__(_View(keys, spell, over or {}, instead), keys.file, keys.auto, keys.version, keys.given)
        self.left, self.noted, self.remarks, self.alone = keys.left, keys.noted, keys.remarks, keys.alone


class _View:
    """A document whose keys are looked up by other names."""

    def __init__(
        self, keys: Keys, spell: Callable[[Keys, str], str], over: Mapping[str, Any], instead: Mapping[str, Any]
    ) -> None:
        self.own, self.keys, self.spell, self.over = keys.document, keys, spell, over
        self.__dict__.update(instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def get(self, key: str) -> Any:
        """The value of a key, or `MISSING`."""
        return self.over[key] if key in self.over else self.own.get(self.spell(self.keys, key))

    def shown(self, key: str) -> str:
        """The key as the file spells it."""
        return self.own.shown(self.spell(self.keys, key))


def spelled(idea: Idea, spell: Callable[[Keys, str], str], every: Callable[[str], Iterable[str]]) -> Idea:
    """The idea under other names. spell: how a file spells a name; every: all spellings of a name"""
    return Idea(
        keys=tuple(dict.fromkeys(key for name in idea.keys for key in every(name))),
        facts=idea.facts,
        read=lambda keys: idea.read(Spelled(keys, spell)),
        write=lambda facts, keys: {
            spell(keys, name): value for name, value in idea.write(facts, Spelled(keys, spell)).items()
        },
    )


def served(server: str, options: Facts) -> str:
    """Return the engine of a kind with these options, as `--rollout` says it; those that are None are left to it.

    >>> served("vllm", {"tp": 2, "graphs": False, "context": None})
    'vllm:tp=2,graphs=false'
    """
    words = (f"{name}={str(value).lower()}" for name, value in options.items() if value is not None)
    return Engine.parse(f"{server}:{','.join(words)}").text()


def engine(server: str, *rows: Idea, test: Test = lambda keys: True, plain: tuple[str, ...] = ("bf16", "fp8")) -> Idea:
    """The idea of the engine that generates: rows whose facts are its options (`Engine`).

    server: its kind; test: whether a file has one; plain: formats of weights that a file can say
    """
    options = product(*rows)

    def read(keys: Keys) -> Facts:
        return {"rollout": served(server, options.read(keys))} if test(keys) else {}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        engine = Engine.parse(facts.get("rollout") or server)
        if not test(keys) or engine.kind != server or engine.weights not in plain:
            return {}
        return options.write({name: getattr(engine, name) for name in options.facts}, keys)

    return Idea(keys=options.keys, facts=("rollout",), read=read, write=write)


def layers(key: str, everything: Any = "all-linear", *also: str, joined: bool = False) -> Idea:
    """The idea of the linear layers that have adapters: a list of their names, or a word for all.

    everything: how all are written, as they are where none are named; also: further words; joined: names are one word
    """
    words = ([everything], everything, *([word] for word in also))

    def read(keys: Keys) -> Facts:
        chosen = keys.words(key)
        return {"lora_targets": "all" if not chosen or chosen in words else ",".join(chosen)}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        wanted = facts.get("lora_targets") or "all"
        named = list(ATTENTION) if wanted == "attention" else wanted.split(",")
        names = ",".join(named) if joined else named
        return {} if wanted.startswith("all,") else {key: everything if wanted == "all" else names}

    return Idea(keys=(key,), facts=("lora_targets",), read=read, write=write)


SAYABLE = ("", "nf4", "nf4-single", "fp4", "int8")
"""Bases that bitsandbytes quantises."""
PACKED = ("gptq", "awq")
"""Checkpoints that are quantised already, and trained on as they are."""


def quantised(
    *,
    four: str = "",
    eight: str = "",
    bits: tuple[str, ...] = (),
    on: Test | None = None,
    kind: str = "",
    nested: str = "",
    double: bool = True,
    upcast: str | None = None,
    method: tuple[str, Mapping[str, str]] = ("", {}),
    model: tuple[str, ...] = (),
) -> Idea:
    """The idea of a quantised base, by bitsandbytes unless another library is said.

    four, eight: switches; bits: a number of bits, in their place; on: whether there is one of 4 bits where these say nothing
    kind: `nf4` or `fp4`; nested: whether scales are quantised too; double: whether they are where nothing is said
    upcast: what is made float32 beside it; method: a key for the library, with bases by its words, empty for bitsandbytes
    model: keys of the model, whose name may say that it is quantised already
    """
    way, libraries = method
    numbered = bits[0] if bits else ""

    def number_of(keys: Keys) -> int | None:
        if bits:
            stated: int | None = keys.agreed(bits, lambda key: keys.whole(key, minimum=0))
        else:
            stated = 8 if eight and keys.flag(eight) else 4 if four and keys.flag(four) else None
        return 4 if stated is None and on is not None and on(keys) else stated

    def read(keys: Keys) -> Facts:
        number, library = number_of(keys), (keys.choice(way, libraries) if way else None) or ""
        own = stored(keys.agreed(model, keys.word)) if model else None
        if not number and (own in PACKED or library in PACKED):
            return {"qlora": True, "base": own or library, "kbit_upcast": upcast}
        number = 8 if library == "int8" else number
        if number in (None, 0, 16):
            return {"qlora": False, "base": own if own != "aqlm" else None}
        keys.note(
            numbered,
            "is counted in 4 bits up to 4, and in 8 above",
            parts="weights",
            share=0.5,
            when=number not in (4, 8),
        )
        twice = keys.flag(nested, double) if nested else double
        base = library or (keys.choice(kind, {"nf4": "nf4", "fp4": "fp4"}) if kind else None) or "nf4"
        if base == "fp4" and twice and number <= 4:
            keys.note(kind, "has quantised scales, of which there are fewer than are counted", "saves", "weights", 0.1)
        base = "int8" if number > 4 else "nf4-single" if base == "nf4" and not twice else base
        return {"qlora": True, "base": base, "kbit_upcast": upcast}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        base = (facts.get("base") or "nf4") if facts.get("qlora") else ""
        library = next((word for word, ours in libraries.items() if ours == base and base not in SAYABLE), None)
        if base not in SAYABLE and library is None:
            return {}
        base = "nf4" if base == "int8" and not eight and not bits else base
        fours, twice = base not in ("", "int8"), base == "nf4"
        plain = next((word for word, ours in libraries.items() if not ours), None)
        values: dict[str, Any] = {
            four: True if fours else False if keys.has(four) else None,
            eight: True if base == "int8" else None,
            **dict[str, Any].fromkeys(bits),
            numbered: {"": None, "int8": 8}.get(base, 4),
            kind: "fp4" if base == "fp4" else "nf4" if fours and keys.has(kind) else None,
            nested: twice if fours and not library and (twice != double or keys.has(nested)) else None,
            way: library or (plain if base and keys.has(way) else None),
        }
        return {key: {"true": True, "false": None}.get(value, value) for key, value in values.items() if key}

    return Idea(
        keys=tuple(filter(None, (four, eight, *bits, kind, nested, way))),
        facts=("qlora", "base", "kbit_upcast"),
        read=read,
        write=write,
    )


def in_part(keys: Keys, part: str) -> str:
    """Return the word of an optimizer that is offloaded, of which `part` may say a share."""
    share = keys.real(part)
    if share is not None and not 0 <= share <= 1:
        raise keys.wrong(part, f"must be from 0 to 1, got {share:g}")
    return "none" if share == 0 else "optimizer" if share in (None, 1) else f"optimizer:{share:g}"


def sayable(facts: Facts, bases: tuple[str, ...] = SAYABLE) -> bool:
    """Return whether a base is one of those that a file can say, or not quantised."""
    return not facts.get("qlora") or (facts.get("base") or "nf4") in bases


def degree(axis: str, *keys: str) -> Idea:
    """The idea of a degree of parallelism, 1 where nothing is said, which a file has a key for where it is more, or has it."""
    return row(axis, *keys, default=1, quiet=1)


def adapters(
    on: Test,
    *rows: Idea,
    switch: Mapping[str, Any] | None = None,
    off: Callable[[Keys], Mapping[str, Any]] = lambda keys: {},
    bare: Facts | None = None,
    bases: tuple[str, ...] = SAYABLE,
    alone: bool = False,
) -> Idea:
    """The idea of LoRA's adapters, with all that is said of them.

    on: whether a file has any; rows: what is said of them; switch: what is written beside; off: what is written in a file without
    them, where all else is removed; bare: what is read of such a file; bases: those that a file can say
    alone: whether nothing is written of adapters of another kind
    """
    inner, beside = product(*rows), switch or {}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if not sayable(facts, bases) or (alone and (facts.get("adapter") or "lora") != "lora"):
            return {}
        if not facts.get("lora_rank"):
            return dict.fromkeys((*inner.keys, *beside)) | dict(off(keys))
        return {**beside, **inner.write(facts, keys)}

    return Idea(
        keys=tuple(dict.fromkeys((*beside, *inner.keys))),
        facts=("adapter", *inner.facts) if alone else inner.facts,
        read=lambda keys: inner.read(keys) if on(keys) else bare or {"lora_rank": 0, "qlora": False},
        write=write,
    )


def dora(key: str) -> Idea:
    """The idea of adapters with a magnitude of their own (DoRA)."""
    return row("use_dora", key, words={"true": True, "false": None}, off=False)


def whole_and_dora(saved: str, magnitudes: str) -> Idea:
    """The idea of modules that are trained whole beside adapters, and of DoRA."""
    return product(row("modules_to_save", saved, kind="joined"), dora(magnitudes))


def refers(facts: Facts) -> bool:
    """Return whether a run has a reference whose log-probabilities are made beside the update."""
    return facts.get("reference") not in (None, "none", "precomputed")
