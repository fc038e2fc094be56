"""The estimate of a training job: memory, FLOPs, time and traffic. This package can be called.

    loadgauge.estimate("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, zero=3, seq_len=8192)
    loadgauge.estimate("llama-3.1-8b", loadgauge.Layout(dp=8, zero=3, global_batch=8, seq_len=8192))

The first form takes the flags of `loadgauge estimate`, with underscores. What is not given takes the command's defaults
(see `Estimate.assumed`); dp = gpus / (tp * pp * cp). The second takes a `Layout` and optionally a `training`, a `gpu`, a
`cluster`, `efficiencies` and a `scale`. Both return an `Estimate`.
`help(loadgauge.api.estimate)` describes every argument.
"""
