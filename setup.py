"""Puts the quickstart and constraints.txt, which lie beside the package, into the wheel. The rest is in setup.cfg."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

NOT_SHIPPED = ("make", "__pycache__", "README.md", "info.yml", "requirements.txt")


class BuildWithQuickstart(build_py):
    """A clone, which an editable installation is, has the recipe in its own place."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "olive_ext", "quickstart")
            shutil.copyfile("constraints.txt", target.with_name("constraints.txt"))
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("recipes/quickstart", target, ignore=shutil.ignore_patterns(*NOT_SHIPPED))


setup(cmdclass={"build_py": BuildWithQuickstart})
