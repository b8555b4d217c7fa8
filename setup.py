"""What pyproject.toml has no field for: the list of subpackages found on disk, and the start-up .pth in the wheel."""

import os

from setuptools import setup
from setuptools.command.build_py import build_py as _build_py


def packages():
    """accel and every package under kernels/ and patches/, by the name it is imported under."""
    found = ["accel"]
    for folder in ("kernels", "patches"):
        found.append(f"accel.{folder}")
        for path, folders, files in os.walk(folder):
            folders.sort()
            if "__init__.py" in files:
                found.append("accel." + path.replace(os.sep, "."))
    return found


class build_py(_build_py):  # noqa: N801 - setuptools' own name for the command
    """Ships the .pth that switches on the targets of ACCEL_TARGETS when Python starts."""

    def run(self):
        super().run()
        if not self.editable_mode:
            self.copy_file("accel_autoload.pth", os.path.join(self.build_lib, "accel_autoload.pth"))


setup(packages=packages(), cmdclass={"build_py": build_py})
