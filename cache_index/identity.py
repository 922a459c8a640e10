"""What a chain of block hashes starts from.

Two requests can share a prefix only under one root. The digest is taken over typed, labelled and
length-prefixed fields, so that no two different roots can be spelled the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

__all__ = ["ModelIdentity", "Root"]

# Part of every digest: raise it when the fields or their meaning change.
_LAYOUT = b"kvroute-root-1"


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The weights and the tokenizer a KV cache belongs to."""

    name: str
    revision: str = ""
    tokenizer: str = ""


@dataclass(frozen=True, slots=True)
class Root:
    """Model, adapter and tenant salt: everything outside the tokens that decides reuse."""

    model: ModelIdentity
    adapter: str = ""
    salt: str = ""

    def digest(self) -> int:
        """The 64-bit unsigned seed of this root's hash chain."""
        fields = (
            (b"model", self.model.name),
            (b"revision", self.model.revision),
            (b"tokenizer", self.model.tokenizer),
            (b"adapter", self.adapter),
            (b"salt", self.salt),
        )
        parts = [_LAYOUT]
        for label, value in fields:
            # A request may carry a lone surrogate; it must still have a digest of its own.
            data = value.encode("utf-8", "surrogatepass")
            parts.append(b"%s:str:%d:" % (label, len(data)))
            parts.append(data)
        return int(xxhash.xxh3_64_intdigest(b"".join(parts)))
