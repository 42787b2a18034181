"""Bytes of every part against every memory."""
