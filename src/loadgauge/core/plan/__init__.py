"""The search: every valid layout at once, through the array reading of the list of operations. This package can be called.

    loadgauge.plan("llama-3.1-8b", gpu="h100-sxm5-80gb", gpus=8, global_batch=64).best.flags()

It takes the fields of a `Job`; the axes of the layout that are not given are open. `help(loadgauge.core.plan.answer.plan)`
describes every argument.
"""
