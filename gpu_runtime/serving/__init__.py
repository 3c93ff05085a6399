"""Models over HTTP: what is asked, who goes first, which engine answers, and what happens when it cannot.

    calls       a request's body -> a Call; what is wrong with it
    order       who starts next; pure
    queue       the calls that wait, in one event loop
    tasks       `task:NAME` -> its candidates, the best first; pure
    profiles    clients and thinking: what changes the prompt; pure
    clients     who asks how often, and who is in cooldown
    breaker     models that keep failing are left alone for a while
    fallback    who answers in a model's place, and whether that may be a cloud
    speak       one way to talk to every kind of engine
    hold        a model pinned for exactly as long as its calls last
    gateway     all of these over one Runtime

Nothing here knows of routes, ports or tokens.
"""
