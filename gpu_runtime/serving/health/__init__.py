"""Records of past calls, by model and by client: failures, circuit breakers, durations, and cooldowns.

Nothing here chooses a model or answers a call.
"""
