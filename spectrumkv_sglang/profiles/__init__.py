"""Precision profiles, and token tiers under a byte budget."""
