"""Devices: the drivers' figures, this process's memory on each device, and maps of allocators.

The folder `scheduler` decides which request gets memory, and `owner` knows the leases.
"""
