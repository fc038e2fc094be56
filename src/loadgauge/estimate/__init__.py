"""The estimate of a training job: memory, FLOPs, time and traffic. This package can be called.

    loadgauge.estimate("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, zero=3, seq_len=8192)
    loadgauge.estimate("llama-3.1-8b", loadgauge.Layout(dp=8, zero=3, global_batch=8, seq_len=8192))

The first form takes the flags of `loadgauge estimate`, with underscores. What is not given is assumed as the command
assumes it (see `Estimate.assumed`), and data parallelism is what tp, pp and cp leave of `gpus`. The second takes a
`Layout` and, if wanted, a `training`, a `gpu`, a `cluster`, `rates` and a `scale`. Both return an `Estimate`.
`help(loadgauge.api.estimate)` describes every argument.
"""
