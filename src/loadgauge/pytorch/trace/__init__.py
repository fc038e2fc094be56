"""What PyTorch itself would allocate, save, compute and send, traced on tensors without memory. Needs the extra `torch`.

`call_job.trace` takes a model, a job, a script or a module; `trace.trace` a `Traceable` of `jobs`, in this process.
"""
