"""Devices: the drivers' figures, this process's memory on each device, and maps of allocators.

Nothing here decides: the folder `scheduler` decides which request gets memory, and `owner` knows
the leases.
"""
