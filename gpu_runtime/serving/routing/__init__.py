"""Chooses the models that may answer a call and their order, and changes the call by the client's profile.

The modules here are pure, except that they read `tasks.yaml` and the file of the cloud guard. They call no model.
"""
