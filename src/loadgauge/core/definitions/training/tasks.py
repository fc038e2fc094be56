"""Post-training tasks: their roles, and the passes of a step over its sequences.

A role is a model with a use: it trains, scores or generates. A pass runs a role in a phase: `generate`, `forward` (scores, keeping
nothing) or `update` (forward, backward and optimizer step). Memory and time of every pass come from the same list of operations.
"""

from typing import Literal

import msgspec

Use = Literal["train", "score", "generate"]
Does = Literal["generate", "forward", "update"]
Phase = Literal[
    "generate",
    "old log-probs",
    "KL log-probs",
    "reference",
    "reward",
    "values",
    "teacher",
    "update",
    "critic update",
    "weight sync",
]
Reference = Literal["model", "adapter", "adapter-off", "precomputed", "none"]
"""Where a reference's log-probs come from: a second model, a second set of adapters, the base without them, a file, nowhere."""
Objective = Literal["kl", "no-kl", "nll", "no-nll", "jsd", "forward-kl", "reverse-kl", "top-k"]
"""A form of a loss: KTO with its KL estimate or without (`apo_zero_unpaired`); CPO and SimPO with the chosen answers' own loss or
without (`cpo_alpha: 0`); the divergence of a distillation: of whole distributions from a mixture, of the teacher's from the
student's (`beta: 0`), of the student's from the teacher's (1), or over the few tokens that the teacher finds likeliest."""
DIVERGENCES: tuple[Objective, ...] = ("jsd", "forward-kl", "reverse-kl")
OBJECTIVES: dict[str, tuple[Objective, ...]] = {
    "kto": ("kl", "no-kl"), "cpo": ("nll", "no-nll"), "simpo": ("nll", "no-nll"), "gkd": DIVERGENCES,
    "opd": ("top-k", *DIVERGENCES),
}  # fmt: skip
"""Forms of a loss by task, the usual one first; other tasks have one."""


class Role(msgspec.Struct, frozen=True):
    """A model of a task. name: as it is shown; field: the field of `Job` that names its model (model: the trained one itself)

    uses: what is done with it; scalar: its head has one column instead of the vocabulary
    """

    name: str
    uses: tuple[Use, ...]
    field: str = "model"
    scalar: bool = False


class Pass(msgspec.Struct, frozen=True):
    """A run of a role over a step's sequences.

    rows: sequences of a pass for each one of the micro-batch (2: the chosen and the rejected one); within: the phase in whose
    midst it is, whose tensors live meanwhile (DPO's reference runs inside the update); times: such passes, one after another
    """

    phase: Phase
    role: str
    does: Does
    rows: int = 1
    within: Phase | None = None
    times: int = 1


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """A way to train. pairs: a sequence of the batch is two, chosen and rejected; reference: the usual one, None: it has none

    slices: log-probs are of slices of the logits, whose gradients are summed
    objectives: forms of its loss that differ in what is held or run, the usual one first
    tiled: TRL's trainer of it makes log-probs in tiles, without the logits (`stacks.LOSS_LOGPROBS`)
    rollout: its answers are generated in every step; source: the implementation read for roles and passes
    """

    name: str
    title: str
    roles: tuple[Role, ...]
    passes: tuple[Pass, ...]
    pairs: bool = False
    reference: Reference | None = None
    rollout: bool = False
    slices: bool = False
    objectives: tuple[Objective, ...] = ()
    tiled: bool = False
    source: str = "trl"

    @property
    def trained(self) -> Role:
        """The role that the task is about: policy or actor."""
        return self.roles[0]

    @property
    def rows(self) -> int:
        """Sequences of the update for each one of a micro-batch."""
        return max(each.rows for each in self.passes if each.phase == "update")


POLICY = Role("policy", ("train",))
ACTOR = Role("actor", ("train", "score", "generate"))
REFERENCE = Role("reference", ("score",))
REWARD = Role("reward model", ("score",), "reward_model", scalar=True)
CRITIC = Role("critic", ("train", "score"), "critic", scalar=True)
TEACHER = Role("teacher", ("score",), "teacher")


def _preference(name: str, title: str, reference: Reference | None, pairs: bool = True) -> Task:
    """A task whose sequences are there: the update, and inside it the reference's pass."""
    rows = 2 if pairs else 1
    # KTO compares with answers to other prompts of the batch too: policy and reference run forward over those as well (trl,
    # `trainer/kto_trainer.py`, `_compute_kl_logps`), the policy before its update.
    apart = name == "kto"
    passes = [Pass("KL log-probs", "policy", "forward")] if apart else []
    passes.append(Pass("update", "policy", "update", rows))
    roles = [POLICY]
    if reference is not None:
        passes.append(Pass("reference", "reference", "forward", rows, within="update", times=1 + apart))
        roles.append(REFERENCE)
    return Task(
        name=name,
        title=title,
        roles=tuple(roles),
        passes=tuple(passes),
        pairs=pairs,
        reference=reference,
        slices=name in ("orpo", "simpo", "cpo"),
        tiled=reference is not None,
        objectives=OBJECTIVES.get(name, ()),
    )


def _reinforced(name: str, title: str, *, reference: Reference | None = "model", critic: bool = False) -> Task:
    """A task that generates its sequences: generation, scores, update, and the weights back to where answers are generated.

    A reward that is a model is asked for by name (`--reward-model`); PPO's critic is like the actor where none is named.
    """
    roles, passes = [ACTOR], [Pass("generate", "actor", "generate"), Pass("old log-probs", "actor", "forward")]
    if reference is not None:
        roles.append(REFERENCE)
        passes.append(Pass("reference", "reference", "forward"))
    roles.append(REWARD)
    passes.append(Pass("reward", "reward model", "forward"))
    if critic:
        roles.append(CRITIC)
        passes += [Pass("values", "critic", "forward"), Pass("critic update", "critic", "update")]
    passes.append(Pass("update", "actor", "update"))
    return Task(
        name=name,
        title=title,
        roles=tuple(roles),
        passes=tuple(passes),
        reference=reference,
        rollout=True,
        source="verl",
        tiled=not critic,
    )


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(name="sft", title="supervised fine-tuning", roles=(POLICY,), passes=(Pass("update", "policy", "update"),)),
        Task(
            name="rm", title="a reward model of chosen and rejected answers", roles=(Role("policy", ("train",), scalar=True),),
            passes=(Pass("update", "policy", "update", 2),), pairs=True,
        ),
        _preference("dpo", "DPO", "model"),
        _preference("ipo", "IPO", "model"),
        _preference("kto", "KTO", "model", pairs=False),
        _preference("orpo", "ORPO", None),
        _preference("simpo", "SimPO", None),
        _preference("cpo", "CPO", None),
        Task(
            name="gkd", title="distillation, a teacher beside the student", roles=(POLICY, TEACHER),
            passes=(Pass("update", "policy", "update"), Pass("teacher", "teacher", "forward", within="update")),
            objectives=OBJECTIVES["gkd"],
        ),
        Task(
            name="opd", title="on-policy distillation: the student answers, a teacher scores", rollout=True, source="nemo-rl",
            roles=(ACTOR, TEACHER),
            passes=(
                Pass("generate", "actor", "generate"), Pass("teacher", "teacher", "forward"), Pass("update", "actor", "update"),
            ),
            objectives=OBJECTIVES["opd"],
        ),
        _reinforced("ppo", "PPO", critic=True),
        _reinforced("grpo", "GRPO"),
        _reinforced("rloo", "RLOO"),
        _reinforced("dapo", "DAPO", reference=None),
        _reinforced("gspo", "GSPO", reference=None),
    )
}  # fmt: skip
"""By the word of `--task`. Sources: TRL 1.16, `trainer/`; verl, `trainer/ppo/ray_trainer.py`."""
