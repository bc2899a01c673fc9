"""Is the served model, with the served policy, the one that was probed?"""
