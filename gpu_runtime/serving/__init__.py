"""Serves models over HTTP: reads calls, orders them, chooses a model, and calls its engine.

    requests    a request's body -> a Call, or the reason why it is refused
    fields      which fields of a body each backend serves
    gateway     answers calls, over one Runtime
    choices     which models may answer a call
    replies     answers on their way to the caller
    request_log  one line of JSON for each call
    server      `gpu serve`: one port, behind the gate
    api/        the HTTP routes
    routing/    tasks, fallbacks, profiles (pure)
    queue/      the order of calls, when each may run, and the pin of its model meanwhile
    health/     circuit breakers, measured durations, clients, and the cause of each error
    engines/    adapters: one way to call every kind of engine

`gpu_runtime.owner` gets the memory for a model; the gate and the tokens are in `gpu_runtime.web`.
"""
