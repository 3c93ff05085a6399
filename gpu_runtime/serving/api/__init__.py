"""The HTTP routes: `/memory/*`, `/v1/*`, `/api/*`, `/usage`, `/health` and `/metrics`, with their descriptions.

The gate checks the tokens, and the gateway chooses the models. Nothing here does.
"""
