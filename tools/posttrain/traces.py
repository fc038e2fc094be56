"""Records TRL's preference trainers on the simulated device: `python -m posttrain.traces` in the environment of `make stack`.

Writes `tests/data/posttrain/trl.json`: the live bytes of each phase of the second step, by the words of a case.
"""

from __future__ import annotations

import json
from pathlib import Path

from stack import batch
from stack.case import Case

OUT = Path(__file__).parents[2] / "tests" / "data" / "posttrain" / "trl.json"
CASES = (
    "trainer=dpo,seq_len=448", "trainer=dpo,checkpointing=non-reentrant", "trainer=dpo,precision=fp32+bf16,seq_len=384",
    "trainer=dpo,method=lora", "trainer=dpo,wrapper=fsdp2", "trainer=dpo,wrapper=fsdp2,checkpointing=non-reentrant",
    "trainer=kto", "trainer=kto,precision=fp32+bf16", "trainer=orpo", "trainer=orpo,checkpointing=non-reentrant",
    "trainer=dpo,wrapper=ddp", "trainer=orpo,wrapper=fsdp2",
    "trainer=simpo", "trainer=simpo,precision=bf16", "trainer=gkd", "trainer=gkd,precision=bf16",
    "trainer=gkd,checkpointing=non-reentrant", "trainer=gkd,wrapper=fsdp2", "trainer=grpo",
    "trainer=grpo,checkpointing=non-reentrant", "trainer=grpo,method=lora",
    "trainer=kto,shifted=False", "trainer=simpo,likelihood=0", "trainer=cpo,precision=bf16,likelihood=0",
    "trainer=simpo,wrapper=fsdp2", "trainer=simpo,wrapper=fsdp2,likelihood=0", "trainer=gkd,mixture=0", "trainer=gkd,mixture=1",
    "trainer=gkd,precision=bf16,mixture=0", "trainer=gkd,checkpointing=non-reentrant,mixture=1",
    "trainer=rm,seq_len=448", "trainer=rm,checkpointing=non-reentrant",
)  # fmt: skip
"""Of each trainer a full one and a checkpointed one; of DPO also adapters, float32 weights, DDP and FSDP."""


def main() -> None:
    """Run the cases and write what they held. Raises `RuntimeError` for a case that fails."""
    found = {}
    for outcome in batch.run(map(Case.of, CASES)):
        if isinstance(outcome, batch.Failed):
            raise RuntimeError(f"{outcome.case.words}: {outcome.error}")
        found[outcome.case.words] = {"prepared": outcome.prepared, **outcome.phases}
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
