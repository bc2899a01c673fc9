"""One module a kind of input: what of it is shown."""
