"""Frames recorded from real engines (vLLM 0.32 alone, with LMCache and with Mooncake).

A file is a row of messages: u32 big endian number of frames, then each frame after its length.
"""

from __future__ import annotations

import lzma
import struct
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent / "captures"
NAMES = sorted(path.name.removesuffix(".frames.bin.xz") for path in FOLDER.glob("*.xz"))


def messages(name: str) -> Iterator[list[bytes]]:
    data = lzma.decompress((FOLDER / f"{name}.frames.bin.xz").read_bytes())
    at = 0
    while at < len(data):
        (count,) = struct.unpack_from(">I", data, at)
        at += 4
        frames = []
        for _ in range(count):
            (length,) = struct.unpack_from(">I", data, at)
            frames.append(data[at + 4 : at + 4 + length])
            at += 4 + length
        yield frames
