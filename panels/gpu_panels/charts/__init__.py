"""Bokeh figures that are made once and then updated with the columns that `data/` computes.

Tables, text and dialogs are in `widgets/`.
"""
