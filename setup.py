"""Everything about this package is in pyproject.toml; this file only compiles the C kernels while it is being built."""

import runpy
import shutil
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path(__file__).parent / "src" / "foredraft" / "kernels"


class BuildKernels(build_py):
    """Compile beside the sources, which is all that an editable install needs, and copy into a regular build."""

    def run(self) -> None:
        super().run()
        libraries = runpy.run_path(str(KERNELS / "build.py"))["compile_all"]()
        if not self.editable_mode:
            target = Path(self.build_lib) / "foredraft" / "kernels"
            target.mkdir(parents=True, exist_ok=True)
            for library in libraries:
                shutil.copy2(library, target)


class PlatformDistribution(Distribution):
    """The wheel holds compiled code, so its name must say for which platform."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """That code is plain C, loaded by ctypes: any Python can use it."""

    def get_tag(self) -> tuple[str, str, str]:
        *_, platform = super().get_tag()
        return "py3", "none", platform


setup(cmdclass={"build_py": BuildKernels, "bdist_wheel": PlatformWheel}, distclass=PlatformDistribution)
