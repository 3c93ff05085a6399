"""Renders facts as text, HTML and JSON, for magics, the command and the console.

The modules are pure: they read no runtime, no device and no clock.
Panel is not imported.
"""
