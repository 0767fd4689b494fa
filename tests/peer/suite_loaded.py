"""PyTorch's suite for the backend that FASTCOLL_TEST_BACKEND names, loaded with this module: by the launcher."""

from suite_cases import load_suite
from torch.testing._internal.common_distributed import TEST_SKIPS

__all__ = ["SKIPPED", "SUITE"]

SUITE = load_suite()

SKIPPED = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}
"""Why a rank that ends with this exit code has skipped its test."""
