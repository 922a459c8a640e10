"""What a process tree leaves in /dev/shm, known by who made it and removed at its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

IN_MOVED_TO, IN_CREATE = 0x80, 0x100
LIBC = ctypes.CDLL(None, use_errno=True)
SHARED_MEMORY = Path("/dev/shm")


class SharedMemoryWatch:
    """Notes the segments in /dev/shm that were made below this process, and removes them.

    Whoever makes a segment has it open or mapped when the kernel tells of it. Later neither name
    nor owner says who made it: a killed engine leaves hundreds of megabytes under any name.
    """

    def __init__(self) -> None:
        self._made: dict[str, tuple[int, int]] = {}
        # To select on; readable when `note` has something to do.
        self.fd = int(LIBC.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
        mask = IN_CREATE | IN_MOVED_TO
        if LIBC.inotify_add_watch(self.fd, bytes(SHARED_MEMORY), mask) < 0:
            print("supervisor: cannot watch /dev/shm; what is left there stays", file=sys.stderr)

    def note(self) -> None:
        """Take in what has happened. Never waits."""
        try:
            events = os.read(self.fd, 1 << 16)
        except OSError:
            return
        names = set(event_names(events))
        files = {name: inode for name in names if (inode := inode_of(SHARED_MEMORY / name))}
        ours = set(held_inodes(descendants(os.getpid()))) if files else set()
        self._made |= {name: inode for name, inode in files.items() if inode in ours}

    def remove(self) -> None:
        """Unlink what is still there and still the file that was made."""
        for name, inode in self._made.items():
            path = SHARED_MEMORY / name
            if inode_of(path) == inode:
                path.unlink(missing_ok=True)


def event_names(events: bytes) -> Iterator[str]:
    """The file names in a read of inotify events: four words, then a padded name of that size."""
    while events:
        size = int.from_bytes(events[12:16], sys.byteorder)
        yield os.fsdecode(events[16 : 16 + size].rstrip(b"\0"))
        events = events[16 + size :]


def inode_of(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def held_inodes(pids: list[int]) -> Iterator[tuple[int, int]]:
    """The files that these processes have open or mapped, as (device, inode)."""
    for process in (Path("/proc") / str(pid) for pid in pids):
        with contextlib.suppress(OSError):
            # Open files first: whoever closes one in between has mapped it before.
            yield from filter(None, map(inode_of, (process / "fd").iterdir()))
            for line in (process / "maps").read_text().splitlines():
                device, inode = line.split(maxsplit=5)[3:5]
                major, minor = (int(part, 16) for part in device.split(":"))
                yield os.makedev(major, minor), int(inode)


def descendants(root: int) -> list[int]:
    """The processes below `root`; one whose parent is just dying may be overlooked."""
    below: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = stat.read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        below.setdefault(int(parent), []).append(int(stat.parent.name))
    found = below.get(root, [])
    for pid in found:
        found += below.get(pid, [])
    return found
