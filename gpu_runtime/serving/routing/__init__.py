"""Which models may answer a call, in which order, and what a client's profile changes in its body.

Pure, except for reading `tasks.yaml` and the file of the cloud guard. Nothing here calls a model.
"""
