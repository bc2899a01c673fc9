"""The precision-tiered payload: its layout, and packing and unpacking it."""
