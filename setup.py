"""The compiled part; the rest is in pyproject.toml. Without a C compiler the package still works, only slower."""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel


class BuildWheel(bdist_wheel):
    """A wheel without the compiled part is one for every platform, and pip must not take it for a compiled one."""

    def run(self) -> None:
        self.run_command("build_ext")
        built = self.get_finalized_command("build_ext").get_outputs()
        if not any(Path(path).exists() for path in built):
            self.distribution.ext_modules = []
            self.root_is_pure, self.py_limited_api = True, False
        super().run()


setup(
    ext_modules=[
        Extension(
            "trueup._core._native",
            ["src/trueup/_core/_native.c"],
            extra_compile_args=["-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"],
            py_limited_api=True,
            optional=True,
        )
    ],
    cmdclass={"bdist_wheel": BuildWheel},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
