"""The compiled part; the rest is in pyproject.toml. Without a C compiler the package still works, only slower."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "trueup.core._native",
            ["src/trueup/core/_native.c"],
            extra_compile_args=["-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
