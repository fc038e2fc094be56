"""Adapters on layers that tensor parallelism splits."""

from loadgauge.core.definitions.job.job import Job
from loadgauge.core.resolve.resolve import resolve_job

TOKENS, HIDDEN, WIDE = 1024, 4096, 11008
"""Tokens of a micro-batch; sizes of Llama 2 7B."""


def products(tp: int) -> dict[str, float]:
    """The elements of each adapter's result in a layer of a rank."""
    many = {} if tp == 1 else {"tp": tp, "gpus": tp, "sequence_parallel": True}
    job = Job(
        "llama-2-7b", framework="megatron", micro_batch=1, seq_len=TOKENS, lora_rank=16, lora_targets="all", **many
    )
    workings = resolve_job(job).estimate().workings
    return {
        operation.name: operation.outputs[0].numel
        for _, layer, _, _ in workings.layers(workings.stages[0])
        for operation in layer
        if operation.name.endswith(".lora_b")
    }


def test_a_row_s_adapter_makes_the_whole_output_and_a_column_s_its_shard():
    """Of a row each rank has a summand of all of it, before it is scattered along the sequence (shoeybi2019, figure 3)."""
    whole, split = products(1), products(4)
    assert whole["attention.output.lora_b"] == whole["mlp.down.lora_b"] == TOKENS * HIDDEN
    assert whole["mlp.gate.lora_b"] == TOKENS * WIDE
    for name, numel in whole.items():
        row = name.startswith(("attention.output", "mlp.down"))
        assert split[name] == (numel if row else numel / 4), name
