"""Pure: a Snapshot, events or maps in; table rows, chart columns and sentences out.

Panel and Bokeh are not imported here: `tabs/`, `charts/` and `widgets/` show what is computed here.
"""
