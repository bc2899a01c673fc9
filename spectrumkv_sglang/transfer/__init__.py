"""Moves tiered payloads from a prefill rank to a decode rank over Mooncake."""
