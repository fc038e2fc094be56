"""How a run is spread over GPUs: degrees of parallelism, ZeRO, overlap."""
