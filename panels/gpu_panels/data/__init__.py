"""The contents of the console: table rows, chart columns and sentences. Pure; neither Panel nor Bokeh is imported."""
