"""How much each cached token matters."""
