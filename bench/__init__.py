"""Measures linear cross-entropy heads side by side: time, memory, exactness. See `python -m bench --help`."""

import os

# torch.compile's processes that compile may not end when told to at exit, beside those of other heads, and a finished
# run was held by them until it was killed, after half a minute. Read when torch._inductor is first imported.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
