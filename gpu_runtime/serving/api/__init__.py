"""The HTTP routes: `/memory/*`, `/v1/*`, `/api/*`, `/usage`, `/health` and `/metrics`, with their descriptions.

The tokens are checked by the gate, and the models are chosen by the gateway, not in this folder.
"""
