"""Loopback mode: an ordinary SGLang server packs and unpacks the KV of chosen requests in place, for the probe."""
