"""Traffic as data: seeded, pure generators. The same seed gives the same traffic."""

from loadgen.workload.model import Chat, Completion, Session, Turn, Workload
from loadgen.workload.mooncake import MooncakeSettings, TraceRow, mooncake, read_trace
from loadgen.workload.multiturn import MultiturnSettings, multiturn

__all__ = [
    "Chat",
    "Completion",
    "MooncakeSettings",
    "MultiturnSettings",
    "Session",
    "TraceRow",
    "Turn",
    "Workload",
    "mooncake",
    "multiturn",
    "read_trace",
]
