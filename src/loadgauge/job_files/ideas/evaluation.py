"""Evaluation in job files of transformers' family: its batch, whether there is any, and what of it stays on the GPU."""

from collections.abc import Callable
from typing import Any

from loadgauge.job_files.ideas.table import Facts, Idea, Keys

NEVER = ("no", "none", "false", "null")
Rule = Callable[[Keys], Any]


def asked(keys: Keys, *names: str) -> bool:
    """Return whether one of these strategies (`eval_strategy`) says that there is an evaluation."""
    return any(str(value).lower() not in NEVER for name in names if (value := keys.raw(name)) is not None)


def evaluation(
    prefix: str = "", batch: int | Rule = 8, *, data: Rule | None = None, own: tuple[str, ...] = (), usual: bool = False
) -> Idea:
    """The idea of Trainer's evaluation. Without metrics of the script's own it keeps losses alone
    (`Trainer.evaluate`: `prediction_loss_only`), so that logits stay only where `eval_accumulation_steps` says how many.

    batch: the tool's default, or a function of the keys; data: whether there is data to evaluate on, where the tool then
        evaluates or not by that; own: further keys that `data` reads
    usual: whether the tool evaluates where there is data and nothing is said
    """
    size, kept, losses, start, do = (
        f"{prefix}{name}"
        for name in (
            "per_device_eval_batch_size",
            "eval_accumulation_steps",
            "prediction_loss_only",
            "eval_on_start",
            "do_eval",
        )
    )
    strategies = (f"{prefix}eval_strategy", f"{prefix}evaluation_strategy")

    def on(keys: Keys) -> bool:
        if data is not None and not data(keys):
            return False
        if keys.has(*strategies):
            return asked(keys, *strategies)
        return usual or bool(keys.flag(start))

    def read(keys: Keys) -> Facts:
        number = keys.whole(size)
        if not on(keys):
            return {}
        several = keys.whole(kept)
        if number is None:
            number = batch(keys) if callable(batch) else batch
        return {"eval_batch": number, "eval_batches": None if keys.flag(losses) else several}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        if facts.get("eval_batch") is None or (data is not None and not data(keys)):
            return {}
        several = facts.get("eval_batches") or None
        silent = {losses: None} if several and keys.flag(losses) else {}
        present = [] if on(keys) else [name for name in strategies if keys.has(name)] or [strategies[0]]
        return {size: facts["eval_batch"], kept: several} | silent | dict.fromkeys(present, "steps")

    return Idea(
        keys=(size, kept, losses, start, do, *strategies, *own),
        facts=("eval_batch", "eval_batches"),
        read=read,
        write=write,
    )


def saving(*keys_of: str, switches: tuple[str, ...] = ()) -> Idea:
    """The idea of checkpoints of sharded weights: FSDP's `state_dict_type`; `switches`: DeepSpeed's keys that gather them."""

    def read(keys: Keys) -> Facts:
        state_types = [
            str(value).upper().removesuffix("_STATE_DICT") for name in keys_of if (value := keys.raw(name)) is not None
        ]
        for name, kind in zip([name for name in keys_of if keys.has(name)], state_types, strict=True):
            keys.refuse(
                name,
                "is read where it is FULL_STATE_DICT, SHARDED_STATE_DICT or LOCAL_STATE_DICT",
                when=kind not in ("FULL", "SHARDED", "LOCAL"),
            )
        flags = [flag for name in switches if (flag := keys.flag(name)) is not None]
        if "FULL" in state_types or any(flags):
            return {"save": "full"}
        return {"save": "sharded" if state_types or flags else None}

    def write(facts: Facts, keys: Keys) -> dict[str, Any]:
        full, stage = facts["save"] == "full", facts.get("zero") or 0
        engine = facts.get("framework") == "deepspeed" or stage == 1 or facts.get("offload") == "optimizer"
        gathers = full and engine and stage == 3 and not isinstance(keys.raw("deepspeed"), str)
        named = [*filter(keys.has, keys_of)] or list(keys_of[: full and bool(stage) and not engine])
        turned = [*filter(keys.has, switches)] or list(switches[:gathers])
        values: dict[str, Any] = dict.fromkeys(named, "FULL_STATE_DICT" if full else "SHARDED_STATE_DICT")
        return values | dict.fromkeys(turned, full)

    return Idea(keys=(*keys_of, *switches), facts=("save",), read=read, write=write)
