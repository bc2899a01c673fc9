"""Before serving: is the low tier safe on this model?"""
