"""check_dist.py FOLDER: the sdist has all of git, the wheel all of the package, and is small."""

import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

LARGEST_WHEEL = 400_000  # bytes

(sdist,), (wheel,) = (list(Path(sys.argv[1]).glob(name)) for name in ("*.tar.gz", "*.whl"))
listed = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True).stdout
tracked = {name for name in listed.decode().split("\0") if name and not name.startswith(".")}

with tarfile.open(sdist) as archive:
    members = {m.name.split("/", 1)[1]: m for m in archive if m.isfile()}
    made = {name for name in members if name == "PKG-INFO" or ".egg-info/" in name}
    assert members.keys() - made == tracked, sorted((members.keys() - made) ^ tracked)
    for name in tracked - {"setup.cfg"}:  # setuptools adds to it
        assert archive.extractfile(members[name]).read() == Path(name).read_bytes(), name

with zipfile.ZipFile(wheel) as archive:
    contents = {name: archive.read(name) for name in archive.namelist()}
info = wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"
assert f"{info}/WHEEL" in contents, f"not pure Python: {wheel.name}"
assert b"Root-Is-Purelib: true" in contents[f"{info}/WHEEL"]
package = {name for name in tracked if name.startswith("npdecoder/")}
found = {name for name in contents if not name.startswith(f"{info}/")}
assert found == package, sorted(found ^ package)
for name in package:
    assert contents[name] == Path(name).read_bytes(), name
assert contents[f"{info}/licenses/LICENSE"] == Path("LICENSE").read_bytes()
metadata = message_from_string(contents[f"{info}/METADATA"].decode())
always = [one for one in metadata.get_all("Requires-Dist") if "extra ==" not in one]
assert (always, metadata["Requires-Python"]) == (["numpy>=1.24"], ">=3.10")
assert wheel.stat().st_size < LARGEST_WHEEL, f"{wheel.stat().st_size} bytes"

print(f"sdist: {len(members)} files; wheel: {len(found)} files, {wheel.stat().st_size} bytes")
