"""The memory of this process by what was handed out, which does not depend on what an allocator keeps for later."""

import ctypes
import tempfile
from xml.etree import ElementTree

LIBC = ctypes.CDLL(None)
LIBC.fopen.restype = ctypes.c_void_p


def allocated_bytes() -> int:
    """Return what malloc has given out, of all its arenas, by malloc_info(3)."""
    with tempfile.NamedTemporaryFile() as file:
        stream = ctypes.c_void_p(LIBC.fopen(file.name.encode(), b"w"))
        LIBC.malloc_info(0, stream)
        LIBC.fclose(stream)
        arenas = ElementTree.parse(file.name).getroot()
    free, mapped = 0, 0
    for total in arenas.findall("total"):
        if total.get("type") == "mmap":
            mapped = int(total.attrib["size"])
        else:
            free += int(total.attrib["size"])
    from_system = arenas.find("system[@type='current']")
    assert from_system is not None
    return int(from_system.attrib["size"]) + mapped - free
