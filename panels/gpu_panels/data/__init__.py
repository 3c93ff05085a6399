"""Computes the contents of the console: table rows, chart columns and sentences.

Pure: the inputs are a Snapshot, events or maps. Panel and Bokeh are not imported here; `tabs/`,
`charts/` and `widgets/` show the results.
"""
