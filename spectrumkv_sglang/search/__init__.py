"""``spectrumkv tune``: which profiles lose least, at which bytes and how fast, on a model and a text."""
