"""Many hosts as one fleet, on Ray: a client requests a model in one place, and any of the hosts may have it.

Ray knows the hosts, runs the actors and carries the messages. Each host has its own book. An agent on each host decides
with the same scheduler as notebooks do. The controller stores only the wishes: which models the hosts should hold. Ray
is imported when the first function of this package is called, never at its import.
"""
