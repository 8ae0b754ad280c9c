"""Tests of rollouts. Those with the real verifiers are run by `make test-integrations`."""

import os

# Nothing is looked for outside this machine.
os.environ |= {"HF_HUB_OFFLINE": "1"}
