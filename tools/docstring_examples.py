"""An extension of griffe for the documentation site: the section `Example:` of a docstring is shown as code, as `Examples:` is."""

import re

import griffe


class DocstringExamples(griffe.Extension):
    """Renames the section in every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
