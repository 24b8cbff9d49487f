"""An extension of griffe for the documentation site, which shows the section `Example:` of a docstring as code."""

import re

import griffe


class DocstringExamples(griffe.Extension):
    """Renames the section to `Examples:` in every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
