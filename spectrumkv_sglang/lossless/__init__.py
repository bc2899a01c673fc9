"""Lossless compression of packed payloads, where the link is slow enough for it to pay."""
