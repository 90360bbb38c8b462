"""Hypothesis times nothing here: on a busy machine a slow example is no fault. --hypothesis-profile still wins."""

from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
