"""Measuring a replica, so that a simulated one takes the same times."""
