"""Metrics, log lines and the transfer log: what an operator sees of a transfer."""
