"""Serves models over HTTP: reads calls, orders them, chooses a model, and calls its engine.

A visitor is a person or program whose request was admitted. A stand-in is a model that answers when the requested
model cannot.

    requests      reads a request's body into a Call, or refuses it
    fields        which fields of a body each backend serves
    prompt_size   whether a prompt is too long
    gateway       answers calls, over one Runtime
    access        what each visitor's key allows, and its limits
    choices       which models may answer a call
    replies       prepares answers for the caller
    request_log   one line of JSON for each call
    store         the calls and tokens of each visitor; the file that keeps them, and the jobs
    figures       figures of a server, for metrics and a console's page
    server        `gpu serve`: one port, behind the gate; the server of a host of a fleet
    fleet_server  `gpu serve --fleet`, which passes each call to the server of a host
    api/          the HTTP routes
    routing/      tasks, stand-ins, profiles
    queue/        the order of calls, and the pins of the models that answer them
    health/       circuit breakers, measured durations, clients, and the cause of each error
    engines/      adapters: one way to call every kind of engine

`gpu_runtime.owner` gets the memory for a model. The gate and the tokens are in `gpu_runtime.web`.
"""
