"""The native CPU kernels: C sources beside this file, compiled by `foredraft.kernels.build`, called by `backends.native`."""
