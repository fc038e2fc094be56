"""`Dialect`: ideas, each with its keys and a translation from keys to facts and back."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from loadgauge.core.base.errors import ConfigError, Untrained, suggest
from loadgauge.core.definitions.job.uncounted import Uncounted
from loadgauge.core.definitions.layout.axes import AXES
from loadgauge.core.definitions.training.stacks import NEWEST
from loadgauge.job_files.ideas.coverage import Coverage, Kind, key_lists
from loadgauge.job_files.ideas.facts import Fact
from loadgauge.job_files.ideas.words import model_of_path, short

LARGEST = 10**9
IDLE = ""
"""The words of `Dialect.programs` for a program that trains nothing."""
PACKAGES = {"automodel": "nemo-automodel"}
"""Packages whose name is not the dialect's."""
UNKNOWN = "a key that is not known here, so whatever it does is not counted"
TRUE, FALSE = ("true", "yes", "on", "1", "y", "t"), ("false", "no", "off", "0", "n", "f")
VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?")
UNASKED = ("nodes", "dp", "weights", "lora_dropout")
"""Facts that no flag asks for where another of the same idea is one."""


class Missing:
    """The type of `MISSING`, the value of a key that a document does not have."""


MISSING = Missing()
STAYS: Any = Missing()
"""Said by what is written of a key that is left as the file has it, or as it does not."""


class Document(Protocol):
    """A file as keys and values that can be changed in place."""

    syntax: str

    def names(self) -> tuple[str, ...]:
        """Every key that has a value, in order."""

    def get(self, key: str) -> Any:
        """The value of a key, or `MISSING`."""

    def put(self, key: str, value: Any) -> None:
        """Sets the value of a key in place, or adds the key."""

    def drop(self, key: str) -> None:
        """Removes a key if it is there."""

    def shown(self, key: str) -> str:
        """The key as the file spells it."""

    def text(self) -> str:
        """The file with all changes."""


class Unknown(ConfigError):
    """A value that is known only where the job is started, such as `$TP`."""


class Keys:
    """Typed look-ups in a document. Each gives None where a key is absent, empty or left to another file (`auto`), and raises
    `ConfigError` with the key and the file where the value is of another kind."""

    def __init__(
        self,
        document: Document,
        file: str = "",
        auto: bool = False,
        version: tuple[int, ...] | None = None,
        given: Mapping[str, Any] | None = None,
    ) -> None:
        self.document, self.file, self.auto, self.version = document, file, auto, version
        self.given: Mapping[str, Any] = given or {}
        """Facts known from elsewhere, where a tool's default depends on them, such as the number of GPUs."""
        self.alone = False
        """Says whether files that the document names are not looked for on the disk."""
        self.left: list[str] = []
        """Keys left to another file."""
        self.noted: dict[str, Uncounted] = {}
        """Holds what an idea has read a key as, and what of it is not counted."""
        self.remarks: dict[str, None] = {}
        """Holds what was taken for granted in reading the file, in words."""

    def wrong(self, key: str, message: str) -> ConfigError:
        """Return, not raise, the `ConfigError` with this message that names the key and the file."""
        return ConfigError(message, key=self.document.shown(key), file=self.file)

    def refuse(self, key: str, message: str, *, when: object) -> None:
        """Raise the `ConfigError` with this message that names the key and the file, where `when` holds."""
        if when:
            raise self.wrong(key, message)

    def idle(self, key: str, message: str) -> Untrained:
        """Return, not raise, the error that a file trains nothing, as this key says."""
        return Untrained(message, key=self.document.shown(key), file=self.file)

    def note(
        self,
        key: str,
        why: str,
        effect: str = "either",
        parts: str = "",
        share: float = 1.0,
        *,
        when: object = True,
        bare: bool = False,
    ) -> None:
        """Adds what of a key is not counted, where `when` holds: its effect, and the share of which parts, as in `Stop`.

        bare: whether its value is left out of the words
        """
        if when:
            value, shown = self.plain(key), self.document.shown(key)
            note = f"{shown}: {why}" if bare or value in (None, True) else f"{shown} = {short(value)}: {why}"
            self.add(Uncounted(note, shown, effect=effect, parts=tuple(parts.split()), share=share))

    def remark(self, text: str, *, when: object = True) -> None:
        """Keep what is said of how the file was read."""
        if when:
            self.remarks[text] = None

    def add(self, item: Uncounted) -> None:
        """Adds what of a key is not counted."""
        self.noted[item.note] = msgspec.structs.replace(item, file=self.file)

    @property
    def program(self) -> str:
        """The words of the command that starts it but for its options; empty where no command does."""
        return " ".join(getattr(self.document, "program", ()))

    def since(self, *version: int) -> bool:
        """Return whether the file is for this version of the tool or a later one; without a version it is for the newest."""
        return self.version is None or self.version >= version

    def has(self, *keys: str) -> bool:
        """Return whether any of the keys has a value that is not left to another file."""
        return any(self.raw(key) is not None for key in keys)

    def raw(self, key: str) -> Any:
        """The value of a key as parsed, of any type; None where it is absent, empty or `auto`."""
        value = self.document.get(key)
        null = value in ("null", "None") and getattr(self.document, "style", "") == "hydra"
        if null or value is MISSING or value is None or value == "":
            return None
        if self.auto and isinstance(value, str) and value.lower() == "auto":
            if key not in self.left:
                self.left.append(key)
            return None
        return value

    def plain(self, key: str) -> Any:
        """The value of a key, of several words the first; False for a switch that is off. For the lists of `coverage`."""
        try:
            value = self.document.get(key)
        except ConfigError:
            return "several values"
        if value is MISSING:
            return None
        if isinstance(value, list) and self.document.syntax == "argv" and len(value) > 0:
            value = value[0]
        return value

    def _one(self, key: str) -> Any:
        value = self.raw(key)
        if isinstance(value, list) and self.document.syntax == "argv":
            value = value[0] if value else True
        if isinstance(value, str) and "$" in value:
            raise Unknown(outside(value, self.document.syntax), key=self.document.shown(key), file=self.file)
        return value

    def whole(self, key: str, minimum: int = 1) -> int | None:
        """The value of a key as a whole number. Raises `ConfigError` for anything else, or less than `minimum`."""
        value = self._one(key)
        if value is None:
            return None
        if isinstance(value, str):
            text = value.strip().replace("_", "")
            sign = text[:1] == "-"
            if text[sign:].isascii() and text[sign:].isdecimal() and len(text) < 12:
                value = int(text)
        if isinstance(value, float) and value.is_integer() and abs(value) < LARGEST:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= LARGEST:
            raise self.wrong(key, f"must be a whole number of at least {minimum}, got {short(value)}")
        return int(value)

    def real(self, key: str, usual: float | None = None) -> float | None:
        """The value of a key as a float, `usual` without one; a text such as "1e-5" is read. Raises `ConfigError` for others."""
        value = self._one(key)
        if value is None:
            return usual
        try:
            if isinstance(value, bool):
                raise ValueError
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise self.wrong(key, f"must be a number, got {short(value)}") from None

    def flag(self, key: str, usual: bool | None = None) -> bool | None:
        """The value as True or False, `usual` without one; on a command line, `--key` and `--no-key` too."""
        value = self._one(key)
        if value is None:
            return usual
        if isinstance(value, str) and value.lower() in TRUE + FALSE:
            return value.lower() in TRUE
        if self.document.syntax == "argv" and isinstance(value, str):
            return True  # a switch, and the word after it is something else
        if not isinstance(value, bool):
            raise self.wrong(key, f"must be true or false, got {short(value)}")
        return bool(value)

    def word(self, key: str) -> str | None:
        """The value of a key as text. Raises `ConfigError` for a list or a mapping."""
        value = self._one(key)
        if value is None:
            return None
        if isinstance(value, dict | list):
            raise self.wrong(key, f"must be a word, got {short(value)}")
        return str(value)

    def model(self, key: str) -> str | None:
        """A model's name or path; of a path that is not there, or begins with a variable that is not known, its end."""
        value = self.raw(key)
        text = str(value[0] if isinstance(value, list) and value else value)
        last = text.rstrip("/").rpartition("/")[2]
        if value is None or not text.startswith(("/", "~", "$")) or "$" in last or not last or os.path.exists(text):
            return self.word(key)
        return last

    def words(self, key: str) -> list[str] | None:
        """The value as a list of texts; a text is split at commas and spaces.

        None without one; `ConfigError` for anything else.
        """
        value = self.raw(key)
        if value is None:
            return None
        if not isinstance(value, list):
            value = [value]
        if not all(isinstance(word, str) for word in value):
            raise self.wrong(key, f"must be a list of words, got {short(value)}")
        if any("$" in word for word in value):
            raise Unknown(outside(value[0], self.document.syntax), key=self.document.shown(key), file=self.file)
        return [part for word in value for part in word.replace(",", " ").split()]

    def joined(self, key: str) -> str | None:
        """The value as a list of texts, with commas between them; None without one."""
        return ",".join(self.words(key) or ()) or None

    def choice(self, key: str, among: Mapping[str, Any], otherwise: tuple[Any, str] | None = None) -> Any:
        """The meaning of a word by `among`, case ignored; None without one.

        otherwise: what is counted for another word, and the parts of the memory that it may change; without it another raises
        `ConfigError`, with the known words
        """
        value = self._one(key)
        if value is None or isinstance(value, dict):  # whose keys are each in a list
            return None
        name = str(value).lower() if isinstance(value, bool) else str(value)
        if name in among:
            return among[name]
        folded = {word.lower(): meaning for word, meaning in among.items()}
        if name.lower() in folded:
            return folded[name.lower()]
        if {"true", "false"} <= among.keys() and name.lower() in TRUE + FALSE:
            return among["true" if name.lower() in TRUE else "false"]
        if otherwise is None or isinstance(value, bool):
            raise self.wrong(key, f"{short(value)} is not one that is read (read: {', '.join(among)})")
        self.note(key, f"is not known here, and {otherwise[0]} is counted", parts=otherwise[1])
        return otherwise[0]

    def agreed(self, names: Sequence[str], read: Callable[[str], Any]) -> Any:
        """The value that `read` gives for these keys, None where they have none. Raises `ConfigError` where two differ."""
        values = {name: value for name in names if (value := read(name)) is not None}
        for other, value in values.items():
            name, first = next(iter(values.items()))
            if value != first:
                raise self.wrong(other, f"{value} contradicts {self.document.shown(name)} = {first}")
        return next(iter(values.values()), None)


def outside(value: str, syntax: str) -> str:
    """Return what to say of a value that is only known where the job is started, with the variables that would give it.

    >>> outside("$TP", "argv"), outside("$(nproc)", "argv")
    ("'$TP' comes from outside the file (--set TP=VALUE)", "'$(nproc)' comes from outside the file")
    """
    names = dict.fromkeys(re.findall(r"\$\{?([A-Za-z_]\w*|\d+)", value[:500]))
    hint = f" (--set {','.join(f'{name}=VALUE' for name in names)})" if names and syntax == "argv" else ""
    return f"{short(value)} comes from outside the file{hint}"


NEAREST = {
    "optimizer": ("adamw", "optimizer"),
    "attention": ("flash", "activations transient"),
    "precision": ("bf16", "weights gradients activations gathered transient"),
}
"""The nearest of what is read to a word of a tool that no table has, by fact, and what of the memory it may change."""
Facts = dict[str, Any]
Read = Callable[[Keys], Facts]
Write = Callable[[Facts, Keys], dict[str, Any]]


class Idea(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a file says, in a few keys.

    read: facts from the keys, with the tool's defaults; write: values of keys from facts, None to remove a key; of what is read
        alone none
    """

    keys: tuple[str, ...]
    facts: tuple[str, ...]
    read: Read
    write: Write = lambda facts, keys: {}


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """The job files of a tool.

    versions: which its table was checked against; the last number is the newest, whose defaults count unless another is given
    syntaxes: of its files, the one that is written first
    blank: what an export begins from, by syntax; blanks: on a command line, by task
    framework: whose defaults apply where the file does not say; zero_stages: those that a file can mean, if not all
    trainers: whose run preferences: `trl` (TRL's), `softmax` (its own, with a log-softmax of all logits), `own`
    sections: of files with sections, where keys without dots belong
    layers: of files that name others, the data file with the tool's own, by name; extends: the key that names them
    fills: a pattern of variables, which are what its group has where nobody sets them
    last: the newest release that has all keys of a file, and one of its keys that the next has not, where there is one
    asleep: what the keys of sections begin with that nothing reads in this file
    style, objects: of options on its command line (`Argv`); lists: the tool whose lists of keys count, where not its own
    """

    name: str
    title: str
    versions: str
    syntaxes: tuple[str, ...]
    ideas: tuple[Idea, ...]
    blank: Mapping[str, str] = {}
    blanks: Mapping[str, str] = {}
    auto: bool = False
    framework: str = "huggingface"
    zero_stages: tuple[int, ...] | None = None
    trainers: str = "own"
    sections: Mapping[str, str] = {}
    style: str = "value"
    objects: frozenset[str] = frozenset()
    layers: str = ""
    extends: str = "defaults"
    fills: str = ""
    lists: str = ""
    last: Callable[[Keys], tuple[tuple[int, ...], str] | None] = lambda keys: None
    asleep: Callable[[Keys], tuple[str, ...]] = lambda keys: ()
    beneath: Callable[[Document], Mapping[str, Any]] | None = None
    """Holds what a recipe or a registry that a document names says by itself, by key; the document's own keys go before it."""
    script: Callable[[str], Document] | None = None
    """Reads a program as a document, where the tool's files are its own programs."""
    closed: bool = False
    """Says whether every key of the tool is in a list, and it drops others."""
    programs: Mapping[str, str] = {}
    """Words of a command line that start another program than the one that is read: a pattern, and what it does."""
    renames: Callable[[Any], tuple[str, Sequence[tuple[str, str]]]] | None = None
    """Names which variant of the tool a document is for, and its own names of keys (`reading/layered.py`)."""

    @property
    def coverage(self) -> Coverage:
        """The rules for keys that no idea reads."""
        return key_lists(self.lists or self.name)

    def begun(self, syntax: str, task: str | None) -> str:
        """Return what an export of a task begins from."""
        return self.blanks.get(task or "", self.blank[syntax]) if syntax == self.syntaxes[0] else self.blank[syntax]

    @property
    def library(self) -> str:
        """The package whose release the versions are of; empty where it is none that `--version` names.

        >>> Dialect(name="automodel", title="", versions="", syntaxes=(), ideas=()).library
        'nemo-automodel'
        """
        name = PACKAGES.get(self.name, self.name)
        return name if name in NEWEST else ""

    @property
    def newest(self) -> str:
        """The newest version whose defaults are known.

        >>> Dialect(name="x", title="", versions="X 0.8 - 0.19", syntaxes=(), ideas=()).newest
        '0.19'
        """
        numbers = re.findall(r"\d+(?:\.\d+)+", self.versions)
        return max(numbers, key=lambda text: tuple(int(part) for part in text.split(".")), default="")

    @property
    def known(self) -> frozenset[str]:
        """Every key that some idea reads."""
        return frozenset(key for idea in self.ideas for key in idea.keys)

    def read(self, keys: Keys, fact_names: frozenset[str] = frozenset()) -> dict[str, Fact]:
        """Reads the facts of a document, by name; keys of facts that are `given` elsewhere need not be readable.

        Raises `ConfigError` for values that cannot be read or contradict each other.
        """
        facts: dict[str, Fact] = {}
        unknown: list[tuple[Unknown, str]] = []
        for idea in self.ideas:
            try:
                values = idea.read(keys)
            except Unknown as error:
                asked = ["global_batch" if fact == "accumulation" else fact for fact in idea.facts]
                if asked == ["global_batch"] and not fact_names & {"global_batch"}:
                    keys.add(
                        Uncounted(
                            f"{error.key}: {str(error).rpartition(': ')[2]}; a step of one micro-batch on each rank is counted",
                            str(error.key),
                            effect="either",
                        )
                    )
                elif not fact_names & {*idea.facts, *asked}:
                    wanted = [fact for fact in asked if fact not in UNASKED]
                    if wanted:
                        unknown.append((error, wanted[0]))
                    else:
                        keys.add(
                            Uncounted(f"{error.key}: {str(error).rpartition(': ')[2]}", str(error.key), effect="either")
                        )
                continue
            for name, value in values.items():
                if value is not None:
                    facts[name] = value if isinstance(value, Fact) else _fact(keys, idea, name, value)
        if [name for _, name in unknown] == ["model"] and (named := model_of_path(keys.file)) is not None:
            keys.remark(f"its model, which comes from outside the file, is taken for {named}, as its path says")
            facts["model"], unknown = Fact(named, str(unknown[0][0].key), default=True), []
        if unknown:
            raise _missing(keys, unknown, named=bool(fact_names & {"model"} or facts.keys() & {"model", "config"}))
        return facts

    def unread(self, document: Document) -> tuple[str, ...]:
        """The keys of a document that no idea reads, as the file spells them; of files over each other the uppermost's."""
        own = getattr(document, "own", document).names()
        return tuple(document.shown(key) for key in self._rest(document) if key in own or not self.layers)

    def covering(self, document: Document) -> Coverage:
        """The rules for a document's keys; on a command line, those for options of the launcher as well."""
        if document.syntax != "argv":
            return self.coverage
        return self.coverage.joined(key_lists("launch"))

    def _rest(self, document: Document, asleep: tuple[str, ...] = ()) -> list[str]:
        """Keys of a document that no idea reads. `--no-x` counts as `x` where it is no option of its own."""
        listed, covering = self.known, self.covering(document)
        unread: list[str] = []
        for key in document.names():
            section, dot, last = key.rpartition(".")
            turned = f"{section}{dot}{last.removeprefix('no_')}"
            if document.syntax == "argv" and key not in listed and not covering.kinds(key):
                key = turned if turned in listed or covering.kinds(turned) else key
            if key not in listed and not key.startswith(asleep):
                unread.append(key)
        return unread

    def kinds(self, key: str) -> tuple[Kind, ...]:
        """The lists that a key is in, "modelled" where an idea reads it; each key of the tool is in exactly one."""
        return ("modelled",) if key in self.known else self.coverage.kinds(key)

    def stopped(self, keys: Keys, strict: bool = False) -> list[ConfigError]:
        """The errors about what a document asks for that would make an estimate wrong; `strict`: also what has a bound."""
        errors: list[ConfigError] = []
        covering = self.covering(keys.document)
        words = " ".join(getattr(keys.document, "program", ()))
        starts = {m[0].strip(): text for pattern, text in self.programs.items() if (m := re.search(pattern, words))}
        for program, text in starts.items() or {getattr(keys.document, "idle", ""): ""}.items():
            kind, whole = (ConfigError, f"{text}, which is not modelled") if text else (Untrained, "is no training job")
            if program:
                return [kind(whole, key=program, file=keys.file)]
        for key in self._rest(keys.document, self.asleep(keys)):
            value = keys.plain(key)
            rule = None if self.drops(key, covering) else covering.stop(key, value)
            if rule is not None and (strict or not rule.effect):
                if rule.idle:
                    return [keys.idle(key, rule.why)]
                shown = rule.why if value is True else f"{short(value)} {rule.why}"
                errors.append(keys.wrong(key, f"{shown}; without it there is an estimate"))
        return errors

    def drops(self, key: str, covering: Coverage) -> bool:
        """Return whether a key is none of the tool's, which drops it without a word."""
        return self.closed and not covering.kinds(key)

    def uncounted(self, keys: Keys) -> tuple[Uncounted, ...]:
        """Return what a document asks for that is not counted: keys with an effect that has a bound, and keys in no list."""
        items: dict[str, Uncounted] = {}
        covering = self.covering(keys.document)
        for key in self._rest(keys.document, self.asleep(keys)):
            value, shown = keys.plain(key), keys.document.shown(key)
            bound, stop = covering.bound(key, value), covering.stop(key, value)
            note = shown if value is True else f"{shown} = {short(value)}"
            item: Uncounted | None = None
            if self.drops(key, covering):
                near = suggest(key, [*self.known, *covering.harmless, *covering.stops, *covering.bounded])
                item, stop = Uncounted(f"{note}: {self.title} has no such key, and drops it{near}", shown), None
            elif bound is not None and bound[0].endswith("*"):
                shown = bound[0]  # once for all of a section
                item = Uncounted(f"{shown}: {bound[1].why}", shown)
            elif bound is not None:
                rule = bound[1]
                low, high = rule.extra(value)
                item = Uncounted(f"{note}: {rule.why}", shown, True, low, high, rule.kernels, rule.parameter)
            elif not covering.kinds(key):
                item = Uncounted(f"{shown}: {UNKNOWN}", shown, known=False, effect="" if stop is None else stop.effect)
            elif stop is not None and stop.effect:
                idle = stop.several and (keys.given.get("gpus") or 1) == 1
                effect = "" if idle else stop.effect
                item = Uncounted(f"{note}: {stop.why}", shown, effect=effect, parts=stop.parts, share=stop.share)
            if item is not None and (stop is None or stop.effect):
                items.setdefault(shown, msgspec.structs.replace(item, file=keys.file))
        return tuple(items.values())


def _missing(keys: Keys, unknown: Sequence[tuple[Unknown, str]], *, named: bool) -> ConfigError:
    """Return the one error about all that is known only where the job is started: the flags that say it.

    unknown: what was raised, with a fact that would do; named: whether the model is known
    """
    variables = dict.fromkeys(name for error, _ in unknown for name in VARIABLE.findall(str(error)))
    flags = dict.fromkeys(f"--{fact.replace('_', '-')}" for _, fact in unknown)
    flags |= {} if named else {"--model": None}
    error = unknown[0][0]
    key = error.key if len(unknown) == 1 else ""
    if keys.document.syntax == "argv" and variables and all(VARIABLE.search(str(error)) for error, _ in unknown):
        words = " ".join(f"--set {name}=..." for name in variables)
        more = "" if named else " --model NAME"
        names = ", ".join(variables)
        if len(variables) == 1:
            return ConfigError(f"{names} is set nowhere: add {words}{more}", key=key, file=keys.file)
        return ConfigError(f"{names} are set nowhere: add {words}{more}", key=key, file=keys.file)
    if len(unknown) == 1:
        return ConfigError(f"{str(error).rpartition(': ')[2]}: add {', '.join(flags)}", key=key, file=keys.file)
    facts = ", ".join(str(error.key) for error, _ in unknown)
    return ConfigError(f"values that come from outside the file: add {' '.join(flags)}", key=facts, file=keys.file)


def _fact(keys: Keys, idea: Idea, name: str, value: Any) -> Fact:
    """A value and the key to name for it: of those that have it the one with most words of its name, else the first two."""
    present = [key for key in idea.keys if keys.has(key)]
    there = present or [key for key in idea.keys if keys.document.get(key) is not MISSING]
    words = [word.rstrip("s") for word in re.split(r"[ _]", AXES[name].label if name in AXES else name) if word[2:]]
    alike = {key: sum(word in key for word in words) for key in there}
    own = sorted((key for key in there if str(keys.raw(key)) == str(value)), key=lambda key: -alike[key])
    nearest = sorted(filter(alike.get, there), key=lambda key: -alike[key])
    own = own if own and alike[own[0]] else nearest or own
    shown = " and ".join(keys.document.shown(key) for key in (own[:1] or there[:2] or idea.keys[:1]))
    return Fact(value, shown, default=not present)


def names_in(text: str) -> tuple[str, ...]:
    """The names in a text, separated by spaces or ends of lines, in order."""
    return tuple(text.split())


def row(
    fact: str,
    *keys: str,
    words: Mapping[str, Any] | None = None,
    default: Any = None,
    kind: str = "whole",
    minimum: int = 1,
    off: Any = None,
    add: bool = True,
    quiet: Any = MISSING,
) -> Idea:
    """The idea of one fact in one key. Of several keys the first is written, unless the file has another.

    words: the tool's words and ours (of several with one meaning the first is written)
    kind: the look-up of `Keys` for a value without words
    default: the tool's own, or a function of the keys; off: the value of ours at which the key is removed
    add: whether a file without any of the keys is given one; quiet: the value at which it is not, and where nothing is wanted
    """
    backward = {ours: theirs for theirs, ours in reversed(list((words or {}).items()))}
    limits = {"minimum": minimum} if kind == "whole" else {}

    def read(document: Keys) -> Facts:
        def value_of(key: str) -> Any:
            if words is not None:
                return document.choice(key, words, NEAREST.get(fact))
            return getattr(document, kind)(key, **limits)

        value = document.agreed(keys, value_of)
        if value is None:
            value = default(document) if callable(default) else default
        return {fact: value}

    def write(facts: Facts, document: Keys) -> dict[str, Any]:
        if not add and not document.has(*keys):
            return {}
        value = facts.get(fact) if quiet is MISSING or facts.get(fact) is not None else quiet
        present = [key for key in keys if document.document.get(key) is not MISSING]
        target = present[0] if present else keys[0]
        if value is None or value == off or (value == quiet and not document.has(*keys)):
            return dict.fromkeys(keys)
        if words is None:
            return {target: value.split(",") if kind == "joined" else value} | dict.fromkeys(present[1:])
        if value not in backward:
            return {}
        theirs = {"true": True, "false": False}.get(backward[value], backward[value])
        return {target: theirs} | dict.fromkeys(present[1:])

    return Idea(keys=keys, facts=(fact,), read=read, write=write)
