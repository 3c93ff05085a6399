"""Computes the contents of the console: table rows, chart columns and sentences.

The modules are pure. Their inputs are a Snapshot, events or maps. Panel and Bokeh are not imported
here. The folders `tabs`, `charts` and `widgets` show the contents.
"""
