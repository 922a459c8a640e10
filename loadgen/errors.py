"""Errors of loadgen, one tree.

LoadgenError
├── WorkloadError        a workload cannot be made as asked
│   └── TraceError       a trace file is not what it should be (names file and line)
├── CalibrationError     a replica cannot be measured, or a file of measurements not be used
└── FleetError           a process of the fleet under test
    ├── StartError       did not come up within its deadline
    └── ProcessDied      ended while it was still needed
"""

from __future__ import annotations


class LoadgenError(Exception):
    """Base of every error raised by loadgen on purpose."""


class WorkloadError(LoadgenError):
    """The workload cannot be generated with these parameters or this tokenizer."""


class TraceError(WorkloadError):
    """A trace file could not be read; the message names the file and the line."""


class CalibrationError(LoadgenError):
    """A replica could not be measured, or what was measured makes no sense."""


class FleetError(LoadgenError):
    """A process of the fleet under test misbehaved."""


class StartError(FleetError):
    """A process did not report that it serves before its deadline."""


class ProcessDied(FleetError):
    """A process ended while the run still needed it."""
