"""The hypothesis profile: the same examples every time, however slow the machine."""

from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None, max_examples=20, database=None)
settings.load_profile("fixed")
