"""`spectrumkv report`: results and running servers as one self-contained HTML page."""
