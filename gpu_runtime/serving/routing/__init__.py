"""Routing: the models that may answer a call, in order, and the changes that a client's profile makes to its body.

The modules here are pure, except that they read `tasks.yaml` and the file of the cloud guard. They call no model.
"""
