"""A simulated vLLM: its scheduler and block cache, its HTTP surface and its KV events.

`engine` is pure and runs in virtual time; everything else stands around it. Nothing here
knows the router or the index, so that their answers can be checked against this package's.
"""
