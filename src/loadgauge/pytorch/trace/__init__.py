"""Traces: PyTorch's allocations, saved tensors, FLOPs and collectives, on tensors without memory. Needs the extra `torch`.

`call_job.trace` takes a model, a job, a script or a module; `trace.trace` a `Traceable` of `jobs`, in this process.
"""
