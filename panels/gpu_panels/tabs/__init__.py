"""The tabs of the console: each connects the poller's data to charts and widgets.

What a tab shows is computed in `data/`; how it is drawn is in `charts/` and `widgets/`.
"""
