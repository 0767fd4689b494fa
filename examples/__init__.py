"""Programs to read and to run. Installed as fastcoll.examples."""

__all__: list[str] = []
