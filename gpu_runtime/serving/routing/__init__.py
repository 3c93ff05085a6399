"""Routing: the models that may answer a call, in order, and the changes that a client's profile makes to its body.

Pure, except for reading `tasks.yaml` and the file of the cloud guard. Nothing here calls a model.
"""
