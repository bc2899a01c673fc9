"""What a profile costs a model: text scored after its prefix's KV has been packed and unpacked, beside baselines."""
