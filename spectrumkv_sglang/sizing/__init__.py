"""`spectrumkv size`: what tiered KV would bring a model on a link, before anything is started."""
