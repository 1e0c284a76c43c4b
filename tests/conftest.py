"""Settings for every test, made before torch is imported."""

import os

# Two test workers share the machine, and tests start ranks of their own: one thread each (children inherit it).
os.environ["OMP_NUM_THREADS"] = "1"
