"""GPUs, clusters, hosts, networks, and what kernels achieve on them."""
