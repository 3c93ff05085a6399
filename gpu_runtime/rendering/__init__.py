"""Renders facts as text, HTML and JSON, for magics, the command and the console.

Pure: nothing here reads a runtime, a device or a clock, except `progress`. Panel is not imported.
"""
