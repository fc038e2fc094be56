"""Blocks are told apart by kind: by class, shapes and flags, not by number."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from loadgauge.pytorch.capture.inputs.kinds import model_class  # noqa: E402
from loadgauge.pytorch.capture.lists.blocks import blocks  # noqa: E402


def found(config: object) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = model_class(config)._from_config(config)
    return {stack.path: stack.pattern for stack in blocks(model, config).stacks}


def test_layers_with_experts_are_another_kind() -> None:
    config = transformers.DeepseekV3Config(
        num_hidden_layers=6, first_k_dense_replace=3, hidden_size=64, n_routed_experts=8
    )
    assert found(config) == {"model.layers": (0, 0, 0, 1, 1, 1)}


def test_layers_that_differ_in_their_mask_alone_are_two_kinds() -> None:
    config = transformers.GptOssConfig(num_hidden_layers=4, num_local_experts=4, hidden_size=64, head_dim=16)
    assert found(config) == {"model.layers": (0, 1, 0, 1)}


def test_a_block_that_shares_an_earlier_ones_weights_is_another_kind() -> None:
    """Zamba2 has two blocks of attention for all its hybrid layers, in turns: the first two layers own them."""
    config = transformers.Zamba2Config(
        num_hidden_layers=7, layer_types=["linear_attention", *5 * ["hybrid"], "linear_attention"], num_mem_blocks=2,
        hidden_size=64, mamba_headdim=16, n_mamba_heads=8, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=128, vocab_size=128, mamba_d_state=16, mamba_ngroups=1, adapter_rank=8, chunk_size=16,
    )  # fmt: skip
    assert found(config)["model.layers"] == (0, 1, 2, 3, 4, 3, 0)


def test_encoder_and_decoder_are_two_lists() -> None:
    config = transformers.T5Config(num_layers=3, num_decoder_layers=4)
    # The first block of each has the table of relative positions.
    assert found(config) == {"encoder.block": (0, 1, 1), "decoder.block": (0, 1, 1, 1)}


def test_a_number_that_only_counts_is_no_kind() -> None:
    class Child(torch.nn.Module):
        def __init__(self, turn: int, width: int) -> None:
            super().__init__()
            self.turn, self.width = turn, width
            self.own = torch.nn.Linear(4, 4)

    net = torch.nn.Module()
    net.parts = torch.nn.ModuleList(Child(turn + 5, 8 if turn < 2 else 16) for turn in range(4))
    (stack,) = blocks(net).stacks
    assert (stack.pattern, stack.firsts) == ((0, 0, 1, 1), (0, 2))
    assert [blocks(net).place(path) for path in ("parts.3.own", "parts")] == [(0, 3), None]
