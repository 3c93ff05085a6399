"""Which call starts next, and the model that it then has: the order of calls, their turns, pins and blocking work.

Nothing here knows HTTP, or what a call's body means.
"""
