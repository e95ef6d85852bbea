"""Measures linear cross-entropy heads side by side: time, memory, exactness. See `python -m bench --help`."""
