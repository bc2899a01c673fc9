"""Published and obvious other ways to send KV in fewer bytes, for comparison only: nothing here serves.

One small class each. Adding one is a class and a line in ``registry``. Every one counts the bytes of its codes, scales,
zeros and maps; headers and control messages, which profiles pay for, are left out in its favour.
"""
