"""Settings of all tests."""

import torch
from hypothesis import settings

torch.set_num_threads(1)  # the matrices of the tests are small: threads would only fight over them
# The same examples in every run, and no deadline: a result must not depend on luck or on how busy the machine is.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")
