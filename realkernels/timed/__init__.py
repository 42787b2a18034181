"""Calls that are timed, each of which can check its own output."""
