"""Serves models over HTTP: reads calls, orders them, chooses a model, and calls its engine.

A visitor is a person or program whose request was admitted. A fallback is a model that answers when the requested
model cannot.

    requests       reads a request's body into a Call, or refuses it
    fields         which fields of a body each backend serves
    gateway        answers calls, over one Runtime
    tasks          `tasks.yaml`, and what it changes in a call
    choices        which models may answer a call
    queue          the order of calls
    holds          the pins of the models that answer them
    breaker        circuit breakers, and the cause of each error
    access         what each visitor's key allows, and its limits
    records        what is recorded of each call: log, durations, figures, usage
    store          the file that keeps the usage of each visitor, and the jobs
    server         `gpu serve`: one port, behind the gate; the server of a host of a fleet
    fleet_server   `gpu serve --fleet`, which passes each call to the server of a host
    thread_stream  blocking work in a thread
    api/           the HTTP routes
    engines/       adapters: one way to call every kind of engine

`gpu_runtime.owner` gets the memory for a model. The gate and the tokens are in `gpu_runtime.web`.
"""
