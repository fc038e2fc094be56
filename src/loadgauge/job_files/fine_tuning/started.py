"""Tells what the variables that a tool is started with say: how many processes, on how many GPUs."""

import re
from typing import Any

from loadgauge.job_files.ideas import Fact, Facts, Idea, Keys
from loadgauge.job_files.reading.known_files import beside

PER_NODE, HOSTS, VISIBLE = "NPROC_PER_NODE", "NNODES", "CUDA_VISIBLE_DEVICES"
LAUNCHERS = ("nproc_per_node", "num_processes", "num_gpus")
"""Options by which another launcher says how many processes it starts."""


def launched(keys: Keys) -> bool:
    """Return whether another launcher says how many: by an option, or in a configuration that is there to be read."""
    name = keys.raw("config_file")
    return keys.has(*LAUNCHERS) or (isinstance(name, str) and (keys.alone or beside(name, keys) is not None))


def variable(keys: Keys, name: str) -> Any:
    """The value of a variable that a program is started with, in a script or in a file's section `ENV`."""
    return keys.raw(f"ENV.{name}") or getattr(keys.document, "variables", {}).get(name)


def count(value: Any) -> int | None:
    """A variable's value as a whole number above 0; None for anything else."""
    text = str(value or "")
    return int(text) if text.isascii() and text.isdecimal() and 0 < len(text) < 6 and int(text) else None


def cards(keys: Keys) -> int | None:
    """The GPUs that a process sees by `CUDA_VISIBLE_DEVICES`; None without it."""
    value = str(variable(keys, VISIBLE) or "")
    return value.count(",") + 1 if value and "$" not in value else None


def visible(keys: Keys) -> Fact | None:
    """The GPUs on which `deepspeed` or `accelerate launch` starts a process each where no option says how many: those of
    `--include`, or those that are visible (launcher/runner.py of DeepSpeed 0.19, utils/launch.py of accelerate 1.15); the one of
    a program that is started by itself."""
    hosts = str(keys.raw("include") or "").split("@")
    if all(":" in host for host in hosts):
        return Fact(sum(host.count(",") + 1 for host in hosts), "--include")
    seen, program = cards(keys), getattr(keys.document, "program", ())
    alone = not re.match(r"(\S*/)?(accelerate|deepspeed)\b", " ".join(program))
    return None if seen is None or launched(keys) or (alone and seen != 1) else Fact(seen, VISIBLE)


def world(keys: Keys) -> int | None:
    """The processes that a command starts, one for each GPU: those that are known from elsewhere, or by its variables."""
    gpus = keys.given.get("gpus")
    if gpus is not None:
        return int(gpus)
    processes, nodes = count(variable(keys, PER_NODE)), count(variable(keys, HOSTS))
    if processes is None and keys.has(LAUNCHERS[0]):
        processes, nodes = keys.whole(LAUNCHERS[0]), keys.whole("nnodes") if keys.has("nnodes") else None
    return None if processes is None else processes * (nodes or 1)


def started(*own: str) -> Idea:
    """The idea of the GPUs by variables: a process for each, or for each card that is visible. `own`: keys of a number of
    workers, which goes before them."""

    def read(keys: Keys) -> Facts:
        workers = keys.agreed(own, keys.whole)
        if (workers or 0) > 1:
            return {"gpus": workers}
        processes, nodes, name = count(variable(keys, PER_NODE)), count(variable(keys, HOSTS)), PER_NODE
        if processes is None and "gpus" not in keys.given and not launched(keys):
            processes, name = cards(keys), VISIBLE
        return {} if processes is None else {"gpus_per_node": Fact(processes, name), "nodes": nodes or 1}

    return Idea(
        keys=(*(f"ENV.{name}" for name in (PER_NODE, HOSTS, VISIBLE)), *own),
        facts=("gpus", "gpus_per_node", "nodes"),
        read=read,
    )
