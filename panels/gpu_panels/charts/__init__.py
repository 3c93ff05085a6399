"""Bokeh figures that are made once. The columns that `data/` computes then update these figures.

Tables, text and dialogs are in `widgets/`.
"""
