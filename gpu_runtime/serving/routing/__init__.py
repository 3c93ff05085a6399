"""Chooses the models that may answer a call, in their order, and changes the call's body by the client's profile.

The modules here are pure, except that they read `tasks.yaml` and the file of the cloud guard. They call no model.
"""
