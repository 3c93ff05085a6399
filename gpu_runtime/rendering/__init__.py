"""Renders facts as text, HTML and JSON. The modules are pure: no runtime, device, clock or Panel."""
