"""Cache formats."""
