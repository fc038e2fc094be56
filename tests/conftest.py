"""What holds for all tests: one thread each, whatever the machine has, so that results do not depend on its cores."""

from __future__ import annotations

import os

# Before torch and numpy are imported; the processes that tests start inherit it.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"
