"""What is measured and recorded about a host: device figures, their history, events, model sizes.

Nothing depends on these records: where one cannot be written, that is logged and the work goes on.
"""
