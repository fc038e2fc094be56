"""PEFT's methods beside LoRA: what each is called, and what of a job means something to it."""

import msgspec


class Tuner(msgspec.Struct, frozen=True, kw_only=True):
    """A method that trains few parameters on a frozen base (source: peft 0.21, `tuners/`).

    title: its name; peft_type: that of PEFT's `adapter_config.json`
    size: what `--lora-rank` says of it (rank, or the size of a block), "" where it has none; default: PEFT's own
    targets: the linear layers that it adapts by default, where these are not all; None: all
    dropout, layers: whether PEFT has a dropout of its inputs, or `layers_to_transform`
    quantised: whether what it does on a quantised base is modelled
    virtual: whether it trains tokens in front of the text, and no layer is adapted
    left_out: what of its memory is not counted
    numeric: its parameters depend on the divisors of a width, so that no formula in letters has them
    """

    title: str
    peft_type: str
    source: str
    size: str = "rank"
    default: int = 8
    targets: frozenset[str] | None = None
    dropout: bool = False
    layers: bool = True
    quantised: bool = False
    virtual: bool = False
    numeric: bool = False
    left_out: str = ""


TUNERS: dict[str, Tuner] = {
    "ia3": Tuner(
        title="(IA)3", peft_type="IA3", source="liu2022ia3", size="", layers=False,
        targets=frozenset({"key", "value", "qkv", "down"}),
    ),
    "vera": Tuner(
        title="VeRA", peft_type="VERA", source="kopiczko2023", default=256, dropout=True, quantised=True,
        targets=frozenset({"query", "value", "qkv"}),
    ),
    "adalora": Tuner(
        title="AdaLoRA", peft_type="ADALORA", source="zhang2023adalora", default=12, dropout=True, quantised=True,
        left_out="gradients that AdaLoRA's penalty makes before the loss's (4 bytes a parameter) where layers run again",
    ),
    "loha": Tuner(
        title="LoHa", peft_type="LOHA", source="hyeonwoo2021",
        left_out="autocast's copies of LoHa's matrices, which live until forward ends (2 bytes a parameter)",
    ),
    "lokr": Tuner(title="LoKr", peft_type="LOKR", source="yeh2023", numeric=True),
    "oft": Tuner(title="OFT", peft_type="OFT", source="qiu2025", size="block size", default=32, quantised=True, numeric=True,
                left_out="indices of OFT's blocks (16 bytes for each number of one block, in each matrix)"),
    "prompt": Tuner(
        title="prompt tuning", peft_type="PROMPT_TUNING", source="lester2021", size="", layers=False, quantised=True,
        virtual=True,
    ),
    "p-tuning": Tuner(
        title="p-tuning", peft_type="P_TUNING", source="liu2021", size="encoder width", default=0, layers=False,
        quantised=True, virtual=True,
    ),
}  # fmt: skip
"""By the word of `--adapter`. LoRA, and DoRA with it, is `loadgauge.core.definitions.model.lora.Lora` itself."""

ADAPTERS = ("lora", *TUNERS)
"""The words of `--adapter`."""
