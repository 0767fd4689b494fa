"""PyTorch's own distributed test suites, run on gloo and with fastcoll in gloo's place.

    python -m torch_suites [--suite NAME ...]

The test files are those of Debian's source package `pytorch`, unpacked into build/; none is
committed. A test that gloo passes and fastcoll fails ends the command with 1, unless
`suites.NOT_APPLICABLE` says why it cannot apply.
"""
