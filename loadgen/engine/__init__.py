"""The real engine: vLLM for CPU as scripts/install-engine puts it down, started and ended.

Nothing here imports more than Python's own library, so that scripts/engine runs from a checkout
with nothing installed.
"""
