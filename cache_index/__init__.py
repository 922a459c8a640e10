"""The index: which replica or pool holds the KV cache of which prompt prefix."""
