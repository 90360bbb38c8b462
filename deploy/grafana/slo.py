"""The service level objectives of the dashboard's tiles and of the alerts. Change them here, then generate.

The seconds must be bounds of the buckets in engine/interface/metrics.py, so that the share within them is exact; a test
compares.
"""

TTFT_S = 1.0  # to the first token
ITL_S = 0.1  # between two tokens
SHARE_WITHIN = 0.95  # share of the requests, and of the times between tokens
ERROR_RATIO = 0.01  # maximum share of failed requests
