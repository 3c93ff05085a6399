"""What past calls show about models and clients: failures, circuit breakers, costs, and cooldowns.

Nothing here chooses a model or answers a call.
"""
