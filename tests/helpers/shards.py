"""Test helpers shared by `tests.data.test_specs` and others."""

import io
import tarfile

from tests.helpers.pictures import picture


def png(seed):
    file = io.BytesIO()
    picture(seed).save(file, "PNG")
    return file.getvalue()


def write_shard(file, samples):
    with tarfile.open(file, "w") as shard:
        for i in samples:
            for extension, content in (("png", png(i)[: 40 if i == 7 else None]), ("cls", str(5 + i % 2).encode())):
                member = tarfile.TarInfo(f"{i:04d}.{extension}")
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))
