"""What can go wrong with the real engine."""

from __future__ import annotations

from loadgen.errors import FleetError, LoadgenError


class EngineMissing(LoadgenError):
    """The engine is not installed, not whole, or not of this lock; the message says what to do."""


class ReplicaError(FleetError):
    """An engine process did not start, or did not end; the message holds the end of its log."""
