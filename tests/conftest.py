"""Settings of all tests."""

from hypothesis import settings

# Machines that run tests are slow and shared: an example may take as long as it takes.
settings.register_profile("averaging", deadline=None, print_blob=True)
settings.load_profile("averaging")
