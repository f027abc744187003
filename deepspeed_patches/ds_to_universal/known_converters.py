"""The converters of DeepSpeed that this one was compared with, by digests.

`python tests/programs/known_converters.py TREE...` prints the rows, of the trees of all releases from 0.12.0 to 0.19.8.
A change of a fix to DeepSpeed's converter changes the last digest of each.
"""

FIRST, LAST = "0.12.0", "0.19.8"
# The first release that has it: the file's digest, that of its syntax tree, and that with this project's fixes in it.
CONVERTERS = {
    "0.12.0": ("fbe98bfdab95", "4010deeb200c", "e4c56a89c068"),
    "0.12.3": ("b39c227681ee", "e50c0d1d4e63", "bec0fbc21780"),
    "0.12.4": ("5befa84fd2cd", "fc3abf689f01", "cecbce6a13a4"),
    "0.12.5": ("a6b5bc4dd9c1", "868239c1ed8c", "81a05f6200a6"),
    "0.14.1": ("48001bec1e0c", "070fccb51928", "64094a7dc89b"),
    "0.14.2": ("d68def2b5a23", "1da230ae0eaa", "0985e06b51cd"),
    "0.14.5": ("a718f3813ebd", "d4d91e7cc3b7", "0e521627ef98"),
    "0.16.0": ("21b3fef5ed40", "337162ad1495", "49ad64505b6c"),
    "0.17.5": ("91a44fdb7b15", "7c43e312a6b6", "5fc7a899538f"),
    "0.18.0": ("fff24ed67926", "21646c1c614c", "945b9360788d"),
    "0.19.2": ("1c3f39ae7793", "bc2f5e242cce", "745ef922ac25"),
    "0.19.3": ("ce37f18a0a06", "a4ae0442422b", "bf23def475eb"),
    "0.19.4": ("09ac68eb703e", "11fddc9394fb", "9c5313b857a9"),
    "0.19.5": ("4561d198cee8", "7508bc8b8b9b", "b85d567743a8"),
    "0.19.6": ("2b4ffd43a54c", "095a55a4da1c", "fe32c2ad0004"),
    "0.19.7": ("336d46c1b4cf", "32e5b3ebafa8", "d4ebe882c51b"),
    "0.19.8": ("cd1f382b558b", "ac9390208bfb", "92fe3e0d1715"),
}


def release_of(digest: str) -> str | None:
    """The first release whose converter has this digest, of its file or of its syntax tree."""
    return next((release for release, digests in CONVERTERS.items() if digest in digests), None)
