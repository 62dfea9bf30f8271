"""Settings of every test: the same random cases on every run, and no clock in the verdict."""

from hypothesis import settings

settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")
