"""Fused decode attention over paged caches: split over the tokens, each tile dequantised once, merged by one kernel."""
