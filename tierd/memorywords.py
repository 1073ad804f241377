"""What Python and the libraries below it say where memory, or address space, is short.

Most say so in an error of no class of its own, with one of these in its text. Loads nothing:
the command's door and the engine look here.
"""

WORDS = (
    "allocate memory",  # torch's allocator, the C library, Rust's libraries
    "unable to allocate",  # numpy
    "not enough memory",  # torch, of a file that it maps
    "failed to map segment",  # the loader of shared libraries
    "bad_alloc",  # C++
    "without exception set",  # Python, that had no room to make the error
)
NO_THREAD = "start new thread"  # Python: a thread's stack takes address space too


def says_shortage(text: str) -> bool:
    """Say whether an error's text means that memory is short."""
    said = text.lower()
    return any(words in said for words in WORDS)
