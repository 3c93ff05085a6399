"""Devices: the drivers' figures, this process's memory on each device, and maps of allocators.

Nothing here decides which request gets memory (`scheduler`), and no lease is known here (`owner`).
"""
