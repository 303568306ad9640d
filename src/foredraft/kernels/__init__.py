"""The native CPU kernels: C sources beside this file; `kernels.build` compiles them, `backends/native/` calls them."""
