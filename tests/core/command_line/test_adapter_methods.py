"""`--adapter`: what each method takes, and what it refuses in one line."""

from __future__ import annotations

import pytest

from command_line import document, typed
from loadgauge import Job, estimate
from loadgauge.core.layers.adapters.tuners import block_size, factors

SMALL = "smollm2-135m --seq-len 256"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--adapter boft", "'boft' is not one of 'lora', 'ia3'"),
        ("--adapter ia3 --lora-rank 8", "is not of (IA)3"),
        ("--adapter loha --lora-dropout 0.1", "is not of LoHa"),
        ("--adapter vera --use-dora", "is not of VeRA"),
        ("--adapter prompt", "needs --virtual-tokens"),
        ("--adapter prompt --virtual-tokens 8 --lora-targets all", "is not of prompt tuning"),
        ("--lora-rank 8 --virtual-tokens 8", "needs --adapter prompt"),
        ("--virtual-tokens 8", "needs --lora-rank"),
        ("--adapter lokr --qlora", "LoKr on a quantised base"),
        ("--adapter ia3 --framework megatron", "is PEFT's"),
        ("--adapter prompt --virtual-tokens 8 --lengths uniform:64", "with --lengths"),
        ("--adapter vera --lora-targets nothing", "no linear layer 'nothing'"),
    ],
)
def test_what_does_not_go_together(flags: str, words: str) -> None:
    ran = typed(f"estimate {SMALL} {flags}")
    assert ran.code == 2
    assert words in ran.err
    assert len(ran.err.strip().splitlines()) <= 2


def test_virtual_tokens_lengthen_the_sequence() -> None:
    """Tokens that are trained are no tokens of the data; all that a layer makes has them too."""
    short, long = (estimate("smollm2-135m", seq_len=s, lora_rank=1, lora_targets="v_proj") for s in (256, 288))
    prompt = estimate("smollm2-135m", seq_len=256, adapter="prompt", virtual_tokens=32)
    parts = [each.memory.parts["loss"] for each in (short, long, prompt)]
    assert parts[2] == parts[1] > parts[0]
    assert prompt.flops.forward == pytest.approx(long.flops.forward, rel=1e-3)


def test_a_job_is_printed_with_its_method() -> None:
    found = document(f"estimate {SMALL} --gpu h100 --adapter vera --lora-rank 64 --json")
    assert found["training"]["lora_rank"] == 64
    assert Job("gpt2", adapter="prompt", virtual_tokens=8).flags() == "--adapter prompt --virtual-tokens 8"


def test_widths_are_divided_as_peft_divides_them() -> None:
    from peft.tuners.lokr.layer import factorization
    from peft.tuners.oft.layer import OFTLayer

    for width in (*range(1, 300), 4096, 4608, 11008, 14336):
        assert factors(width) == factorization(width)
        for wanted in (4, 20, 32, 60):
            assert block_size(width, wanted) == OFTLayer.adjust_oft_parameters(None, width, wanted)
