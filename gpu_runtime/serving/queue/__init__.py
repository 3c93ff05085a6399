"""The queue of calls decides which call starts next, and pins the call's model while the call runs.

Nothing here knows HTTP, or what a call's body means.
"""
