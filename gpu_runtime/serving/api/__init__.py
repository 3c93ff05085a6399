"""The HTTP routes: `/memory/*`, `/v1/*`, `/api/v1/config`, `/health` and `/metrics`, with their descriptions.

Nothing here checks a token (the gate does), or chooses a model (the gateway does).
"""
