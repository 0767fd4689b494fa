"""The version of fastcoll, in a file that setup.py can read without importing anything."""

__all__ = ["__version__"]

__version__ = "0.1.0"
