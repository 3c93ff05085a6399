"""Fixtures for stories that need cards. A driver of our own simulates the cards."""

from tests.nvml_driver import driver as driver
from tests.nvml_driver import host as host
from tests.nvml_driver import library as library
